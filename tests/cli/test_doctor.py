"""What `oar doctor` says of machines that are ready, and of machines that are not.

Answers stand in for imports, GPUs, verl and the recipe. Further down broken packages are really imported.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from oar_plugin.cli import doctor
from oar_plugin.cli.doctor import PACKAGES, Child, needs_of
from oar_plugin.cli.main import main
from oar_plugin.hosts.verl import capabilities
from oar_plugin.runs.launch.preflight import Finding
from oar_plugin.runs.recipe import find_recipe
from tests.limits import PROCESS_S

ROOT = Path(__file__).parents[2]
RECIPE = "qwen2_5_7b_math"
NODE, LOGIN, CPU = (8, False, "8 x H100"), (0, False, "sees none"), (0, True, "sees none")
LIBCUDA = "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
NO_MODULE = "ModuleNotFoundError: No module named '{}'"
NO_SYMBOL = "ImportError: undefined symbol: _ZN3c10"
NEEDED = ("torch", "ray", "transformers", "TransferQueue", "verl", "vllm", "datasets", "flash-attn")
OF_MEGATRON = ("megatron-core", "mbridge", "transformer-engine")


@pytest.fixture
def examined(monkeypatch, capsys):
    """Findings by subject, exit status and verdict, of a node where everything is in place, with some answers changed."""
    module_of = {name: one["module"] for name, one in PACKAGES.items()}
    modules = {f"import {module}": name for name, module in module_of.items()}
    modules |= {"import verl.workers.rollout.vllm_rollout.vllm_async_server": "verl", "import vllm._custom_ops": "vllm"}

    def examine(*words, machine=NODE, absent=(), faults={}, versions={}, lacks={}, wanted={}, more=(), found=()):  # noqa: B006
        tested = {name: re.findall(r"[\d.]+", f"{one.get('tested', '')} 1")[0] for name, one in PACKAGES.items()}
        tested = {name: version for name, version in (tested | versions).items() if name not in absent}
        roots = {module_of.get(name, name).partition(".")[0] for name in {*absent} - {"tensorboard"}}
        gone = {"kernels", *roots}  # without kernels, flash-attn is needed

        def ask(child, function, argument=None, *_):
            if function is doctor.look_at_gpus:
                return (None if "torch" in {*faults, *absent} else machine), faults.get("torch")
            if function is doctor.read_recipe:
                return (needs_of(machine[1], **wanted) | {*more}, [*found]), None
            if function is capabilities.missing:
                return lacks.get(argument, ()), faults.get(argument)
            return None, faults.get(modules.get(argument, argument))

        shown = {name: [SimpleNamespace(version=version)] for name, version in tested.items()}
        monkeypatch.setattr(Child, "ask", ask)
        monkeypatch.setattr(doctor, "importable", lambda name: name not in gone)
        monkeypatch.setattr(doctor, "distributions", lambda name: shown.get(name, []))
        monkeypatch.setattr(doctor, "installed", lambda: tested.get("vllm"))
        capsys.readouterr()
        status = main(["doctor", "--json", *words])
        told = json.loads(capsys.readouterr().out)
        findings = {finding["subject"]: finding for finding in told["findings"]}
        assert len(findings) == len(told["findings"])
        return findings, status, told["verdict"]

    return examine


@pytest.mark.parametrize(
    ("words", "start"), [((), "algorithm.adv_estimator=oar"), (("--recipe", RECIPE), f"oar launch {RECIPE}")]
)
def test_a_node_with_everything_is_ready(examined, capsys, words, start):
    findings, *end = examined(*words)
    assert {finding["level"] for finding in findings.values()} == {"ok"}
    assert end == [0, "ready"]
    assert main(["doctor", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Ready: {start}"


MISSING = [
    *(({"absent": [one]}, one, PACKAGES[one].get("advice") or f'pip install "{one}') for one in NEEDED),
    ({"faults": {"flash-attn": NO_SYMBOL}}, "flash-attn", NO_SYMBOL),
    ({"faults": {"torch": "crashed with SIGSEGV"}}, "torch", "crashed with SIGSEGV"),
    # A checkout on the search path has no version; the module that it lacks is not the package itself.
    ({"faults": {"ray": NO_MODULE.format("msgpack")}}, "ray", "'msgpack'; \n"),
    ({"faults": {"verl": NO_MODULE.format("antlr4")}}, "verl", "; pip install antlr4-python3-runtime==4.9.3\n"),
    ({"faults": {"verl": NO_MODULE.format("transfer_queue")}}, "verl", '; pip install "TransferQueue=='),
    ({"faults": {"verl": NO_MODULE.format("verl.x")}}, "verl", "; again: in an environment of its own"),
    ({"faults": {"verl": NO_SYMBOL}}, "verl", NO_SYMBOL),
    ({"faults": {doctor._LOADED: "ValueError: oar"}}, "oar_plugin", "VERL_USE_EXTERNAL_PLUGINS=auto, on every node"),
    ({"lacks": {"sync": ("verl.x: Y is not there", "z")}}, "sync", "Y is not there; z"),
    ({"faults": {"fsdp": "crashed with SIGSEGV"}}, "fsdp", "not supported: crashed with SIGSEGV"),
    ({"found": [Finding("data", "missing", "is not there")]}, "data", "is not there"),
]
NOTES = [
    *(({"absent": [name]}, name, "not installed") for name in PACKAGES if name not in NEEDED),
    *(({"versions": {"torch": version}}, "torch", PACKAGES["torch"]["tested"]) for version in ("2.10.1", "2.15.0")),
    ({"lacks": {"megatron": ("no megatron",)}}, "megatron", "no megatron"),
    ({"lacks": {"offload": ("vLLM lacks x",)}}, "offload", "vLLM lacks x"),
    ({"machine": CPU}, "GPUs", "verl_cpu"),
]


@pytest.mark.parametrize(("changes", "subject", "said"), MISSING + NOTES)
def test_what_is_missing_or_worth_a_note_comes_with_what_to_do(examined, changes, subject, said):
    """A note: only other runs need it, or it was not tested."""
    findings, *ends = examined(**changes)
    finding, missing = findings[subject], (changes, subject, said) in MISSING
    assert said in f"{finding['text']}; {finding['advice']}\n"
    assert (finding["level"], *ends) == (("missing", 1, "not ready") if missing else ("note", 0, "ready"))


def test_verl_is_not_blamed_for_a_vllm_that_is_not_there_and_bare_environments_get_an_answer(examined, monkeypatch):
    verls = {"import verl.workers.rollout.vllm_rollout.vllm_async_server": "vllm version None not supported"}
    findings = examined(absent=["vllm"], faults=verls)[0]
    assert [name for name, finding in findings.items() if finding["level"] == "missing"] == ["vllm"]
    assert findings["vllm"]["advice"].startswith("pip install 'vllm>=")
    monkeypatch.setitem(sys.modules, "packaging.specifiers", None)  # as after `pip install --no-deps verl`
    bare = examined(absent=["torch", "packaging"])[0]
    assert (bare["torch"]["level"], bare["verl"]["level"]) == ("missing", "ok")


def test_the_tested_versions_are_those_that_were_run_together():
    table = (ROOT / "docs/evidence/versions.md").read_text().partition("|---|")[2].partition("\n\n")[0]
    for row in table.splitlines()[1:]:
        cells = [cell.strip(" |").removeprefix("core ") for cell in row.split(" | ")[2:]]
        for name, cell in zip(("torch", "transformers", "verl", "vllm", "megatron-core"), cells, strict=True):
            if found := re.match(r"[\d.]+\d(\.dev)?", cell):
                assert SpecifierSet(PACKAGES[name]["tested"]).contains(found[0], prereleases=True), row


MORE = [
    *(({"strategy": "megatron"}, {"absent": [name]}, name) for name in OF_MEGATRON),
    ({"strategy": "megatron"}, {"lacks": {"megatron": ("Y is not there",)}}, "megatron"),
    *(({"trainer": name}, {"lacks": {name: ("no Z",)}}, name) for name in ("separate_async", "ray_trainer")),
]


@pytest.mark.parametrize(("wanted", "others", "subject"), MORE)
def test_a_recipe_needs_more(examined, wanted, others, subject):
    assert examined(**others)[1] == 0  # but for this recipe all is well
    findings, status, _ = examined("--recipe", RECIPE, wanted=wanted, **others)
    assert (findings[subject]["level"], status) == ("missing", 1)
    assert examined("--recipe", RECIPE, more=["offload"], lacks={"offload": ("vLLM lacks x",)})[1] == 1


def test_a_login_node_is_told_what_was_not_checked_and_not_that_it_is_ready(examined, capsys):
    """Neither is a package said to be broken that may only lack the driver."""
    faults = {"vllm": LIBCUDA, "verl": LIBCUDA}
    findings, status, verdict = examined(machine=LOGIN, faults=faults)
    unseen = {name for name, finding in findings.items() if finding["level"] == "not checked"}
    assert (unseen, status, verdict) == ({"GPUs", "vllm", "verl"}, 3, "not checked")
    assert main(["doctor"]) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("Not checked: verl, vllm, GPUs")
    assert examined(faults=faults)[1] == 1, "the same errors beside a GPU are there to be mended"
    assert examined(machine=LOGIN, absent=["vllm"])[1] == 1


def test_a_verl_that_looks_for_no_plugins_is_told_which_to_import(examined, monkeypatch):
    monkeypatch.setattr(capabilities, "external_modules", lambda: {capabilities.EXTERNAL_MODULES: "mine,ours"})
    findings = examined(faults={doctor._LOADED: "ValueError: oar"})[0]
    assert f"export {capabilities.EXTERNAL_MODULES}=mine,ours" in findings["oar_plugin"]["advice"]


@pytest.mark.parametrize(("words", "said"), [(("--recipe", "nope"), "nope: "), (("a.b=1",), "a.b=1: ")])
def test_arguments_that_cannot_work_are_refused(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert capsys.readouterr().err.startswith(f"oar doctor: {said}")


# ---- packages that are imported


def test_what_raises_crashes_exits_or_hangs_is_told_and_the_next_call_works(tmp_path, monkeypatch, capfd):
    codes = {
        'import sys\nsys.left = True\nraise ImportError("no symbol\\nand more")': "ImportError: no symbol",
        "import os, sys\nassert not hasattr(sys, 'left')\nos.write(2, b'noise')": None,
        "import os\nos.abort()": "crashed with exit status -6",
        "print('hello')\nraise SystemExit(3)": "SystemExit: 3",
        "import os\nos._exit(5)": "crashed with exit status 5",
        "import time\ntime.sleep(600)": "no answer within 6 s",
        "works = True": None,
    }
    monkeypatch.setattr(doctor, "LIMIT_S", 6.0)
    child = Child()
    for code, fault in codes.items():
        assert child.ask(exec, code) == (None, fault)
    assert child.ask(os.getpid) == child.ask(os.getpid), "what packages share is imported once"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("cuda", "on_cpu"), [("13.0", False), (None, True)])
def test_the_gpus_that_torch_sees_are_told_or_that_it_sees_none(cuda, on_cpu, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert doctor.look_at_gpus()[:2] == (0, on_cpu)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert doctor.look_at_gpus()[:2] == (0, True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    assert doctor.look_at_gpus() == (2, False, "2 x H100")


def test_an_environment_that_has_nothing_gets_a_list_and_no_traceback(tmp_path):
    """Not even rich and packaging: what `pip install --no-deps` leaves in an empty environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=PROCESS_S)
    words = [tmp_path / "venv" / "bin" / "python", "-m", "oar_plugin.cli.main", "doctor", "--recipe", RECIPE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "missing      verl: not installed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Not ready: torch, ")


pytest.importorskip("verl")


@pytest.mark.slow
def test_a_recipe_is_read_composed_checked_and_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("OAR_DATA", str(tmp_path))
    (reward := tmp_path / "reward.py").write_text("import no_such_module\n")
    folder, overrides = find_recipe(RECIPE), [f"reward.custom_reward_function.path={reward}"]
    wanted, found = doctor.read_recipe(folder, overrides, 4, False)
    findings = {one.subject: one for one in found}
    assert {"sync", "fsdp", "vllm", "flash-attn", "TransferQueue"} <= wanted
    assert [findings[name].level for name in ("cluster", "data", "reward")] == ["missing"] * 3
    assert "needs 8 GPUs" in findings["cluster"].text
    assert "no_such_module" in findings["reward"].text
    levels = [doctor.read_recipe(folder, [], *machine[:2])[1][0].level for machine in (NODE, LOGIN, CPU)]
    assert levels == ["ok", "not checked", "missing"]
    wrong = ["algorithm.oar.tau=2", "algorithm.oar.floor=2"]
    _, said = doctor.Child().ask(doctor.read_recipe, folder, wrong, 8, False)
    assert all(f"{one}: " in said for one in wrong), "a line for each, from the other process"
