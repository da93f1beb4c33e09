"""What `oar doctor` says of machines that are ready, and of such that are not.

Most machines here are made up: what `ask` is told stands in for the processes that look at packages, GPUs, verl and the recipe.
Those processes are asked for real further down, with broken packages in front of the search path.
"""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from oar_plugin.cli import doctor
from oar_plugin.cli.doctor import host, machine, packages, questions, recipe
from oar_plugin.cli.doctor.machine import GIB, Machine
from oar_plugin.cli.doctor.packages import PACKAGES, imports, version_of, was_tested
from oar_plugin.cli.doctor.questions import Answer, ask
from oar_plugin.cli.main import main
from oar_plugin.hosts.verl import capabilities
from oar_plugin.runs.launch.finding import importable
from oar_plugin.runs.recipe import find_recipe
from tests.limits import PROCESS_S

ROOT = Path(__file__).parents[2]
RECIPE = "qwen2_5_7b_math"
GPU = {"name": "NVIDIA H100 80GB HBM3", "total": 79 * GIB, "free": 78 * GIB}
CPU = {"torch": "2.13.0+cpu", "built for": None}
LOGIN = {"torch": "2.11.0", "built for": "13.0", "why not": "RuntimeError: Found no NVIDIA driver"}
LIBCUDA = "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
FITS_VERL: list[list[str]] = [[], []]  # what verl lacks, what could not be looked at
TOLD = {
    "devices": {"torch": "2.11.0", "built for": "13.0", "gpus": [GPU] * 8},
    "imports": {name: [package.tested[0] if package.tested else "1.0", None] for name, package in PACKAGES.items()},
    "features": {
        **{"verl": "0.9.1", "folder": "/site/verl", "note": None},
        **{f"feature {name}": FITS_VERL for name in capabilities.FEATURES},
        "rollout": "",
        "loaded": True,
    },
    "recipe": {
        **{"device": "cuda", "mode": "sync", "strategy": "fsdp2", "vanilla_mbridge": True, "offloads": False},
        **{"attention": "flash_attention_2", "share": 0.6, "engine": "vllm", "loggers": ["console", "tensorboard"]},
        **{
            "cluster": {"nodes": 1, "gpus_per_node": 8},
            "findings": [["memory", "ok", "fits", ""], ["data", "ok", "2", ""]],
        },
    },
}
"""A node with eight GPUs where everything is in place. None takes a key away; `fault` is that of the process."""


ABSENT = "absent"


def _absent(name):
    """Version, and what its import says, of a package that is not installed."""
    return None, f"ModuleNotFoundError: No module named '{PACKAGES[name].module.partition('.')[0]}'"


@pytest.fixture
def examined(monkeypatch, tmp_path, capsys):
    """Findings by subject, exit status and last line, of that node with some answers changed."""
    monkeypatch.setattr(machine, "DRIVER", ())  # whatever the machine that runs this has
    monkeypatch.setattr(host.importlib.metadata, "entry_points", lambda group: [EntryPoint("oar", "x", group)])
    # With this package, transformers does without flash-attn.
    monkeypatch.setattr(recipe, "importable", lambda name: name != "kernels" and importable(name))
    for name in ("VERL_USE_EXTERNAL_PLUGINS", "VERL_PLATFORM", "OAR_DATA", "WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def examine(*words, **changes):
        state = TOLD["imports"] | changes.get("imports", {})
        state = {name: _absent(name) if one == ABSENT else one for name, one in state.items()}

        def answer(question, *arguments):
            told = dict(TOLD[question]) | changes.get(question, {})
            if question == "imports":
                return Answer({name: fault for name, (_, fault) in state.items()})
            fault = told.pop("fault", None)
            return Answer({key: value for key, value in told.items() if value is not None or key == "built for"}, fault)

        monkeypatch.setattr(doctor, "ask", answer)
        monkeypatch.setattr(packages, "ask", answer)
        monkeypatch.setattr(packages, "version_of", lambda name: state[name][0])
        monkeypatch.setattr(packages.versions, "installed", lambda: state["vllm"][0])
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
    assert {name: finding for name, finding in findings.items() if finding["level"] != "ok"}.keys() <= {"data"}
    assert (status, verdict) == (0, "ready")
    assert main(["doctor", *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"Ready: oar launch {RECIPE}" if words else "Ready: add algorithm.adv_estimator=oar to your verl command."
    )


NEEDED = {"torch", "ray", "transformers", "TransferQueue", "vllm", "datasets", "flash-attn", "wandb"}
FULL = {**GPU, "free": 20 * GIB}


@pytest.mark.parametrize(
    ("changes", "subject", "said"),
    [
        *(({"imports": {name: ABSENT}}, name, PACKAGES[name].install) for name in sorted(NEEDED)),
        (
            {"imports": {"flash-attn": ["2.8.3", "ImportError: undefined symbol: _ZN3c10"]}},
            "flash-attn",
            "another torch",
        ),
        # A checkout on the search path has no version; what it lacks is not the package itself.
        (
            {"imports": {"ray": [None, "ModuleNotFoundError: No module named 'msgpack'"]}},
            "ray",
            "install what it lacks",
        ),
        (
            {"features": {"verl": None, "fault": "ModuleNotFoundError: verl is not installed"}},
            "verl",
            "pip install 'verl",
        ),
        ({"features": {"folder": None, "fault": "ImportError: x"}}, "verl", "0.9.1: ImportError: x"),
        ({"features": {"loaded": False}}, "entry point", "knows no estimator named oar"),
        ({"features": {"loaded": None, "fault": "no answer within 300 s"}}, "entry point", "no answer within 300 s"),
        ({"features": {"feature sync": [["verl.x: Y is not there", "z"], []]}}, "sync", "Y is not there (and 1 more)"),
        (
            {"features": {"feature fsdp": [["verl.x: Y is not there"], []]}},
            "fsdp",
            "not served: actor_rollout_ref.actor.strategy",
        ),
    ],
)
def test_what_a_run_cannot_start_without_comes_with_what_to_do(examined, changes, subject, said):
    findings, status, verdict = examined(**changes)
    assert findings[subject]["level"] == "missing"
    assert said in f"{findings[subject]['text']}; {findings[subject]['advice']}"
    assert (status, verdict) == (1, "not ready")


@pytest.mark.parametrize(
    ("changes", "subject", "said"),
    [
        *(({"imports": {name: ABSENT}}, name, "not installed") for name in sorted(PACKAGES.keys() - NEEDED)),
        ({"imports": {"torch": ["2.10.1", None]}}, "torch", "tested with 2.11 to 2.13"),
        ({"imports": {"vllm": ["0.32.0", None]}}, "vllm", "scoring on the rollout engine was tried with 0.24 to 0.31"),
        ({"features": {"note": "verl 1.0 was not tried with OAR"}}, "verl", "was not tried"),
        (
            {"features": {"feature megatron": [["no module named megatron"], []]}},
            "megatron",
            "no module named megatron",
        ),
        ({"features": {"feature offload": [["vLLM lacks x"], []]}}, "offload", "perturbation.backend=actor"),
        ({"devices": {"gpus": [FULL, GPU]}}, "GPU memory", "only 20 GiB of GPU 0 are free"),
    ],
)
def test_what_only_other_runs_need_and_what_was_not_tested_is_a_note(examined, changes, subject, said):
    findings, status, _ = examined(**changes)
    assert findings[subject]["level"] == "note"
    assert said in f"{findings[subject]['text']}; {findings[subject]['advice']}"
    assert status == 0


MEGATRON = {"strategy": "megatron"}
NEEDS_32 = {"cluster": {"nodes": 4, "gpus_per_node": 8}}


@pytest.mark.parametrize(
    ("recipe", "others", "subject", "said"),
    [
        ({}, {"imports": {"tensorboard": ABSENT}}, "tensorboard", "pip install tensorboard"),
        ({"loggers": ["no_such_logger"]}, {}, "trainer.logger", "no_such_logger is not installed"),
        ({"loggers": ["wandb"]}, {}, "trainer.logger", "no API key"),
        (MEGATRON, {"imports": {"transformer-engine": ABSENT}}, "transformer-engine", "your torch and CUDA"),
        (MEGATRON, {"imports": {"megatron-core": ABSENT}}, "megatron-core", "docs/megatron.md"),
        (MEGATRON, {"imports": {"mbridge": ABSENT}}, "mbridge", "pip install --no-deps mbridge"),
        (
            MEGATRON | {"vanilla_mbridge": False},
            {"imports": {"megatron-bridge": ABSENT}},
            "megatron-bridge",
            "docs/megatron",
        ),
        (MEGATRON, {"features": {"feature megatron": [["verl.x: Y is not there"], []]}}, "megatron", "Y is not there"),
        (
            {"mode": "separate_async"},
            {"features": {"feature separate_async": [["no Z"], []]}},
            "separate_async",
            "no Z",
        ),
        ({"offloads": True}, {"features": {"feature offload": [["vLLM lacks x"], []]}}, "offload", "vLLM lacks x"),
        ({}, {"devices": {"gpus": [GPU] * 4}}, "cluster", "needs 1 node with 8 GPUs; here 4 visible"),
        ({}, {"devices": {"gpus": [GPU] * 7 + [FULL]}}, "GPU memory", "20 GiB of GPU 7"),
        ({}, {"devices": CPU | {"gpus": None}}, "cluster", "built without CUDA"),
        ({"refused": "algorithm.oar.tau=2: x"}, {}, "configuration", "algorithm.oar.tau=2"),
        ({"fault": "crashed with SIGSEGV"}, {}, "configuration", "crashed with SIGSEGV"),
        (
            {"findings": [["data", "missing", "is not there", "oar data math"]]},
            {},
            "data",
            "is not there; oar data math",
        ),
    ],
)
def test_a_recipe_needs_more(examined, recipe, others, subject, said):
    if {"imports", "features"} & others.keys():
        assert examined(**others)[1] == 0  # but for this recipe all is well
    findings, status, _ = examined("--recipe", RECIPE, recipe=recipe, **others)
    assert findings[subject]["level"] == "missing"
    assert said in f"{findings[subject]['text']}; {findings[subject]['advice']}"
    assert status == 1


def test_of_several_nodes_it_says_that_this_is_one(examined):
    findings, status, _ = examined("--recipe", RECIPE, recipe=NEEDS_32)
    assert "needs 4 nodes with 8 GPUs" in findings["cluster"]["text"]
    assert "on each" in findings["cluster"]["advice"]
    assert status == 0


@pytest.mark.parametrize("words", [(), ("--recipe", RECIPE)])
def test_a_login_node_is_told_what_was_not_checked_and_not_that_it_is_ready(examined, capsys, words):
    """Neither is a package said to be broken that only lacks the driver."""
    features = {"rollout": LIBCUDA, "feature fsdp": [[], [LIBCUDA]]}
    login = {"devices": LOGIN | {"gpus": None}, "imports": {"vllm": ["0.24.0", LIBCUDA]}, "features": features}
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
    assert examined(**{**login, "features": {"feature fsdp": [["no X"], []]}})[1] == 1
    assert examined(**{**login, "imports": {"vllm": ["0.24.0", "ImportError: undefined symbol"]}})[1] == 1


def test_a_driver_that_torch_cannot_use_is_missing(examined, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DRIVER", (tmp_path,))
    findings, status, _ = examined(devices=LOGIN | {"gpus": None})
    assert (findings["GPUs"]["level"], status) == ("missing", 1)
    assert "Found no NVIDIA driver" in findings["GPUs"]["text"]
    assert "CUDA 13.0" in findings["GPUs"]["advice"]


@pytest.mark.parametrize(
    ("platform", "told", "level"),
    [(None, CPU, "note"), ("cpu", LOGIN, "note"), ("cuda", CPU, "not checked"), (None, LOGIN, "not checked")],
)
def test_the_cpu_stack_needs_no_gpu(monkeypatch, platform, told, level):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    if platform is not None:
        monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setattr(machine, "DRIVER", ())
    (finding,) = Machine(Answer(dict(told))).examine()
    assert finding.level == level


def test_on_the_cpu_stack_nothing_that_is_compiled_for_gpus_is_asked_for(examined):
    absent = {name: ABSENT for name in ("flash-attn", "transformer-engine")}
    assert examined(devices=CPU | {"gpus": None}, imports=absent)[1] == 0
    recipe = MEGATRON | {"device": "cpu"}
    changes = {"recipe": recipe, "devices": CPU | {"gpus": None}, "imports": absent}
    findings, _, _ = examined("--recipe", RECIPE, **changes)
    assert findings["transformer-engine"]["level"] == "note"
    assert findings["cluster"]["level"] == "ok"


def test_the_plugin_must_be_registered_wanted_and_complete(examined, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "=none" in examined()[0]["entry point"]["text"]
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, oar")
    assert examined()[1] == 0
    monkeypatch.setattr(host.importlib.metadata, "requires", lambda name: ["torch>=99", "no-such<1", 'x; extra == "y"'])
    findings, status, _ = examined()
    assert "torch>=99 (this is" in findings["oar_plugin"]["text"]
    assert "no-such<1 (not installed)" in findings["oar_plugin"]["text"]
    assert "extra" not in findings["oar_plugin"]["text"]
    assert status == 1
    monkeypatch.setattr(host.importlib.metadata, "entry_points", lambda group: [EntryPoint("other", "x", group)])
    assert "pip install --no-deps ." in examined()[0]["entry point"]["advice"]


@pytest.mark.parametrize(
    ("file", "fits"),
    [("models/modeling_value_head.py", True), ("experimental/ppo/x.py", True), ("trainer/x.py", False)],
)
def test_a_trl_that_verl_cannot_stand_beside(examined, monkeypatch, tmp_path, file, fits):
    path = tmp_path / "trl" / file
    path.parent.mkdir(parents=True)
    path.touch()
    (tmp_path / "trl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    findings, status, _ = examined()
    assert (status == 0) == fits == ("trl" not in findings)
    if not fits:
        assert str(tmp_path / "trl") in findings["trl"]["text"]
        assert "an environment each" in findings["trl"]["advice"]


def test_a_check_that_fails_itself_is_a_finding(examined, monkeypatch):
    def fail():
        raise OSError("no more file handles")

    monkeypatch.setattr(doctor, "examine_data", fail)
    findings, status, _ = examined()
    assert "no more file handles" in findings["data"]["text"]
    assert status == 3


def test_a_machine_that_can_start_no_process_is_told_so(monkeypatch):
    def refuse(*words, **options):
        raise OSError("out of memory")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert ask("devices") == Answer({}, "no process could be started: out of memory")


def test_it_says_which_data_is_there(examined, monkeypatch, tmp_path):
    monkeypatch.setenv("OAR_DATA", str(tmp_path))
    assert examined()[0]["data"]["level"] == "note"
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.parquet").touch()
    data = examined()[0]["data"]
    assert (data["level"], data["text"]) == ("ok", f"OAR_DATA={tmp_path}; found: gsm8k")


@pytest.mark.parametrize(
    ("words", "said"), [(("--recipe", "nope"), "nope: neither a folder nor a recipe"), (("a.b=1",), "a.b=1: overrides")]
)
def test_arguments_that_cannot_work_are_refused(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_version_is_tested_in_a_range_whose_end_stands_for_all_its_releases():
    assert [
        was_tested(version, ("2.11", "2.13")) for version in ("2.10.9", "2.11.0a0+x", "2.13.4+cpu", "2.14", "?")
    ] == [*(False, True, True, False, False)]


# ---- processes that are asked


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Puts packages, each one file of code, in front of the search path of the processes that are asked."""

    def make(**modules):
        for name, code in modules.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
        return tmp_path

    return make


def test_packages_that_raise_crash_exit_or_hang_are_named_and_the_others_are_looked_at(broken, monkeypatch):
    broken(
        flash_attn='raise ImportError("undefined symbol: _ZN3c10")',
        mbridge="import os\nos.abort()",
        wandb="print('hello'); raise SystemExit(3)",
        math_verify="import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)",
        pebble="",
    )
    monkeypatch.setattr(questions, "LIMIT_S", 6.0)
    begun = time.monotonic()
    names = ["flash-attn", "mbridge", "wandb", "math-verify", "pebble"]
    faults = imports(names)
    assert time.monotonic() - begun < PROCESS_S
    assert list(faults) == names
    assert faults["flash-attn"] == "ImportError: undefined symbol: _ZN3c10"
    assert faults["mbridge"] == "crashed with SIGABRT (import mbridge)"
    assert faults["wandb"] == "SystemExit: 3"
    assert faults["math-verify"] == "no answer within 6 s (import math_verify)"
    assert faults["pebble"] is None


def test_the_gpus_that_torch_sees_are_told(broken):
    """A made-up torch: its calls, not its answers, are what counts."""
    cuda = """
import types
__version__, version = "2.11.0+cu130", types.SimpleNamespace(cuda="13.0", hip=None)
cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, mem_get_info=lambda i: (50 + i, 80),
                             get_device_name=lambda i: f"GPU {i}")
"""
    broken(torch=cuda)
    told = ask("devices").told
    assert told["gpus"] == [{"name": f"GPU {i}", "total": 80, "free": 50 + i} for i in range(2)]
    assert told["built for"] == "13.0"


def test_torch_says_why_it_sees_no_gpu(broken):
    broken(
        torch="""
import types
def init(): raise RuntimeError("The NVIDIA driver on your system is too old")
__version__, version = "2.11.0+cu130", types.SimpleNamespace(cuda="13.0", hip=None)
cuda = types.SimpleNamespace(is_available=lambda: False, init=init)
"""
    )
    assert ask("devices").told["why not"] == "RuntimeError: The NVIDIA driver on your system is too old"


def test_a_verl_that_breaks_at_import_is_told(broken):
    folder = broken(verl='raise OSError("libnccl.so: bad")')
    (folder / "verl" / "version").mkdir()
    (folder / "verl" / "version" / "version").write_text("0.9.1")
    answer = ask("features")
    assert answer.told == {"verl": "0.9.1"}
    assert answer.fault == "OSError: libnccl.so: bad (import verl)"


def test_an_environment_that_has_nothing_gets_a_list_and_no_traceback(tmp_path):
    """Not even rich and packaging: what `pip install --no-deps` leaves in an empty environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=PROCESS_S)
    words = [tmp_path / "venv" / "bin" / "python", "-m", "oar_plugin.cli.main", "doctor", "--recipe", RECIPE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "missing      verl: not installed  -> pip install 'verl>=0.9.0'" in done.stdout
    *_, last = done.stdout.splitlines()
    assert last.startswith("Not ready: torch, ")


pytest.importorskip("verl")


@pytest.mark.slow
def test_this_environment_has_what_is_looked_for():
    """The processes on the packages that are here: each is asked for by names that exist."""
    told = ask("features").told
    assert told["loaded"] is True
    assert told["rollout"] == ""
    assert [told[f"feature {name}"] for name in ("sync", "colocate_async", "separate_async", "fsdp")] == [FITS_VERL] * 4
    here = {name: fault for name, fault in imports(list(PACKAGES)).items() if version_of(name) is not None}
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
    answer = ask("recipe", folder, "79.1", f"reward.custom_reward_function.path={reward}", "trainer.logger=[wandb]")
    assert answer.fault is None
    told = answer.told
    assert (told["mode"], told["strategy"], told["share"], told["loggers"]) == ("sync", "fsdp2", 0.6, ["wandb"])
    assert told["cluster"] == {"nodes": 1, "gpus_per_node": 8}
    found = {subject: (level, f"{text}; {advice}") for subject, level, text, advice in told["findings"]}
    assert found["memory"][0] == "ok"
    for part in (
        "math/train.parquet has no column prompt",
        "gsm8k/test.parquet cannot be read",
        "math500/test.parquet is not",
    ):
        assert part in found["data"][1]
    assert found["model"][0] == "missing"
    assert "no_such_module" in found["reward"][1]
    offloads = ("algorithm.oar.importance=oar_p", "algorithm.oar.perturbation.backend=rollout")
    small = ask("recipe", folder, "20", *offloads).told
    (memory,) = [finding for finding in small["findings"] if finding[0] == "memory"]
    assert (memory[1], small["offloads"]) == ("missing", True)
    assert "=" in memory[3]
    unseen = ask("recipe", folder, "").told
    assert ["memory", "not checked"] in [finding[:2] for finding in unseen["findings"]]
    wrong = ask("recipe", folder, "", "algorithm.oar.tau=2").told
    assert "algorithm.oar.tau=2" in wrong["refused"]
