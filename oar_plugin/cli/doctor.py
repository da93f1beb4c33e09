"""`oar doctor` says if a run would start here and what to do if not. What may crash is imported in a `Child`."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import NamedTuple

from oar_plugin import __version__
from oar_plugin.cli.child import Child
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.vllm.versions import installed
from oar_plugin.output import INSTALL, cause, say
from oar_plugin.runs.launch.preflight import Finding, Level, importable

PACKAGES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("packages.json").read_text(encoding="utf-8"))
"""Package -> the module whose import shows that it works, tested versions, and how to install it if pip alone does not."""

_LOADED = "from verl.trainer.ppo import core_algos; core_algos.get_adv_estimator_fn('oar')"


class Machine(NamedTuple):
    gpus: int = 0  # that torch sees
    on_cpu: bool = False  # whether verl_cpu would run verl on the CPU here, by its own rule
    text: str = ""  # what torch sees, or why it sees none

    @property
    def unseen(self) -> Level:
        """The level of an import that fails: without a GPU another node may import it."""
        return "missing" if self.gpus or self.on_cpu else "not checked"


class Run(NamedTuple):
    """What a run needs; by default one with verl's defaults."""

    trainer: str = "sync"
    strategy: str = "fsdp"
    engine: str = "vllm"
    offloads: bool = False
    bridge: str = "mbridge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "note: only other runs need it, or untested; not checked: not on this machine; missing: no start"
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
    with closing(Child()) as child:
        findings = list(examine(child, recipe, args.overrides))
    missing, unseen = ([one.subject for one in findings if one.level == level] for level in ("missing", "not checked"))
    verdict, status = ("not ready", 1) if missing else ("not checked", 3) if unseen else ("ready", 0)
    if args.json:
        print(json.dumps({"verdict": verdict, "findings": [finding._asdict() for finding in findings]}, indent=1))
        return status
    for subject, level, text, advice in findings:
        say(f"{level:12} {subject}: {text}{advice and f'  -> {advice}'}")
    words = ["oar", "launch", args.recipe, *args.overrides] if recipe else ["algorithm.adv_estimator=oar"]
    say(f"{verdict.capitalize()}: {', '.join(missing or unseen) or shlex.join(words)}")
    return status


def examine(child: Child, recipe: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """Yield all findings for a recipe, given by its folder, or for a run with verl's defaults."""
    machine, without_torch = child.ask(look_at_gpus)
    machine, wanted, of_recipe = machine or Machine(text=str(without_torch)), Run(), []
    if not without_torch:
        read, fault = child.ask(read_recipe, recipe, overrides, machine)
        wanted, of_recipe = read or (Run(), [Finding("configuration", "missing", str(fault))])
    if recipe:
        child.close()  # its reward, and the parts of verl that it needed, may have failed halfway
    modules = {name: PACKAGES[name]["module"] for name in PACKAGES if name in _needed(wanted, machine)}
    if wanted.engine == "vllm":
        modules["verl"] = "verl.workers.rollout.vllm_rollout.vllm_async_server"
    if machine.on_cpu and "vllm" in modules:
        modules["vllm"] = "vllm._custom_ops"  # this module selects kernels for the CPU's instruction set
    faults = {name: without_torch if name == "torch" else _fault(child, module) for name, module in modules.items()}
    yield from (_package(name, name in modules, faults.get(name), machine) for name in PACKAGES)
    yield from _features(child, wanted, faults["verl"])
    level: Level = "ok" if machine.gpus else "note" if machine.on_cpu else "not checked"
    yield Finding("GPUs", level, machine.text, "" if machine.gpus else "for the CPU: VERL_PLATFORM=cpu, and verl_cpu")
    yield from of_recipe


def _fault(child: Child, module: str) -> str | None:
    """Why the import of a module fails; None if it works. A package that is not there costs no new child."""
    package = module.partition(".")[0]
    if child.ask(importable, package)[0] is False:
        return f"ModuleNotFoundError: No module named '{package}'"
    return child.ask(exec, f"import {module}")[1]


def look_at_gpus() -> Machine:
    """Import torch and look at the GPUs that it sees."""
    import torch

    asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
    built_for = torch.version.cuda or torch.version.hip or ""
    if gpus := [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]:
        least, names = min(gpu.total_memory for gpu in gpus) / 2**30, ", ".join(sorted({gpu.name for gpu in gpus}))
        return Machine(len(gpus), False, f"{len(gpus)} x {names}, at least {least:.1f} GiB each")
    text = f"torch {torch.__version__}{built_for and f', which needs a driver for CUDA {built_for},'} sees none"
    return Machine(0, asked == "cpu" or not (asked or built_for), text)


def read_recipe(recipe: Path | None, overrides: Sequence[str], machine: Machine) -> tuple[Run, list[Finding]]:
    """What a recipe needs, or verl's default trainer, and the findings of `oar launch` for the recipe."""
    try:
        from omegaconf import OmegaConf

        from oar_plugin.hosts.verl.hydra_conf import config_folder
        from oar_plugin.hosts.verl.settings import resolve, switched_on, trainer_of
        from oar_plugin.runs.launch import preflight
        from oar_plugin.runs.recipe import check_config, compose_recipe, gpus_needed

        if recipe is None:
            trainer = OmegaConf.load(config_folder() / "ppo_trainer.yaml").trainer
            return Run(trainer_of(OmegaConf.create({"trainer": trainer}))), []
        check_config(config := compose_recipe(recipe, "oar", overrides))
        actor, engine = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.name
        bridge = "mbridge" if OmegaConf.select(actor, "megatron.vanilla_mbridge") else "megatron-bridge"
        offloads = switched_on(config) and resolve(config).offloads
        each = 0 if config.trainer.device == "cpu" else gpus_needed(config)[1]
        level: Level = "ok" if machine.gpus >= each else machine.unseen
        cluster = Finding("cluster", level, f"needs {each} GPUs on each node; here {machine.gpus} visible")
        found = preflight.examine(config, preflight.gpu_of_run(None, None, local=True), gpu_seen=machine.gpus > 0)[1]
        return Run(trainer_of(config), actor.strategy, engine, offloads, bridge), [cluster, *found]
    except Exception as error:  # without verl, say
        fault = str(error) if isinstance(error, ValueError) else cause(error)
        return Run(), [Finding("configuration", "missing", fault)] if recipe else []


def _needed(wanted: Run, machine: Machine) -> set[str]:
    needed = {"torch", "ray", "transformers", "datasets", "verl"} | ({"vllm"} if wanted.engine == "vllm" else set())
    needed |= {"TransferQueue"} if wanted.trainer in capabilities.TRAINERS else set()
    if wanted.strategy == "megatron":
        return needed | {"megatron-core", wanted.bridge} | (set() if machine.on_cpu else {"transformer-engine"})
    # If `kernels` is installed, transformers downloads a kernel in place of this package.
    return needed if machine.on_cpu or importable("kernels") else needed | {"flash-attn"}


def _package(name: str, needed: bool, fault: str | None, machine: Machine) -> Finding:
    """A package that a run needs was imported. For others the version is enough."""
    module, tested, advice = (PACKAGES[name].get(key, "") for key in ("module", "tested", "advice"))
    version = installed() if name == "vllm" else next((one.version for one in distributions(name=name)), None)
    level: Level = "missing" if needed else "note"
    install = advice or f'pip install "{name}{tested}"'
    if version is None and (not needed or f"No module named '{module.split('.')[0]}" in str(fault)):
        return Finding(name, level, "not installed", install)
    if fault:  # a package may need a GPU's driver
        level = "missing" if needed and name == "torch" else machine.unseen
        return Finding(name, level, f"{version or ''} does not import: {fault}".strip(), f"again: {install}")
    from packaging.specifiers import SpecifierSet

    if version is None or SpecifierSet(tested).contains(version, prereleases=True):
        return Finding(name, "ok", f"{version or ''}{'' if needed else ', not imported: only other runs need it'}")
    return Finding(name, "note", version, f"tested with {tested}")


def _features(child: Child, wanted: Run, verl_fault: str | None) -> Iterator[Finding]:
    """Whether verl loads OAR, and what it has of each feature."""
    fault, advice, variables = "", "", capabilities.external_modules()
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not any(entry.name == "oar" for entry in entry_points(group="verl.plugins")):
        fault, advice = "not installed here", f"{INSTALL} in a checkout, on every node"
    elif policy != "auto" and "oar" not in policy.replace(" ", "").split(","):
        fault = f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves it out"
    elif variables:
        fault, advice = "this verl looks for no entry points", f"export {'='.join(*variables.items())}, on every node"
    elif not verl_fault and child.ask(exec, _LOADED)[1]:
        fault, advice = "verl did not load it", 'python -c "import verl" says more'
    loaded = "registered" if verl_fault else "loaded by verl"
    yield Finding("oar_plugin", "missing" if fault else "ok", fault or f"{__version__}, {loaded}", advice)
    needed = {wanted.trainer, wanted.strategy.rstrip("2"), "offload" if wanted.offloads else ""}  # fsdp2: `fsdp`
    for name in () if verl_fault else capabilities.FEATURES:
        missing, crashed = child.ask(capabilities.missing, name)
        lacking = crashed or "; ".join(missing)
        level: Level = "ok" if not lacking else "missing" if name in needed else "note"
        yield Finding(name, level, f"not supported: {lacking}" if lacking else "supported")
