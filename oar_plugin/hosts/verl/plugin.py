"""The `verl.plugins` entry point: loaded by `import verl` in the driver and in every Ray worker.

It registers subclasses of verl's trainers and engines, and an estimator `oar`. Every process of a cluster pays for start-up
time, so a class is registered when verl imports the module with the registry: a hook on that module imports ours.

Where verl lacks something that a feature hooks (`capabilities`), its own class stays without a message, in every run. The
driver of a run with OAR reports it (`settings.resolve`, and `oar` below). verl hides a plugin that fails to load (it logs
at DEBUG): this module reports its own failures on stderr, and imports only the standard library at its top, so that it can.

The way of a batch, in the v1 trainer:
1. `trainer._balance_batch` marks the rows that need credit, and those that are labelled (`oar_needed`), and spreads these.
2. `trainer._compute_old_log_prob` sends the request with verl's own log-prob call.
3. `importance_pass.infer_batch`, on each rank, finds the answers and starts a step of `passes.schedule`.
4. Read: verl's own forward over all rows, in which hooks see hidden states and answers (`fsdp`, `megatron`: `forward_step`).
5. Predict: the regression of earlier steps gives each reasoning token its score, micro-batch by micro-batch.
6. Label: masked copies as rows of a second call, or a backward to the embeddings over the rows that need one.
7. Learn: the regression takes the labels of all ranks.
8. `estimator.weigh_rows`: the gate turns scores into weights, which go back with the log-probs.
9. `trainer._compute_advantage` multiplies verl's own advantage with them, and writes metrics and dumps.
10. verl updates the actor, and knows of nothing.
"""

import importlib
import logging
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

logger = logging.getLogger("oar_plugin")


def _register(module: str) -> None:
    """Import a module of ours, which registers its classes, unless verl lacks what all of its features hook."""
    from oar_plugin.hosts.verl.capabilities import TRAINERS, missing

    try:
        if all(faults := [missing(feature) for feature in (TRAINERS if module == "trainer" else [module])]):
            logger.info("oar_plugin leaves verl's own %s in place: %s", module, "; ".join(sum(faults, ())))
        else:
            importlib.import_module(f"oar_plugin.hosts.verl.{module}")
    except Exception as error:  # an unforeseen verl: its runs go on without OAR
        logger.warning("oar_plugin leaves verl's own %s in place, for it does not fit: %r", module, error)


def _register_engines(package: ModuleType) -> None:
    # A hook on the whole package runs after hooks on its modules. In one of those another plugin may register an engine for
    # its device, and ours is a subclass of that.
    _register("fsdp")
    if f"{package.__name__}.megatron.transformer_impl" in sys.modules:
        _register("megatron")


def _register_estimator(core_algos: Any) -> None:
    @core_algos.register_adv_est("oar")
    def oar(**kwargs: Any) -> Any:
        ours = sys.modules.get("oar_plugin.hosts.verl.ray_trainer")
        if ours is not None and ours.OarRayTrainer.running:
            return ours.advantage_to_weight(**kwargs)
        from oar_plugin.hosts.verl import capabilities

        trainers = (*capabilities.TRAINERS, "ray_trainer")
        faults = [fault for trainer in trainers for fault in capabilities.missing(trainer)]
        raise RuntimeError(
            "algorithm.adv_estimator=oar was reached outside of OAR's trainers: verl's RayPPOTrainer and, where verl has a key "
            f"trainer.v1.trainer_mode, its values {', '.join(capabilities.TRAINERS)}"
            + "".join(f"\nthis verl: {fault}" for fault in dict.fromkeys(faults))
        )


ADVICE = (
    "Install what the line above names, or oar_plugin again (pip install --no-deps); see `oar doctor` on this node."
)
HOOKS: dict[str, Callable[[Any], None]] = {
    "verl.trainer.ppo.v1": lambda package: _register("trainer"),
    "verl.trainer.ppo.ray_trainer": lambda module: _register("ray_trainer"),
    "verl.workers.engine": _register_engines,
    "verl.trainer.ppo.core_algos": _register_estimator,
}


def load() -> None:
    """Register everything. Raises nothing: a plugin must not take down a run that does not use it."""
    # Users see warnings also where no handler of the root logger writes them. vLLM's API server imports
    # model_hosting_container_standards, which raises the level of the root logger and of its handlers to ERROR, in every
    # process that imports verl's rollout.
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
        ours = logging.StreamHandler()
        ours.addFilter(lambda record: not any(record.levelno >= one.level for one in logging.getLogger().handlers))
        logger.addHandler(ours)
    try:
        import wrapt

        from oar_plugin.hosts.verl import hydra_conf

        hydra_conf.register()
        for name, hook in HOOKS.items():
            wrapt.register_post_import_hook(hook, name)
    except Exception:
        print("oar_plugin failed to load, so algorithm.adv_estimator=oar is unknown to this process:", file=sys.stderr)
        traceback.print_exc()
        print(f"{ADVICE}\n", file=sys.stderr)


load()
