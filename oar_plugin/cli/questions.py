"""Questions of `oar doctor` that import packages. Another process answers them, because an import may crash or hang.

A question is a generator of pairs `(key, value)`. The process writes each pair immediately, so a crash loses only later pairs.
The value of the key `doing` is the next step. If the process ends early, the message has this step.
"""

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple

from oar_plugin.output import cause

LIMIT_S = 300.0
"""Time limit of one question, in seconds. Imports need most of it: ten seconds, or minutes from a slow network disk."""
Pairs = Iterator[tuple[str, Any]]
Ask = Callable[..., dict[str, Any]]


@contextmanager
def one_process() -> Iterator[Ask]:
    """Give a function `ask(question, *arguments)` that returns the question's pairs.

    One process answers all questions, so it imports each package once. If it crashes or hangs, a new process answers the next
    question. Each process and its children are killed at the latest at the end of the context. `ask` adds the key `fault`: the
    reason why the process ended before the last pair; None if it wrote all pairs.
    """
    running: list[Popen[str]] = []

    def kill() -> None:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def ask(question: Callable[..., Pairs], *arguments: Any) -> dict[str, Any]:
        if not running:
            # With -m the working directory is on the search path, as for `python -m verl.trainer.main_ppo`.
            words = [sys.executable, "-m", __name__]
            try:
                running.append(Popen(words, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, start_new_session=True))
            except OSError as error:  # no memory, no more processes
                return {"fault": f"no process could be started: {error}"}
        (process,) = running
        assert process.stdin is not None
        assert process.stdout is not None
        told, begun, watch = dict[str, Any](), time.monotonic(), threading.Timer(LIMIT_S, kill)
        watch.start()
        try:
            with suppress(BrokenPipeError):  # it has just crashed
                print(json.dumps([question.__name__, arguments]), file=process.stdin, flush=True)
            for line in process.stdout:
                told |= [json.loads(line)] if line.endswith("\n") else []  # the last one may be incomplete
                if "fault" in told:
                    break
        finally:
            watch.cancel()  # also after Ctrl-C, which would wait for it
        if "fault" not in told:
            code = process.wait()
            kill()
            running.clear()
            told["fault"] = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            if time.monotonic() - begun >= LIMIT_S:
                told["fault"] = f"no answer within {LIMIT_S:g} s"
        fault, doing = told.pop("fault"), told.pop("doing", None)
        return {**told, "fault": f"{fault} ({doing})" if fault and doing else fault}

    try:
        yield ask
    finally:
        kill()
        for process in running:
            process.wait()


def _answer() -> None:
    """Read questions from standard input, and write every pair, and at the end the pair `fault`, to standard output.

    Packages print when they are imported: what they write to standard output goes nowhere.
    """
    gc.disable()  # it takes a tenth of the time of imports
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    for standard in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    for line in questions:
        question, arguments = json.loads(line)
        try:
            for pair in globals()[question](*arguments):
                print(json.dumps(pair, default=str), file=answers)
            fault = None
        except (Exception, SystemExit) as error:
            fault = cause(error)
        print(json.dumps(("fault", fault)), file=answers)
    os._exit(0)  # a normal exit runs the packages' exit code, which may hang


class Machine(NamedTuple):
    """The GPUs that torch sees here, and the accelerator that torch is built for."""

    torch: str = ""
    built_for: str | None = None  # version of CUDA or ROCm; None: a build for the CPU
    gpus: Sequence[Mapping[str, Any]] = ()  # name, and bytes in total and free
    why_not: str = ""  # torch's message if it sees no GPU
    fault: str | None = None  # why `devices` ended before its last pair; None if it did not

    @property
    def on_cpu(self) -> bool:
        """Whether verl_cpu would run verl on the CPU here. verl_cpu uses the same rule."""
        asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
        return bool(self.torch) and not self.gpus and (asked == "cpu" or (not asked and self.built_for is None))

    @property
    def without_gpus(self) -> bool:
        """Whether the run's GPUs are elsewhere or unknown: packages that need a driver may fail to import here."""
        return not self.gpus and not self.on_cpu


def imports(modules: Mapping[str, str]) -> Pairs:
    """Yield for each name the error that the import of its module raised; None if the import works."""
    for name, module in modules.items():
        yield "doing", f"import {module}"
        try:
            importlib.import_module(module)
            yield name, None
        except (Exception, SystemExit) as error:
            yield name, cause(error)


def devices() -> Pairs:
    """The fields of `Machine`."""
    import torch

    yield "torch", torch.__version__
    yield "built_for", torch.version.cuda or torch.version.hip
    yield "doing", "looking for GPUs"
    if torch.cuda.is_available():
        seen = [(torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)) for i in range(torch.cuda.device_count())]
        yield "gpus", [{"name": name, "free": free, "total": total} for name, free, total in seen]
    elif torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except Exception as error:
            yield "why_not", cause(error)


def default_trainer() -> Pairs:
    """The trainer that this verl starts unless its configuration says otherwise."""
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.hydra_conf import config_folder
    from oar_plugin.hosts.verl.settings import trainer_of

    trainer = OmegaConf.load(config_folder() / "ppo_trainer.yaml").trainer
    yield "mode", trainer_of(OmegaConf.create({"trainer": trainer}))


def features(needed: Sequence[str]) -> Pairs:
    """Yield verl's version and folder, each feature's missing code, the failed imports of those that are needed, and whether
    verl loads OAR.
    """
    from oar_plugin.hosts.verl import capabilities
    from oar_plugin.hosts.vllm import versions

    yield "verl", capabilities.host_version()
    yield "doing", "import verl"
    import verl

    yield "folder", str(Path(verl.__file__ or "").parent)
    yield "note", capabilities.version_note()
    found: dict[str, tuple[list[str], list[str]]] = {}
    for feature in capabilities.FEATURES:
        yield "doing", f"looking at {feature}"
        lacking = capabilities.missing(feature)
        if feature == "offload" and (reason := versions.unsupported(versions.installed())):
            lacking = [*lacking, reason]
        found[feature] = lacking, capabilities.unchecked(feature) if feature in needed else []
        yield "features", found
    yield from imports({"rollout": "verl.workers.rollout.vllm_rollout.vllm_async_server"})
    yield "doing", "asking verl for the estimator"
    from verl.trainer.ppo import core_algos

    yield "loaded", "oar" in core_algos.ADV_ESTIMATOR_REGISTRY
    yield from imports({"wrapt": "wrapt", "hydra_conf": "oar_plugin.hosts.verl.hydra_conf"})  # what the plugin imports


def recipe(folder: str, overrides: Sequence[str], sees_gpus: bool) -> Pairs:
    """What a recipe needs, the findings of `oar launch` for it, and why `oar launch` would refuse it."""
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.settings import resolve, switched_on, trainer_of
    from oar_plugin.runs.launch import job, preflight
    from oar_plugin.runs.recipe import check_config, compose_recipe, gpus_needed

    yield "doing", "composing the recipe"
    try:
        config = compose_recipe(Path(folder), "oar", overrides)
        for name, key in {
            "strategy": "actor_rollout_ref.actor.strategy",
            "vanilla_mbridge": "actor_rollout_ref.actor.megatron.vanilla_mbridge",
            "attention": "actor_rollout_ref.model.override_config.attn_implementation",
            "share": "actor_rollout_ref.rollout.gpu_memory_utilization",
            "engine": "actor_rollout_ref.rollout.name",
        }.items():
            if (value := OmegaConf.select(config, key)) is not None:
                yield name, value
        yield "mode", trainer_of(config)
        yield "loggers", preflight.strings(config, "trainer.logger")
        yield "offloads", switched_on(config) and resolve(config).offloads
        check_config(config)
        job.template_values(config, Path(folder), "oar", overrides)
        yield "nodes", None if config.trainer.device == "cpu" else gpus_needed(config)[:2]
        yield "doing", "looking at memory, data, model, reward and loggers"
        gpu = preflight.gpu_of_run(None, None, local=True)
        yield "findings", preflight.examine(config, gpu, gpu_seen=sees_gpus)[1]
    except ValueError as error:
        yield "refused", str(error)


if __name__ == "__main__":
    _answer()
