"""Every recipe: what it is made of, that only the estimator sets it apart from its baseline, that verl and OAR accept it."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from oar_plugin.cli.recipes import summary
from oar_plugin.hosts.verl.recipe import VARIANTS, RecipeError, check_config, command, compose_recipe, gpus_needed
from oar_plugin.hosts.verl.settings import resolve
from oar_plugin.plan import Plan, choose_gpu
from recipes.smoke import architecture_of, group_of

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path.parent for path in FOLDER.glob("*/recipe.yaml"))
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)

_composed: dict[tuple[Path, str], dict] = {}


def composed(recipe, variant="oar"):
    if (recipe, variant) not in _composed:
        _composed[recipe, variant] = compose_recipe(recipe, variant)
    return _composed[recipe, variant]


def flat(config):
    """`a.b.c -> value`, interpolations unresolved."""
    container = OmegaConf.to_container(config, resolve=False)

    def walk(node, path):
        if isinstance(node, dict) and node:
            for key, value in node.items():
                yield from walk(value, f"{path}.{key}" if path else str(key))
        else:
            yield path, node

    return dict(walk(container, ""))


def differing(one, other):
    """Keys whose values are not the same."""
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def test_there_are_recipes():
    assert len(RECIPES) >= 12


@every_recipe
def test_has_what_a_recipe_has(recipe):
    assert {"README.md", "recipe.yaml", "oar.yaml", "grpo.yaml", "run.sh"} == {path.name for path in recipe.iterdir()}
    assert os.access(recipe / "run.sh", os.X_OK)
    subprocess.run(["bash", "-n", recipe / "run.sh"], check=True)
    assert recipe.name in (FOLDER / "README.md").read_text(), "listed"


@every_recipe
def test_baseline_differs_in_the_estimator_only(recipe):
    oar, grpo = flat(composed(recipe)), flat(composed(recipe, "grpo"))
    assert {key for key in differing(oar, grpo) if not key.startswith("algorithm.oar.")} == {"algorithm.adv_estimator"}
    assert oar["algorithm.adv_estimator"] == "oar"
    assert grpo["algorithm.adv_estimator"] == "grpo"


@every_recipe
@pytest.mark.parametrize("variant", VARIANTS)
def test_verl_and_oar_accept_it(recipe, variant):
    config = composed(recipe, variant)
    check_config(config)
    if variant == "oar":
        assert resolve(config).base_estimator == "grpo"


@every_recipe
def test_takes_presets(recipe):
    assert "defaults: [recipe, oar: " in (recipe / "oar.yaml").read_text()


@pytest.mark.parametrize("preset", ["published", "onward"])
@pytest.mark.parametrize("name", ["qwen2_5_7b_math", "qwen2_5_7b_oar_p"])
def test_a_preset_and_a_key_on_top_of_it(name, preset):
    own = composed(FOLDER / name).algorithm.oar
    oar = compose_recipe(FOLDER / name, "oar", [f"oar={preset}", "algorithm.oar.beta=1.5"]).algorithm.oar
    assert (oar.beta, oar.answer_patterns) == (1.5, own.answer_patterns)
    # A recipe that names an importance means it.
    assert oar.importance == ("oar_p" if name.endswith("oar_p") else {"published": "oar_g"}.get(preset, preset))
    assert oar.keys() == own.keys()


@every_recipe
@pytest.mark.parametrize("variant", VARIANTS)
def test_fits_the_gpus_that_it_names(recipe, variant):
    made = Plan(composed(recipe, variant), choose_gpu("A100-80"))
    assert made.fits, made.verdict
    assert made.headroom >= 0


@every_recipe
def test_what_the_list_says_of_it_is_so(recipe):
    what, nodes, engine = summary(recipe)
    actor = composed(recipe).actor_rollout_ref
    assert what.split()[0].strip(",") in actor.model.path
    assert engine.lower().startswith(actor.actor.strategy)
    count, gpus, _ = gpus_needed(composed(recipe))
    number = {1: "one node", 2: "two nodes", 4: "four nodes", 8: "eight nodes"}[count]
    assert nodes.startswith(f"{number} with {gpus} GPUs")


@every_recipe
def test_baseline_and_oar_write_to_different_places(recipe):
    assert composed(recipe).trainer.default_local_dir != composed(recipe, "grpo").trainer.default_local_dir
    assert recipe.name in composed(recipe).trainer.experiment_name


@every_recipe
def test_prompt_and_response_fit_the_engines(recipe):
    config = composed(recipe)
    longest = config.data.max_prompt_length + config.data.max_response_length
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    shared = actor.megatron.context_parallel_size if "megatron" in actor else actor.ulysses_sequence_parallel_size
    assert longest <= rollout.max_model_len
    assert longest <= actor.ppo_max_token_len_per_gpu * shared, "verl refuses a response longer than a micro-batch"


@pytest.mark.parametrize("group", ["dp", "megatron", "colocate_async", "separate_async"])
def test_smoke_group_is_there(group, monkeypatch):
    monkeypatch.setenv("OAR_SMOKE", "/nowhere")
    recipe = next(recipe for recipe in RECIPES if group_of(composed(recipe)) == group)
    config = compose_recipe(recipe, "oar", [f"+cpu_smoke={group}"])
    assert config.trainer.device == "cpu"
    assert config.actor_rollout_ref.model.path == "/nowhere/model"


def test_stand_in_has_the_architecture_of_the_model():
    assert architecture_of("Qwen/Qwen2.5-7B") == "qwen2"
    assert architecture_of("01-ai/Yi-1.5-34B-Chat-16K") == "llama"
    assert architecture_of("Qwen/Qwen3-30B-A3B-Base") == "qwen3_moe"


def test_a_folder_that_is_no_recipe_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"has no oar\.yaml"):
        compose_recipe(tmp_path)


def test_an_override_that_is_not_there_is_named():
    with pytest.raises(RecipeError, match=r"data\.no_such_key"):
        compose_recipe(RECIPES[0], "oar", ["data.no_such_key=1"])


def test_a_preset_with_a_plus_sign_is_told_how_to_write_it():
    with pytest.raises(RecipeError, match=r"\+oar=onward: .*write oar=onward$"):
        compose_recipe(RECIPES[0], "oar", ["+oar=onward"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=False", "data.train_batch_size=7"],
            "verl refuses this configuration",
        ),
        (["trainer.use_v1=False"], "trainer.use_v1=False: the legacy trainer"),
    ],
)
def test_what_verl_or_oar_would_refuse_later_is_refused_before_anything_starts(overrides, message, capsys):
    with pytest.raises(RecipeError, match=message):
        check_config(compose_recipe(RECIPES[0], "oar", overrides))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("trainer", "rollout", "reward", "gpus_of_a_node", "expected"),
    [
        ((4, 8), None, None, None, (4, 8, 32)),
        ((2, 4), None, None, 8, (1, 8, 8)),  # two parts on one machine
        ((1, 4), (1, 4), None, None, (1, 8, 8)),  # one machine, split
        ((2, 8), (1, 8), None, None, (3, 8, 24)),
        ((1, 8), (2, 4), None, None, (2, 8, 16)),
        ((1, 4), (1, 4), (1, 2), None, (3, 4, 10)),
        ((1, 4), (1, 4), (1, 2), 8, (2, 8, 10)),
    ],
)
def test_nodes_and_gpus_are_those_of_all_pools(trainer, rollout, reward, gpus_of_a_node, expected):
    nodes = [{"nnodes": n, "n_gpus_per_node": gpus} for n, gpus in (trainer, rollout or (0, 8), reward or (0, 8))]
    config = {
        "trainer": {**nodes[0], "v1": {"trainer_mode": "separate_async" if rollout else "sync"}},
        "actor_rollout_ref": {"rollout": nodes[1]},
        "reward": {"reward_model": {**nodes[2], "enable_resource_pool": reward is not None}},
    }
    assert gpus_needed(OmegaConf.create(config), gpus_of_a_node) == expected


def test_command_runs_the_variant():
    words = command(RECIPES[0], "grpo", ["data.seed=1"])
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert words[-3:] == ["--config-name", "grpo", "data.seed=1"]
