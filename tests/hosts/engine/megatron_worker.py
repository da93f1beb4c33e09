"""A rank with verl's real Megatron engine and importance, in several layouts.

CPU stand-ins: see `verl_cpu/megatron.py`. On GPUs, for `tests/gpu`, none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import verl  # noqa: F401  loads the plugin, as in a run
from verl.utils.device import get_device_name

from tests.hosts.engine import cases, world
from tests.hosts.engine.worker import afterwards, asked_of, join, run, start
from tests.processes import worker
from verl_cpu import megatron

ON_CPU = get_device_name() == "cpu"
if ON_CPU:
    megatron.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from verl.workers.config import EngineRouterReplayConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig  # noqa: E402

CPU_ENGINE = {"use_distributed_optimizer": False}  # it takes CUDA tensors only
CPU_TRANSFORMER = {
    "use_cpu_initialization": True,
    "attention_backend": "auto",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
}
BYTES = {"tp2": ["fisher", "oar_g"], "tp2 sp": ["fisher"], "cp2": ["fisher", "fisher joint"]}
BYTES |= {"tp2 sp pp2 cp2": ["fisher"]}


def engine_of(folder: str, name: str, host_only: bool = False) -> Any:
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    layout = cases.MEGATRON_LAYOUTS[name]
    settings = {"sequence_parallel": False, "context_parallel_size": 1, "use_remove_padding": True} | layout.engine
    config = McoreEngineConfig(
        **(CPU_ENGINE if ON_CPU else {}),
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=90 // settings["context_parallel_size"],
        override_transformer_config={
            **(CPU_TRANSFORMER if ON_CPU else {}),
            "sequence_parallel": settings["sequence_parallel"],
            **layout.transformer,
        },
        router_replay=EngineRouterReplayConfig(mode=layout.replay or "disabled"),
        **settings,
    )
    if ON_CPU:
        object.__setattr__(config, "dtype", "float32")  # verl's config admits half precision only
    # megatron-core clips tensors on CUDA only: on a CPU its optimizer steps without clipping.
    clip = 0.0 if ON_CPU else 1.0
    optimizer = McoreOptimizerConfig(lr=1e-3, clip_grad=clip, lr_decay_steps=10, total_training_steps=10)
    model = HFModelConfig(path=str(Path(folder, layout.model)), use_remove_padding=config.use_remove_padding)
    engine = start("megatron", host_only, model, config, optimizer)
    if layout.columns is not None:
        engine.model_config.hf_config.vocab_size = layout.columns
    if layout.counts:
        count_tokens(engine)
    return engine


def count_tokens(engine: Any) -> None:
    """Count tokens per expert, as routers with expert bias do. mbridge knows no such weights of Qwen's."""
    for router in (module for chunk in engine.module for module in chunk.modules() if isinstance(module, TopKRouter)):
        router.enable_expert_bias = True
        del router.local_tokens_per_expert  # None
        router.register_buffer("local_tokens_per_expert", torch.zeros(world.EXPERTS["num_experts"]), persistent=False)


def half_way(engine: Any) -> None:
    """A half-accumulated training gradient: sentinels in DDP's buffers, and a pending `.grad`."""
    for chunk in engine.module:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            buffer.grad_data.fill_(7.0 + dist.get_rank())
        parameter = next(chunk.parameters())
        parameter.grad = torch.full_like(parameter, 3.0)


def score(engine: Any, *args: Any, **request: Any) -> dict[str, Any]:
    """The result, with how often attention was computed for it: more often with recomputation."""
    half_way(engine)
    attention, forward = megatron.DenseCoreAttention, megatron.DenseCoreAttention.forward
    with mock.patch.object(attention, "forward", autospec=True, side_effect=forward) as counted:
        result = run(engine, *args, **request)
    return result | {"attention": counted.call_count}


@contextmanager
def ungathered(engine: Any) -> Iterator[None]:
    """As after an optimizer's step: each of the two data-parallel ranks has its own part of the weights, and DDP knows."""
    for group in (group for chunk in engine.module for group in chunk.bucket_groups):
        for bucket in group.buckets:
            bucket.param_data.chunk(2)[1 - dist.get_rank()].zero_()
        group.param_gather_dispatched = False
    yield


def bytes_moved(engine: Any, request: str) -> dict[str, int]:
    """Payload of the all-reduces that the pass adds, by what they carry: of a pass without log-probs, which have their own.

    The model's own reductions are of three dimensions, `[s, b, H]`, and verl's counts are integers or scalars. Each kind is
    counted on the rank that moves most of it.
    """
    moved = {"rows": 0, "vocabulary": 0, "sequence": 0, "scores": 0}
    hidden = engine.tf_config.hidden_size
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and tensor.dim() in (1, 2) and kwargs["group"].size() > 1:
            widths = {1: "vocabulary", 2: "vocabulary", hidden: "rows"}
            kind = "scores" if tensor.dim() == 1 else widths.get(tensor.shape[1], "sequence")
            moved[kind] += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    run(engine, around=mock.patch.object(dist, "all_reduce", counted), **cases.REQUESTS[request] | cases.ONLY)
    most = torch.tensor(list(moved.values()))
    original(most, dist.ReduceOp.MAX)
    return dict(zip(moved, most.tolist(), strict=True))


def refusals(engine: Any) -> dict[str, str]:
    """What is said of each setting that is not served; of some, only a later megatron-core than this has the name."""
    from oar_plugin.hosts.verl.megatron import REFUSED, check_chunks

    said = {}
    for name in (one.in_model for one in REFUSED["megatron"] if one.in_model):
        try:
            with mock.patch.object(engine.module[0].config, name, True, create=True):
                said[name] = str(check_chunks(engine.module))
        except ValueError as error:
            said[name] = str(error)
    return said


def main(table: str, folder: str) -> dict[str, Any]:
    join()
    out: dict[str, Any] = {}
    for name, (layout, requests) in cases.TABLES[table].items():
        engine = engine_of(folder, name)
        around = ungathered(engine) if "override_ddp_config" in layout.engine else None
        split = engine.get_data_parallel_size() > 1
        out |= asked_of(engine, name, requests, split, partial(score, around=around))
        if table in ("megatron", "eight"):
            out |= {f"{name} {request} bytes": bytes_moved(engine, request) for request in BYTES.get(name, [])}
        if (table, name) == ("megatron", "tp2 sp"):
            out["refusals"] = refusals(engine)
        if (table, name) in (("megatron", "tp2 sp"), ("mixture", "ep2 dp2 aux full")):
            out |= afterwards(engine, partial(engine_of, folder, name))
    return out


if __name__ == "__main__":
    worker(main)
