"""One process of a launch; torchrun starts as many as the layout has, and rank 0 writes the result.

In every round GRPO and OAR each take the same batch through verl's engine, phase by phase one after the other, and who goes
first alternates. A phase begins at a barrier, as it does in verl, and lasts until the slowest process has done it.
"""

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import verl  # noqa: F401  loads the plugin, and on a machine without an accelerator its CPU pieces, before any of verl
from tensordict import TensorDict
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers import config as verl_config
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from benchmarks.machine import choose_device, describe_machine, load_average, synchronize
from benchmarks.scaling.layouts import FAILED, Launch, Layout, Work
from benchmarks.tiny.model import CPU, SHAPES
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.passes.request import IMPORTANCE, MEASURES, NEEDED, REQUEST, STATUS, WEIGHTS, Request, nested
from verl_cpu.megatron import has_megatron_bridge

T = TypeVar("T")


def build_engine(
    layout: Layout, work: Work, folder: str, device: torch.device, attention: str = "flash_attention_2"
) -> Any:
    """verl's engine with its optimizer, initialized, through the registry as in a run. `attention`: of FSDP.

    On a CPU it has the stand-ins of `verl_cpu`, and Megatron's optimizer is the ordinary one without clipping.
    """
    cpu, steps = device.type == "cpu", 1_000_000  # more than there will be
    schedule = {"lr": 1e-6, "total_training_steps": steps}
    batches = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": work.micro_batch}
    model = partial(verl_config.HFModelConfig, path=folder, use_remove_padding=True)
    parts: tuple[Any, ...]
    if layout.engine == "fsdp":
        dtype = {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
        if cpu and attention == "flash_attention_2":
            from verl_cpu import ulysses

            ulysses.install()
            attention = ulysses.ATTENTION
        engine = verl_config.FSDPEngineConfig(
            strategy="fsdp2",
            ulysses_sequence_parallel_size=layout.sequence,
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=not cpu,
            **batches,
        )
        whole = model(
            override_config={"attn_implementation": attention}, enable_gradient_checkpointing=work.checkpointing
        )
        parts = "fsdp2", whole, engine, verl_config.FSDPOptimizerConfig(**schedule)
    else:
        transformer: dict[str, Any] = {"sequence_parallel": layout.tensor > 1}
        if work.checkpointing:
            transformer |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if cpu:
            transformer |= {"use_cpu_initialization": True, "attention_backend": "auto"}
            transformer |= {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False}
        engine = verl_config.McoreEngineConfig(
            tensor_model_parallel_size=layout.tensor,
            sequence_parallel=layout.tensor > 1,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            use_distributed_optimizer=not cpu,
            vanilla_mbridge=not has_megatron_bridge(),
            override_transformer_config=transformer,
            dtype=work.dtype,
            **batches,
        )
        clip = 0.0 if cpu else 1.0
        optimizer = verl_config.McoreOptimizerConfig(clip_grad=clip, lr_decay_steps=steps, **schedule)
        parts = "megatron", model(), engine, optimizer
    built = EngineRegistry.new("language_model", *parts, CheckpointConfig())
    built.initialize()
    return built


class Actor:
    """The three phases of a step on one rank's rows, every `layout.data`-th: the rows to score are spread evenly."""

    def __init__(self, engine: Any, layout: Layout, work: Work, token_BL: Tensor) -> None:
        self.engine, self.layout = engine, layout
        mine = slice(engine.get_data_parallel_rank(), None, layout.data)
        self.token_BL, self.prompt_length, self.total = token_BL[mine], work.prompt_length, work.responses
        self.needed_B = torch.arange(work.responses)[mine] < work.scored
        self.config = OarConfig.parse({"importance": work.importance})
        self.request = Request.of_step(self.config, 1).to_dict()
        self.size, strategy = work.micro_batch, engine.engine_config.strategy
        ppo = verl_config.ActorConfig(strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=self.size)
        self.loss = partial(ppo_loss, ppo)
        sign_B = 1.0 - 2.0 * (torch.arange(len(self.token_BL)) % 2)
        self.advantage_BL = (sign_B * self.needed_B)[:, None].expand(-1, work.response_length).contiguous()

    def data(self, importance: bool = False) -> TensorDict:
        """A fresh batch for a log-prob pass, with a request when importance is wanted. verl writes into what it is given."""
        response_BL = self.token_BL[:, self.prompt_length :]
        rows = {
            "prompts": self.token_BL[:, : self.prompt_length],
            "responses": response_BL,
            "response_mask": torch.ones_like(response_BL),
            "loss_mask": torch.ones_like(response_BL),
            "input_ids": self.token_BL,
            "position_ids": torch.arange(self.token_BL.shape[1]).expand_as(self.token_BL),
            NEEDED: self.needed_B.long()[:, None],
        }
        data = TensorDict({name: nested(values) for name, values in rows.items()}, batch_size=[len(response_BL)])
        flags = {"use_remove_padding": True, "use_dynamic_bsz": False, "use_fused_kernels": False, "temperature": 1.0}
        tu.assign_non_tensor(data, calculate_entropy=True, micro_batch_size_per_gpu=self.size, **flags)
        if importance:
            tu.assign_non_tensor_data(data, REQUEST, self.request)
        return data

    def training_data(self, output: dict[str, Any], advantage_BL: Tensor) -> TensorDict:
        """A fresh batch for the update, on-policy."""
        data = self.data()
        # Only the last stage of a pipeline has log-probs, and only it looks at them here.
        known = "log_probs" in output
        old_BL = no_padding_2_padding(output["log_probs"].cpu(), data) if known else torch.zeros_like(advantage_BL)
        data["old_log_probs"], data["advantages"] = nested(old_BL), nested(advantage_BL)
        tu.assign_non_tensor(data, calculate_entropy=False, global_batch_size=self.total)
        return data

    def log_prob(self, data: TensorDict) -> dict[str, Any]:
        """The log-prob pass; with a request in `data`, importance comes out of it too."""
        with self.engine.eval_mode():
            return dict(self.engine.infer_batch(data).get("model_output", {}))

    def update(self, data: TensorDict) -> None:
        """verl's PPO loss on the whole batch, one optimizer step."""
        with self.engine.train_mode():
            self.engine.train_batch(data, self.loss)

    def reshape(self, output: dict[str, Any], times: int = 1) -> Tensor:
        """Advantages of this rank's rows times their weights, `times` over, and the metrics."""
        fields = (torch.stack(list(output[name].unbind())) for name in (WEIGHTS, STATUS, MEASURES))
        weight_BL, status_B1, measure_B4 = (field.repeat(times, 1) for field in fields)
        summarize(measure_B4, status_B1[:, 0])
        return self.advantage_BL.repeat(times, 1) * weight_BL

    def driver(self, output: dict[str, Any]) -> None:
        """The driver's part: on one process, for as many rows as all ranks have."""
        if distributed.get_rank() == 0:
            self.reshape(output, self.layout.data)

    def check(self, output: dict[str, Any]) -> None:
        """Raises: RuntimeError when a row that was to be scored was not, or the other way round."""
        status_B = torch.cat(list(output[STATUS].unbind()))
        if not torch.equal(status_B == Status.SCORED, self.needed_B):
            raise RuntimeError(f"not every row that was to be scored was: {[Status(int(x)).name for x in status_B]}")


class Clock:
    """`times`: wall `seconds` of the slowest process, `cpu_seconds` of all, each by method and phase, a value a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: dict[str, dict[str, dict[str, list[float]]]] = {
            kind: {"grpo": defaultdict(list), "oar": defaultdict(list)} for kind in ("seconds", "cpu_seconds")
        }

    def time(self, method: str, phase: str, work: Callable[[], T]) -> T:
        """What `work` returns; every process must call this, with the same names."""
        synchronize(self.device)
        distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        synchronize(self.device)
        walls, cpus = zip(*gathered((time.perf_counter() - wall, time.process_time() - cpu)), strict=True)
        self.times["seconds"][method][phase].append(max(walls))
        self.times["cpu_seconds"][method][phase].append(sum(cpus))
        return result


def gathered(value: T) -> list[T]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def measure(launch: Launch) -> dict[str, Any]:
    """Build the engine and run the rounds.

    Returns:
        The clock's `seconds` and `cpu_seconds` (`log_prob` of `oar` has importance and weights in it; `driver` is of
        `oar` only, and runs on rank 0 as verl's driver would); `machine`; `scores`, importance of the first response before any
        update; `parameters`.

    Raises:
        ValueError: not as many processes were started as the layout has.
        RuntimeError: rows were not scored that should have been.
    """
    layout, work, device = launch.layout, launch.work, choose_device("auto")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif layout.engine == "megatron":
        from verl_cpu import megatron

        megatron.install()
    initialize_global_process_group_ray()
    if (started := distributed.get_world_size()) != layout.processes:
        raise ValueError(f"--layout {layout} takes {layout.processes} processes, and {started} were started")
    machine = describe_machine(device)
    with model_folder(work) as folder:
        engine = build_engine(layout, work, folder, device)
        token_BL = work.token_BL(AutoTokenizer.from_pretrained(folder))
    actor, clock = Actor(engine, layout, work, token_BL), Clock(device)
    first = actor.log_prob(actor.data(importance=True))
    actor.check(first)
    scores = first[IMPORTANCE][0].tolist()
    one_round(actor, Clock(device), oar_first=False)  # a warm-up
    for number in range(work.rounds):
        one_round(actor, clock, oar_first=bool(number % 2))
    machine |= {"load_average_after": load_average(), "backend": distributed.get_backend()}
    machine["nodes"] = len(set(gathered(socket.gethostname())))
    with torch.device("meta"):  # the whole model, tied weights once: a rank has a part of them
        model = AutoModelForCausalLM.from_config(engine.model_config.hf_config, attn_implementation="eager")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {**clock.times, "machine": machine, "scores": scores, "parameters": parameters}


def one_round(actor: Actor, clock: Clock, oar_first: bool) -> None:
    """Phase by phase, so that what is compared lies close together in time."""
    methods, training = ("oar", "grpo") if oar_first else ("grpo", "oar"), {}
    for method in methods:
        data = actor.data(importance=method == "oar")
        output = clock.time(method, "log_prob", partial(actor.log_prob, data))
        advantage_BL = actor.advantage_BL
        if method == "oar":
            clock.time(method, "driver", partial(actor.driver, output))
            advantage_BL = actor.reshape(output)
        training[method] = actor.training_data(output, advantage_BL)
    for method in methods:
        clock.time(method, "update", partial(actor.update, training[method]))


@contextmanager
def model_folder(work: Work, device: torch.device = CPU) -> Iterator[str]:
    """The model on disk: the one that was named, or one with random weights, written once a node and gone afterwards."""
    if work.model is not None:
        yield work.model
        return
    local = int(os.environ["LOCAL_RANK"])
    with tempfile.TemporaryDirectory() as folder:
        if local == 0:
            saved: Any
            for saved in (work.make_model(device), make_tokenizer(SHAPES["tiny"].vocab, by_bytes=True)):
                saved.save_pretrained(folder)
        yield gathered(folder)[distributed.get_rank() - local]
        distributed.barrier()  # the others may still be reading


def run(argument: str) -> None:
    """Measure what the argument says, see `Launch.argument`; rank 0 writes the result, whole or not at all."""
    told = json.loads(argument)
    layout, runs = Layout.parse(told.pop("layout")), Path(told.pop("runs"))
    measured = measure(launch := Launch(layout, Work(**told)))
    if distributed.get_rank() == 0:
        runs.mkdir(parents=True, exist_ok=True)
        path = launch.file(runs)
        path.with_suffix(".part").write_text(json.dumps(launch.told() | measured))
        path.with_suffix(".part").replace(path)
        print(f"written: {path}")
    distributed.barrier()


def main() -> None:
    """Entry of `python -m`: ends the process whatever threads of the backends are left."""
    status = 0
    try:
        run(sys.argv[1])
    except Exception as error:
        traceback.print_exc()
        print(f"{FAILED} {type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
