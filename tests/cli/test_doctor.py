"""What `oar doctor` says of machines that are ready, and of machines that are not.

Answers stand in for imports, GPUs, verl and the recipe. Further down broken packages are really imported.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from oar_plugin.cli import child, doctor
from oar_plugin.cli.child import Child
from oar_plugin.cli.doctor import PACKAGES, Machine, Run
from oar_plugin.cli.main import main
from oar_plugin.hosts.verl import capabilities
from oar_plugin.runs.launch.preflight import Finding
from oar_plugin.runs.recipe import find_recipe
from tests.limits import PROCESS_S

ROOT = Path(__file__).parents[2]
RECIPE = "qwen2_5_7b_math"
NODE, LOGIN, CPU = Machine(8, False, "8 x H100"), Machine(0, False, "sees none"), Machine(0, True, "sees none")
LIBCUDA = "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
NO_SYMBOL = "ImportError: undefined symbol: _ZN3c10"
PLAIN = Run()
NEEDED = ("torch", "ray", "transformers", "TransferQueue", "verl", "vllm", "datasets", "flash-attn")
OF_MEGATRON = ("megatron-core", "mbridge", "transformer-engine")


def registered(*names):
    return lambda group: [EntryPoint(name, "x", group) for name in names]


@pytest.fixture
def examined(monkeypatch, capsys):
    """Findings by subject, exit status and verdict, of a node where everything is in place, with some answers changed."""
    # With this package, transformers does without flash-attn.
    monkeypatch.setattr(doctor, "importable", lambda name: name != "kernels")
    monkeypatch.setattr(doctor, "entry_points", registered("oar", "cpu"))
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    modules = {f"import {one['module']}": name for name, one in PACKAGES.items()}
    modules |= {"import verl.workers.rollout.vllm_rollout.vllm_async_server": "verl", "import vllm._custom_ops": "vllm"}

    def examine(*words, machine=NODE, absent=(), faults={}, versions={}, lacks={}, wanted=PLAIN, found=()):  # noqa: B006
        tested = {name: re.findall(r"[\d.]+", f"{one.get('tested', '')} 1")[0] for name, one in PACKAGES.items()}
        tested = {name: version for name, version in (tested | versions).items() if name not in absent}
        broken = {name: f"No module named '{PACKAGES[name]['module']}'" for name in absent} | faults

        def ask(child, function, argument=None, *_):
            if function is doctor.look_at_gpus:
                return (None if "torch" in broken else machine), broken.get("torch")
            if function is doctor.read_recipe:
                return (wanted, list(found)), None
            if function is capabilities.missing:
                return lacks.get(argument, ()), broken.get(argument)
            return True, broken.get(modules.get(argument, argument))

        shown = {name: [SimpleNamespace(version=version)] for name, version in tested.items()}
        monkeypatch.setattr(Child, "ask", ask)
        monkeypatch.setattr(doctor, "distributions", lambda name: shown.get(name, []))
        monkeypatch.setattr(doctor, "installed", lambda: tested.get("vllm"))
        capsys.readouterr()
        status = main(["doctor", "--json", *words])
        told = json.loads(capsys.readouterr().out)
        findings = {finding["subject"]: finding for finding in told["findings"]}
        assert len(findings) == len(told["findings"])
        return findings, status, told["verdict"]

    return examine


READY = [((), "algorithm.adv_estimator=oar"), (("--recipe", RECIPE), f"oar launch {RECIPE}")]


@pytest.mark.parametrize(("words", "start"), READY)
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
    ({"faults": {"ray": "ModuleNotFoundError: No module named 'msgpack'"}}, "ray", "msgpack"),
    ({"faults": {"verl": NO_SYMBOL}}, "verl", NO_SYMBOL),
    ({"faults": {doctor._LOADED: "ValueError: oar"}}, "oar_plugin", "verl did not load it"),
    ({"lacks": {"sync": ("verl.x: Y is not there", "z")}}, "sync", "Y is not there; z"),
    ({"faults": {"fsdp": "crashed with SIGSEGV"}}, "fsdp", "not supported: crashed with SIGSEGV"),
    ({"found": [Finding("data", "missing", "is not there")]}, "data", "is not there"),
]
NOTES = [
    *(({"absent": [name]}, name, "not installed") for name in PACKAGES if name not in NEEDED),
    ({"versions": {"torch": "2.10.1"}}, "torch", PACKAGES["torch"]["tested"]),
    ({"lacks": {"megatron": ("no megatron",)}}, "megatron", "no megatron"),
    ({"lacks": {"offload": ("vLLM lacks x",)}}, "offload", "vLLM lacks x"),
    ({"machine": CPU}, "GPUs", "verl_cpu"),
]


@pytest.mark.parametrize(("changes", "subject", "said"), MISSING + NOTES)
def test_what_is_missing_or_worth_a_note_comes_with_what_to_do(examined, changes, subject, said):
    """A note: only other runs need it, or it was not tested."""
    findings, *ends = examined(**changes)
    finding, missing = findings[subject], (changes, subject, said) in MISSING
    assert said in f"{finding['text']}; {finding['advice']}"
    assert (finding["level"], *ends) == (("missing", 1, "not ready") if missing else ("note", 0, "ready"))


MORE = [
    *(({"strategy": "megatron"}, {"absent": [name]}, name) for name in OF_MEGATRON),
    ({"strategy": "megatron"}, {"lacks": {"megatron": ("Y is not there",)}}, "megatron"),
    *(({"trainer": name}, {"lacks": {name: ("no Z",)}}, name) for name in ("separate_async", "ray_trainer")),
    ({"offloads": True}, {"lacks": {"offload": ("vLLM lacks x",)}}, "offload"),
]


@pytest.mark.parametrize(("wanted", "others", "subject"), MORE)
def test_a_recipe_needs_more(examined, wanted, others, subject):
    assert examined(**others)[1] == 0  # but for this recipe all is well
    findings, status, _ = examined("--recipe", RECIPE, wanted=Run(**wanted), **others)
    assert (findings[subject]["level"], status) == ("missing", 1)


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


def test_the_plugin_must_be_registered_wanted_and_looked_for(examined, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "=none" in examined()[0]["oar_plugin"]["text"]
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, oar")
    assert examined()[1] == 0
    monkeypatch.setattr(capabilities, "external_modules", lambda: {capabilities.EXTERNAL_MODULES: "mine,ours"})
    findings, status, _ = examined()
    assert (findings["oar_plugin"]["level"], status) == ("missing", 1)
    assert f"export {capabilities.EXTERNAL_MODULES}=mine,ours" in findings["oar_plugin"]["advice"]
    monkeypatch.setattr(doctor, "entry_points", registered("cpu"))
    assert "pip install --no-deps ." in examined()[0]["oar_plugin"]["advice"]


@pytest.mark.parametrize(("words", "said"), [(("--recipe", "nope"), "nope: "), (("a.b=1",), "a.b=1: ")])
def test_arguments_that_cannot_work_are_refused(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert capsys.readouterr().err.startswith(f"oar doctor: {said}")


# ---- packages that are imported


def test_packages_that_raise_crash_exit_or_hang_are_named_and_the_others_are_looked_at(tmp_path, monkeypatch, capfd):
    codes = {
        'import sys\nsys.left = True\nraise ImportError("no symbol\\nand more")': "ImportError: no symbol",
        "import os, sys\nassert not hasattr(sys, 'left')\nos.write(2, b'noise')": None,
        "import os\nos.abort()": "crashed with SIGABRT",
        "print('hello')\nraise SystemExit(3)": "SystemExit: 3",
        "import os\nos._exit(5)": "exit status 5",
        "import time\ntime.sleep(600)": "no answer within 6 s",
        "works = True": None,
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "LIMIT_S", 6.0)
    with closing(Child()) as asked:
        for number, (code, fault) in enumerate(codes.items()):
            (tmp_path / f"module{number}.py").write_text(code)
            assert doctor._fault(asked, f"module{number}") == fault
        process = asked.ask(os.getpid)
        assert doctor._fault(asked, "absent.part") == "ModuleNotFoundError: No module named 'absent'"
        assert asked.ask(os.getpid) == process, "what packages share is imported once"
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ProcessLookupError):
        os.kill(process[0], 0)


GPUS = [
    ("13.0", 2, "", (2, False, "2 x H100, at least 80.0 GiB each")),
    ("13.0", 0, "", (0, False, "torch 2.11.0, which needs a driver for CUDA 13.0, sees none")),
    ("13.0", 0, "cpu", (0, True, "torch 2.11.0, which needs a driver for CUDA 13.0, sees none")),
    (None, 0, "", (0, True, "torch 2.11.0 sees none")),
]


@pytest.mark.parametrize(("cuda", "count", "platform", "expected"), GPUS)
def test_the_gpus_that_torch_sees_are_told_or_that_it_sees_none(cuda, count, platform, expected, monkeypatch):
    """A made-up torch: its calls, not its answers, are what counts."""
    gpus = [SimpleNamespace(name="H100", total_memory=(80 + i) * 2**30) for i in range(count)]
    calls = SimpleNamespace(device_count=lambda: count, get_device_properties=gpus.__getitem__)
    torch = SimpleNamespace(__version__="2.11.0", version=SimpleNamespace(cuda=cuda, hip=None), cuda=calls)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("VERL_PLATFORM", platform)
    assert tuple(doctor.look_at_gpus()) == expected


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
def test_this_environment_has_what_is_looked_for(capsys):
    status = main(["doctor", "--json"])
    findings = {one["subject"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert status == 0, findings
    used = ("torch", "ray", "transformers", "TransferQueue", "verl", "vllm", "sync", "fsdp", "oar_plugin")
    assert {findings[name]["level"] for name in used} == {"ok"}
    assert "loaded by verl" in findings["oar_plugin"]["text"]


@pytest.mark.slow
def test_a_recipe_is_read_composed_checked_and_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("OAR_DATA", str(tmp_path))
    (reward := tmp_path / "reward.py").write_text("import no_such_module\n")
    folder, overrides = find_recipe(RECIPE), [f"reward.custom_reward_function.path={reward}"]
    wanted, found = doctor.read_recipe(folder, overrides, Machine(4, False, ""))
    findings = {one.subject: one for one in found}
    assert wanted == Run("sync", "fsdp2", "vllm", False, "megatron-bridge")
    assert [findings[name].level for name in ("cluster", "data", "reward")] == ["missing"] * 3
    assert "needs 8 GPUs" in findings["cluster"].text
    assert "no_such_module" in findings["reward"].text
    levels = [doctor.read_recipe(folder, [], machine)[1][0].level for machine in (NODE, LOGIN, CPU)]
    assert levels == ["ok", "not checked", "missing"]
    (wrong,) = doctor.read_recipe(folder, ["algorithm.oar.tau=2"], NODE)[1]
    assert (wrong.subject, wrong.level) == ("configuration", "missing")
    assert "algorithm.oar.tau=2" in wrong.text
