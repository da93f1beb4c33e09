"""The `verl.plugins` entry point: loaded by `import verl` in the driver and in every Ray worker.

It registers:
* subclasses of the three v1 trainers, which build verl's own class unless the estimator is `oar`;
* a subclass of `RayPPOTrainer`, which calls only verl's methods unless the estimator is `oar`;
* subclasses of the FSDP and Megatron engines, which act only on a batch that carries a request;
* an estimator named `oar`, which `RayPPOTrainer` calls. It raises an explanation if no trainer of ours runs.

Every process of a cluster pays for start-up time, so nothing of this happens before verl imports the module with the registry.
A hook on that module imports ours, which registers its class at its end.

If verl lacks something that a feature touches (`capabilities`), its own class stays in place without a message, because these
hooks run in every process of every run, with OAR or without. The driver of a run with OAR reports it (`settings.resolve_here`,
and `oar` below).

verl hides a plugin that fails to load (it logs at DEBUG). This module reports its own failures on stderr. It imports only the
standard library at its top, so that it can.
"""

import logging
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from oar_plugin.hosts.verl import capabilities

logger = logging.getLogger("oar_plugin")


class _WhereRootIsSilent(logging.StreamHandler[Any]):
    """Writes our warnings to stderr if no handler of the root logger does.

    vLLM's API server imports model_hosting_container_standards, which raises the level of the root logger and of its
    handlers to ERROR, in every process that imports verl's rollout.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


def _fits(feature: str) -> bool:
    try:
        faults = capabilities.missing(feature)
    except Exception as error:  # an unforeseen verl: its runs go on without OAR
        logger.warning("oar_plugin leaves verl's own %s in place, for it could not check it: %r", feature, error)
        return False
    if faults:
        logger.info("oar_plugin leaves verl's own %s in place: %s", feature, "; ".join(faults))
    return not faults


def _register_trainers(package: ModuleType) -> None:
    if any([_fits(mode) for mode in capabilities.TRAINERS]):
        import oar_plugin.hosts.verl.trainer  # noqa: F401


def _register_ray_trainer(module: ModuleType) -> None:
    if _fits("ray_trainer"):
        import oar_plugin.hosts.verl.ray_trainer  # noqa: F401


def _register_engines(package: ModuleType) -> None:
    # A hook on the whole package runs after hooks on its modules. In one of those another plugin may register an engine for
    # its device, and ours is a subclass of that.
    if _fits("fsdp"):
        import oar_plugin.hosts.verl.fsdp
    if f"{package.__name__}.megatron.transformer_impl" in sys.modules and _fits("megatron"):
        try:
            import oar_plugin.hosts.verl.megatron  # noqa: F401
        except ImportError as error:  # verl would take it for its own package's, and start without any engine
            logger.warning("oar_plugin does not fit this megatron-core; strategy=megatron works without OAR: %s", error)


def _register_estimator(core_algos: Any) -> None:
    @core_algos.register_adv_est("oar")
    def oar(**kwargs: Any) -> Any:
        ours = sys.modules.get("oar_plugin.hosts.verl.ray_trainer")
        if ours is not None and ours.OarRayTrainer.running:
            return ours.advantage_to_weight(**kwargs)
        trainers = (*capabilities.TRAINERS, "ray_trainer")
        faults = [fault for trainer in trainers for fault in capabilities.missing(trainer)]
        raise RuntimeError(
            "algorithm.adv_estimator=oar was reached outside of OAR's trainers: verl's RayPPOTrainer and, where verl has a key "
            f"trainer.v1.trainer_mode, its values {', '.join(capabilities.TRAINERS)}"
            + "".join(f"\nthis verl: {fault}" for fault in dict.fromkeys(faults))
        )


HOOKS: dict[str, Callable[[Any], None]] = {
    "verl.trainer.ppo.v1": _register_trainers,
    "verl.trainer.ppo.ray_trainer": _register_ray_trainer,
    "verl.workers.engine": _register_engines,
    "verl.trainer.ppo.core_algos": _register_estimator,
}


def load() -> None:
    """Register everything. Raises nothing: a plugin must not take down a run that does not use it."""
    # Users see warnings also where the root logger has no handler.
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
        logger.addHandler(_WhereRootIsSilent())
    try:
        import wrapt

        from oar_plugin.hosts.verl import hydra_conf

        hydra_conf.register()
        for name, hook in HOOKS.items():
            wrapt.register_post_import_hook(hook, name)
    except Exception:
        print("oar_plugin failed to load; algorithm.adv_estimator=oar is not available:", file=sys.stderr)
        traceback.print_exc()


load()
