"""Checks once, before the first step, that every node has the driver's plugin.

If only some of the actor's processes had the plugin, these would make collective calls that the others do not: an abort or a
hang. If none had it, the run would be plain GRPO. Two versions may score differently.
"""

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import verl

import oar_plugin
from oar_plugin.config import OarConfig
from oar_plugin.hosts.verl.capabilities import external_modules, missing

TIME_LIMIT_S = 300.0
"""For all answers together. A process answers at once unless it is busy with something else."""


def check_nodes(actors: Sequence[Any], servers: Sequence[Any], feature: str, oar: OarConfig) -> None:
    """Compare the plugin of verl's actor workers and rollout servers, as Ray handles, with this process's.

    The actors have their models; `feature`: their engine, one of `capabilities.FEATURES`. They must be able to import what
    `oar` names. RuntimeError: each node that has another plugin or none, or does not answer in time, and what it has.
    """
    versions = f"oar_plugin {oar_plugin.__version__} with verl {verl.__version__}"
    settings, driver = oar.model_dump(), sources()

    def ask(process: Any, feature: str | None) -> tuple[str, str]:
        """The process's node, and its fault or an empty string. Sent by value: it uses nothing of this module."""
        import socket

        import ray

        node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        try:
            import verl

            import oar_plugin

            found = f"oar_plugin {oar_plugin.__version__} with verl {verl.__version__}"
            if found != versions:
                return node, found
            from oar_plugin.hosts.verl.handshake import fault_of
        except ImportError as error:
            return node, f"no oar_plugin ({error})"
        return node, fault_of(process, feature, settings, driver)

    asked = {handle.__ray_call__.remote(ask, feature): ("actor worker", i) for i, handle in enumerate(actors)}
    asked |= {handle.__ray_call__.remote(ask, None): ("rollout server", i) for i, handle in enumerate(servers)}
    answered = set(ray.wait(list(asked), num_returns=len(asked), timeout=TIME_LIMIT_S)[0])
    others: dict[tuple[str, str, str], list[str]] = {}
    for reference, (kind, number) in asked.items():
        node, fault = "a node that is not known", f"no answer within {TIME_LIMIT_S:.0f} s"
        try:
            if reference in answered:
                node, fault = ray.get(reference)
        except ray.exceptions.RayError as error:
            fault = f"no answer: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        if fault:
            others.setdefault((node, kind, fault), []).append(str(number))
    if others:
        lines = [f"  {node}, {kind} {', '.join(who)}: {fault}" for (node, kind, fault), who in others.items()]
        raise RuntimeError(
            f"algorithm.adv_estimator=oar needs the same oar_plugin on every node. The driver, on {socket.gethostname()}, has "
            f"{versions}. These differ:\n"
            + "\n".join(lines)
            + "\nInstall the driver's oar_plugin, and your own modules, "
            "there, into the environment that Ray's processes run in; `oar doctor` on the node says what it has."
        )


def fault_of(process: Any, feature: str | None, settings: Mapping[str, Any], driver: tuple[str, bool]) -> str:
    """Why a process with the driver's versions cannot run OAR as the driver does, or an empty string."""
    (digest, checkout), (expected, driver_checkout) = sources(), driver
    if digest != expected and (checkout or driver_checkout):
        return f"other code of the same version: its sources' digest is {digest}, the driver's {expected}"
    if feature is None:
        return ""
    roles = getattr(process, "worker_dict", {"": process}).values()
    engines = [role.actor.engine for role in roles if getattr(role, "actor", None) is not None]
    if len(engines) != 1:
        return f"{len(engines)} actor engines in {type(process).__name__}, where one was expected"
    if any(cls.__module__.startswith("oar_plugin.") for cls in type(engines[0]).__mro__):
        try:
            OarConfig.parse(settings)
        except ValueError as error:
            return str(error)
        return ""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    reasons = [f"VERL_USE_EXTERNAL_PLUGINS={policy}"] if policy != "auto" else []
    reasons += [f"not set there: {name}={value}" for name, value in external_modules().items()]
    reasons += missing(feature)
    why = f": {'; '.join(reasons)}" if reasons else ", and the process's log should say why"
    return f"its engine is verl's own {type(engines[0]).__name__}{why}"


def sources() -> tuple[str, bool]:
    """A digest of the plugin's code, and whether that is a checkout, of which two may differ in one version."""
    folder = Path(str(oar_plugin.__file__)).parent
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    ours = [name for name in names if not name.startswith("recipes/")]  # only a wheel has these there
    contents = b"".join(name.encode() + (folder / name).read_bytes() for name in ours)
    return hashlib.sha256(contents).hexdigest()[:12], not any(folder.parent.glob("oar_plugin-*.dist-info"))
