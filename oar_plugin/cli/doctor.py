"""`oar doctor` says if a run would start here and what to do if not. `questions` has imports that may crash or hang."""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from oar_plugin.cli import questions
from oar_plugin.cli.questions import Ask, Machine, one_process
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.vllm import versions
from oar_plugin.output import INSTALL, say
from oar_plugin.runs.launch.preflight import LOGGERS, Finding, Level, importable

_HELP = """\
Check whether a run with OAR would start on this machine: packages, features of this verl and this vLLM, GPUs, and what
a recipe needs. If not, say what to do. Imports all that a run imports (some seconds); starts and changes nothing.

  ok           no problem
  note         information: it is untested, or only other runs need it
  not checked  cannot be checked on this machine, for example GPUs on a login node
  missing      a run would not start
"""
_EXAMPLES = """\
examples:
  oar doctor                                           verl's defaults: FSDP, the synchronous trainer, vLLM
  oar doctor --recipe mine trainer.n_gpus_per_node=4   a recipe (a name that `oar recipes` lists, or a folder), with overrides
  oar doctor --json | jq -r '.findings[] | select(.level == "missing") | .subject'
  srun --ntasks-per-node=1 oar doctor --recipe qwen2_5_32b_megatron        on each node of a job: environments differ
"""
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"), Path("/dev/kfd"))
DRIVER_ERROR = re.compile(r"libcuda|libnvidia|nvidia driver|cuda driver|no cuda|cuda is not available", re.IGNORECASE)


class Package(NamedTuple):
    module: str  # its import shows that the package works
    tested: str = ""  # tested versions; empty: an untested package for GPUs
    advice: str = ""  # how to install it; empty: pip install with its name and the tested versions


_TABLE = json.loads(Path(__file__).with_name("packages.json").read_text(encoding="utf-8"))
PACKAGES = {name: Package(**fields) for name, fields in _TABLE.items()}
PLAIN: dict[str, Any] = {
    **{"mode": "sync", "strategy": "fsdp", "vanilla_mbridge": True, "attention": "flash_attention_2", "engine": "vllm"},
    **{"loggers": ["console", "wandb"], "offloads": False},
}
"""verl's defaults, used if no recipe sets another value. Some versions of verl have another `mode` (`default_trainer`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    parser.add_argument("--recipe", metavar="RECIPE", help="also check what this recipe needs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for the recipe")
    parser.add_argument("--json", action="store_true", help="print verdict and findings as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    from oar_plugin.runs.recipe import RecipeError, find_recipe

    try:
        if args.overrides and args.recipe is None:
            raise RecipeError(f"{args.overrides[0]}: overrides need a recipe; name one with --recipe")
        recipe = None if args.recipe is None else find_recipe(args.recipe)
    except RecipeError as error:
        say(f"oar doctor: {error}", sys.stderr)
        return 2
    with one_process() as ask:
        findings = list(examine(ask, recipe, args.overrides))
    missing, unseen = ([one.subject for one in findings if one.level == level] for level in ("missing", "not checked"))
    verdict, status = ("not ready", 1) if missing else ("not checked", 3) if unseen else ("ready", 0)
    if args.json:
        print(json.dumps({"verdict": verdict, "findings": [finding._asdict() for finding in findings]}, indent=1))
        return status
    for subject, level, text, advice in findings:
        say(f"{level:12} {subject}: {text}{advice and f'  -> {advice}'}")
    command = "add algorithm.adv_estimator=oar to your verl command."
    if recipe is not None:
        command = f"oar launch {shlex.join([args.recipe, *args.overrides])}"
    say(f"{verdict.capitalize()}: {', '.join(missing or unseen) or command}")
    return status


def examine(ask: Ask, recipe: Path | None = None, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield all findings for a recipe, given by its folder, or for a run with verl's defaults."""
    if sys.stderr.isatty():
        say("oar doctor: imports what a run imports, a moment ...", sys.stderr)
    machine = Machine(**ask(questions.devices))
    asked = {} if recipe is None else ask(questions.recipe, str(recipe), list(overrides), bool(machine.gpus))
    wanted = PLAIN | ask(questions.default_trainer) | asked
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "packages": lambda: _packages(ask, _needed(wanted, machine.on_cpu), machine),
        "verl": lambda: _verl(ask, wanted, machine),
        "GPUs": lambda: _gpus(machine, asked.get("share")),
        "recipe": lambda: [] if recipe is None else _recipe(asked, machine),
    }
    for subject, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # anything here may be broken in any way
            yield Finding(subject, "not checked", f"the check itself failed: {type(error).__name__}: {error}")


def _needed(wanted: Mapping[str, Any], on_cpu: bool) -> set[str]:
    needed = {"torch", "ray", "transformers", "datasets"}
    if wanted["mode"] in capabilities.TRAINERS:
        needed.add("TransferQueue")
    needed |= {LOGGERS[name] for name in wanted["loggers"] if name in LOGGERS}
    if wanted["engine"] == "vllm":
        needed.add("vllm")
    if wanted["strategy"] == "megatron":
        needed |= {"megatron-core", "mbridge" if wanted["vanilla_mbridge"] else "megatron-bridge"}
        needed |= set() if on_cpu else {"transformer-engine"}
    # If `kernels` is installed, transformers downloads a kernel in place of this package.
    elif wanted["attention"] == "flash_attention_2" and not on_cpu and not importable("kernels"):
        needed.add("flash-attn")
    return needed


def _packages(ask: Ask, needed: Collection[str], machine: Machine) -> Iterator[Finding]:
    """Import the packages that a run needs. For other packages the version is enough, and imports take seconds."""
    modules = {name: package.module for name, package in PACKAGES.items() if name in needed}
    if machine.on_cpu and "vllm" in modules:
        modules["vllm"] = "vllm._custom_ops"  # this module selects kernels for the CPU's instruction set
    faults = import_faults(ask, modules)
    for name, (module, tested, advice) in PACKAGES.items():
        version, install = version_of(name), advice or f'pip install "{name}{tested}"'
        level: Level = "missing" if name in needed else "note"
        fault = faults.get(name, None if version else f"ModuleNotFoundError: No module named '{module}'")
        absent = re.fullmatch(r"ModuleNotFoundError: No module named '([\w.]+)'", fault or "")
        if fault is None:
            from packaging.specifiers import SpecifierSet

            known = version is None or SpecifierSet(tested).contains(version, prereleases=True)
            text = f"{version or ''}{'' if name in needed else ', not imported: only other runs need it'}"
            yield Finding(name, "ok" if known else "note", text, "" if known else f"tested with {tested}")
        elif version is None and absent and f"{module}.".startswith(f"{absent[1]}."):
            yield Finding(name, level, "not installed", install)
        elif machine.without_gpus and DRIVER_ERROR.search(fault):
            yield Finding(name, "not checked", f"needs a GPU's driver: {fault}", "run this on a node that has one")
        else:
            yield Finding(name, level, f"{version or ''} does not import: {fault}".strip(), f"again: {install}")


def import_faults(ask: Ask, modules: Mapping[str, str]) -> dict[str, str | None]:
    """Return each module's import error, None if it works. After a crash, a new process imports the others."""
    faults: dict[str, str | None] = {}
    while left := {name: module for name, module in modules.items() if name not in faults}:
        told = ask(questions.imports, left)
        fault = told.pop("fault")
        faults |= told
        if len(told) < len(left):
            faults[next(name for name in left if name not in told)] = fault
    return faults


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is absent, or a checkout on the search path."""
    found = importlib.metadata.distributions(name=name)
    return versions.installed() if name == "vllm" else next((each.version for each in found), None)


def _verl(ask: Ask, wanted: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    engine = "megatron" if wanted["strategy"] == "megatron" else "fsdp"
    needed = [str(wanted["mode"]), engine, *(["offload"] if wanted["offloads"] else [])]
    told = ask(questions.features, needed)
    if "folder" in told:
        note = told["note"] or ""
        yield Finding("verl", "note" if note else "ok", f"{told['verl']} in {told['folder']}", note)
    else:
        yield Finding("verl", "missing", f"{told.get('verl', '')} {told['fault']}".strip(), "pip install 'verl>=0.9.0'")
    yield _plugin(told)
    unseen: Level = "not checked" if machine.without_gpus else "missing"  # a node with GPUs may import it
    for name, (lacking, unchecked) in told.get("features", {}).items():
        faults = "; ".join([*lacking, *unchecked])
        level: Level = "ok" if not faults else "note" if name not in needed else "missing" if lacking else unseen
        advice = "perturbation.backend=actor computes the same importance" if faults and name == "offload" else ""
        yield Finding(name, level, f"not supported: {faults}" if faults else "supported", advice)
    if wanted["engine"] == "vllm" and told.get("rollout"):
        yield Finding("rollout", unseen, f"verl's server for vLLM does not import: {told['rollout']}")


def _plugin(told: Mapping[str, Any]) -> Finding:
    version = version_of("oar_plugin")
    if reason := _left_out("oar"):
        return Finding("oar_plugin", "missing", reason, f"{INSTALL} in a checkout, on every node")
    for name, value in capabilities.external_modules().items():
        text = f"{version}: this verl does not load plugins by their entry points"
        return Finding("oar_plugin", "missing", text, f"export {name}={value}, on every node; `oar launch` does it")
    if told.get("loaded"):
        return Finding("oar_plugin", "ok", f"{version}, loaded by verl")
    if "verl" not in told:
        return Finding("oar_plugin", "note", f"{version}, registered")
    why = told.get("wrapt") or told.get("hydra_conf") or told["fault"] or "verl has no estimator named oar"
    text = f"{version}: verl did not load it: {why}"
    return Finding("oar_plugin", "missing", text, 'python -c "import verl" says more')


def _left_out(name: str) -> str | None:
    """Return why verl would not load the plugin with this entry point; None if it would."""
    if not any(entry.name == name for entry in importlib.metadata.entry_points(group="verl.plugins")):
        return "not installed here"
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    listed = policy == "auto" or name in [word.strip() for word in policy.split(",")]
    return None if listed else f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves out {name}"


def _gpus(machine: Machine, share: float | None) -> Iterator[Finding]:
    """`share`: the part of a GPU's memory that the rollout engine takes when it starts."""
    if machine.gpus:
        names = ", ".join(sorted({gpu["name"] for gpu in machine.gpus}))
        smallest = min(gpu["total"] for gpu in machine.gpus) / 2**30
        yield Finding("GPUs", "ok", f"{len(machine.gpus)} x {names}, at least {smallest:.1f} GiB each")
        if full := [gpu for gpu in machine.gpus if gpu["free"] < (share or 0.9) * gpu["total"]]:
            text = f"only {full[0]['free'] / 2**30:.0f} GiB are free on {len(full)} of them"
            advice = "nvidia-smi shows which process uses the rest"
            yield Finding("GPU memory", "missing" if share else "note", text, advice)
    elif machine.fault or not machine.torch:
        yield Finding("GPUs", "not checked", f"torch did not answer: {machine.fault}")
    elif machine.on_cpu and (reason := _left_out("cpu")):
        text = f"no GPU is used, and verl_cpu, which runs verl on the CPU, is not loaded: {reason}"
        yield Finding("GPUs", "missing", text, "pip install ./verl_cpu in a checkout; for GPUs, a torch build for CUDA")
    elif machine.on_cpu:
        yield Finding("GPUs", "note", "none is used: verl_cpu runs verl on the CPU (demo and tests; small models only)")
    else:
        here = any(path.exists() for path in DRIVER_FILES)
        text = f"torch {machine.torch} sees none ({machine.why_not}); packages compiled for them may not import"
        advice = f"a driver for CUDA {machine.built_for} or newer, CUDA_VISIBLE_DEVICES, or the container's --gpus"
        elsewhere = "run this on a node with GPUs; for the CPU stack: VERL_PLATFORM=cpu"
        yield Finding("GPUs", "missing" if here else "not checked", text, advice if here else elsewhere)


def _recipe(told: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    if "nodes" in told:
        yield _cluster(told["nodes"], machine)
    if refused := told.get("refused") or told["fault"]:
        yield Finding("configuration", "missing", refused, "oar plan RECIPE shows the whole error")
    else:
        yield Finding("configuration", "ok", f"strategy={told.get('strategy')}, trainer={told.get('mode')}")
    yield from starmap(Finding, told.get("findings", []))


def _cluster(nodes: tuple[int, int] | None, machine: Machine) -> Finding:
    """Whether this machine can be one of the recipe's nodes. `nodes`: (nodes, GPUs per node); None: no GPU."""
    if nodes is None:
        return Finding("cluster", "ok", "needs no GPU")
    (count, needed), seen = nodes, len(machine.gpus)
    text = f"needs {count} node{'s' if count > 1 else ''} with {needed} GPUs; here {seen} visible"
    if seen < needed and not machine.without_gpus:
        fewer = f"another machine, or: oar plan RECIPE trainer.n_gpus_per_node={seen}"
        return Finding("cluster", "missing", text, fewer if seen else "a machine with GPUs, and a torch build for them")
    return Finding("cluster", "ok" if seen else "not checked", text, "run this on each of them" if count > 1 else "")
