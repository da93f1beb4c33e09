"""A small run of a recipe with real verl, Ray and vLLM."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tiny.verl_run import read_metrics, training_environment
from oar_plugin.runs.recipe import entry_point
from oar_plugin.runs.run_folder import START
from verl_cpu.session import Session, run_verl

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen2_5_7b_math"
LIMIT_S = 900.0
"""The limit for a run that hangs where it was expected to end or to go on."""


@dataclass
class LiveRun:
    """One run, started by a thread. All of its processes end with its context."""

    folder: Path  # it exists
    assets: Path  # the folder with model and data
    overrides: tuple[str, ...]  # on top of the recipe and of the sizes of its smoke test
    name: str
    _session: Session | None = None

    def __enter__(self) -> "LiveRun":
        self._pool = ThreadPoolExecutor(1)
        self._status: Future[int] = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.end()
        self._pool.shutdown()

    def _run(self) -> int:
        arguments = [
            *entry_point(RECIPE),
            "+cpu_smoke=dp",
            f"trainer.default_local_dir={self.folder}/checkpoints",
            "trainer.test_freq=-1",
            f"algorithm.oar.dump.dir={self.folder}/dump",
            *self.overrides,
        ]
        environment = training_environment(self._metrics) | {"OAR_SMOKE": str(self.assets), START: "resume"}
        log = self.folder / f"{self.name}.log"
        return run_verl(
            arguments, environment, log, LIMIT_S, on_start=lambda session: setattr(self, "_session", session)
        )

    @property
    def _metrics(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def log(self) -> str:
        file = self.folder / f"{self.name}.log"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def checkpointed(self) -> int:
        """The step of the last complete checkpoint, 0 for none."""
        tracker = self.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text(encoding="utf-8")) if tracker.exists() else 0

    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the finished steps."""
        return read_metrics(self._metrics)

    def wait_for(self, fact: Callable[[], Any]) -> None:
        """Wait until `fact` is true. AssertionError where the run ends before that; TimeoutError after `LIMIT_S`."""
        deadline = time.monotonic() + LIMIT_S
        while not fact():
            assert not self.ended(), f"ended with {self.status()}:\n{self.log()[-4000:]}"
            if time.monotonic() > deadline:
                raise TimeoutError(self.log()[-4000:])
            time.sleep(0.05)

    def ended(self) -> bool:
        return self._status.done()

    def status(self) -> int:
        """verl's exit status; waits for it."""
        return self._status.result()
