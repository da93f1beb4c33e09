"""Every recipe: what it is made of, that only the estimator sets it apart from its baseline, that verl and OAR accept it."""

import functools
import re
from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from oar_plugin.hosts.verl.settings import resolve
from oar_plugin.runs.plan.known import choose_gpu
from oar_plugin.runs.plan.planning import Plan
from oar_plugin.runs.recipe import check_config, compose_recipe, flat, gpus_needed

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path.parent for path in FOLDER.glob("*/recipe.yaml"))
assert len(RECIPES) >= 12, "the tests of every recipe would be tests of none"
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


@functools.cache
def composed(recipe, variant="oar", *overrides):
    """Read-only: every test gets the same object."""
    config = compose_recipe(recipe, variant, overrides)
    OmegaConf.set_readonly(config, True)
    return config


def with_overrides(config, overrides):
    """A copy with other values, in place of interpolations too."""
    changed = config.copy()
    OmegaConf.set_readonly(changed, False)
    OmegaConf.set_struct(changed, False)
    for key, value in overrides.items():
        OmegaConf.update(changed, key, value)
    return changed


@every_recipe
def test_baseline_differs_in_the_estimator_only_and_both_write_to_places_of_their_own(recipe):
    configs = [composed(recipe, variant) for variant in ("oar", "grpo")]
    oar, grpo = (dict(flat(OmegaConf.to_container(config))) for config in configs)
    differing = {key for key in oar.keys() | grpo.keys() if oar.get(key) != grpo.get(key)}
    assert {key for key in differing if not key.startswith("algorithm.oar.")} == {"algorithm.adv_estimator"}
    assert (oar["algorithm.adv_estimator"], grpo["algorithm.adv_estimator"]) == ("oar", "grpo")
    assert len({config.trainer.default_local_dir for config in configs}) == 2
    assert recipe.name in configs[0].trainer.experiment_name


SMALLEST = {"24 GB": "L4-24", "40 GB": "A100-40", "80 GB": "A100-80"}


@every_recipe
@pytest.mark.parametrize("variant", ["oar", "grpo"])
def test_verl_and_oar_accept_it_and_it_fits_the_gpus_that_it_names(recipe, variant):
    config = composed(recipe, variant)
    check_config(config)
    assert variant == "grpo" or resolve(config).base_estimator == "grpo"
    first = (recipe / "recipe.yaml").read_text().splitlines()[0]
    for gpu in {"A100-80", *(SMALLEST[size] for size in re.findall(r"\d+ GB", first))}:
        made = Plan(config, choose_gpu(gpu))
        assert made.verdict == "fits", made.margin


@every_recipe
def test_the_table_has_what_is_planned_for_it(recipe):
    made = Plan(composed(recipe))
    left = " to ".join(dict.fromkeys(f"{size / 2**30:.0f}" for size in made.headroom))
    shown = f"| {left} | {float(f'{made.step:.2g}'):.0f} | {made.to_grpo:.2f} |"
    (row,) = re.findall(rf"^\| {recipe.name}(?: \(.*?\))? (\| \d.*)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert row == shown


# A recipe that names an importance means it.
@pytest.mark.parametrize(("name", "importance"), [("qwen2_5_7b_math", "oar_g"), ("qwen2_5_7b_oar_p", "oar_p")])
def test_a_preset_and_a_key_on_top_of_it(name, importance):
    own = composed(FOLDER / name).algorithm.oar
    oar = composed(FOLDER / name, "oar", "oar=published", "algorithm.oar.beta=1.5").algorithm.oar
    assert (oar.beta, oar.answer_patterns, oar.importance) == (1.5, own.answer_patterns, importance)
    assert oar.keys() == own.keys()


@pytest.mark.parametrize(
    ("trainer", "rollout", "reward", "expected"),
    [
        ((4, 8), None, None, (4, 8)),
        ((1, 4), (1, 4), None, (1, 8)),  # one machine, split
        ((2, 8), (1, 8), None, (3, 8)),
        ((1, 8), (2, 4), None, (2, 8)),  # two parts on one machine
        ((1, 4), (1, 4), (1, 2), (3, 4)),
    ],
)
def test_nodes_and_gpus_are_those_of_all_pools(trainer, rollout, reward, expected):
    nodes = [{"nnodes": n, "n_gpus_per_node": gpus} for n, gpus in (trainer, rollout or (0, 8), reward or (0, 8))]
    config = {
        "trainer": {**nodes[0], "use_v1": True, "v1": {"trainer_mode": "separate_async" if rollout else "sync"}},
        "actor_rollout_ref": {"rollout": nodes[1]},
        "reward": {"reward_model": {**nodes[2], "enable_resource_pool": reward is not None}},
    }
    assert gpus_needed(OmegaConf.create(config)) == expected
