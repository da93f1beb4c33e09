"""Checks once, before the first step, that every node has the driver's plugin.

If only some of the actor's processes had the plugin, these would make collective calls that the others do not: an abort or a
hang. If none had it, the run would be plain GRPO. Two versions may score differently.

The question is sent to a process by value and imports the plugin there: a node may have none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from oar_plugin.config import OarConfig

TIME_LIMIT_S = 300.0
"""For all answers together. A process answers at once unless it is busy with something else."""


class NodesDifferError(RuntimeError):
    """The nodes of a run do not have the same plugin."""


def check_nodes(actors: Sequence[Any], servers: Sequence[Any], feature: str, oar: OarConfig) -> None:
    """Compare the plugin of verl's actor workers and rollout servers, as Ray handles, with this process's.

    The actors have their models; `feature`: their engine, one of `capabilities.FEATURES`. They must be able to import what
    `oar` names. NodesDifferError: each node that has another plugin or none, or does not answer in time, and what it has.
    """
    question = make_question(oar.model_dump())
    here = question(None, None)
    asked = {handle.__ray_call__.remote(question, feature): ("actor worker", i) for i, handle in enumerate(actors)}
    asked |= {handle.__ray_call__.remote(question, None): ("rollout server", i) for i, handle in enumerate(servers)}
    answered = set(ray.wait(list(asked), num_returns=len(asked), timeout=TIME_LIMIT_S)[0])
    others: dict[tuple[str, str, str], list[str]] = {}
    for reference, (kind, number) in asked.items():
        node, fault = _unlike(here, reference, reference in answered)
        if fault:
            others.setdefault((node, kind, fault), []).append(str(number))
    if others:
        lines = [f"  {node}, {kind} {', '.join(who)}: {fault}" for (node, kind, fault), who in others.items()]
        raise NodesDifferError(
            f"algorithm.adv_estimator=oar needs the same oar_plugin on every node. The driver, on {here['node']}, has "
            f"{here['plugin']} with verl {here['verl']}. These differ:\n" + "\n".join(lines) + "\nInstall the driver's "
            "oar_plugin, and your own modules, there, into the environment that Ray's processes run in; `oar doctor` on the "
            "node says what it has."
        )


def _unlike(here: Mapping[str, str], reference: Any, answered: bool) -> tuple[str, str]:
    """The node of an answer, and how it differs from the driver; the latter is empty where it does not."""
    if not answered:
        return "a node that is not known", f"no answer within {TIME_LIMIT_S:.0f} s"
    try:
        there = ray.get(reference)
    except ray.exceptions.RayError as error:
        return "a node that is not known", f"no answer: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    if there["fault"]:
        return there["node"], there["fault"]
    differs = any(there[name] != here[name] for name in ("sources", "verl"))
    return there["node"], f"{there['plugin']} with verl {there['verl']}" if differs else ""


def make_question(settings: Mapping[str, Any]) -> Callable[[Any, str | None], dict[str, str]]:
    """The question: a nested function that uses nothing of this module, so that it can be sent by value."""

    def ask(process: Any, feature: str | None) -> dict[str, str]:
        """`node`, `plugin`, `sources`, `verl` of a process, and `fault`: why it cannot run OAR, or empty."""
        import hashlib
        import os
        import socket
        from pathlib import Path

        import ray

        node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        answer = {"node": node, "plugin": "", "sources": "", "verl": "", "fault": ""}
        try:
            import verl

            import oar_plugin
        except ImportError as error:
            return answer | {"fault": f"no oar_plugin ({error})"}
        folder = Path(str(oar_plugin.__file__)).parent
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
        ours = [name for name in names if not name.startswith("recipes/")]  # only a wheel has these there
        contents = b"".join(name.encode() + (folder / name).read_bytes() for name in ours)
        answer |= {"sources": hashlib.sha256(contents).hexdigest()[:12], "verl": verl.__version__}
        answer["plugin"] = f"oar_plugin {oar_plugin.__version__} (its sources' digest: {answer['sources']})"
        if feature is None:
            return answer

        roles = getattr(process, "worker_dict", {"": process}).values()
        engines = [role.actor.engine for role in roles if getattr(role, "actor", None) is not None]
        if len(engines) != 1:
            fault = f"{len(engines)} actor engines in {type(process).__name__}, where one was expected"
            return answer | {"fault": fault}
        engine = engines[0]
        if any(cls.__module__.startswith("oar_plugin.") for cls in type(engine).__mro__):
            try:
                from oar_plugin.config import OarConfig

                OarConfig.parse(settings)
                return answer
            except ValueError as error:
                return answer | {"fault": f"{answer['plugin']}, but {error}"}
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
        reasons = [f"VERL_USE_EXTERNAL_PLUGINS={policy}"] if policy != "auto" else []
        try:
            from oar_plugin.hosts.verl.capabilities import external_modules, missing

            reasons += [f"not set there: {name}={value}" for name, value in external_modules().items()]
            reasons += missing(feature)
        except Exception as error:  # an older plugin
            reasons.append(f"{type(error).__name__}: {error}")
        why = f": {'; '.join(reasons)}" if reasons else ", and the process's log should say why"
        return answer | {"fault": f"{answer['plugin']}, but its engine is verl's own {type(engine).__name__}{why}"}

    return ask
