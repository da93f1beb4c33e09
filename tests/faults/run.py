"""A small run of a recipe with real verl, Ray and vLLM, and its processes by their purpose."""

import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.tiny.verl_run import read_metrics, training_environment
from oar_plugin.runs.recipe import entry_point
from oar_plugin.runs.run_folder import START
from verl_cpu.session import Session, run_verl

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
"""The limit for a run that hangs where it was expected to end or to go on."""

GRACE_S = 60.0
"""The time that Ray's daemons may take to end after the driver."""

KINDS = {
    "driver": "verl.trainer.main_ppo",
    "trainer": "ray::TaskRunner",
    "actor": "ray::WorkerDict",
    "rollout server": "ray::vLLMHttpServer",
    "engine core": "VLLM::EngineCore",
    "load balancer": "ray::GlobalRequestLoadBalancer",
    "agent loop": "AgentLoopWorker",
    "reward loop": "RewardLoopWorker",
    "storage": "ray::SimpleStorageUnit",
    "storage controller": "ray::TransferQueueController",
    "raylet": "/raylet/raylet",
    "gcs": "/gcs/gcs_server",
}
"""Kind of process -> a part of its command line, which Ray and vLLM set."""


@dataclass
class LiveRun:
    """One run, started by a thread. All of its processes end with its context."""

    folder: Path  # it exists
    assets: Path  # the folder with model and data
    overrides: tuple[str, ...] = ()  # on top of the recipe and of the sizes of its smoke test
    name: str = "first"
    recipe: str = "qwen2_5_7b_math"
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = LIMIT_S
    left: list[str] = field(default_factory=list)  # processes that were still there `GRACE_S` after the driver's end
    _session: Session | None = None

    def __enter__(self) -> "LiveRun":
        self._pool = ThreadPoolExecutor(1)
        self._status: Future[int] = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._status.done() and self._session is not None:
            for process in self.of("driver"):
                with suppress(psutil.Error):
                    process.kill()
        self._pool.shutdown()

    def _run(self) -> int:
        arguments = [
            *entry_point(ROOT / "recipes" / self.recipe),
            "+cpu_smoke=dp",
            f"trainer.default_local_dir={self.folder}/checkpoints",
            "trainer.test_freq=-1",
            f"algorithm.oar.dump.dir={self.folder}/dump",
            *self.overrides,
        ]
        environment = training_environment(self.metrics_file) | {"OAR_SMOKE": str(self.assets), START: "resume"}
        environment |= self.environment
        return run_verl(arguments, environment, self.log_file, self.limit_s, on_start=self._started)

    def _started(self, session: Session) -> None:
        """After the driver's end, note which processes stay, and only then end them."""
        self._session, end = session, session.end

        def look_and_end() -> None:
            deadline = time.monotonic() + GRACE_S
            while session.processes() and time.monotonic() < deadline:
                time.sleep(0.2)
            self.left = [re.sub(r"\S*/", "", _line(process))[:60].strip() for process in session.processes()]
            end()

        session.end = look_and_end

    @property
    def metrics_file(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    @property
    def tracker(self) -> Path:
        return self.folder / "checkpoints" / "latest_checkpointed_iteration.txt"

    def checkpointed(self) -> int:
        """The step of the last complete checkpoint, 0 for none."""
        return int(self.tracker.read_text(encoding="utf-8")) if self.tracker.exists() else 0

    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the finished steps."""
        return read_metrics(self.metrics_file)

    @property
    def directory(self) -> Path:
        assert self._session is not None
        return self._session.directory

    def processes(self) -> int:
        return len(self._session.processes()) if self._session is not None else 0

    def of(self, kind: str) -> list[psutil.Process]:
        """Its processes of a kind, the oldest first."""
        processes = []
        for process in self._session.processes() if self._session is not None else []:
            with suppress(psutil.Error):
                line = _line(process)
                if KINDS[kind] in line and (kind != "driver" or not line.startswith("ray::")):
                    processes.append(process)
        return sorted(processes, key=lambda process: process.create_time())

    def wait_for(self, fact: Callable[[], Any]) -> None:
        """Wait until `fact` is true. AssertionError where the run ends before that; TimeoutError after `LIMIT_S`."""
        deadline = time.monotonic() + LIMIT_S
        while not fact():
            assert not self._status.done(), f"ended with {self._status.result()}:\n{self.log()[-4000:]}"
            if time.monotonic() > deadline:
                raise TimeoutError(self.log()[-4000:])
            time.sleep(0.05)

    def wait_to_end(self, limit_s: float | None = None) -> None:
        with suppress(FutureTimeoutError):
            self._status.result(limit_s or self.limit_s)

    def ended(self) -> bool:
        return self._status.done()

    def status(self) -> int:
        """verl's exit status; waits for it."""
        return self._status.result()


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
