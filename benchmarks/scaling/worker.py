"""One process of a launch; torchrun starts as many as the layout has, and rank 0 writes the result.

In every round GRPO and OAR each take the same batch through verl's engine, phase by phase one after the other, and who goes
first alternates. A phase begins at a barrier, as it does in verl, and lasts until the slowest process has done it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import verl  # noqa: F401  loads the plugin, before any of verl is imported
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.distributed import initialize_global_process_group_ray

from benchmarks.machine import choose_device, describe_machine, load_average, synchronize
from benchmarks.scaling.engine import Actor, build_engine
from benchmarks.scaling.launch import FAILED
from benchmarks.scaling.layouts import Launch, Layout, Work
from benchmarks.tiny.random_models import SHAPES, build_batch, build_model
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.passes.request import IMPORTANCE

T = TypeVar("T")


class Clock:
    """`times`: wall `seconds` of the slowest process, `cpu_seconds` of all, each by method and phase, a value a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: dict[str, dict[str, dict[str, list[float]]]] = {
            kind: {"grpo": {}, "oar": {}} for kind in ("seconds", "cpu_seconds")
        }

    def time(self, method: str, phase: str, work: Callable[[], T]) -> T:
        """What `work` returns; every process must call this, with the same names."""
        synchronize(self.device)
        distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        synchronize(self.device)
        walls, cpus = zip(*gathered((time.perf_counter() - wall, time.process_time() - cpu)), strict=True)
        for kind, spent in (("seconds", max(walls)), ("cpu_seconds", sum(cpus))):
            self.times[kind][method].setdefault(phase, []).append(spent)
        return result


def gathered(value: T) -> list[T]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def measure(launch: Launch, work: Work) -> dict[str, Any]:
    """Build the engine and run the rounds.

    Returns:
        The clock's `seconds` and `cpu_seconds` (`log_prob` of `oar` has importance in it; `gate` is of `oar` only, and runs on
        rank 0 as verl's driver would); `machine`; `scores`, importance of the first response before any update; `parameters`.

    Raises:
        ValueError: the layout cannot run this model and batch, or not as many processes were started as it has.
        RuntimeError: rows were not scored that should have been.
    """
    layout, device = launch.layout, choose_device("auto")
    work.check()
    if (problem := launch.problem(work)) is not None:
        raise ValueError(f"--layout {layout}: {problem}")
    if device.type == "cuda" and layout.engine == "megatron" and work.dtype == "float32":
        raise ValueError(
            "--dtype float32: on a GPU verl's Megatron engine takes half precision only; allowed: bfloat16"
        )
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif layout.engine == "megatron":
        from oar_plugin.hosts.verl.cpu import megatron

        megatron.install()
    initialize_global_process_group_ray()
    if (started := distributed.get_world_size()) != layout.processes:
        raise ValueError(f"--layout {layout} takes {layout.processes} processes, and {started} were started")
    machine = describe_machine(device)
    tokenizer = AutoTokenizer.from_pretrained(work.model) if work.model is not None else None
    lengths = (work.prompt_length, work.response_length, work.answer_length)
    scored = max(1, round(launch.responses * work.scored_share))
    batch = build_batch(launch.responses, *lengths, scored, torch.device("cpu"), 0, tokenizer)
    with model_folder(work) as folder:
        actor, clock = Actor(build_engine(layout, work, folder, device), layout, work, batch), Clock(device)
    first = actor.log_prob(actor.data(importance=True))
    actor.check(first)
    scores = first[IMPORTANCE][0].tolist()
    one_round(actor, Clock(device), oar_first=False)  # a warm-up
    for number in range(work.rounds):
        one_round(actor, clock, oar_first=bool(number % 2))
    machine |= {"load_average_after": load_average(), "backend": distributed.get_backend()}
    machine["nodes"] = len(set(gathered(socket.gethostname())))
    with torch.device("meta"):  # the whole model, tied weights once: a rank has a part of them
        model = AutoModelForCausalLM.from_config(actor.engine.model_config.hf_config, attn_implementation="eager")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {**clock.times, "machine": machine, "scores": scores, "parameters": parameters}


def one_round(actor: Actor, clock: Clock, oar_first: bool) -> None:
    """Phase by phase, so that what is compared lies close together in time."""
    methods = ("oar", "grpo") if oar_first else ("grpo", "oar")
    training = {}
    for method in methods:
        data = actor.data(importance=method == "oar")
        output = clock.time(method, "log_prob", partial(actor.log_prob, data))
        advantage_BL = actor.advantage_BL
        if method == "oar":
            clock.time(method, "gate", partial(gate_on_rank_0, actor, output))
            advantage_BL = actor.gate(output).advantage_BL
        training[method] = actor.training_data(output, advantage_BL)
    for method in methods:
        clock.time(method, "update", partial(actor.update, training[method]))


def gate_on_rank_0(actor: Actor, output: dict[str, Any]) -> None:
    if distributed.get_rank() == 0:
        actor.gate(output, times=actor.layout.data)


@contextmanager
def model_folder(work: Work) -> Iterator[Path]:
    """The model on disk: the one that was named, or one with random weights, written once a node and gone afterwards."""
    if work.model is not None:
        yield Path(work.model)
        return
    hosts, rank = gathered(socket.gethostname()), distributed.get_rank()
    writer = hosts.index(hosts[rank])
    with tempfile.TemporaryDirectory() as folder:
        if writer == rank:
            context, kind = work.prompt_length + work.response_length, (getattr(torch, work.dtype), torch.device("cpu"))
            model: Any = build_model(work.size, "qwen2", SHAPES[work.size].vocab, context, *kind, 0)
            for saved in (model, make_tokenizer(SHAPES["tiny"].vocab, by_bytes=True)):  # the tokenizer of `build_batch`
                saved.save_pretrained(folder)
        yield Path(gathered(folder)[writer])
        distributed.barrier()  # the others may still be reading


def run(argument: str) -> None:
    """Measure what the argument says, see `Launch.argument`; rank 0 writes the result, whole or not at all."""
    told = json.loads(argument)
    layout, runs = told.pop("layout"), Path(told.pop("runs"))
    work = Work(**told)
    launch = Launch(Layout.parse(layout), work.responses)
    measured = measure(launch, work)
    if distributed.get_rank() == 0:
        runs.mkdir(parents=True, exist_ok=True)
        path = launch.file(runs)
        path.with_suffix(".part").write_text(json.dumps({"layout": layout, **asdict(work), **measured}))
        path.with_suffix(".part").replace(path)
        print(f"written: {path}")


def main() -> None:
    """Entry of `python -m`: ends the process whatever threads of the backends are left."""
    status = 0
    try:
        run(sys.argv[1])
        distributed.barrier()
    except Exception as error:
        traceback.print_exc()
        print(f"{FAILED} {type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
