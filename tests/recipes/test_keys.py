"""Mistyped keys of overrides and of a recipe's files."""

import shutil

import pytest

pytest.importorskip("verl")

from oar_plugin.runs.recipe import RecipeError, compose_recipe, find_recipe

RECIPE = find_recipe("qwen2_5_32b_megatron")
ROLLOUT, MEGATRON = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"


def test_an_override_of_verl():
    for word, said in {
        "trainer.save_frq=1": "verl has no key trainer.save_frq; did you mean trainer.save_freq?",
        "actor_rollout_ref.actor.lr=1": "; did you mean actor_rollout_ref.actor.optim.lr?",
        f"{ROLLOUT}.engine_kwargs.vllm.x=1": f"verl has no key {ROLLOUT}.engine_kwargs.vllm.x",
    }.items():
        with pytest.raises(RecipeError, match=r"on the command line \+KEY adds one") as refused:
            compose_recipe(RECIPE, "oar", ["oar=decision", word])
        assert said in str(refused.value)
    allowed = [f"+{ROLLOUT}.engine_kwargs.vllm.x=1", "+trainer.newer=1", "++trainer.save_freq=1", "~data.seed"]
    compose_recipe(RECIPE, "grpo", ["trainer.nnodes=4", *allowed])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  train_batch_size", "  train_batchsize", "data.train_batchsize; did you mean data.train_batch_size?"),
        ("trainer:", "tainer:", "verl has no key tainer"),
        (
            "    megatron:",
            "    megatron:\n      pipelin_model_parallel_size: 2",
            f"did you mean {MEGATRON}.pipeline_model",
        ),
        ("    megatron:", "    fsdp_config:\n      x: 1\n    megatron:", "actor.fsdp_config.x"),
        ("trainer:", "trainer: [", "does not compose"),
        # What verl passes on is free, and a variable to refer to.
        ("    megatron:", "    megatron:\n      override_transformer_config: {of_megatron: 1}", None),
        ("  rollout:", "  rollout:\n    engine_kwargs: {vllm: {of_vllm: 1}}", None),
        ("trainer:", "my_folder: /data\ntrainer:", None),
    ],
)
def test_a_key_of_a_recipes_file(tmp_path, old, new, said):
    shutil.copytree(RECIPE, mine := tmp_path / "mine")
    text = (mine / "recipe.yaml").read_text()
    assert f"\n{old}" in text
    (mine / "recipe.yaml").write_text(text.replace(f"\n{old}", f"\n{new}", 1))
    if said is None:
        compose_recipe(mine)
        return
    with pytest.raises(RecipeError) as refused:
        compose_recipe(mine)
    assert str(mine) in str(refused.value)
    assert said in str(refused.value)
