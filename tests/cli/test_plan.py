"""`oar plan`: exit status, output and messages."""

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from oar_plugin.cli.main import main
from oar_plugin.hosts.verl import recipe
from oar_plugin.plan.layout import with_overrides

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL, LARGE = RECIPES / "qwen2_5_7b_math", RECIPES / "qwen2_5_32b_megatron"


@pytest.fixture(autouse=True, scope="module")
def composed_once():
    """Hydra takes seconds for a recipe: compose each once, overrides on top."""
    real = recipe.compose_recipe
    kept: dict[tuple[Path, str], DictConfig] = {}

    def compose(folder, variant="oar", overrides=()):
        if (folder, variant) not in kept:
            kept[folder, variant] = real(folder, variant)
        return with_overrides(kept[folder, variant], dict(o.split("=", 1) for o in overrides))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "compose_recipe", compose)
        yield


@pytest.mark.parametrize("folder", [SMALL, LARGE], ids=lambda folder: folder.name)
def test_the_recipes_fit(folder, capsys):
    assert main(["plan", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "Verdict: fits" in shown
    assert "projections, not measurements" in shown
    assert "50% of the responses scored" in " ".join(shown.split())


def test_what_does_not_fit_is_said_by_the_exit_status_and_what_to_change(capsys):
    assert main(["plan", str(SMALL), "--gpu-memory", "24"]) == 1
    shown = capsys.readouterr().out
    assert "Verdict: does not fit" in shown
    assert "actor_rollout_ref.actor.fsdp_config" in shown


def test_json_is_all_that_is_printed(capsys):
    assert main(["plan", str(SMALL), "--gpus", "16", "--json", "--gpu", "h200"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"]
    assert values["projection"]
    assert values["setup"]["layout"]["gpus"] == 16
    assert values["gpu"]["name"].startswith("NVIDIA H200")


def test_overrides_may_stand_behind_options(capsys):
    arguments = [
        "plan",
        str(SMALL),
        "--gpus",
        "8",
        "data.max_response_length=1024",
        "--json",
        "data.max_prompt_length=512",
    ]
    assert main(arguments) == 0
    work = json.loads(capsys.readouterr().out)["setup"]["workload"]
    assert (work["max_response"], work["max_prompt"]) == (1024, 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the folder of a recipe"),
        ([str(SMALL), "--gpu", "abacus"], "allowed: A100-40"),
        ([str(SMALL), "--gpus", "12"], "multiple of 8"),
        ([str(SMALL), "--response-length", "9999"], "data.max_response_length"),
        (
            [str(SMALL), "actor_rollout_ref.actor.ppo_mini_batch_size=100"],
            "actor_rollout_ref.actor.ppo_mini_batch_size=100",
        ),
        ([str(SMALL), "--out", "somewhere"], "--out goes with --check"),
    ],
)
def test_wrong_input_is_named(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_stray_argument_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", str(SMALL), "--gpu", "H100-80", "--color"])
    assert exit_.value.code == 2
    assert "--color" in capsys.readouterr().err
