"""Run by torchrun: verl's real Megatron engine with importance, in several layouts; results go to a file.

CPU stand-ins: see `oar_plugin/hosts/verl/cpu/megatron.py`.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401  loads the plugin, as in a run

from oar_plugin.hosts.verl.cpu import megatron
from tests.hosts.engine.worker import ENTROPY, EXACT, ONWARD, OWN, RANDOM, batch, differences, flags, gather, run

megatron.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402

EVERY = list(range(8))
PADDED_FROM = 200
RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def build(
    folder: str,
    tp: int = 1,
    sp: bool = False,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    packed: bool = True,
    recompute: str | None = None,
    host_only: bool = False,
) -> Any:
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    model = HFModelConfig(path=folder, use_remove_padding=packed)
    engine = McoreEngineConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        use_remove_padding=packed,
        use_distributed_optimizer=False,  # it takes CUDA tensors only
        vanilla_mbridge=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=90 // cp,
        override_transformer_config={
            "use_cpu_initialization": True,
            "attention_backend": "auto",
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "sequence_parallel": sp,
            **RECOMPUTE.get(recompute or "", {}),
        },
    )
    object.__setattr__(engine, "dtype", "float32")  # verl's config admits half precision only
    # megatron-core clips tensors on CUDA only: on a CPU its optimizer steps without clipping.
    optimizer = McoreOptimizerConfig(lr=1e-3, clip_grad=0.0, lr_decay_steps=10, total_training_steps=10)
    cls = EngineRegistry.get_engine_cls("language_model", "megatron")
    if host_only:
        cls = cls.__bases__[1]  # what is registered, less our mixin
    built = cls(model, engine, optimizer, CheckpointConfig())
    built.initialize()
    return built


def state(engine: Any) -> dict[str, Any]:
    """Everything that the pass must leave as it was."""
    chunks = engine.module
    named = {f"{i}.{n}": p for i, chunk in enumerate(chunks) for n, p in chunk.named_parameters()}
    modules = {f"{i}.{n}": m for i, chunk in enumerate(chunks) for n, m in chunk.named_modules()}
    buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return {
        "weights": {n: p.detach().clone() for n, p in named.items()},
        "requires_grad": {n: p.requires_grad for n, p in named.items()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in named.items()},
        "grad_buffers": dict(enumerate(buffer.grad_data.clone() for buffer in buffers)),
        "training": {n: m.training for n, m in modules.items()},
        "hooks": {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in modules.items()},
        "config": {i: dict(vars(get_model_config(chunk))) for i, chunk in enumerate(chunks)},
        "optimizer": {
            i: {j: dict(v) for j, v in enumerate(o.optimizer.state.values())} for i, o in enumerate(optimizers)
        },
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": np.random.get_state()[1].tolist(),
        "python_rng": random.getstate(),
    }


def half_way(engine: Any) -> None:
    """A half-accumulated training gradient: sentinels in DDP's buffers, and a pending `.grad`."""
    for chunk in engine.module:
        for buffer in chunk.buffers:
            buffer.grad_data.fill_(7.0 + dist.get_rank())
        parameter = next(chunk.parameters())
        parameter.grad = torch.full_like(parameter, 3.0)


def score(engine: Any, rows: list[int] = EVERY, packed: bool = True, **kwargs: Any) -> list[dict[str, Any]]:
    """The result on every rank."""
    half_way(engine)
    return gather(run(engine, rows, packed, look=state, **kwargs))


def attention_calls(engine: Any, **kwargs: Any) -> tuple[list[dict[str, Any]], int]:
    """The result, and how often attention was computed for it on this rank: more often with recomputation."""
    calls = []
    original = megatron.DenseCoreAttention.forward
    megatron.DenseCoreAttention.forward = lambda self, *args, **kw: calls.append(1) or original(self, *args, **kw)
    try:
        return score(engine, **kwargs), len(calls)
    finally:
        megatron.DenseCoreAttention.forward = original


def bytes_moved(engine: Any, rows: list[int], **request: Any) -> dict[str, int]:
    """Payload of the all-reduces that the pass adds, by what they carry: of a pass without log-probs, which have their own.

    The model's own reductions are of three dimensions, `[s, b, H]`, and verl's counts are integers or scalars. Each kind is
    counted on the rank that moves most of it.
    """
    moved = {"rows": 0, "vocabulary": 0, "sequence": 0, "scores": 0}
    looks: list[int] = []

    def look(engine: Any) -> dict[str, Any]:
        if not looks:  # so far it was the ordinary pass that `run` compares with
            moved.update(dict.fromkeys(moved, 0))
        looks.append(1)
        return {}

    hidden = engine.tf_config.hidden_size
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and tensor.dim() in (1, 2) and kwargs["group"].size() > 1:
            widths = {1: "vocabulary", 2: "vocabulary", hidden: "rows"}
            kind = "scores" if tensor.dim() == 1 else widths.get(tensor.shape[1], "sequence")
            moved[kind] += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        run(engine, rows, True, only=True, look=look, **request)
    finally:
        dist.all_reduce = original
    everywhere = gather(moved)
    return {kind: max(rank[kind] for rank in everywhere) for kind in moved}


def refusals(engine: Any) -> dict[str, str]:
    """What `check_chunks` says of each setting that is not served."""
    from oar_plugin.hosts.verl.megatron_served import check_chunks

    config, said = get_model_config(engine.module[0]), {}
    for name, value in {
        "num_moe_experts": 4,
        "mtp_num_layers": 1,
        "fp8": "e4m3",
        "overlap_moe_expert_parallel_comm": True,
        "defer_embedding_wgrad_compute": True,
        "cuda_graph_impl": "local",
    }.items():
        before = getattr(config, name)
        setattr(config, name, value)
        try:
            check_chunks(engine.module)
        except ValueError as error:
            said[f"{name}={value}"] = str(error)
        setattr(config, name, before)
    try:
        run(engine, EVERY, True, look=state, importance="oar_p", perturbation=EXACT)
    except ValueError as error:
        said["importance=oar_p"] = str(error)
    return said


def noticed(engine: Any) -> list[str]:
    """Negative control for `state`: what it says of a pass that leaves a trace of every kind."""
    half_way(engine)
    before = state(engine)
    chunk = engine.module[0]
    parameter = next(chunk.parameters())
    chunk.buffers[0].grad_data[0] = 1.0
    parameter.grad = torch.ones_like(parameter)
    parameter.requires_grad_(False)
    chunk.training = not chunk.training
    chunk.register_forward_hook(lambda *args: None)
    get_model_config(chunk).finalize_model_grads_func = print
    optimizer = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])[0]
    optimizer.optimizer.state[parameter] = {"step": 1}
    torch.rand(1)
    np.random.rand()
    random.random()
    with torch.no_grad():
        parameter.mul_(2)
    return sorted({path.split("/")[1] for path in differences(before, state(engine))})


def unfrozen(engine: Any) -> list[str]:
    """Negative control for freezing: traces of a pass whose taps leave the parameters as they are."""
    from unittest import mock

    from oar_plugin.passes.tap import Traces

    with mock.patch.object(Traces, "freeze"):
        result = score(engine)
    return sorted({path.split("/")[1] for path in result[0]["traces"]})


def ordinary(engine: Any) -> dict[str, Any]:
    """Log-probs of a batch without a request."""
    with engine.eval_mode():
        output = engine.infer_batch(flags(batch(EVERY), True, False)).get("model_output", {})
    return {"class": type(engine).__name__, "log_probs": output["log_probs"].values() if output else None}


def train_steps(engine: Any) -> list[float]:
    """Ordinary updates."""

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return -model_output["log_probs"].values().mean(), {}

    norms = []
    for _ in range(2):
        with engine.train_mode():
            metrics = engine.train_batch(flags(batch(EVERY), True, False), loss)["metrics"]
        norms.append(float(metrics.get("grad_norm", 0.0)))  # of the rank that reports
    return norms


def double(folder: str) -> dict[str, Any]:
    """Two processes, one layout after the other."""
    out: dict[str, Any] = {}
    engine = build(folder, tp=2)
    out["tp2"] = score(engine)
    out["tp2_bytes"] = {
        "fisher": bytes_moved(engine, EVERY),
        "oar_g": bytes_moved(engine, EVERY, importance="oar_g"),
        "onward": bytes_moved(engine, EVERY, **ONWARD),
    }
    out["tp2_joint"] = score(engine, probe="answer_joint")
    out["tp2_onward"] = score(engine, **ONWARD)

    engine = build(folder, tp=2, sp=True)
    out["ordinary"] = ordinary(engine)
    out["tp2_sp"], out["calls"] = attention_calls(engine)
    out["tp2_sp_again"] = score(engine)
    out["tp2_sp_bytes"] = {"fisher": bytes_moved(engine, EVERY)}
    for probe in ("last", "answer_mean", "answer_joint"):
        out[f"tp2_sp_fisher_{probe}"] = score(engine, probe=probe)
        out[f"tp2_sp_oar_g_{probe}"] = score(engine, importance="oar_g", probe=probe)
    out["tp2_sp_dynamic"] = score(engine, dynamic=True)
    out["tp2_sp_only"] = score(engine, only=True)
    out["tp2_sp_draws"] = score(engine, num_draws=3)
    out["tp2_sp_onward"] = score(engine, **ONWARD)
    for name, request in (("entropy", ENTROPY), ("random", RANDOM), ("own", OWN)):
        out[f"tp2_sp_{name}"] = score(engine, **request)
    out["tp2_sp_onward_only"] = score(engine, only=True, **ONWARD)
    out["refusals"] = refusals(engine)
    out["grad_norms"] = train_steps(engine)
    out["noticed"] = noticed(engine)
    out["fresh_grad_norms"] = train_steps(build(folder, tp=2, sp=True))
    out["ordinary_host"] = ordinary(build(folder, tp=2, sp=True, host_only=True))

    for how in RECOMPUTE:
        out[f"tp2_sp_recompute_{how}"], out[f"calls_{how}"] = attention_calls(
            build(folder, tp=2, sp=True, recompute=how)
        )
    out["tp2_sp_padded"] = score(build(folder, tp=2, sp=True, packed=False), packed=False)
    engine = build(folder, tp=2)
    engine.model_config.hf_config.vocab_size = PADDED_FROM  # as if the columns from there on were padding
    out["tp2_vocabulary"] = score(engine)
    out["tp2_vocabulary_onward"] = score(engine, **ONWARD)

    engine = build(folder, pp=2)
    out["pp2"] = score(engine)
    out["pp2_oar_g"] = score(engine, importance="oar_g")
    out["pp2_draws"] = score(engine, num_draws=3)
    out["pp2_onward"] = score(engine, **ONWARD)
    for name, request in (("entropy", ENTROPY), ("random", RANDOM), ("own", OWN)):
        out[f"pp2_{name}"] = score(engine, **request)
    out["pp2_dynamic"] = score(engine, dynamic=True)
    out["pp2_only"] = score(engine, only=True)
    out["unfrozen"] = unfrozen(engine)
    out["pp2_recompute_full"] = score(build(folder, pp=2, recompute="full"))

    engine = build(folder, pp=2, vpp=2)
    out["pp2_vpp2"] = score(engine)
    out["pp2_vpp2_dynamic"] = score(engine, dynamic=True)
    out["pp2_vpp2_oar_g"] = score(engine, importance="oar_g")
    out["pp2_vpp2_onward"] = score(engine, **ONWARD)
    out["pp2_vpp2_joint"] = score(engine, probe="answer_joint")

    engine = build(folder, cp=2)
    out["cp2"] = score(engine)
    out["cp2_bytes"] = {"fisher": bytes_moved(engine, EVERY), "joint": bytes_moved(engine, EVERY, probe="answer_joint")}
    out["cp2_onward"] = score(engine, **ONWARD)
    for name, request in (("entropy", ENTROPY), ("random", RANDOM), ("own", OWN)):
        out[f"cp2_{name}"] = score(engine, **request)
    out["cp2_dynamic"] = score(engine, dynamic=True)
    for probe in ("last", "answer_mean", "answer_joint"):
        out[f"cp2_fisher_{probe}"] = score(engine, probe=probe)
        out[f"cp2_oar_g_{probe}"] = score(engine, importance="oar_g", probe=probe)
    out["cp2_padded"] = score(build(folder, cp=2, packed=False), packed=False)

    rows = [[0, 1, 3, 2], [4, 5, 6, 7]][dist.get_rank()]
    engine = build(folder)
    out["dp2"] = score(engine, rows)
    out["dp2_dynamic"] = score(engine, rows, dynamic=True)

    tied = str(
        Path(folder) / "tied"
    )  # last: mbridge remembers of a tied model, in its class, that it has no output layer
    out["tp2_sp_tied"] = score(build(tied, tp=2, sp=True))
    engine = build(tied, pp=2)
    out["pp2_tied"] = score(engine)
    out["pp2_tied_onward"] = score(engine, **ONWARD)
    return out


def eight(folder: str) -> dict[str, Any]:
    """Eight processes: tensor, sequence, pipeline and context parallel at once."""
    engine = build(folder, tp=2, sp=True, pp=2, cp=2)
    out: dict[str, Any] = {"fisher": score(engine), "dynamic": score(engine, dynamic=True)}
    out["joint"] = score(engine, probe="answer_joint")
    out["oar_g"] = score(engine, importance="oar_g")
    out["onward"] = score(engine, **ONWARD)
    for name, request in (("entropy", ENTROPY), ("random", RANDOM), ("own", OWN)):
        out[name] = score(engine, **request)
    out["bytes"] = {"fisher": bytes_moved(engine, EVERY)}
    return out


if __name__ == "__main__":
    which, folder, target = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {"double": double, "eight": eight}[which](folder)
    if dist.get_rank() == 0:
        torch.save(result, Path(target))
    dist.barrier()
    os._exit(0)  # gloo's threads outlive destroy_process_group on some builds
