"""Mistyped keys of overrides and of a recipe's files. A table each, composed at once: Hydra takes its time."""

import shutil

import pytest

pytest.importorskip("verl")

from oar_plugin.hosts.verl.hydra_conf import misspelt
from oar_plugin.runs.recipe import RecipeError, check_config, compose_recipe, find_recipe
from tests.hosts.whole_run import OF_OLD, OLD

RECIPE = find_recipe("qwen2_5_32b_megatron")
ROLLOUT, MEGATRON = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"


def test_an_override_of_verl():
    said = {
        "trainer.save_frq=1": "; did you mean trainer.save_freq? to add one, write +trainer.save_frq=1",
        "actor_rollout_ref.actor.lr=1": "; did you mean actor_rollout_ref.actor.optim.lr? to add one",
        "data.no_such_key=1": "; to add one, write +data.no_such_key=1",
        f"{ROLLOUT}.engine_kwargs.vllm.x=1": f"; to add one, write +{ROLLOUT}.engine_kwargs.vllm.x=1",
    }
    with pytest.raises(RecipeError) as refused:
        compose_recipe(RECIPE, "oar", ["oar=decision", "trainer.nnodes=4", *said])
    for line, (word, hint) in zip(str(refused.value).splitlines(), said.items(), strict=True):
        assert line.startswith(f"{word}: verl's schema has no such key{hint}")
    allowed = [f"+{ROLLOUT}.engine_kwargs.vllm.x=1", "+trainer.newer=1", "++trainer.save_freq=1", "~data.seed"]
    compose_recipe(RECIPE, "grpo", ["trainer.nnodes=4", *allowed])


@pytest.mark.skipif(not OLD, reason="only verl 0.8 lacks actor_rollout_ref.rollout.seed")
def test_a_rollout_key_of_the_recipes_that_this_verl_lacks_is_refused_before_a_run():
    """It composes, for a recipe's own file names it. verl's workers would fail, after Ray has started."""
    recipe = find_recipe("qwen2_5_7b_math")
    with pytest.raises(RecipeError, match="'seed'"):
        check_config(compose_recipe(recipe))
    check_config(compose_recipe(recipe, overrides=OF_OLD))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algorithm.oar.tauu=0.5", "algorithm.oar.tauu=0.5: unknown key; did you mean algorithm.oar.tau?"),
        ("algorithm.oar.perturbation.spann=2", "did you mean algorithm.oar.perturbation.span?"),
        ("algorithm.oar.perturbation.span=2", None),
        ("algorithm.oar.perturbation={span: 2}", None),
        ("algorithm.oar.tau=0.5", None),
        ("+algorithm.oar.tauu=0.5", None),  # that of the whole configuration finds it
    ],
)
def test_an_override_of_oar_on_whatever_command_line(word, said):
    found = misspelt(["algorithm.adv_estimator=oar", "tau", word])
    assert found is None if said is None else said in found


MISTYPED = [
    ("  train_batch_size", "  train_batchsize", "data.train_batchsize: verl has no such key; did you mean data.train"),
    ("trainer:", "tainer:", "tainer: verl has no such key; did you mean trainer?"),
    ("  rollout:", "  rollout:\n    temprature: 2", f"did you mean {ROLLOUT}.temperature?"),
    ("    megatron:", "    megatron:\n      pipelin_model_parallel_size: 2", f"did you mean {MEGATRON}.pipeline_model"),
    ("    megatron:", "    fsdp_config:\n      x: 1\n    megatron:", "actor.fsdp_config: verl has no"),
]
FREE = [
    ("    megatron:", "    megatron:\n      override_transformer_config: {of_megatron: 1}"),
    ("  rollout:", "  rollout:\n    engine_kwargs: {vllm: {of_vllm: 1}}"),
    ("trainer:", "reward: {custom_reward_function: {reward_kwargs: {mine: 1}}}\ntrainer:"),
    ("trainer:", "my_folder: /data\ntrainer:"),  # to refer to
]


@pytest.fixture
def mine(tmp_path):
    shutil.copytree(RECIPE, tmp_path / "mine")

    def changed(*changes):
        text = (RECIPE / "recipe.yaml").read_text()
        for old, new in changes:
            assert f"\n{old}" in text
            text = text.replace(f"\n{old}", f"\n{new}", 1)
        (tmp_path / "mine" / "recipe.yaml").write_text(text)
        return tmp_path / "mine"

    return changed


def test_a_key_of_a_recipes_file(mine):
    with pytest.raises(RecipeError) as refused:
        compose_recipe(mine(*((old, new) for old, new, _ in MISTYPED)))
    lines = str(refused.value).splitlines()
    assert len(lines) == len(MISTYPED)
    assert all("mine/recipe.yaml: " in line for line in lines)
    assert [said for *_, said in MISTYPED if not any(said in line for line in lines)] == []


def test_what_verl_passes_on_is_free(mine):
    compose_recipe(mine(*FREE))


def test_a_broken_file_is_named(mine):
    with pytest.raises(RecipeError, match="does not compose"):
        compose_recipe(mine(("trainer:", "trainer: [")))
