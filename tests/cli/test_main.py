"""The command line as a whole, and `oar recipes` and `oar plan`."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from oar_plugin import __version__
from oar_plugin.cli.main import COMMANDS, main
from oar_plugin.hosts.verl.hydra_conf import config_folder
from oar_plugin.runs.recipe import find_recipe, recipe_names
from tests import verl_defaults
from tests.limits import PROCESS_S
from tests.tracked import ROOT

RECIPE = "qwen2_5_7b_math"


@pytest.mark.parametrize(
    ("words", "status", "out", "err"),
    [
        *(([command, "--help"], 0, f"usage: oar {command}", "") for command in COMMANDS),
        (["--version"], 0, f"oar_plugin {__version__}\n", ""),
        (["trian"], 2, "", "doctor"),
        # A wrong option is not taken for an override.
        (["launch", RECIPE, "--dry-run", "--partitoin", "gpu"], 2, "", "--partitoin"),
        (["launch", RECIPE, "--dry-run", "--srun", "'"], 2, "", "--srun"),
    ],
)
def test_commands_explain_themselves_and_what_is_none_is_refused(words, status, out, err, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    said = capsys.readouterr()
    assert exit_.value.code == status
    assert out in said.out
    assert err in said.err


# ---- oar recipes


def test_it_lists_every_recipe_by_its_whole_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(recipe_names()) <= listed


def test_a_copy_is_a_recipe_of_ones_own_and_templates_can_be_copied(tmp_path, monkeypatch, capsys):
    def contents(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "qwen2_5_7b_math", "mine"]) == 0
    assert "oar launch mine" in capsys.readouterr().out
    assert find_recipe("mine") == tmp_path / "mine"
    for other, said in (("qwen2_5_1_5b_math", "mine exists"), ("cpu_demo", "cpu_demo: neither a folder nor a recipe")):
        assert main(["recipes", "copy", other, "mine"]) == 2
        assert said in capsys.readouterr().err
    own, original = (contents(folder) for folder in (tmp_path / "mine", find_recipe("qwen2_5_7b_math")))
    assert own.keys() == original.keys()
    assert own["oar.yaml"] == original["oar.yaml"]
    assert b"recipes/qwen2_5_7b_math" not in own["README.md"] + own["run.sh"], "its commands run the original"
    assert b"oar plan mine" in own["README.md"]
    assert b"experiment_name: mine-" in own["recipe.yaml"]
    links = re.findall(r"\]\(([^)#]+)\)", own["README.md"].decode())
    assert links
    assert all(Path(link).exists() for link in links)
    assert main(["recipes", "copy", "cluster", "cluster"]) == 0
    assert contents(tmp_path / "cluster").keys() == {"ray.j2", "slurm.j2", "kubernetes.j2"}


# ---- oar plan

BIG = ["Verdict: fits", "50% of the responses", "200 steps", "11 validations", "GPU-hours on 32", "Assumed:", "No run"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["qwen2_5_32b_megatron"], 0, BIG),
        (
            [RECIPE, "--gpu-memory", "27"],
            1,
            ["Verdict: does not fit", "of 27 GiB in update", "fsdp_config.optimizer_offload"],
        ),
    ],
)
def test_whether_a_recipe_fits_is_said_and_what_to_change(words, status, said, capsys):
    assert main(["plan", *words]) == status
    shown = " ".join(capsys.readouterr().out.split())
    assert [part for part in said if part not in shown] == []


def test_json_is_all_that_is_printed_and_overrides_may_stand_behind_options(capsys):
    words = ["trainer.nnodes=2", "--json", "--gpu", "h200", "data.max_response_length=1024"]
    words += ["data.max_prompt_length=512"]
    assert main(["plan", RECIPE, *words]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["projection"]
    assert values["gpus"] == 16
    assert values["gpu"]["name"].startswith("NVIDIA H200")
    assert (values["mean_prompt"], values["mean_response"]) == (128, 512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing", "recipes: qwen2_5_0_5b_gsm8k"),
        (f"{RECIPE} --gpu abacus", "allowed: L4-24"),
        (f"{RECIPE} --response-length 9999", "--response-length 9999: must be above 0 and at most 2048"),
        (f"{RECIPE} algorithm.oar.tau=2", "algorithm.oar.tau=2: Input should be less than or equal to 1"),
        (f"{RECIPE} actor_rollout_ref.actor.use_dynamic_bsz=False", "ppo_micro_batch_size_per_gpu"),
    ],
)
def test_wrong_input_is_named(words, message, capsys):
    assert main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_plans_are_the_same_without_verl(capsys):
    """Another process has neither verl nor what comes with it; this one has them, and the plan does not import them."""
    others = [name for name in recipe_names() if name != "qwen2_5_7b_oar_p"]  # asks which vLLM is there
    asked = [[name] for name in others] + [[RECIPE, "algorithm.oar.tau=0.5", "--variant", "grpo"]]
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["verl", "transformers", "ray", "tensordict", "vllm"]))
from oar_plugin.cli.main import main
for words in {asked!r}:
    main(["plan", *words, "--json"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PROCESS_S)
    for words in asked:
        main(["plan", *words, "--json"])
    assert done.stdout == capsys.readouterr().out


@pytest.mark.skipif(version("verl") != "0.9.1", reason="the defaults are those of verl 0.9.1")
def test_the_defaults_without_verl_are_verls():
    for engine in verl_defaults.ENGINES:
        here = verl_defaults.composed(verl_defaults.FOLDER, engine)
        assert here == verl_defaults.composed(config_folder(), engine), "python -m tests.verl_defaults"


PLAN = "oar_plugin.hosts.verl.hydra_conf", "omegaconf"


def test_a_package_that_the_plan_lacks_is_one_line(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("oar_plugin.runs.plan", "oar_plugin.hosts", *PLAN))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert main(["plan", RECIPE]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install omegaconf" in said
