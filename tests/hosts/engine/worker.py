"""Run by torchrun: verl's real FSDP engine with importance, in several configurations; results go to a file.

CPU stand-ins: gloo for NCCL; under Ulysses, see `oar_plugin/hosts/verl/cpu/ulysses.py`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401  loads the plugin, as in a run
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry

from oar_plugin.hosts.verl.cpu import ulysses
from oar_plugin.passes.request import NEEDED, REQUEST, Perturbation, Request
from tests.hosts.engine import world

TEMPERATURE = 0.7  # of sampling; not 1, so that entropies at another temperature are noticed
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(rows: list[int]) -> TensorDict:
    encoded = [world.encode()[i] for i in rows]
    ids = [torch.cat(pair) for pair in encoded]
    masks = [torch.ones(len(response), dtype=torch.long) for _, response in encoded]
    return TensorDict(
        {
            "prompts": nested([p for p, _ in encoded]),
            "responses": nested([r for _, r in encoded]),
            "response_mask": nested(masks),
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(len(i)) for i in ids]),
            "loss_mask": nested(masks),
            NEEDED: nested([torch.tensor([int(world.ROWS[i][2])]) for i in rows]),
        },
        batch_size=[len(rows)],
    )


def build(
    folder: str,
    strategy: str = "fsdp2",
    packed: bool = True,
    sp: int = 1,
    checkpointing: bool = False,
    lora: int = 0,
    attention: str = "sdpa",
    offload: bool = False,
    dtype: str = "fp32",
    host_only: bool = False,
) -> Any:
    model = HFModelConfig(
        path=folder,
        override_config={"attn_implementation": attention},
        enable_gradient_checkpointing=checkpointing,
        use_remove_padding=packed,
        lora_rank=lora,
        lora_alpha=16,
        target_modules="all-linear",
    )
    engine = FSDPEngineConfig(
        strategy=strategy,
        ulysses_sequence_parallel_size=sp,
        use_dynamic_bsz=False,
        wrap_policy={"min_num_params": 0},
        mixed_precision={**FP32, "param_dtype": dtype},
        model_dtype="fp32",
        use_torch_compile=False,
        use_remove_padding=packed,
        param_offload=offload,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=90,
    )
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
    cls = EngineRegistry.get_engine_cls("language_model", strategy)
    if host_only:
        cls = type("HostEngine", cls.__bases__[1:], {})  # what is registered, less our mixin
    built = cls(model, engine, optimizer, CheckpointConfig())
    built.initialize()
    return built


def flags(data: TensorDict, packed: bool, dynamic: bool) -> TensorDict:
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=dynamic,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=120,
        use_fused_kernels=False,
        calculate_entropy=True,
        temperature=TEMPERATURE,
    )
    return data


def state(engine: Any) -> dict[str, Any]:
    """Everything that the pass must leave as it was."""
    parameters = dict(engine.module.named_parameters())
    local = {n: getattr(p, "_local_tensor", p).detach().clone() for n, p in parameters.items()}
    return {
        "weights": local,
        "requires_grad": {n: p.requires_grad for n, p in parameters.items()},
        "grads": sorted(n for n, p in parameters.items() if p.grad is not None),
        "training": {n: m.training for n, m in engine.module.named_modules()},
        "hooks": {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in engine.module.named_modules()},
        "optimizer": {k: dict(v) for k, v in enumerate(engine.optimizer.state.values())},
        "scaler": engine.scaler,
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": np.random.get_state()[1].tolist(),
        "python_rng": random.getstate(),
    }


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict):
        if before.keys() != after.keys():
            return [path]
        return [d for k in before for d in differences(before[k], after[k], f"{path}/{k}")]
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return [] if torch.equal(before, after) else [path]
    return [] if before == after else [path]


def run(
    engine: Any,
    rows: list[int],
    packed: bool,
    dynamic: bool = False,
    only: bool = False,
    look: Callable[[Any], dict[str, Any]] = state,
    **request: Any,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "importance": "fisher",
        "probe": "answer_mean",
        "sigma": world.SIGMA,
        "num_draws": 1,
        "seed": 0,
        "temperature": TEMPERATURE,
        "answer_patterns": ("hash",),
        "max_response_length": world.MAX_RESPONSE_LENGTH,
        "importance_only": only,
        **request,
    }
    with engine.eval_mode():
        plain = engine.infer_batch(flags(batch(rows), packed, dynamic)).get("model_output", {})
        before = look(engine)
        data = flags(batch(rows), packed, dynamic)
        tu.assign_non_tensor_data(data, REQUEST, Request(**values).to_dict())
        output = engine.infer_batch(data)["model_output"]
        traces = differences(before, look(engine))
    result: dict[str, Any] = {"rows": rows, "traces": traces}
    for key, value in output.items():
        result[key] = [row.clone() for row in value.unbind()]
    for key in ("log_probs", "entropy"):
        if key in output:
            # Not the last position: its label is the first token of whatever sequence stands behind it in the pack.
            pairs = zip(output[key].unbind(), plain[key].unbind(), strict=True)
            result[f"{key}_error"] = max((a - b)[:-1].abs().max().item() for a, b in pairs)
    return result


def train_step(engine: Any, packed: bool) -> float:
    """An ordinary update after the pass."""

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return -model_output["log_probs"].values().mean(), {}

    with engine.train_mode():
        return float(engine.train_batch(flags(batch([0, 1]), packed, False), loss)["metrics"]["grad_norm"])


def noticed(engine: Any) -> list[str]:
    """Negative control for `state`: what it says of a pass that leaves a trace of every kind."""
    before = state(engine)
    parameter = next(iter(engine.module.parameters()))
    parameter.grad = torch.zeros_like(parameter)
    parameter.requires_grad_(False)
    engine.module.training = not engine.module.training
    engine.module.register_forward_hook(lambda *args: None)
    engine.optimizer.state[parameter] = {"step": 1}
    engine.scaler = "touched"
    torch.rand(1)
    np.random.rand()
    random.random()
    with torch.no_grad():
        parameter.mul_(2)
    return sorted({path.split("/")[1] for path in differences(before, state(engine))})


EXACT = Perturbation(budget=1.0, span=1, replacement_token=world.PAD)
OAR_P = {"importance": "oar_p", "perturbation": EXACT}
ONWARD = {"importance": "onward"}
ENTROPY = {"importance": "entropy"}
RANDOM = {"importance": "random"}
OWN = {"importance": "python:tests.own_importance:Saliency"}


def perturbed(folder: str) -> dict[str, Any]:
    """OAR-P in one process."""
    every = list(range(8))
    out: dict[str, Any] = {}
    engine = build(folder)
    for probe in ("last", "answer_mean", "answer_joint"):
        out[probe] = run(engine, every, True, probe=probe, **OAR_P)
    out["dynamic"] = run(engine, every, True, dynamic=True, **OAR_P)
    out["importance_only"] = run(engine, every, True, only=True, **OAR_P)
    for name, changes in {
        "span": {"span": 4},
        "sampled": {"replacement_token": None},
        "blocks": {"budget": 0.5},
    }.items():
        out[name] = run(engine, every, True, importance="oar_p", perturbation=replace(EXACT, **changes))
    out["hybrid"] = run(engine, every, True, importance="hybrid", perturbation=replace(EXACT, budget=0.3))
    out["grad_norm"] = train_step(engine, True)
    out["fresh_grad_norm"] = train_step(build(folder), True)
    out["padded"] = run(build(folder, packed=False), every, False, **OAR_P)
    out["lora"] = run(build(folder, lora=4), every, True, **OAR_P)
    out["checkpointing"] = run(build(folder, checkpointing=True), every, True, **OAR_P)
    out["bf16"] = run(build(folder, dtype="bf16"), every, True, **OAR_P)
    out["fsdp1"] = run(build(folder, strategy="fsdp"), every, True, **OAR_P)
    return out


def perturbed_double(folder: str) -> dict[str, Any]:
    """OAR-P in two processes: data parallel with three rows to score here and one there, then a Ulysses pair."""
    rows = [[0, 1, 3, 2], [4, 5, 6, 7]][dist.get_rank()]
    out: dict[str, Any] = {}
    engine = build(folder)
    out["fsdp2"] = gather(run(engine, rows, True, **OAR_P))
    out["fsdp2_blocks"] = gather(run(engine, rows, True, importance="oar_p", perturbation=replace(EXACT, budget=0.5)))
    out["fsdp2_hybrid"] = gather(run(engine, rows, True, importance="hybrid", perturbation=replace(EXACT, budget=0.3)))
    ulysses.install()
    engine = build(folder, sp=2, attention=ulysses.ATTENTION)
    for probe in ("answer_mean", "answer_joint"):
        out[f"ulysses_{probe}"] = gather(run(engine, list(range(8)), True, probe=probe, **OAR_P))
    sampled = replace(EXACT, replacement_token=None)
    out["ulysses_sampled"] = gather(run(engine, list(range(8)), True, importance="oar_p", perturbation=sampled))
    return out


def single(folder: str) -> dict[str, Any]:
    every = list(range(8))
    out: dict[str, Any] = {}
    engine = build(folder, packed=True)
    out["packed"] = run(engine, every, True)
    out["packed_again"] = run(engine, every, True)
    out["dynamic"] = run(engine, every, True, dynamic=True)
    out["importance_only"] = run(engine, every, True, only=True)
    out["one_by_one"] = {i: run(engine, [i, 2], True) for i in world.SCORED}
    for probe in ("last", "answer_joint"):
        out[f"fisher_{probe}"] = run(engine, every, True, probe=probe)
    for probe in ("last", "answer_mean", "answer_joint"):
        out[f"oar_g_{probe}"] = run(engine, every, True, importance="oar_g", probe=probe)
    out["draws"] = run(engine, every, True, num_draws=64)
    out["onward"] = run(engine, every, True, **ONWARD)
    out["onward_dynamic"] = run(engine, every, True, dynamic=True, **ONWARD)
    out["onward_only"] = run(engine, every, True, only=True, **ONWARD)
    out["onward_last"] = run(engine, every, True, probe="last", **ONWARD)
    out["onward_draws"] = run(engine, every, True, num_draws=16, **ONWARD)
    for name, request in (("entropy", ENTROPY), ("random", RANDOM), ("own", OWN)):
        out[name] = run(engine, every, True, **request)
        out[f"{name}_only"] = run(engine, every, True, only=True, **request)
    out["moved"] = moved(engine)
    out["grad_norm"] = train_step(engine, True)
    out["fresh_grad_norm"] = train_step(build(folder, packed=True), True)
    out["padded"] = run(build(folder, packed=False), every, False)
    out["checkpointing"] = run(build(folder, checkpointing=True), every, True)
    out["offload"] = run(build(folder, offload=True), every, True)
    out["lora"] = run(build(folder, lora=4), every, True)
    out["bf16"] = run(build(folder, dtype="bf16"), every, True)
    out["inert"] = {kind: losses_and_weights(folder, kind) for kind in ("plugin", "host")}
    out["fsdp1"] = run(build(folder, strategy="fsdp"), every, True)
    out["onward_padded"] = run(build(folder, packed=False), every, False, **ONWARD)
    out["onward_checkpointing"] = run(build(folder, checkpointing=True), every, True, **ONWARD)
    out["onward_lora"] = run(build(folder, lora=4), every, True, **ONWARD)
    out["onward_bf16"] = run(build(folder, dtype="bf16"), every, True, **ONWARD)
    out["onward_fsdp1"] = run(build(folder, strategy="fsdp"), every, True, **ONWARD)
    out["noticed"] = noticed(engine)
    return out


def moved(engine: Any) -> dict[str, bool]:
    """Whether the pass works on the tensors that verl moved to the device; here the move is a copy, as on a GPU."""
    from oar_plugin.hosts.verl import fsdp

    seen: dict[str, list[int]] = {"verl": [], "ours": []}
    prepare, built, to = engine.prepare_model_inputs, fsdp.MicroBatchPass, TensorDict.to

    def noted_inputs(micro_batch: TensorDict) -> Any:
        seen["verl"].append(micro_batch["input_ids"].values().data_ptr())
        return prepare(micro_batch)

    def noted_pass(request: Any, packed: Any, layout: Any) -> Any:
        seen["ours"].append(packed.token_T.data_ptr())
        return built(request, packed, layout)

    def copied(data: TensorDict, *args: Any, **kwargs: Any) -> TensorDict:
        there = to(data, *args, **kwargs).copy()
        there["input_ids"] = torch.nested.nested_tensor_from_jagged(
            there["input_ids"].values().clone(), there["input_ids"].offsets()
        )
        return there

    with (
        mock.patch.object(engine, "prepare_model_inputs", noted_inputs),
        mock.patch.object(fsdp, "MicroBatchPass", noted_pass),
        mock.patch.object(TensorDict, "to", copied),
    ):
        run(engine, list(range(8)), True, only=True, look=lambda engine: {})
    return {"some": len(seen["ours"]) > 0, "same": set(seen["ours"]) <= set(seen["verl"])}


def losses_and_weights(folder: str, kind: str) -> dict[str, Any]:
    """Two ordinary updates and a log-prob pass, through the engine that the registry gives or through verl's own class."""
    engine = build(folder, host_only=kind == "host")
    norms = [train_step(engine, True) for _ in range(2)]
    with engine.eval_mode():
        log_probs = engine.infer_batch(flags(batch([0, 1]), True, False))["model_output"]["log_probs"].values()
    weights = {n: p.full_tensor().clone() for n, p in engine.module.named_parameters()}
    return {"class": type(engine).__name__, "norms": norms, "log_probs": log_probs, "weights": weights}


def double(folder: str) -> dict[str, Any]:
    """Two processes: data parallel (rank 1 has one row to score, rank 0 three), then one Ulysses pair."""
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    rows = [[0, 1, 3, 2], [4, 5, 6, 7]][rank]
    out["fsdp2"] = gather(run(build(folder), rows, True))
    out["fsdp2_checkpointing"] = gather(run(build(folder, checkpointing=True), rows, True))
    out["fsdp2_padded"] = gather(run(build(folder, packed=False), rows, False))
    out["fsdp2_onward"] = gather(run(build(folder), rows, True, **ONWARD))
    out["fsdp1_onward"] = gather(run(build(folder, strategy="fsdp"), rows, True, **ONWARD))
    ulysses.install()
    engine = build(folder, sp=2, attention=ulysses.ATTENTION)
    out["ulysses"] = gather(run(engine, list(range(8)), True))
    out["ulysses_oar_g"] = gather(run(engine, list(range(8)), True, importance="oar_g"))
    out["ulysses_onward"] = gather(run(engine, list(range(8)), True, **ONWARD))
    for name, request in (("entropy", ENTROPY), ("random", RANDOM), ("own", OWN)):
        out[f"ulysses_{name}"] = gather(run(engine, list(range(8)), True, **request))
    out["ulysses_joint"] = gather(run(engine, list(range(8)), True, probe="answer_joint"))
    return out


def gather(result: dict[str, Any]) -> list[dict[str, Any]]:
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return results


if __name__ == "__main__":
    which, folder, target = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kinds = {"single": single, "double": double, "perturbed": perturbed, "perturbed_double": perturbed_double}
    result = kinds[which](folder)
    if dist.get_rank() == 0:
        torch.save(result, Path(target))
    dist.barrier()
    os._exit(0)  # gloo and FSDP threads outlive destroy_process_group on some builds
