"""The command line as a whole, and `oar recipes` and `oar plan`."""

import re
import subprocess
import sys

import pytest

from oar_plugin import __version__
from oar_plugin.cli.arguments import COMPOSING
from oar_plugin.cli.main import COMMANDS, main
from oar_plugin.runs.recipe import find_recipe, recipe_names
from tests.limits import PROCESS_S
from tests.tracked import ROOT

RECIPE = "qwen2_5_7b_math"


@pytest.mark.parametrize(
    ("words", "status", "out", "err"),
    [
        *(([command, "--help"], 0, f"usage: oar {command}", "") for command in COMMANDS),
        *(([command, "--help"], 0, COMPOSING, "") for command in ("plan", "launch")),
        (["--version"], 0, f"oar_plugin {__version__}\n", ""),
        (["lunch"], 2, "", f"lunch: no such command; allowed: {', '.join(COMMANDS)}; did you mean launch?"),
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


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (err, [command for command in COMMANDS if f"\n    {command} " not in out]) == ("", [])


# ---- oar recipes


def test_it_lists_every_recipe_by_its_whole_name_and_the_command_that_it_prints_copies_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    said = capsys.readouterr().out
    assert set(recipe_names()) <= {line.split()[0] for line in said.splitlines() if line.strip()}
    command = " ".join(re.search(r"cp -r [^;]* MINE(?=;)", said)[0].split())
    subprocess.run(command.replace("NAME", RECIPE).replace("MINE", "mine").split(), check=True)
    assert find_recipe("mine") == tmp_path / "mine"
    assert main(["plan", "mine"]) == 0


# ---- oar plan

BIG = ["Verdict: fits", "50% of the responses", "200 steps, ", "11 validations", "GPU-hours on 32"]
BIG += ["Assumed:", "not measured"]
SMALL = ["Verdict: does not fit", "of 27 GiB in update", "fsdp_config.optimizer_offload"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("qwen2_5_32b_megatron", 0, BIG),
        (f"{RECIPE} --gpu-memory 27", 1, SMALL),
        # Overrides may stand behind options.
        (
            f"{RECIPE} trainer.nnodes=2 --gpu h200 data.max_response_length=1024",
            0,
            ["NVIDIA H200", "on 16 GPUs", "of 512 tokens"],
        ),
        (f"{RECIPE} actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096", 0, ["By formula"]),
        ("nothing", 2, ["recipes: qwen2_5_0_5b_gsm8k"]),
        (f"{RECIPE} --gpu abacus", 2, ["allowed: L4-24"]),
        (f"{RECIPE} --gpu RTX4090", 2, ["allowed: L4-24", "did you mean 4090?"]),
        (f"{RECIPE} --gpu a100-80gb", 2, ["did you mean A100-80?"]),
        (f"{RECIPE} actor_rollout_ref.rollout.dtype=fp8", 2, ["rollout.dtype=fp8; only bfloat16"]),
        (f"{RECIPE} algorithm.oar.tau=2", 2, ["algorithm.oar.tau=2: Input should be less than or equal to 1"]),
    ],
)
def test_whether_a_recipe_fits_is_said_and_what_to_change_and_wrong_input_is_named(words, status, said, capsys):
    assert main(["plan", *words.split()]) == status
    printed = capsys.readouterr()
    shown = " ".join((printed.err if status == 2 else printed.out).split())
    assert [part for part in said if part not in shown] == []


def printed(modules, *words):
    """What a process prints in which these modules are not installed, on stdout and stderr."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules})); import oar_plugin.cli.main as cli; cli.main({[*words]})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PROCESS_S)
    return done.stdout, done.stderr


def test_a_plan_reads_the_files_of_the_installed_verl_and_imports_none_of_it(capsys):
    words = ["plan", RECIPE, "algorithm.oar.tau=0.5"]
    assert main(words) == 0
    # verl's submodules come from an import of verl only; the package itself is found by its folder.
    modules = "verl.protocol verl.trainer verl.utils verl.workers transformers ray tensordict vllm"
    assert printed(modules.split(), *words) == (capsys.readouterr().out, "")


def test_recipes_are_listed_without_rich_and_what_needs_it_says_so():
    assert printed(["rich"], "recipes")[0].startswith("qwen2_5_0_5b_gsm8k  ")
    _, err = printed(["rich"], "inspect", ".", "--model", "m")
    assert err == "oar inspect: rich is not installed here; pip install rich\n"


@pytest.mark.parametrize("command", ["plan", "launch"])
@pytest.mark.parametrize(
    ("modules", "line"),
    [
        (["verl"], "not installed here: verl; .* an older transformers; .*: pip install --no-deps verl"),
        (["hydra"], "not installed here: hydra; .*: pip install --no-deps hydra-core"),
        (["verl", "hydra"], "not installed here: verl, hydra; .*: pip install --no-deps verl hydra-core"),
    ],
)
def test_what_composing_lacks_is_one_line_to_copy(command, modules, line):
    out, err = printed(modules, command, RECIPE, *(["--dry-run"] if command == "launch" else []))
    assert (out, err.count("\n")) == ("", 1)
    assert re.fullmatch(f"oar {command}: {line}\n", err)
