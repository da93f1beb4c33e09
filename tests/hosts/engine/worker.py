"""Run by torchrun: verl's real FSDP engine with importance, in several configurations; results go to a file.

CPU stand-ins: gloo for NCCL; under Ulysses, see `oar_plugin/hosts/verl/cpu/ulysses.py`.
"""

import os
import random
import sys
from collections.abc import Callable
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
from oar_plugin.passes.request import NEEDED, REQUEST, Request
from tests.hosts.engine import cases, world
from tests.hosts.engine.launch import differences

EVERY = list(range(8))
UNEVEN = [[0, 1, 3, 2], [4, 5, 6, 7]]  # data parallel: rank 0 has three rows to score, rank 1 one
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "fsdp2": {},
    "fsdp1": {"strategy": "fsdp"},
    "padded": {"use_remove_padding": False},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "offload": {"param_offload": True},
    "lora": {"model": {"lora_rank": 4, "lora_alpha": 16, "target_modules": "all-linear"}},
    "bf16": {"param_dtype": "bf16"},
    "ulysses": {
        "ulysses_sequence_parallel_size": 2,
        "model": {"override_config": {"attn_implementation": ulysses.ATTENTION}},
    },
}


def batch(rows: list[int], packed: bool = True, dynamic: bool = False) -> TensorDict:
    encoded = [world.encode()[i] for i in rows]
    ids = [torch.cat(pair) for pair in encoded]
    masks = [torch.ones(len(response), dtype=torch.long) for _, response in encoded]
    data = TensorDict(
        {
            "prompts": world.nested([p for p, _ in encoded]),
            "responses": world.nested([r for _, r in encoded]),
            "response_mask": world.nested(masks),
            "input_ids": world.nested(ids),
            "position_ids": world.nested([torch.arange(len(i)) for i in ids]),
            "loss_mask": world.nested(masks),
            NEEDED: world.nested([torch.tensor([int(world.ROWS[i][2])]) for i in rows]),
        },
        batch_size=[len(rows)],
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=dynamic,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=120,
        use_fused_kernels=False,
        calculate_entropy=True,
        temperature=world.TEMPERATURE,
    )
    return data


def build(
    folder: str,
    host_only: bool = False,
    strategy: str = "fsdp2",
    use_remove_padding: bool = True,
    param_dtype: str = "fp32",
    model: dict[str, Any] | None = None,
    **engine: Any,
) -> Any:
    settings = {
        "override_config": {"attn_implementation": "sdpa"},
        "enable_gradient_checkpointing": False,
        "use_remove_padding": use_remove_padding,
        **(model or {}),
    }
    engine_config = FSDPEngineConfig(
        strategy=strategy,
        use_dynamic_bsz=False,
        wrap_policy={"min_num_params": 0},
        mixed_precision={"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        model_dtype="fp32",
        use_torch_compile=False,
        use_remove_padding=use_remove_padding,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=90,
        **engine,
    )
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
    cls = EngineRegistry.get_engine_cls("language_model", strategy)
    if host_only:
        cls = type("HostEngine", cls.__bases__[1:], {})  # what is registered, less our mixin
    built = cls(HFModelConfig(path=folder, **settings), engine_config, optimizer, CheckpointConfig())
    built.initialize()
    return built


def random_states() -> dict[str, Any]:
    return {
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": np.random.get_state()[1].tolist(),
        "python_rng": random.getstate(),
    }


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
        **random_states(),
    }


def kinds(traces: list[str]) -> list[str]:
    """Entries of `state` that differ."""
    return sorted({path.split("/")[1] for path in traces})


def run(
    engine: Any,
    rows: list[int] = EVERY,
    packed: bool = True,
    dynamic: bool = False,
    only: bool = False,
    look: Callable[[Any], dict[str, Any]] = state,
    **request: Any,
) -> dict[str, Any]:
    asked = Request(
        sigma=world.SIGMA,
        temperature=world.TEMPERATURE,
        answer_patterns=("hash",),
        max_response_length=world.MAX_RESPONSE_LENGTH,
        importance_only=only,
        **{"importance": "fisher", **request},
    )
    with engine.eval_mode():
        plain = engine.infer_batch(batch(rows, packed, dynamic)).get("model_output", {})
        before = look(engine)
        data = batch(rows, packed, dynamic)
        tu.assign_non_tensor_data(data, REQUEST, asked.to_dict())
        output = engine.infer_batch(data)["model_output"]
        traces = differences(before, look(engine))
    result: dict[str, Any] = {"rows": rows, "traces": traces}
    result |= {key: [row.clone() for row in value.unbind()] for key, value in output.items()}
    for key in ("log_probs", "entropy"):
        if key in output:
            # Not the last position: its label is the first token of whatever sequence stands behind it in the pack.
            pairs = zip(output[key].unbind(), plain[key].unbind(), strict=True)
            result[f"{key}_error"] = max((a - b)[:-1].abs().max().item() for a, b in pairs)
    return result


def gather(result: Any) -> list[Any]:
    """The result on every rank."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return results


def train_step(engine: Any, rows: list[int], packed: bool = True) -> float:
    """The norm of an ordinary update's gradient; 0 on a rank that does not report."""

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return -model_output["log_probs"].values().mean(), {}

    with engine.train_mode():
        return float(engine.train_batch(batch(rows, packed), loss)["metrics"].get("grad_norm", 0.0))


def disturb(module: Any, parameter: torch.nn.Parameter, optimizer: Any) -> None:
    """Leave a trace of every kind."""
    parameter.grad = torch.ones_like(parameter)
    parameter.requires_grad_(False)
    module.training = not module.training
    module.register_forward_hook(lambda *args: None)
    optimizer.state[parameter] = {"step": 1}
    for draw in (torch.rand, np.random.rand, lambda _: random.random()):
        draw(1)
    with torch.no_grad():
        parameter.mul_(2)


def noticed(engine: Any) -> list[str]:
    """Negative control: what `state` says of such a pass."""
    before = state(engine)
    disturb(engine.module, next(iter(engine.module.parameters())), engine.optimizer)
    engine.scaler = "touched"
    return kinds(differences(before, state(engine)))


def moved(engine: Any) -> dict[str, bool]:
    """Whether the pass works on the tensors that verl moved to the device; here the move is a copy, as on a GPU."""
    from oar_plugin.hosts.verl import fsdp

    to = TensorDict.to

    def copied(data: TensorDict, *args: Any, **kwargs: Any) -> TensorDict:
        there = to(data, *args, **kwargs).copy()
        ids = there["input_ids"]
        there["input_ids"] = torch.nested.nested_tensor_from_jagged(ids.values().clone(), ids.offsets())
        return there

    with (
        mock.patch.object(engine, "prepare_model_inputs", wraps=engine.prepare_model_inputs) as inputs,
        mock.patch.object(fsdp, "MicroBatchPass", wraps=fsdp.MicroBatchPass) as passes,
        mock.patch.object(TensorDict, "to", copied),
    ):
        run(engine, only=True, look=lambda engine: {})
    verls = {call.kwargs["micro_batch"]["input_ids"].values().data_ptr() for call in inputs.call_args_list}
    ours = {call.args[1].token_T.data_ptr() for call in passes.call_args_list}
    return {"some": len(ours) > 0, "same": ours <= verls}


def losses_and_weights(engine: Any) -> dict[str, Any]:
    """Two ordinary updates and a log-prob pass."""
    norms = [train_step(engine, [0, 1]) for _ in range(2)]
    with engine.eval_mode():
        log_probs = engine.infer_batch(batch([0, 1]))["model_output"]["log_probs"].values()
    weights = {n: p.full_tensor().clone() for n, p in engine.module.named_parameters()}
    return {"class": type(engine).__name__, "norms": norms, "log_probs": log_probs, "weights": weights}


def scored(folder: str, layout: str, asked: list[str], results: dict[str, Any]) -> Any:
    """Add the results of these requests on every rank; returns the engine."""
    if layout == "ulysses":
        ulysses.install()
    engine = build(folder, **LAYOUTS[layout])
    split = dist.get_world_size() > 1 and layout != "ulysses"
    rows = UNEVEN[dist.get_rank()] if split else EVERY
    for words in asked:
        results[f"{layout} {words}"] = gather(run(engine, rows, layout != "padded", **cases.request(words)))
    return engine


def single(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    engine, *_ = [scored(folder, layout, asked, out) for layout, asked in cases.SINGLE.items()]
    out["one by one"] = {i: run(engine, [i, 2]) for i in world.SCORED}
    out["moved"] = moved(engine)
    out["grad_norms"] = [[train_step(one, [0, 1])] for one in (engine, build(folder))]
    out["inert"] = [losses_and_weights(build(folder, host_only)) for host_only in (False, True)]
    out["noticed"] = noticed(engine)
    return out


def double(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for layout, asked in cases.DOUBLE.items():
        scored(folder, layout, asked, out)
    return out


def main(**tables: Callable[[str], dict[str, Any]]) -> None:
    table, folder, target = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = tables[table](folder)
    if dist.get_rank() == 0:
        torch.save(result, Path(target))
    dist.barrier()
    os._exit(0)  # gloo's and FSDP's threads outlive destroy_process_group on some builds


if __name__ == "__main__":
    main(single=single, double=double)
