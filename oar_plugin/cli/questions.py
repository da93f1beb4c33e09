"""Questions of `oar doctor` that import packages. A process of its own answers each: it may crash, hang or change itself.

A question is a generator of pairs `(key, value)`. The key `doing` names the next step: a message says where the process ended.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from oar_plugin.runs.launch.preflight import Finding, cause

LIMIT_S = 300.0
"""Seconds for one question. Imports take most of them: ten seconds, or minutes from a slow network disk."""
Pairs = Iterator[tuple[str, Any]]


class Answer(NamedTuple):
    """The pairs that the process sent, and why it ended before the last one; None where it did not."""

    told: dict[str, Any]
    fault: str | None = None


def ask(question: Callable[..., Pairs], *arguments: Any) -> Answer:
    """Put a question to a new process, which ends with all that it started, and return the answer."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, question, arguments), daemon=True)
    try:
        process.start()
    except OSError as error:  # no memory, no more processes
        return Answer({}, f"no process could be started: {error}")
    assert process.pid  # it was started; 0 would name this process's own group below
    sender.close()
    told: dict[str, Any] = {}
    deadline = time.monotonic() + LIMIT_S
    try:
        while "error" not in told and receiver.poll(max(0.0, deadline - time.monotonic())):
            told.update([receiver.recv()])
        told.setdefault("error", f"no answer within {LIMIT_S:g} s")
    except EOFError:  # the process ended by itself
        process.join(10)
        code = process.exitcode or 0
        told["error"] = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    fault, doing = told.pop("error"), told.pop("doing", None)
    return Answer(told, f"{fault} ({doing})" if fault and doing else fault)


def _answer(sender: Connection, question: Callable[..., Pairs], arguments: tuple[Any, ...]) -> None:
    """Send every pair, and at the end the pair `error`: None, or what the question raised."""
    os.setsid()  # whatever it starts can be ended with it
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # packages print when they are imported
        os.dup2(nowhere, stream)
    sys.path.insert(0, os.getcwd())  # as for `python -m verl.trainer.main_ppo`
    try:
        for pair in question(*arguments):
            sender.send(pair)
        sender.send(("error", None))
    except (Exception, SystemExit) as error:
        sender.send(("error", cause(error)))


class Machine(NamedTuple):
    """The GPUs that torch sees here, and the accelerator that torch is built for."""

    torch: str = ""
    built_for: str | None = None  # version of CUDA or ROCm; None: a build for the CPU
    gpus: Sequence[Mapping[str, Any]] = ()  # name, and bytes in total and free
    why_not: str = ""  # what torch says when it sees none
    fault: str | None = None  # why `devices` did not answer to its end

    @property
    def on_cpu(self) -> bool:
        """Whether verl_cpu would run verl on the CPU here: it decides in the same way."""
        asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
        return bool(self.torch) and not self.gpus and (asked == "cpu" or (not asked and self.built_for is None))

    @property
    def without_gpus(self) -> bool:
        """Whether the run's GPUs are elsewhere or unknown: packages that need a driver may fail to import here."""
        return not self.gpus and not self.on_cpu


# ---- the questions


def imports(modules: Mapping[str, str]) -> Pairs:
    """For each name: what the import of its module raised, None where it works."""
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


def features() -> Pairs:
    """verl's version and folder, what each feature lacks, what could not be imported for it, and whether verl loads OAR."""
    from oar_plugin.hosts.verl import capabilities
    from oar_plugin.hosts.vllm import versions

    yield "verl", capabilities.host_version()
    yield "doing", "import verl"
    import verl

    yield "folder", str(Path(verl.__file__ or "").parent)
    yield "note", capabilities.version_note()
    for feature in capabilities.FEATURES:
        yield "doing", f"looking at {feature}"
        lacking = capabilities.missing(feature)
        if feature == "offload" and (reason := versions.unsupported(versions.installed())):
            lacking = [*lacking, reason]
        yield f"feature {feature}", (lacking, capabilities.unchecked(feature))
    yield from imports({"rollout": "verl.workers.rollout.vllm_rollout.vllm_async_server"})
    yield "doing", "asking verl for the estimator"
    from verl.trainer.ppo import core_algos

    yield "loaded", "oar" in core_algos.ADV_ESTIMATOR_REGISTRY
    yield from imports({"wrapt": "wrapt", "hydra_conf": "oar_plugin.hosts.verl.hydra_conf"})  # what the plugin imports


def recipe(folder: Path, overrides: Sequence[str], machine: Machine) -> Pairs:
    """What a recipe needs, the findings of `oar launch` for it, and why `oar launch` would refuse it."""
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.settings import resolve, switched_on
    from oar_plugin.runs.launch import job, preflight
    from oar_plugin.runs.recipe import check_config, compose_recipe, gpus_needed

    yield "doing", "composing the recipe"
    try:
        config = compose_recipe(folder, "oar", overrides)
        for name, key in {
            "mode": "trainer.v1.trainer_mode",
            "strategy": "actor_rollout_ref.actor.strategy",
            "vanilla_mbridge": "actor_rollout_ref.actor.megatron.vanilla_mbridge",
            "attention": "actor_rollout_ref.model.override_config.attn_implementation",
            "share": "actor_rollout_ref.rollout.gpu_memory_utilization",
            "engine": "actor_rollout_ref.rollout.name",
        }.items():
            if (value := OmegaConf.select(config, key)) is not None:
                yield name, value
        yield "loggers", preflight.strings(config, "trainer.logger")
        yield "offloads", switched_on(config) and resolve(config).offloads
        check_config(config)
        job.template_values(config, folder, "oar", overrides)
        yield "cluster", _cluster(str(config.trainer.device), *gpus_needed(config)[:2], machine)
        yield "doing", "looking at memory, data, model, reward and loggers"
        gpu = preflight.gpu_of_run(None, None, local=True)
        yield "findings", preflight.examine(config, gpu, gpu_seen=bool(machine.gpus))[1]
    except ValueError as error:
        yield "refused", str(error)


def _cluster(device: str, nodes: int, needed: int, machine: Machine) -> Finding:
    """Whether this machine can be one of the recipe's nodes."""
    seen = len(machine.gpus)
    text = f"needs {nodes} node{'s' if nodes > 1 else ''} with {needed} GPUs; here {seen} visible"
    if device == "cpu":
        return Finding("cluster", "ok", "needs no GPU")
    if seen < needed and not machine.without_gpus:
        fewer = f"another machine, or: oar plan RECIPE trainer.n_gpus_per_node={seen}"
        cuda = f"torch {machine.torch} runs on the CPU: a torch build for CUDA, and VERL_PLATFORM unset"
        return Finding("cluster", "missing", text, cuda if machine.on_cpu else fewer)
    return Finding("cluster", "ok" if seen else "not checked", text, "run this on each of them" if nodes > 1 else "")
