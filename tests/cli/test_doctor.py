"""What `oar doctor` says of machines that are ready, and of machines that are not.

Most machines here are made up: answers stand in for the processes that look at packages, GPUs, verl and the recipe. Further
down real processes answer, with broken packages in front of the search path.
"""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from oar_plugin.cli import doctor, questions
from oar_plugin.cli.doctor import PACKAGES, import_faults, version_of
from oar_plugin.cli.main import main
from oar_plugin.cli.questions import Machine, one_process
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.vllm import versions
from oar_plugin.runs.launch.preflight import Finding, importable
from oar_plugin.runs.recipe import find_recipe
from tests.limits import PROCESS_S

ROOT = Path(__file__).parents[2]
RECIPE = "qwen2_5_7b_math"
GIB = 2**30
GPU = {"name": "NVIDIA H100 80GB HBM3", "total": 79 * GIB, "free": 78 * GIB}
FULL = {**GPU, "free": 20 * GIB}
CPU = {"torch": "2.13.0+cpu", "built_for": None, "gpus": None}
LOGIN = {"torch": "2.11.0", "built_for": "13.0", "gpus": None, "why_not": "RuntimeError: Found no NVIDIA driver"}
LIBCUDA = "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
FITS_VERL: list[list[str]] = [[], []]  # what verl lacks, what could not be imported
TOLD = {
    "devices": {"torch": "2.11.0", "built_for": "13.0", "gpus": [GPU] * 8},
    # The oldest version that was tested, and what its import says.
    "imports": {name: (re.findall(r"[\d.]+", f"{one.tested} 1")[0], None) for name, one in PACKAGES.items()},
    "default_trainer": {"mode": "sync"},
    "features": {
        **{"verl": "0.9.1", "folder": "/site/verl", "note": "", "rollout": None, "loaded": True},
        "features": dict.fromkeys(capabilities.FEATURES, FITS_VERL),
    },
    "recipe": {
        **{"mode": "sync", "strategy": "fsdp2", "vanilla_mbridge": True, "offloads": False, "share": 0.6},
        **{"attention": "flash_attention_2", "engine": "vllm", "loggers": ["console", "tensorboard"]},
        **{"nodes": [1, 8], "findings": [Finding("memory", "ok", "fits")]},
    },
}
"""A node with eight GPUs where everything is in place. None removes a key; `fault` is that of the process."""
ABSENT = "absent"


def lacks(feature, *lacking, unchecked=()):
    """Changes to the answers: verl lacks something that the feature uses, or it could not be imported."""
    return {"features": {"features": TOLD["features"]["features"] | {feature: [list(lacking), list(unchecked)]}}}


def absent(name):
    """Version, and what its import says, of a package that is not installed."""
    return None, f"ModuleNotFoundError: No module named '{PACKAGES[name].module.partition('.')[0]}'"


def registered(*names):
    return lambda group: [EntryPoint(name, "x", group) for name in names]


@pytest.fixture
def examined(monkeypatch, tmp_path, capsys):
    """Findings by subject, exit status and verdict, of that node with some answers changed."""
    monkeypatch.setattr(doctor, "DRIVER_FILES", ())  # whatever the machine that runs this has
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", registered("oar", "cpu"))
    # With this package, transformers does without flash-attn.
    monkeypatch.setattr(doctor, "importable", lambda name: name != "kernels" and importable(name))
    for name in ("VERL_USE_EXTERNAL_PLUGINS", "VERL_PLATFORM", "WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def examine(*words, **changes):
        state = TOLD["imports"] | changes.get("imports", {})
        state = {name: absent(name) if one == ABSENT else one for name, one in state.items()}

        def answer(question, *arguments):
            told = TOLD[question.__name__] | changes.get(question.__name__, {})
            if question is questions.imports:
                return {name: fault for name, (_, fault) in state.items()} | {"fault": None}
            return {"fault": None} | {key: value for key, value in told.items() if value is not None}

        monkeypatch.setattr(doctor, "one_process", lambda: nullcontext(answer))
        monkeypatch.setattr(doctor, "version_of", lambda name: "0.1" if name == "oar_plugin" else state[name][0])
        capsys.readouterr()
        status = main(["doctor", "--json", *words])
        found = json.loads(capsys.readouterr().out)
        findings = {finding["subject"]: finding for finding in found["findings"]}
        assert len(findings) == len(found["findings"])
        return findings, status, found["verdict"]

    return examine


@pytest.mark.parametrize("words", [(), ("--recipe", RECIPE)])
def test_a_node_with_everything_is_ready(examined, capsys, words):
    findings, status, verdict = examined(*words)
    assert {finding["level"] for finding in findings.values()} == {"ok"}
    assert (status, verdict) == (0, "ready")
    assert main(["doctor", *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Ready: ")
    assert (f"oar launch {RECIPE}" if words else "algorithm.adv_estimator=oar") in last


NEEDED = ("torch", "ray", "transformers", "TransferQueue", "vllm", "datasets", "flash-attn", "wandb")
NO_MSGPACK = "ModuleNotFoundError: No module named 'msgpack'"
NO_SYMBOL = "ImportError: undefined symbol: _ZN3c10"


MISSING = [
    *(({"imports": {name: ABSENT}}, name, PACKAGES[name].advice or f'pip install "{name}') for name in NEEDED),
    ({"imports": {"flash-attn": ("2.8.3", NO_SYMBOL)}}, "flash-attn", NO_SYMBOL),
    # A checkout on the search path has no version; the module that it lacks is not the package itself.
    ({"imports": {"ray": (None, NO_MSGPACK)}}, "ray", NO_MSGPACK),
    ({"features": {"verl": None, "folder": None, "fault": "verl is not installed"}}, "verl", "pip install 'verl"),
    ({"features": {"folder": None, "fault": "ImportError: x"}}, "verl", "0.9.1 ImportError: x"),
    ({"features": {"loaded": False}}, "oar_plugin", "verl did not load it"),
    ({"features": {"loaded": False, "wrapt": "ImportError: no wrapt"}}, "oar_plugin", "no wrapt"),
    ({"features": {"loaded": None, "fault": "no answer within 300 s"}}, "oar_plugin", "no answer within 300 s"),
    (lacks("sync", "verl.x: Y is not there", "z"), "sync", "Y is not there; z"),
    (lacks("fsdp", "verl.x: Y is not there"), "fsdp", "Y is not there"),
    ({"features": {"rollout": "ImportError: x"}}, "rollout", "ImportError: x"),
]
NOTES = [
    *(({"imports": {name: ABSENT}}, name, "not installed") for name in PACKAGES if name not in NEEDED),
    ({"imports": {"torch": ("2.10.1", None)}}, "torch", PACKAGES["torch"].tested),
    ({"features": {"note": "verl 1.0 was not tried with OAR"}}, "verl", "was not tried"),
    (lacks("megatron", "no megatron"), "megatron", "no megatron"),
    (lacks("offload", "vLLM lacks x"), "offload", "perturbation.backend=actor"),
    ({"devices": {"gpus": [FULL, GPU]}}, "GPU memory", "20 GiB"),
]


@pytest.mark.parametrize(
    ("level", "changes", "subject", "said"),
    [*(("missing", *one) for one in MISSING), *(("note", *one) for one in NOTES)],
)
def test_what_is_missing_or_worth_a_note_comes_with_what_to_do(examined, level, changes, subject, said):
    """A note: only other runs need it, or it was not tested."""
    findings, status, verdict = examined(**changes)
    assert findings[subject]["level"] == level
    assert said in f"{findings[subject]['text']}; {findings[subject]['advice']}"
    assert (status, verdict) == ((1, "not ready") if level == "missing" else (0, "ready"))


MEGATRON = {"strategy": "megatron"}


@pytest.mark.parametrize(
    ("recipe", "others", "subject"),
    [
        ({}, {"imports": {"tensorboard": ABSENT}}, "tensorboard"),
        (MEGATRON, {"imports": {"transformer-engine": ABSENT}}, "transformer-engine"),
        (MEGATRON, {"imports": {"megatron-core": ABSENT}}, "megatron-core"),
        (MEGATRON, {"imports": {"mbridge": ABSENT}}, "mbridge"),
        (MEGATRON | {"vanilla_mbridge": False}, {"imports": {"megatron-bridge": ABSENT}}, "megatron-bridge"),
        (MEGATRON, lacks("megatron", "verl.x: Y is not there"), "megatron"),
        ({"mode": "separate_async"}, lacks("separate_async", "no Z"), "separate_async"),
        ({"offloads": True}, lacks("offload", "vLLM lacks x"), "offload"),
        ({}, {"devices": {"gpus": [GPU] * 7 + [FULL]}}, "GPU memory"),
        ({"refused": "algorithm.oar.tau=2: x"}, {}, "configuration"),
        ({"fault": "crashed with SIGSEGV"}, {}, "configuration"),
        ({"findings": [Finding("data", "missing", "is not there")]}, {}, "data"),
        ({"nodes": [1, 16]}, {}, "cluster"),
    ],
)
def test_a_recipe_needs_more(examined, recipe, others, subject):
    if others:
        assert examined(**others)[1] == 0  # but for this recipe all is well
    findings, status, _ = examined("--recipe", RECIPE, recipe=recipe, **others)
    assert (findings[subject]["level"], status) == ("missing", 1)
    reason = recipe.get("refused") or recipe.get("fault") or ""
    assert reason in findings[subject]["text"]


@pytest.mark.parametrize(
    ("nodes", "devices", "level"),
    [
        ([4, 8], {}, "ok"),
        ([1, 8], {"gpus": [GPU] * 4}, "missing"),
        ([1, 8], CPU, "missing"),
        ([1, 8], LOGIN, "not checked"),
        (None, CPU, "ok"),
    ],
)
def test_a_machine_has_the_gpus_of_a_node_or_not(examined, nodes, devices, level):
    told = {**TOLD["recipe"], "nodes": nodes}
    machine = Machine(**TOLD["devices"] | devices | {"gpus": devices.get("gpus", [GPU] * 8) or ()})
    finding, *_ = doctor._recipe({**told, "fault": None}, machine)
    assert (finding.subject, finding.level) == ("cluster", level)
    assert ("each of them" in finding.advice) == (nodes == [4, 8])
    assert nodes is None or f"{nodes[1]} GPUs" in finding.text


@pytest.mark.parametrize("words", [(), ("--recipe", RECIPE)])
def test_a_login_node_is_told_what_was_not_checked_and_not_that_it_is_ready(examined, capsys, words):
    """Neither is a package said to be broken that only lacks the driver."""
    features = {"rollout": LIBCUDA, **lacks("fsdp", unchecked=[LIBCUDA])["features"]}
    login = {"devices": LOGIN, "imports": {"vllm": ("0.24.0", LIBCUDA)}, "features": features}
    findings, status, verdict = examined(*words, **login)
    unseen = {name for name, finding in findings.items() if finding["level"] == "not checked"}
    assert unseen == {"GPUs", "vllm", "rollout", "fsdp"} | ({"cluster"} if words else set())
    assert (status, verdict) == (3, "not checked")
    assert main(["doctor", *words]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert "GPUs" in last
    assert "Ready" not in last
    # The same errors beside a GPU, or another error here, are there to be mended.
    assert examined(imports=login["imports"])[1] == 1
    assert [examined(features={key: fault})[1] for key, fault in features.items()] == [1, 1]
    assert examined(**{**login, **lacks("fsdp", "no X")})[1] == 1
    assert examined(**{**login, "imports": {"vllm": ("0.24.0", NO_SYMBOL)}})[1] == 1


def test_a_driver_that_torch_cannot_use_is_missing(examined, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "DRIVER_FILES", (tmp_path,))
    findings, status, _ = examined(devices=LOGIN)
    assert (findings["GPUs"]["level"], status) == ("missing", 1)
    assert "Found no NVIDIA driver" in findings["GPUs"]["text"]
    assert "CUDA 13.0" in findings["GPUs"]["advice"]


@pytest.mark.parametrize(
    ("platform", "devices", "level"),
    [(None, CPU, "note"), ("cpu", LOGIN, "note"), ("cuda", CPU, "not checked"), (None, LOGIN, "not checked")],
)
def test_the_cpu_stack_needs_no_gpu_but_its_package(examined, monkeypatch, platform, devices, level):
    if platform is not None:
        monkeypatch.setenv("VERL_PLATFORM", platform)
    absent = {name: ABSENT for name in ("flash-attn", "transformer-engine")}
    findings, status, _ = examined(devices=devices, imports=absent if level == "note" else {})
    assert (findings["GPUs"]["level"], status) == (level, 0 if level == "note" else 3)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", registered("oar"))
    findings, status, _ = examined(devices=devices, imports=absent)
    assert (findings["GPUs"]["level"] == "missing") == (level == "note")
    assert ("pip install ./verl_cpu" in findings["GPUs"]["advice"]) == (level == "note")
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", registered("oar", "cpu"))
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "oar")
    assert (examined(devices=devices)[0]["GPUs"]["level"] == "missing") == (level == "note")


def test_a_verl_that_does_not_look_for_plugins_needs_a_variable(examined, monkeypatch):
    monkeypatch.setattr(capabilities, "external_modules", lambda: {capabilities.EXTERNAL_MODULES: "mine,ours"})
    findings, status, _ = examined()
    assert (findings["oar_plugin"]["level"], status) == ("missing", 1)
    assert f"export {capabilities.EXTERNAL_MODULES}=mine,ours" in findings["oar_plugin"]["advice"]


def test_the_trainer_that_verl_starts_by_default_is_needed(examined):
    default = {"default_trainer": {"mode": "ray_trainer"}, "imports": {"TransferQueue": ABSENT}}
    assert examined(**default, **lacks("sync", "x is not there"))[1] == 0
    assert examined(**default, **lacks("ray_trainer", "x is not there"))[1] == 1


def test_the_plugin_must_be_registered_and_wanted(examined, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "=none" in examined()[0]["oar_plugin"]["text"]
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, oar")
    assert examined()[1] == 0
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", registered("cpu"))
    findings, status, _ = examined()
    assert (findings["oar_plugin"]["level"], status) == ("missing", 1)
    assert "pip install --no-deps ." in findings["oar_plugin"]["advice"]


def test_a_check_that_fails_itself_is_a_finding(examined, monkeypatch):
    def fail(*_):
        raise OSError("no more file handles")

    monkeypatch.setattr(doctor, "_gpus", fail)
    findings, status, _ = examined()
    assert "no more file handles" in findings["GPUs"]["text"]
    assert status == 3


@pytest.mark.parametrize(("words", "said"), [(("--recipe", "nope"), "nope: "), (("a.b=1",), "a.b=1: ")])
def test_arguments_that_cannot_work_are_refused(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert capsys.readouterr().err.startswith(f"oar doctor: {said}")


def test_the_table_has_the_versions_of_vllm_that_scoring_was_tried_with():
    inside = [f"{versions.TRIED[0]}.0", f"{versions.TRIED[1]}.9"]
    assert list(SpecifierSet(PACKAGES["vllm"].tested).filter([*inside, "0.23.9", "0.99.0"])) == inside


# ---- processes that are asked


def ask(*words):
    with one_process() as ask_:
        return ask_(*words)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Puts packages, each one file of code, in front of the search path of the processes that are asked."""

    def make(**modules):
        for name, code in modules.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return make


def test_packages_that_raise_crash_exit_or_hang_are_named_and_the_others_are_looked_at(broken, monkeypatch, capfd):
    folder = broken(
        raises='raise ImportError("undefined symbol: _ZN3c10")',
        crashes="import os\nos.abort()",
        exits="print('hello'); raise SystemExit(3)",
        ends="import os\nos._exit(5)",
        hangs="import subprocess, time\nopen('child', 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "time.sleep(600)",
        works="import os\nos.write(2, b'noise')",
    )
    monkeypatch.setattr(questions, "LIMIT_S", 6.0)
    begun = time.monotonic()
    names = ["raises", "crashes", "exits", "ends", "hangs", "works"]
    with one_process() as ask_:
        faults = import_faults(ask_, {name.title(): name for name in names})
    assert time.monotonic() - begun < PROCESS_S
    assert faults == {
        "Raises": "ImportError: undefined symbol: _ZN3c10",
        "Crashes": "crashed with SIGABRT (import crashes)",
        "Exits": "SystemExit: 3",
        "Ends": "exit status 5 (import ends)",
        "Hangs": "no answer within 6 s (import hangs)",
        "Works": None,
    }
    assert capfd.readouterr() == ("", "")
    status = Path("/proc", (folder / "child").read_text(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text(), "what it started was ended with it"


def test_a_machine_that_can_start_no_process_is_told_so(monkeypatch):
    def refuse(words, **options):
        raise OSError("out of memory")

    monkeypatch.setattr(questions, "Popen", refuse)
    assert ask(questions.devices) == {"fault": "no process could be started: out of memory"}


TORCH = """
import types
__version__, version = "2.11.0+cu130", types.SimpleNamespace(cuda="13.0", hip=None)
def init(): raise RuntimeError("The NVIDIA driver on your system is too old")
cuda = types.SimpleNamespace(is_available=lambda: {}, device_count=lambda: 2, mem_get_info=lambda i: (50 + i, 80),
                             get_device_name=lambda i: f"GPU {{i}}", init=init)
"""


@pytest.mark.parametrize("seen", [True, False])
def test_the_gpus_that_torch_sees_are_told_or_why_it_sees_none(broken, seen):
    """A made-up torch: its calls, not its answers, are what counts."""
    broken(torch=TORCH.format(seen))
    machine = Machine(**ask(questions.devices))
    assert machine.built_for == "13.0"
    assert machine.gpus == ([{"name": f"GPU {i}", "total": 80, "free": 50 + i} for i in range(2)] if seen else ())
    assert machine.why_not == ("" if seen else "RuntimeError: The NVIDIA driver on your system is too old")


def test_a_verl_that_breaks_at_import_is_told(broken):
    folder = broken(verl='raise OSError("libnccl.so: bad")')
    (folder / "verl" / "version").mkdir()
    (folder / "verl" / "version" / "version").write_text("0.9.1")
    assert ask(questions.features, ["sync"]) == {"verl": "0.9.1", "fault": "OSError: libnccl.so: bad (import verl)"}


def test_an_environment_that_has_nothing_gets_a_list_and_no_traceback(tmp_path):
    """Not even rich and packaging: what `pip install --no-deps` leaves in an empty environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=PROCESS_S)
    words = [tmp_path / "venv" / "bin" / "python", "-m", "oar_plugin.cli.main", "doctor", "--recipe", RECIPE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "missing      verl: " in done.stdout
    *_, last = done.stdout.splitlines()
    assert last.startswith("Not ready: torch, ")


pytest.importorskip("verl")


@pytest.mark.slow
def test_this_environment_has_what_is_looked_for():
    """The processes on the packages that are here: each is asked for by names that exist."""
    told = ask(questions.features, ["sync", "fsdp"])
    assert told["loaded"] is True
    assert told["rollout"] is told["wrapt"] is told["hydra_conf"] is None
    needed = ("sync", "colocate_async", "separate_async", "fsdp")
    assert [told["features"][name] for name in needed] == [FITS_VERL] * 4
    with one_process() as ask_:
        modules = {name: one.module for name, one in PACKAGES.items()} | {"vllm": "vllm._custom_ops"}
        faults = import_faults(ask_, modules)
    here = {name: fault for name, fault in faults.items() if version_of(name) is not None}
    assert set(here.values()) == {None}, here
    assert {"torch", "ray", "transformers", "TransferQueue", "vllm"} <= here.keys()


@pytest.mark.slow
def test_a_recipe_is_read_composed_checked_and_planned(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setenv("OAR_DATA", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, column in (("gsm8k", "prompt"), ("math", "question")):
        (tmp_path / name).mkdir()
        parquet.write_table(pyarrow.table({column: ["1+1?"]}), tmp_path / name / "train.parquet")
    (tmp_path / "gsm8k" / "test.parquet").write_bytes(b"half a downl")
    folder = str(find_recipe(RECIPE))
    reward = tmp_path / "reward.py"
    reward.write_text("import no_such_module\n")
    overrides = [f"reward.custom_reward_function.path={reward}", "trainer.logger=[wandb]"]
    told = ask(questions.recipe, folder, overrides, True)
    assert told["fault"] is None
    assert (told["mode"], told["strategy"], told["share"], told["loggers"]) == ("sync", "fsdp2", 0.6, ["wandb"])
    assert (told["nodes"], told["offloads"]) == ([1, 8], False)
    levels = {subject: level for subject, level, *_ in told["findings"]}
    texts = {subject: f"{text}; {advice}" for subject, _, text, advice in told["findings"]}
    for file in ("math/train.parquet", "gsm8k/test.parquet", "math500/test.parquet"):
        assert file in texts["data"]
    assert levels["memory"] in ("ok", "note")
    assert [levels[subject] for subject in ("data", "model", "reward")] == ["missing"] * 3
    assert "no_such_module" in texts["reward"]
    wrong = ask(questions.recipe, folder, ["algorithm.oar.tau=2"], True)
    assert "algorithm.oar.tau=2" in wrong["refused"]
