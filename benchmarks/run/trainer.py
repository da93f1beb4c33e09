"""A trainer whose steps are GRPO's and OAR's in turn, in one run: what slows down the machine slows down both.

Loaded into verl by verl's own extension point, `VERL_USE_EXTERNAL_MODULES`; importing it replaces the trainer. A GRPO step
calls the methods of verl's own trainer and carries no request, so that the actor runs verl's plain log-prob pass; an OAR step
is our trainer's.
"""

from types import ModuleType
from typing import Any

import wrapt

from benchmarks.run.assets import METHOD, is_oar


def _register(module: ModuleType) -> None:
    """Put the trainer in the place of `sync`, the only mode that is measured."""
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    # If the plugin's own hook has not run yet, this import registers our trainers: they must not come after this one.
    from oar_plugin.hosts.verl.trainer import OarTrainerMixin

    class AlternatingTrainer(OarTrainerMixin, PPOTrainerSync):
        """GRPO and OAR in turn, as `is_oar` has it."""

        def _turn(self) -> Any:
            """The methods of the trainer whose step it is."""
            return super() if is_oar(self.global_steps) else super(OarTrainerMixin, self)

        def _balance_batch(self, batch: Any, metrics: dict, *given: Any, **more: Any) -> Any:
            return self._turn()._balance_batch(batch, metrics, *given, **more)

        def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
            metrics[METHOD] = float(is_oar(self.global_steps))
            return self._turn()._compute_old_log_prob(batch, metrics)

        def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
            self.config.algorithm.adv_estimator = "oar" if is_oar(self.global_steps) else self.oar.base_estimator
            batch = self._turn()._compute_advantage(batch, metrics)
            self.config.algorithm.adv_estimator = "oar"
            return batch

    trainer_base.TRAINER_REGISTRY["sync"] = AlternatingTrainer


wrapt.register_post_import_hook(_register, "verl.trainer.ppo.v1")
