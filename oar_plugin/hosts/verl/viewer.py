"""What `algorithm.oar.dump` asks for, at the steps that it names: a file for `oar inspect`, and pictures on dashboards.

It may never cost the run: what fails is counted in a metric, logged once, and training goes on.
"""

import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl.dashboards import DASHBOARDS, Picture
from oar_plugin.hosts.verl.dump import Credited, Reader
from oar_plugin.page.record import Response
from oar_plugin.passes.request import IMPORTANCE, SEGMENTS
from oar_plugin.whole_file import write_whole

logger = logging.getLogger("oar_plugin")

DUMP_FAILED, DASHBOARD_FAILED = "oar/dump_failed", "oar/dashboard_failed"


class Viewer:
    """Shows some groups of a run.

    Args:
        oar: the settings.
        tokenizer: the model's.
        home: a relative `algorithm.oar.dump.dir` is below it. Ray runs the trainer on any node, in a folder of its own.

    Raises:
        OarConfigError: `algorithm.oar.dump.dir` cannot be made.
    """

    def __init__(self, oar: OarConfig, tokenizer: Any, home: str) -> None:
        self._oar, self._reader = oar, Reader(oar, tokenizer)
        self._header = self._reader.header()
        self._step, self._responses = 0, list[Response]()
        self._warned = set[str]()
        self.folder = None if oar.dump.dir is None else Path(home, Path(oar.dump.dir).expanduser()).absolute()
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OarConfigError(
                    f"algorithm.oar.dump.dir={oar.dump.dir}: {error}; allowed: a folder to write in"
                ) from error
            print(f"algorithm.oar.dump.dir: {self.folder}, as node {socket.gethostname()} sees it")

    def show(self, batch: Credited, loggers: Mapping[str, Any]) -> dict[str, float]:
        """Show some groups of a batch if it is time to.

        Args:
            batch: each of a step's several ones may add groups to its file; dashboards get the first one's.
            loggers: verl's, by name.

        Returns:
            Metrics: what failed, 1 or 0, and where something was shown the seconds that took.
        """
        boards = [name for name in DASHBOARDS if name in loggers]
        metrics = {DUMP_FAILED: 0.0} if self.folder else {}
        metrics |= {DASHBOARD_FAILED: 0.0} if boards else {}
        if not metrics or (batch.step > 1 and batch.step % self._oar.dump.every):
            return metrics
        start, first, begins = time.perf_counter(), batch.step != self._step, not self._step
        if first:
            self._step, self._responses = batch.step, []
        with self._counted(metrics, "reading responses", *metrics):
            left = self._oar.dump.groups - len({response.group for response in self._responses})
            groups = self._reader.groups(batch, left)
            self._responses += [response for group in groups for response in group]
            if self.folder is not None:
                if begins:
                    with self._counted(metrics, f"renaming in {self.folder}", DUMP_FAILED):
                        self._discard_later(self.folder)
                with self._counted(metrics, f"writing into {self.folder}", DUMP_FAILED):
                    lines = [self._header.line(), *(response.line() for response in self._responses)]
                    write_whole(self.folder / f"step_{batch.step:06d}.jsonl", "".join(lines))
            for name in boards if first else ():
                with self._counted(metrics, name, DASHBOARD_FAILED):
                    DASHBOARDS[name](loggers[name], self._picture(batch, groups))
        return metrics | {"timing_s/oar_dump": time.perf_counter() - start}

    def _discard_later(self, folder: Path) -> None:
        """After a resume: steps that an earlier process dumped, and that this run does again, are no longer its newest."""
        steps = {file: file.stem.removeprefix("step_") for file in folder.glob("step_*.jsonl")}
        later = [file for file, step in steps.items() if step.isdecimal() and int(step) > self._step]
        for file in later:
            file.replace(f"{file}.discarded")
        if later:
            logger.warning("%s: %d files of steps after %d are now *.discarded", folder, len(later), self._step)

    @contextmanager
    def _counted(self, metrics: dict[str, float], what: str, *names: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            metrics.update(dict.fromkeys(names, 1.0))
            if what not in self._warned:
                self._warned.add(what)
                text = "step %d: %s failed: %r. Training goes on; %s counts it, and this is not said again"
                said = self._step, what, error, ", ".join(names)
                logger.warning(text, *said, exc_info=not isinstance(error, OSError))

    def _picture(self, batch: Credited, groups: list[list[Response]]) -> Picture:
        scored_B1 = (batch.reshaped.status_B == Status.SCORED)[:, None]
        paid_BL = (batch.padded[SEGMENTS] == Segment.REASONING) & scored_B1
        weights, importance = batch.reshaped.weight_BL[paid_BL], batch.padded[IMPORTANCE][paid_BL]
        return Picture(batch.step, weights.numpy(), importance.numpy(), groups[0] if groups else [], self._header)
