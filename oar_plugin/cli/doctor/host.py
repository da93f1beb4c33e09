"""verl, whether it loads the plugin, and which features fit it."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from oar_plugin.cli.doctor.questions import Answer
from oar_plugin.hosts.verl.capabilities import TRAINERS
from oar_plugin.runs.launch.finding import Finding

INSTALL = "into this environment: pip install --no-deps . in a checkout"
FEATURES = {  # how to ask for each
    **{mode: f"trainer.v1.trainer_mode={mode}" for mode in TRAINERS},
    # `settings` has these two as well, and cannot be imported without verl's packages.
    "fsdp": "actor_rollout_ref.actor.strategy=fsdp or fsdp2",
    "megatron": "actor_rollout_ref.actor.strategy=megatron",
    "offload": "algorithm.oar.perturbation.backend=rollout",
}
ADVICE = {"offload": "perturbation.backend=actor computes the same importance in the actor"}


def examine_host(answer: Answer, needed: Collection[str], engine: str, without_gpus: bool) -> Iterator[Finding]:
    """What verl has, what the plugin needs, and what of both fits.

    Args:
        answer: to `ask("features")`.
        needed: features that a run cannot start without.
        engine: of the rollout.
        without_gpus: whether this machine lacks the GPUs of the run: what does not import here may do so there.
    """
    told, fault = answer
    if "verl" not in told:
        absent = "not installed" in (fault or "")
        text = "not installed" if absent else f"cannot be looked at: {fault}"
        yield Finding("verl", "missing", text, "pip install 'verl>=0.9.0'" if absent else "")
    elif "folder" not in told:
        yield Finding("verl", "missing", f"{told['verl']}: {fault}", 'python -c "import verl" shows the whole error')
    else:
        note = told.get("note")
        yield Finding("verl", "note" if note else "ok", f"{told['verl']} in {told['folder']}", note or "")
    yield from _trl()
    yield _requirements()
    yield _entry_point(answer)
    for key, found in told.items():
        if key.startswith("feature "):
            lacking, unseen = found
            yield _feature(key.removeprefix("feature "), lacking, unseen, needed, without_gpus)
    if engine == "vllm" and (fault := told.get("rollout")):
        yield Finding(
            "rollout", "not checked" if without_gpus else "missing", f"verl's server for vLLM does not import: {fault}"
        )


def _feature(name: str, lacking: list[str], unseen: list[str], needed: Collection[str], without_gpus: bool) -> Finding:
    """`lacking`: what verl has not; `unseen`: what could not be imported to look at it."""
    key, faults = FEATURES[name], [*lacking, *unseen]
    if not faults:
        return Finding(name, "ok", f"served: {key}")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    text, advice = f"not served: {key}: {faults[0]}{more}", ADVICE.get(name, "")
    if name not in needed:
        return Finding(name, "note", text, advice)
    return Finding(name, "missing" if lacking or not without_gpus else "not checked", text, advice)


def _trl() -> Iterator[Finding]:
    """verl's patch of models imports TRL's model with a value head from any trl that it finds; newer ones have none."""
    spec = importlib.util.find_spec("trl")
    for folder in spec.submodule_search_locations or () if spec else ():
        if not any(Path(folder, place).exists() for place in ("experimental/ppo", "models/modeling_value_head.py")):
            text = f"verl's patch of models cannot be imported beside the trl in {folder}"
            yield Finding("trl", "missing", text, "an environment each for verl and for TRL, or pip uninstall trl")


def _requirements() -> Finding:
    """What the plugin itself needs: `pip install --no-deps` does not look."""
    try:
        version, listed = importlib.metadata.version("oar_plugin"), importlib.metadata.requires("oar_plugin") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("oar_plugin", "missing", "not installed: verl finds it by its entry point only", INSTALL)
    wrong = [fault for line in listed if "extra ==" not in line and (fault := _unmet(line))]
    if wrong:
        return Finding("oar_plugin", "missing", f"{version}; it needs {', '.join(wrong)}", "pip install them")
    return Finding("oar_plugin", "ok", f"{version}, and what it needs")


def _unmet(requirement: str) -> str | None:
    match = re.match(r"[\w.-]+", requirement)
    name = match[0] if match else requirement
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement} (not installed)"
    try:
        from packaging.requirements import Requirement
    except ImportError:  # comes with verl
        return None
    fits = Requirement(requirement).specifier.contains(found, prereleases=True)
    return None if fits else f"{requirement} (this is {found})"


def _entry_point(answer: Answer) -> Finding:
    subject, policy = "entry point", os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not any(entry.name == "oar" for entry in importlib.metadata.entry_points(group="verl.plugins")):
        return Finding(subject, "missing", "not registered", INSTALL)
    if policy != "auto" and "oar" not in [name.strip() for name in policy.split(",")]:
        advice = "unset it, or add oar to it, on every node"
        return Finding(subject, "missing", f"VERL_USE_EXTERNAL_PLUGINS={policy}", advice)
    if "verl" not in answer.told:
        return Finding(subject, "note", "registered")
    if answer.told.get("loaded"):
        return Finding(subject, "ok", "loaded by verl")
    said = answer.fault or "it knows no estimator named oar"
    return Finding(subject, "missing", f"verl did not load it: {said}", 'python -c "import verl" shows the whole error')
