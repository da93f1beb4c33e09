"""Which of our modules make each feature on verl, and whether the installed verl has what they use (`hosts.required_api`).

A feature whose uses are all there is supported; each other one is refused by itself. A version number says less: verl's
development snapshots keep theirs for months.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from oar_plugin.hosts.required_api import Feature, path_of, requirements

OLDEST = "0.9.0"
"""Versions before have no v1 trainer."""

TRIED = ("0.9.0", "0.9.1", "0.10.0.dev")
"""verl versions that whole runs and tests were made with. Others are supported if they have what is used."""

TRAINERS = {
    mode: (f"verl.trainer.ppo.v1.trainer_{mode}", name)
    for mode, name in (
        ("sync", "PPOTrainerSync"),
        ("colocate_async", "PPOTrainerColocateAsync"),
        ("separate_async", "PPOTrainerSeparateAsync"),
    )
}
"""Features that are values of `trainer.v1.trainer_mode`: module and class of verl's trainer."""


def _feature(*modules: str, host: str = "", mixins: tuple[str, ...] = ()) -> Feature:
    return Feature(tuple(f"oar_plugin.{module}" for module in modules), host, mixins)


_ENGINE = ("hosts.verl.importance_pass", "hosts.verl.balancing")

FEATURES = {
    **{
        mode: _feature(
            "hosts.verl.trainer", "hosts.verl.balancing", host=".".join(trainer), mixins=("OarTrainerMixin",)
        )
        for mode, trainer in TRAINERS.items()
    },
    "fsdp": _feature(
        "hosts.verl.fsdp",
        *_ENGINE,
        host="verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead",
        mixins=("ImportancePass", "OarFSDPMixin"),
    ),
    "megatron": _feature(
        "hosts.verl.megatron",
        "passes.megatron_taps",
        *_ENGINE,
        host="verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead",
        mixins=("ImportancePass", "OarMegatronMixin"),
    ),
    "offload": _feature("hosts.verl.agent_loop", "hosts.verl.rollout_server", "hosts.verl.rollout_worker"),
}
"""The three trainers, the two engines, and OAR-P on vLLM's rollout engines."""


def host_version() -> str:
    """verl's own version, also where verl was never installed and is found by PYTHONPATH. Imports nothing.

    ModuleNotFoundError: there is no verl.
    """
    package = path_of("verl")
    if package is None:
        raise ModuleNotFoundError("verl is not installed")
    return (package.parent / "version" / "version").read_text(encoding="utf-8").strip()


def version_note() -> str | None:
    """What there is to say about verl's version: None from the oldest to the newest tried. Never a reason to refuse."""
    from packaging.version import InvalidVersion, Version

    version = host_version()
    try:
        if Version(TRIED[0]) <= Version(version) <= Version(TRIED[-1]):
            return None
    except InvalidVersion:  # a fork's own
        pass
    return f"verl {version} was not tried with OAR; these were: {', '.join(TRIED)}"


def missing(feature: str) -> list[str]:
    """What a feature uses and the installed verl lacks, one sentence each; empty where the feature is supported."""
    from packaging.version import InvalidVersion, Version

    version = host_version()
    try:
        if Version(version).release < Version(OLDEST).release:
            return [f"verl {version} has no v1 trainer; OAR needs verl {OLDEST} or newer"]
    except InvalidVersion:  # a fork's own: what is there decides
        pass
    return list(requirements(FEATURES[feature]).faults)


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
