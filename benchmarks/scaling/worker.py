"""One process of a launch of `oar bench scaling`. torchrun or Ray starts as many as the layout has; rank 0 writes the result.

In every round GRPO and OAR each take the same batch through verl's engine, phase by phase one after the other, and who goes
first alternates. A phase begins at a barrier, as it does in verl, and lasts until the slowest process has done it.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import verl  # noqa: F401  loads the plugin, before any of verl is imported
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.distributed import initialize_global_process_group_ray

from benchmarks.machine import choose_device, describe_machine, load_average, synchronize
from benchmarks.scaling.arguments import add_settings, settings_of
from benchmarks.scaling.engine import Actor, build_engine
from benchmarks.scaling.measure import (
    FAILED,
    MODES,
    PHASES,
    Launch,
    Layout,
    Measured,
    ModelShape,
    Settings,
    launch_of,
    write,
)
from benchmarks.tiny.random_models import SHAPES, Batch, build_batch, build_model, build_tokenizer
from oar_plugin.passes.request import IMPORTANCE

_DESCRIPTION = """\
Measure one layout: GRPO's and OAR's log-prob pass, gate and update side by side, through verl's engine. Started by torchrun on
each node, with as many processes in all as the layout has; rank 0 writes a result file, and
`oar bench scaling --launcher none --runs DIR` makes the report of all of them.
"""
_EXAMPLE = """\
example, on each of two nodes of eight GPUs:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 \\
    -m benchmarks.scaling.worker --layout megatron:tensor=8,data=2 --model DIR --dtype bfloat16 --runs DIR
"""

T = TypeVar("T")


class Clock:
    """Times phases over all processes.

    Attributes:
        rounds: per method and phase, `[wall of the slowest, processor seconds of all]` a round.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rounds: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def time(self, method: str, phase: str, work: Callable[[], T]) -> T:
        """What `work` returns; every process must call this, with the same names."""
        synchronize(self.device)
        distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        synchronize(self.device)
        spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
        every = [torch.empty_like(spent) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, spent)
        walls, cpus = torch.stack(every).unbind(1)
        kept = self.rounds.setdefault(method, {}).setdefault(phase, [])
        kept.append((walls.max().item(), cpus.sum().item()))
        return result

    def series(self, index: int) -> dict[str, dict[str, list[float]]]:
        """Wall (0) or processor (1) seconds of `Measured`."""
        return {
            method: {phase: [pair[index] for pair in phases[phase]] for phase in PHASES if phase in phases}
            for method, phases in self.rounds.items()
        }


def measure(launch: Launch, settings: Settings) -> Measured:
    """Build the engine and run the rounds; every process returns the same but for what only the first stage has.

    Raises:
        ValueError: the layout cannot run this model and batch, or not as many processes were started as it has.
        RuntimeError: rows were not scored that should have been.
    """
    layout = launch.layout
    settings.check()
    shape = ModelShape.of(settings.size, Path(settings.model) if settings.model else None)
    if (problem := layout.problem(shape, settings, launch.responses)) is not None:
        raise ValueError(f"--layout {layout}: {problem}")
    device = choose_device(settings.device)
    if device.type == "cuda" and layout.engine == "megatron" and settings.dtype == "float32":
        raise ValueError(
            "--dtype float32: verl's Megatron engine takes half precision only on a GPU; allowed: bfloat16"
        )
    torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif layout.engine == "megatron":
        from oar_plugin.hosts.verl.cpu import megatron

        megatron.install()
    initialize_global_process_group_ray()
    if distributed.get_world_size() != layout.processes:
        raise ValueError(
            f"--layout {layout} takes {layout.processes} processes, and {distributed.get_world_size()} were started"
        )
    machine = describe_machine(device)
    batch = _batch(launch, settings)
    with _model_folder(settings, batch) as folder:
        engine = build_engine(layout, settings, folder, device)
    actor, clock = Actor(engine, layout, settings, batch), Clock(device)

    first = actor.log_prob(actor.data(importance=True))
    actor.check(first)
    scores = first[IMPORTANCE][0].tolist()
    _round(actor, Clock(device), oar_first=False)
    for number in range(settings.rounds):
        _round(actor, clock, oar_first=bool(number % 2))
    machine |= {"load_average_after": load_average(), **_cluster()}
    return Measured(
        launch, clock.series(0), clock.series(1), machine, scores, _parameters(engine.model_config.hf_config)
    )


def _round(actor: Actor, clock: Clock, oar_first: bool) -> None:
    """Phase by phase, so that what is compared lies close together in time."""
    methods = ("oar", "grpo") if oar_first else ("grpo", "oar")
    training = {}
    for method in methods:
        data = actor.data(importance=method == "oar")
        output = clock.time(method, "log_prob", partial(actor.log_prob, data))
        advantage_BL = actor.advantage_BL
        if method == "oar":
            clock.time(method, "gate", partial(_gate_on_rank_0, actor, output))
            advantage_BL = actor.gate(output).advantage_BL
        training[method] = actor.training_data(output, advantage_BL)
    for method in methods:
        clock.time(method, "update", partial(actor.update, training[method]))


def _gate_on_rank_0(actor: Actor, output: dict[str, Any]) -> None:
    if distributed.get_rank() == 0:
        actor.gate(output, times=actor.layout.data)


def _batch(launch: Launch, settings: Settings) -> Batch:
    tokenizer = AutoTokenizer.from_pretrained(settings.model) if settings.model is not None else None
    return build_batch(
        launch.responses,
        settings.prompt_length,
        settings.response_length,
        settings.answer_length,
        max(1, round(launch.responses * settings.scored_share)),
        torch.device("cpu"),
        settings.seed,
        tokenizer,
    )


@contextmanager
def _model_folder(settings: Settings, batch: Batch) -> Iterator[Path]:
    """The model on disk: the one that was named, or one with random weights, written once a node and gone afterwards."""
    if settings.model is not None:
        yield Path(settings.model)
        return
    hosts = _gathered(socket.gethostname())
    writes = hosts.index(hosts[distributed.get_rank()]) == distributed.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        if writes:
            model: Any = build_model(
                settings.size,
                settings.architecture,
                settings.vocab or SHAPES[settings.size].vocab,
                batch.token_BL.shape[1],
                getattr(torch, settings.dtype),
                torch.device("cpu"),
                settings.seed,
            )
            model.save_pretrained(folder)
            build_tokenizer().save_pretrained(folder)
        folders = _gathered(folder)
        yield Path(folders[hosts.index(hosts[distributed.get_rank()])])
        distributed.barrier()  # the others may still be reading


def _parameters(hf_config: Any) -> int:
    """Of the whole model, tied ones once: a rank has a part of them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    return sum(parameter.numel() for parameter in model.parameters())


def _cluster() -> dict[str, Any]:
    nodes = len(set(_gathered(socket.gethostname())))
    return {"nodes": nodes, "backend": distributed.get_backend(), "system": platform.system()}


def _gathered(value: T) -> list[T]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def run(argv: Sequence[str]) -> Path | None:
    """Measure what the arguments say; rank 0 returns the file that it wrote."""
    arguments = _parser().parse_args(argv)
    settings = settings_of(arguments)
    launch = launch_of(arguments.layout, settings, arguments.mode)
    measured = measure(launch, settings)
    if distributed.get_rank() != 0:
        return None
    arguments.runs.mkdir(parents=True, exist_ok=True)
    path: Path = arguments.runs / f"{launch.name}.json"
    write(path, settings, measured)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.scaling.worker",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--layout",
        required=True,
        type=Layout.parse,
        help="fsdp:data=N,sequence=N or megatron:data=N,tensor=N,pipeline=N,context=N; sizes of 1 may be left out",
    )
    parser.add_argument("--mode", default="weak", choices=MODES, help="what --responses counts (default: %(default)s)")
    parser.add_argument("--runs", required=True, type=Path, metavar="DIR", help="where the result file goes")
    add_settings(parser)
    return parser


def main() -> None:
    """Entry of `python -m`: ends the process whatever threads of the backends are left."""
    status = 0
    try:
        path = run(sys.argv[1:])
        if path is not None:
            print(f"written: {path}")
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
