"""A trainer whose steps are GRPO's and OAR's in turn, in one run: what slows down the machine slows down both.

Loaded into verl by verl's own extension point, `VERL_USE_EXTERNAL_MODULES`; importing it replaces the trainer. A GRPO step
calls the methods of verl's own trainer and carries no request, so that the actor runs verl's plain log-prob pass; an OAR step
is our trainer's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil
import wrapt

from benchmarks.run.assets import CPU_SECONDS, HOST_ADVANTAGE, METHOD, is_oar
from oar_plugin.hosts.verl.cpu.vllm_worker import SESSION_VARIABLE


def _processor_seconds() -> float:
    tag, total = os.environ.get(SESSION_VARIABLE), 0.0
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if tag is not None and process.environ().get(SESSION_VARIABLE) == tag:
                total += sum(process.cpu_times()[:2])  # of user and system
    return total


def _register(module: ModuleType) -> None:
    """Put the trainer in the place of `sync`, the only mode that is measured."""
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils.debug import marked_timer

    # Registers our trainers, if the plugin's own hook has not done so yet: it refuses to come after another.
    from oar_plugin.hosts.verl.trainer import OarTrainerMixin

    class TimedHost(PPOTrainerSync):
        """verl's trainer with a timer around its advantage and a meter of processor time."""

        _processor_seconds_before: float | None = None

        def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
            with marked_timer(HOST_ADVANTAGE, self.timing_raw):
                return super()._compute_advantage(batch, metrics)

        def _compute_metrics(self, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            now = _processor_seconds()  # here, the step's own clock has stopped
            if self._processor_seconds_before is not None:
                metrics[CPU_SECONDS] = now - self._processor_seconds_before
            self._processor_seconds_before = now

    class AlternatingTrainer(OarTrainerMixin, TimedHost):
        """GRPO and OAR in turn, as `is_oar` has it."""

        def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
            metrics[METHOD] = float(is_oar(self.global_steps))
            if is_oar(self.global_steps):
                return super()._compute_old_log_prob(batch, metrics)
            return super(OarTrainerMixin, self)._compute_old_log_prob(batch, metrics)

        def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
            if is_oar(self.global_steps):
                return super()._compute_advantage(batch, metrics)
            with self._base_estimator():
                return super(OarTrainerMixin, self)._compute_advantage(batch, metrics)

    trainer_base.TRAINER_REGISTRY["sync"] = AlternatingTrainer


wrapt.register_post_import_hook(_register, "verl.trainer.ppo.v1")
