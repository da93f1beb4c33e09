"""Mistyped keys and wrong values of overrides and of a recipe's files."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from oar_plugin.hosts.verl.settings import SEEDS
from oar_plugin.runs.allowed import unknown_names
from oar_plugin.runs.recipe import RecipeError, check_config, compose_recipe, find_recipe
from oar_plugin.runs.run_folder import KeepRun

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())
RECIPE, MATH = find_recipe("qwen2_5_32b_megatron"), find_recipe("qwen2_5_7b_math")
ROLLOUT = "actor_rollout_ref.rollout"


def test_an_override_of_verl():
    for word, said in {
        "trainer.save_frq=1": "verl has no key trainer.save_frq; did you mean trainer.save_freq?",
        "actor_rollout_ref.actor.lr=1": "; did you mean actor_rollout_ref.actor.optim.lr?",
        f"{ROLLOUT}.engine_kwargs.vllm.x=1": f"verl has no key {ROLLOUT}.engine_kwargs.vllm.x",
    }.items():
        with pytest.raises(RecipeError, match=r"on the command line \+\+KEY adds one") as refused:
            compose_recipe(RECIPE, "oar", ["oar=published", word])
        assert said in str(refused.value)
    allowed = [f"+{ROLLOUT}.engine_kwargs.vllm.x=1", "+trainer.newer=1", "++trainer.save_freq=1", "~data.seed"]
    compose_recipe(RECIPE, "grpo", ["trainer.nnodes=4", *allowed])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  train_batch_size", "  train_batchsize", "data.train_batchsize; did you mean data.train_batch_size?"),
        ("trainer:", "tainer:", "verl has no key tainer"),
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


@pytest.mark.parametrize("key", CASES["values"])
def test_a_value_that_is_none_of_its_key_is_refused_with_what_is_allowed(key):
    for value in CASES["values"][key]:
        with pytest.raises(RecipeError, match=rf"^{key}=.*: allowed: .+\Z"):  # and no other key
            compose_recipe(MATH, "oar", [f"{key}={value}"])


def test_values_and_added_keys_that_verl_reads_are_accepted(capsys):
    for variant, words in CASES["accepted"].items():
        compose_recipe(MATH, variant, words)
    assert capsys.readouterr().err == ""


def test_a_seed_of_null_starts_both_variants_with_a_number_that_is_drawn_once(tmp_path, capsys):
    drawn = {}
    for variant in ("oar", "grpo", "oar"):
        config = compose_recipe(MATH, variant, ["data.seed=null", f"trainer.default_local_dir='{tmp_path}/{variant}'"])
        check_config(config)
        KeepRun().on_run_start(config)
        (number,) = {OmegaConf.select(config, key) for key in SEEDS[variant == "grpo" :]}
        assert f" {number}, drawn for this run" in capsys.readouterr().err
        assert drawn.setdefault(variant, number) == number
    assert drawn["oar"] != drawn["grpo"]


@pytest.mark.parametrize("word", CASES["added"])
def test_an_added_key_that_nothing_reads(word):
    with pytest.raises(RecipeError) as refused:
        compose_recipe(RECIPE, "oar", [word])
    assert CASES["added"][word] in str(refused.value)
    assert ".yaml" not in str(refused.value), "no file of the recipe is at fault"


def test_an_added_key_that_code_of_ones_own_may_read_is_noted_once(capsys):
    for _ in range(2):
        compose_recipe(RECIPE, "oar", ["+trainer.save_frq=1", "+data.mine='${mine.x}'", "+mine.x=1"])
    notes = [note.split(":") for note in capsys.readouterr().err.splitlines()]
    assert [note[1] for note in notes] == [" +trainer.save_frq=1", " +data.mine='${mine.x}'"]
    assert notes[0][2].endswith("did you mean trainer.save_freq?")


@pytest.mark.parametrize("key", CASES["names"])
def test_a_name_that_verl_does_not_have(key):
    wrong, right = CASES["names"][key]
    said = rf"^{key}={wrong.strip('[]')}: verl has no such name.*; allowed: .*\b{right}\b"
    with pytest.raises(RecipeError, match=said):
        check_config(compose_recipe(MATH, "oar", [f"{key}={wrong}"]))
    check_config(compose_recipe(MATH, "grpo", [f"{key}={right}"]))


def test_names_of_modules_of_ones_own_are_known(tmp_path, monkeypatch):
    module = "from verl.trainer.ppo.core_algos import register_policy_loss as register\nregister('mine')(len)\n"
    (tmp_path / "my_losses.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    for own, faults in (("null", 1), ("only_on_the_nodes", 0), ("my_losses", 0), ("null", 0)):
        words = ["actor_rollout_ref.actor.policy_loss.loss_mode=mine", f"actor_rollout_ref.model.external_lib={own}"]
        assert len(list(unknown_names(compose_recipe(RECIPE, "oar", words)))) == faults
