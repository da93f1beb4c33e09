"""A rank with verl's real FSDP engine and importance, in several configurations.

CPU stand-ins: gloo for NCCL; under Ulysses, see `verl_cpu/ulysses.py`. On GPUs, for `tests/gpu`, none.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401  loads the plugin, as in a run
from tensordict import TensorDict
from transformers import Qwen2ForCausalLM
from verl.protocol import DataProto
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.padding import left_right_2_no_padding

from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance.base import Rows
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.hosts.verl.ray_trainer import asking
from oar_plugin.passes import prediction
from oar_plugin.passes import rows as rows_module
from oar_plugin.passes.request import CHOSEN, FIELDS, IMPORTANCE, NEEDED, REQUEST, STATUS
from tests.asked import asked
from tests.hosts.engine import cases, world
from tests.hosts.engine.compare import differences
from tests.processes import worker
from verl_cpu import ulysses

EVERY = list(range(8))
IMAGES = [False] * 4, [False, True, True, False], [True] * 4
MICRO_BATCHES_SCORED = 2  # of `EVERY`, two rows each
UNEVEN = [[0, 1, 3, 2], [4, 5, 6, 7]]  # data parallel: rank 0 has three rows to score, rank 1 one
LAYOUTS = {name: layout.engine for table in (cases.SINGLE, cases.DOUBLE) for name, (layout, _) in table.items()}


def batch(rows: list[int], *how: bool) -> TensorDict:
    encoded = world.encode()
    return batch_of([encoded[i] for i in rows], [world.ROWS[i][2] for i in rows], *how)


def batch_of(
    encoded: list[tuple[torch.Tensor, torch.Tensor]],
    needed: list[bool],
    packed: bool = True,
    dynamic: bool = False,
    fused: bool = False,
) -> TensorDict:
    """What verl hands to an engine: of prompts and responses, and whether to score each response."""
    prompts, responses = zip(*encoded, strict=True)
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones_like(response) for response in responses]
    data = TensorDict(
        {
            "prompts": world.nested(prompts),
            "responses": world.nested(responses),
            "response_mask": world.nested(masks),
            "input_ids": world.nested(ids),
            "position_ids": world.nested([torch.arange(len(i)) for i in ids]),
            "loss_mask": world.nested(masks),
            NEEDED: world.nested([torch.tensor([CHOSEN * one]) for one in needed]),
        },
        batch_size=[len(encoded)],
    )
    return with_sizes(data, packed, dynamic, fused)


def with_sizes(data: TensorDict, packed: bool = True, dynamic: bool = False, fused: bool = False) -> TensorDict:
    sizes = {"use_dynamic_bsz": dynamic, "micro_batch_size_per_gpu": 2, "max_token_len_per_gpu": 120}
    how = {"use_remove_padding": packed, "use_fused_kernels": fused, "calculate_entropy": True}
    tu.assign_non_tensor(data, **sizes, **how, temperature=world.TEMPERATURE)
    return data


def start(strategy: str, host_only: bool, *config: Any) -> Any:
    """The engine that is registered, or what it is less our mixin."""
    cls = EngineRegistry.get_engine_cls("language_model", strategy)
    if host_only:
        cls = type("HostEngine", cls.__bases__[1:], {})
    engine = cls(*config, CheckpointConfig())
    engine.initialize()
    return engine


def build(
    folder: str, host_only: bool = False, param_dtype: str = "fp32", model: dict[str, Any] | None = None, **engine: Any
) -> Any:
    defaults = {"strategy": "fsdp2", "use_remove_padding": True, "use_torch_compile": False}
    engine = defaults | {"wrap_policy": {"min_num_params": 0}} | engine
    settings = {"override_config": {"attn_implementation": "sdpa"}, "enable_gradient_checkpointing": False}
    config = FSDPEngineConfig(
        use_dynamic_bsz=False,
        mixed_precision={"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        model_dtype="fp32",
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=90,
        **engine,
    )
    model_config = HFModelConfig(path=folder, use_remove_padding=config.use_remove_padding, **settings | (model or {}))
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
    return start(config.strategy, host_only, model_config, config, optimizer)


def chunks(engine: Any) -> list[torch.nn.Module]:
    """Parts of the model that this process has: several with Megatron's virtual pipeline."""
    return [engine.module] if isinstance(engine.module, torch.nn.Module) else list(engine.module)


def optimizers(engine: Any) -> list[torch.optim.Optimizer]:
    """Below megatron-core's wrappers."""
    wrapped = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [getattr(one, "optimizer", one) for one in wrapped]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def state(engine: Any) -> dict[str, Any]:
    """Everything that the pass must leave as it was."""
    parts = dict(enumerate(chunks(engine)))
    parameters = {f"{i}.{n}": p for i, chunk in parts.items() for n, p in chunk.named_parameters()}
    modules = {f"{i}.{n}": m for i, chunk in parts.items() for n, m in chunk.named_modules()}
    found = {
        "weights": {n: copied(p) for n, p in parameters.items()},
        "requires_grad": {n: p.requires_grad for n, p in parameters.items()},
        "grads": {n: None if p.grad is None else copied(p.grad) for n, p in parameters.items()},
        "training": {n: m.training for n, m in modules.items()},
        "dropout": {n: getattr(m, "attention_dropout", None) for n, m in modules.items()},
        "hooks": {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in modules.items()},
        "optimizer": dict(enumerate(dict(one) for each in optimizers(engine) for one in each.state.values())),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy_rng": np.random.get_state()[1].tolist(),
        "python_rng": random.getstate(),
    }
    if isinstance(engine.module, torch.nn.Module):
        return found | {"scaler": engine.scaler}
    buffers = [buffer for chunk in parts.values() for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    found["grad_buffers"] = dict(enumerate(buffer.grad_data.clone() for buffer in buffers))
    found["buffers"] = {f"{i}.{n}": b.clone() for i, chunk in parts.items() for n, b in chunk.named_buffers()}
    replays = {n: getattr(module, "router_replay", None) for n, module in modules.items()}
    found["replay"] = {n: str(vars(one)) for n, one in replays.items() if one is not None}
    found["config"] = {i: dict(vars(chunk.config)) for i, chunk in parts.items()}
    return found


def ready(engine: Any, *how: Any) -> TensorDict:
    """`batch`, with what router replay adds."""
    data = batch(*how)
    replay = getattr(getattr(engine.engine_config, "router_replay", None), "mode", "disabled")
    tu.assign_non_tensor(data, enable_routing_replay=replay != "disabled")
    if replay == "R3":
        data["routed_experts"] = world.nested(world.routes(ids) for ids in data["input_ids"].unbind())
    return data


def request_of(only: bool = False, **request: Any) -> dict[str, Any]:
    defaults = {"importance": "fisher", "answer_patterns": ("hash",), "sigma": world.SIGMA}
    limits = {"max_response_length": world.MAX_RESPONSE_LENGTH, "temperature": world.TEMPERATURE}
    return asked(**limits | defaults | {"importance_only": only, **request}).to_dict()


def answer_to_padded(engine: Any, request: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The answer to a request in the way of `RayPPOTrainer`, whose batches are padded."""

    prompts, responses = zip(*world.encode(), strict=True)
    prompt_BP = world.nested(prompt.flip(0) for prompt in prompts).to_padded_tensor(-1).flip(1)  # padded on the left
    token_BT = torch.cat([prompt_BP, world.nested(responses).to_padded_tensor(-1)], 1)
    real_BT, before = (token_BT >= 0).long(), prompt_BP.shape[1]
    fields = {"prompts": prompt_BP, "responses": token_BT[:, before:], "response_mask": real_BT[:, before:]}
    fields |= {"input_ids": token_BT, "attention_mask": real_BT, "position_ids": (real_BT.cumsum(-1) - 1).clamp(0)}
    workers = SimpleNamespace(compute_log_prob=lambda data: engine.infer_batch(with_sizes(data))["model_output"])
    needed_B = torch.tensor([needed for *_, needed in world.ROWS])
    with engine.eval_mode(), asking(workers, needed_B, request_of(**request), 1, FIELDS) as answer:
        workers.compute_log_prob(left_right_2_no_padding(DataProto.from_dict(fields).to_tensordict()))
    return answer


def run(
    engine: Any,
    rows: list[int] = EVERY,
    packed: bool = True,
    dynamic: bool = False,
    only: bool = False,
    around: AbstractContextManager | None = None,
    first: bool = False,
    **request: Any,
) -> dict[str, Any]:
    fused = engine.model_config.use_fused_kernels
    with engine.eval_mode():
        plain = {} if first else engine.infer_batch(ready(engine, rows, packed, dynamic, fused)).get("model_output", {})
        before = state(engine)
        data = ready(engine, rows, packed, dynamic, fused)
        tu.assign_non_tensor_data(data, REQUEST, request_of(only, **request))
        engine._schedule = None
        with around or nullcontext():
            for _ in range(1 + ("amortize" in request)):  # the first one learns
                output = engine.infer_batch(data.clone())["model_output"]
        traces = differences(before, state(engine))
    result: dict[str, Any] = {"rows": rows, "traces": traces}
    result |= {key: [row.cpu().clone() for row in value.unbind()] for key, value in output.items()}
    if "routed_experts" in plain:
        pairs = zip(output["routed_experts"].unbind(), plain["routed_experts"].unbind(), strict=True)
        result["same_routes"] = all(torch.equal(a, b) for a, b in pairs)
    for key in ("log_probs", "entropy"):
        if key in output and not first:
            # Not the last position: its label is the first token of whatever sequence stands behind it in the pack.
            pairs = zip(output[key].unbind(), plain[key].unbind(), strict=True)
            result[f"{key}_error"] = max((a - b)[:-1].abs().max().item() for a, b in pairs)
    return result


def recomputed(engine: Any) -> int:
    """Layers that are computed once more in a pass, for its backward."""
    calls: list[Any] = []
    layer = engine.module.model.layers[0].input_layernorm
    hook = layer.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    run(engine, only=True)
    hook.remove()
    return sum(calls) - MICRO_BATCHES_SCORED


def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    return -model_output["log_probs"].values().mean(), {}


def updated(engine: Any) -> dict[str, Any]:
    """Two ordinary updates and a log-prob pass."""
    with engine.train_mode():
        metrics = [engine.train_batch(batch([0, 1]), loss)["metrics"] for _ in range(2)]
    norms = [float(one.get("grad_norm", 0.0)) for one in metrics]  # not every rank reports one
    with engine.eval_mode():
        log_probs = engine.infer_batch(batch(EVERY))["model_output"]["log_probs"].values()
    weights = state(engine)["weights"]
    return {"class": type(engine).__name__, "norms": norms, "log_probs": log_probs, "weights": weights}


def afterwards(engine: Any, build: Callable[[bool], Any]) -> dict[str, Any]:
    """Of an engine that scored: whether it goes on as a fresh one, and that one as verl's own."""
    norms = updated(engine)["norms"]
    inert = [updated(build(host_only)) for host_only in (False, True)]
    return {"inert": inert, "grad_norms": [norms, inert[0]["norms"]]}


def behind(folder: str, layout: str, what: Callable[[Any], Any]) -> tuple[list[list[float]], Any]:
    """Gradient norms of two updates, where `what` was done to the engine first and where not; and what it returned."""

    def fresh() -> Any:
        torch.manual_seed(0)  # of an adapter
        return build(folder, **LAYOUTS[layout])

    scored, plain = fresh(), fresh()
    found = what(scored)
    return [updated(engine)["norms"] for engine in (scored, plain)], found


def no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate")


@contextmanager
def no_memory_in(engine: Any, where: str) -> Iterator[None]:
    """In the `forward` from the second chunk of rows on, or in the first layer's `backward`."""
    real, calls = Fisher.coefficients, itertools.count(1)

    def coefficients(self: Fisher, number: int, rows: Rows) -> torch.Tensor:
        return no_memory() if next(calls) == 2 else real(self, number, rows)

    def watch(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(no_memory)

    if where == "forward":
        with mock.patch.object(Fisher, "coefficients", coefficients):
            yield
        return
    layers = next(module for module in engine.module.modules() if isinstance(module, torch.nn.ModuleList))
    handle = layers[0].register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def out_of_memory(engine: Any, where: str = "forward", rows: list[int] = EVERY) -> dict[str, Any] | str:
    """The pass; the error's text where it ends the batch."""
    try:
        return run(engine, rows, around=no_memory_in(engine, where))
    except torch.OutOfMemoryError as error:
        return str(error)


def refused(engine: Any) -> str:
    """What is said of a model that caps its logits, as no key of its configuration says; a fused one changes its entropies."""
    forward = engine.module.forward

    def capped(*args: Any, **named: Any) -> Any:
        output = forward(*args, **named)
        name = "entropy" if output.logits is None else "logits"
        setattr(output, name, torch.tanh(getattr(output, name)))
        return output

    with mock.patch.object(engine.module, "forward", capped):
        try:
            run(engine)
        except ValueError as error:
            return str(error)
    return ""


def seeing(folder: str, layer: str, images: list[bool], request: str = "fisher") -> list[int] | str:
    """Statuses of responses by a model that sees images, which some rows have; or what is said of the model."""
    world.make_vision_model(Path(folder, layer), layer, "full_attention")
    engine, data = build(str(Path(folder, layer))), batch([0, 1, 3, 4])
    ids = data["input_ids"].unbind()
    for row in (row for row, one in zip(ids, images, strict=True) if one):
        row[0] = 255
    data["input_ids"] = world.nested(ids)
    data["position_ids"] = world.nested(torch.arange(len(row)).expand(4, -1).contiguous() for row in ids)
    image = {"pixel_values": torch.ones(4, 1536), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [image if one else {} for one in images])
    tu.assign_non_tensor_data(data, REQUEST, request_of(**cases.REQUESTS[request]))
    try:
        with engine.eval_mode():
            return engine.infer_batch(data)["model_output"][STATUS].values().tolist()
    except ValueError as error:
        return str(error)


def given_by_engines(engine: Any) -> list[torch.Tensor]:
    """Importance in the second of two steps; rollout engines score all rows in the first, and some in the second."""
    own, engine._schedule = run(engine, **cases.REQUESTS["oar_p"]), None
    values = request_of(**cases.REQUESTS["oar_p shared"])
    values["config"]["perturbation"]["backend"] = "rollout"
    for step in range(2):
        data, statuses = ready(engine, EVERY), torch.cat(own[STATUS])
        statuses[world.SCORED[: 2 * step]] = Status.NOT_SCORED
        scored = [row * (status == Status.SCORED) for row, status in zip(own[IMPORTANCE], statuses, strict=True)]
        data[ENGINE_FIELDS[IMPORTANCE]] = world.nested(scored)
        data[ENGINE_FIELDS[STATUS]] = world.nested(statuses[:, None].unbind())
        tu.assign_non_tensor_data(data, REQUEST, values)
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]
    return [row.cpu() for row in output[IMPORTANCE].unbind()]


def asked_of(engine: Any, layout: str, asked: list[str], split: bool, run: Callable[..., Any] = run) -> dict[str, Any]:
    """The results of these requests on this rank; the rows are split among ranks or not."""
    rows = UNEVEN[engine.get_data_parallel_rank()] if split else EVERY
    packed = engine.engine_config.use_remove_padding
    return {f"{layout} {name}": run(engine, rows, packed, **cases.REQUESTS[name]) for name in asked}


def single(folder: str) -> dict[str, Any]:
    engines = {name: build(str(Path(folder, one.model)), **one.engine) for name, (one, _) in cases.SINGLE.items()}
    out: dict[str, Any] = {}
    for name, (_, requests) in cases.SINGLE.items():
        out |= asked_of(engines[name], name, requests, split=False)
    engine = engines["packed"]
    starved = {
        f"{layout} {where}": behind(folder, layout, partial(out_of_memory, where=where))
        for layout in ("packed", "checkpointing", "bf16", "offload")
        for where in ("forward", "backward")
    }
    again = {layout: recomputed(engines[layout]) for layout in ("packed", "checkpointing", "activations")}
    fresh = {layout: behind(folder, layout, partial(run, first=True))[0] for layout in ("bf16", "fsdp1", "lora")}
    out |= {"out of memory": starved, "recomputed": again, "behind a pass": fresh}
    # The response of row 6 has 40 tokens and no end, its prompt has 2.
    cut = partial(run, engines["packed"], [6, 7], max_response_length=41)
    out["given"] = given_by_engines(engines["packed"])
    out["lengths"] = [cut(max_length=most)[STATUS][0].item() for most in (42, 43)]
    layers = "full_attention", "linear_attention"
    out["seeing"] = {name: [seeing(folder, name, images) for images in IMAGES] for name in layers}
    out["seeing copies"] = [seeing(folder, "full_attention", images, "oar_p") for images in IMAGES]
    out["no way back"] = out_of_memory(build(folder, **LAYOUTS["fsdp1"]))
    padded = {name: cases.REQUESTS[name] for name in ("fisher", "oar_p", "fisher only")}
    out["to padded"] = {name: answer_to_padded(engine, request) for name, request in padded.items()}
    return out | afterwards(engine, partial(build, folder))


def double(folder: str) -> dict[str, Any]:
    rows_module.CHUNK = 2  # so that ranks have different numbers of chunks
    out: dict[str, Any] = {}
    for name, (layout, requests) in cases.DOUBLE.items():
        if parallel := "ulysses_sequence_parallel_size" in layout.engine:
            ulysses.install()
        # verl puts a fused forward into the model's class.
        with mock.patch.object(Qwen2ForCausalLM, "forward", Qwen2ForCausalLM.forward):
            engine = build(str(Path(folder, layout.model)), **layout.engine)
            out |= asked_of(engine, name, requests, split=not parallel)
    out["refused"] = [refused(build(folder))]
    with mock.patch.object(Qwen2ForCausalLM, "forward", Qwen2ForCausalLM.forward):
        for model in ("tied", "capped"):
            engine = build(f"{folder}/{model}", **LAYOUTS["fused tied"])
            out["refused"].append(refused(engine))
        engine.module.lm_head.bias = torch.nn.Parameter(torch.zeros(1))
        engine.module.config.final_logit_softcapping = None
        out["biased"] = refused(engine)
    return out | {"out of memory": out_of_memory(build(folder), rows=UNEVEN[dist.get_rank()])}


def join() -> None:
    prediction.ENOUGH, prediction.FEWEST = world.ENOUGH, 1
    torch.set_num_threads(1)
    if get_device_name() == "cpu":
        dist.init_process_group("gloo")  # verl would ask for `cpu` twice
    else:
        initialize_global_process_group(timeout_second=300)


def main(table: str, folder: str) -> dict[str, Any]:
    join()
    return {"single": single, "double": double}[table](folder)


if __name__ == "__main__":
    worker(main)
