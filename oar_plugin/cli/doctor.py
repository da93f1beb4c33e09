"""`oar doctor` says if a run would start here and what to do if not."""

import argparse
import gc
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from oar_plugin import __version__
from oar_plugin.cli.arguments import INSTALLS
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.vllm.versions import installed
from oar_plugin.output import cause, say
from oar_plugin.runs.launch.preflight import Finding, Level, importable

LIMIT_S = 300.0  # seconds of one call: an import takes ten, or minutes from a slow network disk
PACKAGES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("packages.json").read_text(encoding="utf-8"))
"""Package -> the module whose import shows that it works, tested versions, and how to install it if pip alone does not."""
_PACKAGE = {name: one.get("advice") or f'pip install "{name}{one.get("tested", "")}"' for name, one in PACKAGES.items()}
_MODULE = INSTALLS | {one["module"].partition(".")[0]: _PACKAGE[name] for name, one in reversed(PACKAGES.items())}
ABSENT = "not installed"
_LOADED = "from verl.trainer.ppo import core_algos; core_algos.get_adv_estimator_fn('oar')"


class Child:
    """Calls functions in one process, where what they import may raise, crash or hang. After a fault a new one follows."""

    _process: SpawnProcess | None = None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
        """Return what a function returns, or None and why it does not return. What is sent must be picklable."""
        if self._process is None:
            self._pipe, theirs = Pipe()
            self._process = get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send((function, arguments))
            in_time = self._pipe.poll(LIMIT_S)
            result, fault = self._pipe.recv() if in_time else (None, f"no answer within {LIMIT_S:g} s")
        except (EOFError, ConnectionError):
            self._process.join()
            result, fault = None, f"crashed with exit status {self._process.exitcode}"
        if fault:
            self._process.kill()
            self._process = None
        return result, fault


def _serve(pipe: Connection) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    gc.disable()  # imports make many objects and drop few: looking for those takes a fifth of the time
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((function(*arguments), None))
        except (Exception, SystemExit) as error:
            pipe.send((None, str(error) if isinstance(error, ValueError) and str(error) else cause(error)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "note: only other runs need it, or untested; not checked: not on this machine; missing: no start"
    parser.add_argument("--recipe", metavar="RECIPE", help="also check what this recipe needs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for the recipe")
    parser.add_argument("--json", action="store_true", help="print verdict and findings as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    from oar_plugin.runs.recipe import RecipeError, find_recipe

    if args.overrides and args.recipe is None:
        raise RecipeError(f"{args.overrides[0]}: overrides need a recipe; name one with --recipe")
    recipe = None if args.recipe is None else find_recipe(args.recipe)
    sys.path.insert(0, os.getcwd())  # as for `python -m verl.trainer.main_ppo`
    findings = list(examine(Child(), recipe, args.overrides))
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
    gpus, on_cpu, seen = machine or (0, False, str(without_torch))
    read, fault = child.ask(read_recipe, recipe, overrides, gpus, on_cpu)
    needed, of_recipe = read or (needs_of(on_cpu), [Finding("configuration", "missing", str(fault))] if recipe else [])
    modules = {name: PACKAGES[name]["module"] for name in PACKAGES if name in needed}
    if "vllm" in modules:
        if importable("vllm"):  # else it is vLLM that is missing, and not verl
            modules["verl"] = "verl.workers.rollout.vllm_rollout.vllm_async_server"
        if on_cpu:
            modules["vllm"] = "vllm._custom_ops"  # this module selects kernels for the CPU's instruction set
    faults: dict[str, str | None] = {}
    for name, module in modules.items():
        there = importable(module.partition(".")[0])  # a package that is not there costs no new process
        faults[name] = child.ask(exec, f"import {module}")[1] if there else ABSENT
    unseen: Level = "missing" if gpus or on_cpu else "not checked"  # another node may import it
    yield from (_package(name, name in modules, faults.get(name), unseen) for name in PACKAGES)
    if not faults["verl"]:
        yield from _features(child, needed)
    for swift in distributions(name="ms-swift"):
        path = Path(__file__).parents[1] / "hosts" / "swift" / "plugin.py"
        yield Finding("ms-swift", "note", swift.version, f"with OAR: --rlhf_type grpo --external_plugins {path}")
    level: Level = "ok" if gpus else "note" if on_cpu else "not checked"
    yield Finding("GPUs", level, seen, "" if gpus else "for the CPU: VERL_PLATFORM=cpu, and verl_cpu")
    yield from of_recipe


def look_at_gpus() -> tuple[int, bool, str]:
    """How many GPUs torch sees; whether verl_cpu would run verl on the CPU here, by its own rule; a text for people."""
    import torch

    if count := torch.cuda.device_count():
        return count, False, f"{count} x {torch.cuda.get_device_name()}"
    asked, for_gpus = os.environ.get("VERL_PLATFORM", "").strip().lower(), torch.version.cuda or torch.version.hip
    return 0, asked == "cpu" or not (asked or for_gpus), f"torch {torch.__version__} sees none"


def read_recipe(recipe: Path | None, overrides: list[str], gpus: int, on_cpu: bool) -> tuple[set[str], list[Finding]]:
    """What a recipe needs, or a run with verl's default trainer, and the findings of `oar launch` for the recipe."""
    from omegaconf import DictConfig, OmegaConf

    from oar_plugin.hosts.verl.hydra_conf import config_folder
    from oar_plugin.hosts.verl.settings import resolve, switched_on, trainer_of
    from oar_plugin.runs.launch import preflight
    from oar_plugin.runs.recipe import check_config, compose_recipe, gpus_needed

    if recipe is None:
        return needs_of(on_cpu, trainer_of(DictConfig(OmegaConf.load(config_folder() / "ppo_trainer.yaml")))), []
    check_config(config := compose_recipe(recipe, "oar", overrides))
    actor, engine = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.name
    bridge = "mbridge" if OmegaConf.select(actor, "megatron.vanilla_mbridge") else "megatron-bridge"
    needed = needs_of(on_cpu, trainer_of(config), actor.strategy, engine, bridge)
    needed |= {"offload"} if switched_on(config) and resolve(config).offloads else set()
    each = 0 if config.trainer.device == "cpu" else gpus_needed(config)[1]
    level: Level = "ok" if gpus >= each else "missing" if gpus or on_cpu else "not checked"
    cluster = Finding("cluster", level, f"needs {each} GPUs on each node; here {gpus} visible")
    memory, *found = preflight.examine(config, preflight.gpu_of_run(None, local=True), overrides)[1]
    if memory.subject == "memory" and not gpus:
        memory = memory._replace(level="not checked", advice="oar plan RECIPE --gpu NAME plans for other GPUs")
    return needed, [cluster, memory, *found]


def needs_of(
    on_cpu: bool, trainer: str = "sync", strategy: str = "fsdp", engine: str = "vllm", bridge: str = "mbridge"
) -> set[str]:
    """The packages, and the features of `capabilities`, that a run needs; by default one with verl's defaults."""
    needed = {"torch", "ray", "transformers", "datasets", "verl", trainer, strategy.rstrip("2")}  # fsdp2: `fsdp`
    needed |= {"TransferQueue"} if trainer in capabilities.TRAINERS else set()
    needed |= {"vllm"} if engine == "vllm" else set()
    if strategy == "megatron":
        return needed | {"megatron-core", bridge} | (set() if on_cpu else {"transformer-engine"})
    # If `kernels` is installed, transformers downloads a kernel in place of this package.
    return needed if on_cpu or importable("kernels") else needed | {"flash-attn"}


def _package(name: str, needed: bool, fault: str | None, unseen: Level) -> Finding:
    """A package that a run needs was imported. For others the version is enough."""
    tested = PACKAGES[name].get("tested", "")
    version = installed() if name == "vllm" else next((one.version for one in distributions(name=name)), None)
    if version is None and (not needed or fault == ABSENT):
        return Finding(name, "missing" if needed else "note", "not installed", _PACKAGE[name])
    if fault:  # a package may need a GPU's driver
        level: Level = "missing" if name == "torch" else unseen
        lacks = re.search(r"No module named '(\w+)(?![\w.])", fault)
        text = f"{version or ''} does not import: {fault}".strip()
        return Finding(name, level, text, _MODULE.get(lacks[1], "") if lacks else f"again: {_PACKAGE[name]}")
    if version and importable("packaging"):
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(tested).contains(version, prereleases=True):
            return Finding(name, "note", version, f"tested with {tested}")
    return Finding(name, "ok", f"{version or ''}{'' if needed else ', not imported: only other runs need it'}")


def _features(child: Child, needed: set[str]) -> Iterator[Finding]:
    """Whether verl loads OAR, and what it has of each feature."""
    if child.ask(exec, _LOADED)[1]:
        exports = [f"export {name}={value}" for name, value in capabilities.external_modules().items()]
        advice = exports or ["pip install --no-deps WHEEL (or its checkout), and VERL_USE_EXTERNAL_PLUGINS=auto"]
        yield Finding("oar_plugin", "missing", "verl did not load it", f"{advice[0]}, on every node")
    else:
        yield Finding("oar_plugin", "ok", f"{__version__}, loaded by verl")
    for name in capabilities.FEATURES:
        missing, crashed = child.ask(capabilities.missing, name)
        lacking = crashed or "; ".join(missing)
        level: Level = "ok" if not lacking else "missing" if name in needed else "note"
        yield Finding(name, level, f"not supported: {lacking}" if lacking else "supported")
