"""What `algorithm.oar.dump` asks for, at the steps that it names: a file for `oar inspect`, and pictures on dashboards.

It may never cost the run: what fails is counted in a metric, logged once, and training goes on.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl.dashboards import DASHBOARDS, Picture
from oar_plugin.hosts.verl.dump import Credited, Reader
from oar_plugin.page.dumps import DUMP_FAILED, Dumps
from oar_plugin.page.record import Response
from oar_plugin.passes.request import IMPORTANCE, SEGMENTS

DASHBOARD_FAILED = "oar/dashboard_failed"


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
        self._groups, self._reader = oar.dump.groups, Reader(oar, tokenizer)
        self._header = self._reader.header()
        self._step, self._responses = 0, list[Response]()
        self.dumps = Dumps(oar.dump, home)

    def show(self, batch: Credited, loggers: Mapping[str, Any]) -> dict[str, float]:
        """Show some groups of a batch if it is time to.

        Args:
            batch: each of a step's several ones may add groups to its file; dashboards get the first one's.
            loggers: verl's, by name.

        Returns:
            Metrics: what failed, 1 or 0, and where something was shown the seconds that took.
        """
        boards = [name for name in DASHBOARDS if name in loggers]
        metrics = {DUMP_FAILED: 0.0} if self.dumps.folder else {}
        metrics |= {DASHBOARD_FAILED: 0.0} if boards else {}
        if not metrics or not self.dumps.due(batch.step):
            return metrics
        start, first = time.perf_counter(), batch.step != self._step
        if first:
            self._step, self._responses = batch.step, []
        counted = partial(self.dumps.counted, batch.step, metrics)
        with counted("reading responses", *metrics):
            left = self._groups - len({response.group for response in self._responses})
            groups = self._reader.groups(batch, left)
            self._responses += [response for group in groups for response in group]
            if self.dumps.folder is not None:
                with counted(f"writing into {self.dumps.folder}", DUMP_FAILED):
                    self.dumps.write(self._header, batch.step, self._responses)
            for name in boards if first else ():
                with counted(name, DASHBOARD_FAILED):
                    DASHBOARDS[name](loggers[name], self._picture(batch, groups))
        return metrics | {"timing_s/oar_dump": time.perf_counter() - start}

    def _picture(self, batch: Credited, groups: list[list[Response]]) -> Picture:
        scored_B1 = (batch.reshaped.status_B == Status.SCORED)[:, None]
        paid_BL = (batch.padded[SEGMENTS] == Segment.REASONING) & scored_B1
        weights, importance = batch.reshaped.weight_BL[paid_BL], batch.padded[IMPORTANCE][paid_BL]
        return Picture(batch.step, weights.numpy(), importance.numpy(), groups[0] if groups else [], self._header)
