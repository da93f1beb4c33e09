"""Checks once, before the first step, that every node has the driver's plugin.

If only some of the actor's processes had the plugin, these would make collective calls that the others do not: an abort or a
hang. If none had it, the run would be plain GRPO. Two versions may score differently.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import verl

import oar_plugin
from oar_plugin.config import OarConfig
from oar_plugin.hosts.verl.capabilities import missing

TIME_LIMIT_S = 300.0  # for all answers together; a process answers at once unless it is busy with something else


def check_nodes(actors: Sequence[Any], servers: Sequence[Any], feature: str, oar: OarConfig) -> None:
    """Compare the plugin of verl's actor workers and rollout servers, as Ray handles, with this process's.

    The actors have their models; `feature`: their engine, one of `capabilities.FEATURES`. They must be able to import what
    `oar` names. RuntimeError: each node that has another plugin or none, or does not answer in time, and what it has.
    """
    versions = f"oar_plugin {oar_plugin.__version__} with verl {verl.__version__}"
    settings, digest = oar.model_dump(), sources()

    def ask(process: Any, feature: str | None) -> tuple[str, str]:
        """The process's node, and its fault or an empty string. Sent by value: it uses nothing of this module."""
        import ray

        node = f"node {ray.util.get_node_ip_address()}"
        try:
            import verl

            import oar_plugin
        except ImportError as error:
            return node, f"no oar_plugin ({error})"
        if (found := f"oar_plugin {oar_plugin.__version__} with verl {verl.__version__}") != versions:
            return node, found
        from oar_plugin.hosts.verl.handshake import fault_of, sources

        return node, fault_of(process, feature, settings) if sources() == digest else "other code of the same version"

    asked = {handle.__ray_call__.remote(ask, feature): f"actor worker {i}" for i, handle in enumerate(actors)}
    asked |= {handle.__ray_call__.remote(ask, None): f"rollout server {i}" for i, handle in enumerate(servers)}
    answered = set(ray.wait(list(asked), num_returns=len(asked), timeout=TIME_LIMIT_S)[0])
    faults = dict[str, None]()
    for reference, place in asked.items():
        fault = f"no answer within {TIME_LIMIT_S:.0f} s"
        try:
            if reference in answered:
                place, fault = ray.get(reference)
        except ray.exceptions.RayError as error:
            fault = f"no answer: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        if fault:
            faults[f"  {place}: {fault}"] = None  # one line for all processes of a node
    if faults:
        needs = "algorithm.adv_estimator=oar needs the same oar_plugin on every node"
        advice = "Install the driver's, and your own modules, there for Ray's processes; `oar doctor` there says what it has."
        raise RuntimeError("\n".join([f"{needs}. The driver has {versions}. These differ:", *faults, advice]))


def fault_of(process: Any, feature: str | None, settings: Mapping[str, Any]) -> str:
    """Why a process with the driver's code cannot run OAR as the driver does, or an empty string."""
    if feature is None:
        return ""
    roles = getattr(process, "worker_dict", {"": process}).values()
    engines = [type(role.actor.engine) for role in roles if getattr(role, "actor", None) is not None]
    if not any(cls.__module__.startswith("oar_plugin.") for engine in engines for cls in engine.__mro__):
        why = "; ".join(missing(feature)) or "see VERL_USE_EXTERNAL_PLUGINS there, and the process's log"
        return f"its engine is verl's own {', '.join(engine.__name__ for engine in engines)}: {why}"
    try:
        OarConfig.parse(settings)
    except ValueError as error:
        return str(error)
    return ""


def sources() -> str:
    """A digest of the plugin's code: two checkouts of one version may differ."""
    folder = Path(str(oar_plugin.__file__)).parent
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    ours = sorted(path.as_posix() for path in paths if path.parts[0] != "recipes")  # only a wheel has these there
    return hashlib.sha256(b"".join(name.encode() + (folder / name).read_bytes() for name in ours)).hexdigest()
