"""Which of our modules make each feature on verl, and whether the installed verl has what they use (`hosts.required_api`).

A feature whose uses are all there is supported; each other one is refused by itself. A version number says less: verl's
development snapshots keep theirs for months.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from oar_plugin.hosts.required_api import Feature, path_of, requirements

OLDEST = "0.8.0"
"""Versions before compute log-probs outside of the engines that OAR extends, unless a key says otherwise."""

TRIED = ("0.8.0", "0.9.0", "0.9.1", "0.10.0.dev")
"""verl versions that whole runs and tests were made with. Others are supported if they have what is used."""

PLUGIN = "oar_plugin.hosts.verl.plugin"
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
"""Environment variable with the modules that `import verl` imports, in every version of verl."""

TRAINERS = {
    "sync": "verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync",
    "colocate_async": "verl.trainer.ppo.v1.trainer_colocate_async.PPOTrainerColocateAsync",
    "separate_async": "verl.trainer.ppo.v1.trainer_separate_async.PPOTrainerSeparateAsync",
}
"""Features that are values of `trainer.v1.trainer_mode`, and the class of verl's trainer."""

_TRAINER = ("hosts.verl.trainer_credit", "hosts.verl.viewer", "hosts.verl.balancing")
_MIXINS = ("TrainerCredit", "OarTrainerMixin", "OarRayTrainer")
_ENGINE = ("hosts.verl.importance_pass", "hosts.verl.balancing")
_ENGINES = "verl.workers.engine"

FEATURES = {
    **{mode: Feature(("hosts.verl.trainer", *_TRAINER), trainer, _MIXINS) for mode, trainer in TRAINERS.items()},
    "ray_trainer": Feature(
        ("hosts.verl.ray_trainer", *_TRAINER), "verl.trainer.ppo.ray_trainer.RayPPOTrainer", _MIXINS
    ),
    "fsdp": Feature(
        ("hosts.verl.fsdp", *_ENGINE),
        f"{_ENGINES}.fsdp.transformer_impl.FSDPEngineWithLMHead",
        ("ImportancePass", "OarFSDPMixin"),
    ),
    "megatron": Feature(
        ("hosts.verl.megatron", "passes.megatron_taps", *_ENGINE),
        f"{_ENGINES}.megatron.transformer_impl.MegatronEngineWithLMHead",
        ("ImportancePass", "OarMegatronMixin"),
    ),
    "offload": Feature(("hosts.verl.agent_loop", "hosts.verl.rollout_server", "hosts.verl.rollout_worker")),
}
"""The three trainers of `trainer.v1`, `RayPPOTrainer`, the two engines, and OAR-P on vLLM's rollout engines."""


def host_version() -> str:
    """verl's own version, also where verl was never installed and is found by PYTHONPATH. Imports nothing.

    Raises:
        ModuleNotFoundError: there is no verl.
    """
    package = path_of("verl")
    if package is None:
        raise ModuleNotFoundError("verl is not installed")
    return (package.parent / "version" / "version").read_text(encoding="utf-8").strip()


def _parsed(version: str) -> Any:
    """The version, which can be compared; None for a fork's own, of which nothing is known."""
    # Not at the top: the doctor looks at environments that lack it.
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version)
    except InvalidVersion:
        return None


def version_note() -> str | None:
    """What there is to say about verl's version: None from the oldest to the newest tried. Never a reason to refuse."""
    version = host_version()
    parsed, oldest, newest = map(_parsed, (version, TRIED[0], TRIED[-1]))
    if parsed and oldest <= parsed <= newest:
        return None
    return f"verl {version} was not tried with OAR; these were: {', '.join(TRIED)}"


def missing(feature: str) -> list[str]:
    """What a feature uses and the installed verl lacks, one sentence each; empty where the feature is supported."""
    version = host_version()
    parsed, oldest = map(_parsed, (version, OLDEST))
    if parsed and parsed.release < oldest.release:
        return [
            f"verl {version} computes log-probs outside of the engines that OAR extends; OAR needs {OLDEST} or newer"
        ]
    faults = list(requirements(FEATURES[feature]).faults)
    program = path_of("verl.trainer.main_ppo")
    if feature in TRAINERS and program and "verl.trainer.ppo.v1" not in program.read_text(encoding="utf-8"):
        # verl's branch `neo` keeps their code.
        faults.append("verl.trainer.main_ppo does not start the trainers of trainer.v1")
    return faults


def external_modules() -> dict[str, str]:
    """The environment variable with which this verl loads OAR, its value extended; empty where it loads OAR without.

    verl 0.8 does not look for the entry points `verl.plugins`. Without a verl, the answer is empty.
    """
    package, named = path_of("verl"), os.environ.get(EXTERNAL_MODULES, "")
    if package is None or PLUGIN in named.split(",") or '"verl.plugins"' in package.read_text(encoding="utf-8"):
        return {}
    return {EXTERNAL_MODULES: ",".join(filter(None, [PLUGIN, named]))}


def unchecked(feature: str) -> list[str]:
    """The modules that a feature uses and this process cannot import, one sentence each. It imports the others.

    A driver may run on a node without megatron-core or a GPU's libraries, say.
    """
    modules = requirements(FEATURES[feature]).modules
    return [reason for module in modules if path_of(module) and (reason := _unimportable(module)) is not None]


@cache
def _unimportable(module: str) -> str | None:
    """Why the module's first import failed: a second one may trip over what the first one left behind."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken CUDA library raises OSError, for example
        return f"{module} cannot be imported here ({type(error).__name__}: {error})"
    return None


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this verl's function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def subclass(mixin: type, held: type, host: type, place: str) -> type:
    """The class to register as `place`: a subclass of `held` with our mixin, or `held` itself if it has the mixin already.

    `held` is the class in the registry: verl's own (`host`), or a subclass of it that another plugin has put there.

    Raises:
        RuntimeError: another plugin has replaced verl's class already.
    """
    if issubclass(held, mixin):
        return held
    if not issubclass(held, host):
        raise RuntimeError(f"verl's {place} was already replaced by {held}; OAR cannot replace it too.")
    name = f"Oar{held.__name__.removeprefix('PPO')}"
    return type(name, (mixin, held), {"host": held, "__module__": mixin.__module__})
