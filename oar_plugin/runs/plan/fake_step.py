"""One rank's training step on fake tensors, with a meter for FLOPs, bytes and collectives (`count.py` says what it counts)."""

import json
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Forward
from oar_plugin.passes.gradient import MicroBatchPass, SetTap, run_forwards
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps
from oar_plugin.runs.plan.count import Counts, Flops, Key, Linear
from oar_plugin.runs.plan.models import PlanError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEPTHS = 3, 5  # from three layers on, FSDP's prefetches have their final form
MOMENTS = "first layer", "forward", "logits", "backward", "optimizer", "kept"


def _attend(
    _: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, scaling: float, **___: Any
) -> tuple[Tensor, None]:
    """Causal attention that keeps what flash-attn keeps: queries, keys, values, output, and a float32 per row and head."""
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("counted", _attend)


def _attention(products: int, first: int) -> Callable[..., int]:
    def formula(*args: Any, **_: Any) -> int:
        query, key = args[first : first + 2]
        batch, heads, length, size = query.shape
        return int(products * batch * heads * length * key.shape[-2] * size)  # half of 2 x products x length^2

    return formula


def _grouped(rows: Tensor, weights: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    # Rows by experts, or the gradient of the weights: two matrices whose common dimension is that of rows.
    return 2 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1]


_aten = torch.ops.aten
FORMULAS = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(2, 0),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1),
    _aten._grouped_mm: _grouped,
}


class Meter(TorchDispatchMode):
    """Counts FLOPs, live bytes and collectives of the operations inside of `with`.

    `found` has the numbers of each phase. With `split`, tensors of the residual stream count 1 / split.
    """

    def __init__(self, hidden: int = 0, split: int = 1) -> None:
        super().__init__()
        self.hidden, self.split, self.tokens = hidden, split, 0
        self.live = self.start = 0.0
        self.seen = WeakIdKeyDictionary()  # storage -> [bytes]
        self.found: dict[str, defaultdict[str, float]] = {}
        self.begin("build", 0)

    def begin(self, phase: str, tokens: int) -> None:
        self.tokens, self.start, self.now = tokens, self.live, self.found.setdefault(phase, defaultdict(float))
        self.moment("first layer")

    def keep(self) -> None:
        """Notes what is alive between forward and backward."""
        self.now["kept"] = max(self.now["kept"], self.live - self.start)

    def moment(self, name: str) -> None:
        self.at = name
        self.now[name] = max(self.now[name], self.live - self.start)

    def __enter__(self) -> "Meter":
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2 frees and allocates gathered weights so
            result = self._resize(storage, size)
            if storage in self.seen:
                self._set(self.seen[storage], float(size))
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _set(self, held: list[float], size: float) -> None:
        self.live += size - held[0]
        held[0] = size
        self.moment(self.at)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local tensors come here again
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(leaf.is_meta and not isinstance(leaf, FakeTensor) for leaf in leaves):
            return result  # DTensor runs operations on tensors of the whole shape, to learn the shape of their result
        if (formula := FORMULAS.get(func._overloadpacket)) is not None:
            self.now["flops"] += formula(*args, **(kwargs or {}), out_val=result)
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.now["number"] += 1
            self.now["collective bytes"] += max((one.nbytes for one in tensors), default=0)
        for tensor in leaves:
            storage = tensor.untyped_storage()
            if storage not in self.seen:
                self.seen[storage] = held = [0.0]
                stream = tensor.dim() > 1 and tuple(tensor.shape[-1:]) == (self.hidden,)
                split = self.split if stream and tensor.numel() == self.tokens * self.hidden else 1
                weakref.finalize(storage, self._set, held, 0.0)
                self._set(held, storage.nbytes() / split)
        return result


class _CrossEntropy(torch.autograd.Function):
    """Log-probs. Like flash-attn's kernel, the backward overwrites the logits; Megatron's keeps a float32 softmax (`wide`)."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, wide: bool) -> Tensor:
        ctx.dtype, ctx.kept_TV = logits_TV.dtype, logits_TV.float() if wide else logits_TV
        return logits_TV.new_zeros(len(logits_TV), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        kept_TV, ctx.kept_TV = ctx.kept_TV, None
        return kept_TV.mul_(gradient_T[:, None].to(kept_TV.dtype)).to(ctx.dtype), None  # a CPU would copy for mixed types


class _Kernel(torch.autograd.Function):
    """A fused kernel of Megatron: keeps its inputs and nothing else. The output is like the first of them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.zeros_like(inputs[0], memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return tuple(torch.zeros_like(one) for one in ctx.saved_tensors)


def _entropy(logits_TV: Tensor, rows: int) -> None:
    """verl's entropy: per chunk a float32 copy, the softmax, and one more tensor at a time. Whole, autocast does the same."""
    for chunk_NV in logits_TV.split(rows or len(logits_TV)):
        wide_NV = chunk_NV.float()
        softmax_NV = wide_NV.softmax(-1)
        wide_NV.logsumexp(-1) - (softmax_NV * wide_NV).sum(-1)


def _vocabulary_parallel_entropy(logits_TV: Tensor) -> None:
    """Megatron's: the softmax and its product with the logits take the logits' type."""
    softmax_TV = (logits_TV - logits_TV.amax(-1, keepdim=True)).exp_()
    (softmax_TV.div_(softmax_TV.sum(-1, keepdim=True)) * logits_TV).sum(-1)


class Step:
    """One rank's model and the phases of its step. A batch is a number of sequences of equal length, without padding."""

    def __init__(self, key: Key, layers: int, meter: Meter | None = None) -> None:
        self.key, self.meter = key, meter
        self.model: Any = AutoModelForCausalLM.from_config(
            _config(key, layers),
            dtype=DTYPES[key.weights if key.strategy == "fsdp2" else key.element],
            attn_implementation="counted",
            **({"experts_implementation": "grouped_mm"} if "num_experts_per_tok" in key.model else {}),
        )
        if key.recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if key.lora_rank:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=key.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            with patch.object(nn.Module, "to", lambda module, *_, **__: module):  # fails for parameters that are fake
                self.model = get_peft_model(self.model, adapters)
            self.model.enable_input_require_grads()
        if key.fused:
            from verl.models.transformers.dense_common import forward_with_torch_backend

            self.model.forward = MethodType(forward_with_torch_backend, self.model)
        decoder = self.model.get_decoder()
        decoder.register_forward_pre_hook(self._begin_forward)
        decoder.layers[0].register_forward_hook(self._after_first_layer)
        decoder.register_forward_hook(self._decoded)
        if key.strategy == "megatron":
            self._use_kernels()

    def _use_kernels(self) -> None:
        for module in self.model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = lambda x, m=module: _Kernel.apply(x, m.weight.expand_as(x[..., :1, :]))
            elif hasattr(module, "_apply_gate"):
                module._apply_gate = lambda x: _Kernel.apply(*x.chunk(2, -1))
            elif hasattr(module, "gate_proj"):
                module.forward = lambda x, m=module: m.down_proj(_Kernel.apply(m.gate_proj(x), m.up_proj(x)))
        for one in self.trained():  # added to Megatron's buffer at once
            one.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))

    def shard(self, mesh: DeviceMesh) -> None:
        """As verl's `apply_fsdp2`: layers, and the embedding and the projection unless they are tied, then the root."""
        policy = MixedPrecisionPolicy(DTYPES[self.key.element], torch.float32, cast_forward_inputs=True)
        tied = self.model.config.tie_word_embeddings
        ends = () if tied else ("embed_tokens",) if self.key.fused else ("embed_tokens", "lm_head")
        named = list(self.model.named_modules())
        wrapped = [m for name, m in named if isinstance(m, GradientCheckpointingLayer) or name.split(".")[-1] in ends]
        for module in [*wrapped, self.model]:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    def trained(self) -> list[nn.Parameter]:
        return [one for one in self.model.parameters() if one.requires_grad]

    def numbers(self) -> dict[str, float]:
        """Returns the numbers of parameters, before they are sharded."""
        named, embedding = dict(self.model.named_parameters()), self.model.get_input_embeddings().weight
        experts = [one for name, one in named.items() if ".experts." in name]
        lists = {"all": list(named.values()), "trained": self.trained(), "experts": experts, "embedding": [embedding]}
        return {name: float(sum(one.numel() for one in of)) for name, of in lists.items()}

    def _at(self, moment: str) -> None:
        if self.meter is not None:
            self.meter.moment(moment)

    def _begin_forward(self, *_: Any) -> None:
        self.in_forward = True
        self._at("first layer")

    def _after_first_layer(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if self.in_forward:  # not in a recomputation
            self._at("forward")
            self._on_gradient(output, "first layer")

    def _decoded(self, _: nn.Module, __: Any, output: Any) -> None:
        self.in_forward = False
        if self.meter is not None:
            self.meter.now["layers flops"] = self.meter.now["flops"]
            if output.last_hidden_state.requires_grad:
                self.meter.keep()
        self._at("logits")
        self._on_gradient(output.last_hidden_state, "backward")

    def _on_gradient(self, tensor: Tensor, moment: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._at(moment))

    def _forward(self, shape: tuple[int, int], entropy: bool) -> Tensor:
        """The host's forward: log-probs `[T]`; with `entropy` also the entropy, which nothing reads."""
        token_BL = torch.zeros(shape, dtype=torch.long)
        if self.key.fused:
            output = self.model(input_ids=token_BL, use_cache=False, return_dict=True)
            return output.log_probs.flatten()
        logits_TV = self.model(input_ids=token_BL, use_cache=False).logits.flatten(0, 1)
        return self._log_probs(logits_TV, entropy)

    def _log_probs(self, logits_TV: Tensor, entropy: bool) -> Tensor:
        megatron = self.key.strategy == "megatron"
        if entropy:
            if megatron:  # of a copy, because the cross entropy may overwrite the logits
                _vocabulary_parallel_entropy(logits_TV.clone())
            else:
                _entropy(logits_TV, self.key.entropy_rows)
        return _CrossEntropy.apply(logits_TV, megatron)

    def log_probs(self, shape: tuple[int, int]) -> None:
        self.model.eval()
        with torch.no_grad():
            self._forward(shape, entropy=True)
        self._reshard()

    def importance(self, shape: tuple[int, int], tables: MicroBatchPass) -> None:
        """The product's gradient pass over a batch whose rows all are scored, log-probs and entropy included."""
        self.model.eval()
        forwards = tables.importance.forwards(tables.request.num_draws) or [Forward(None, log_probs=True)]

        def model_forward(forward: Forward, set_tap: SetTap) -> None:
            set_tap(tables)
            output = self.model(input_ids=torch.zeros(shape, dtype=torch.long), use_cache=False, return_dict=True)
            if forward.log_probs and not self.key.fused:
                self._log_probs(output.logits.detach().flatten(0, 1), entropy=True)

        with ModelTaps(self.model, self.key.recompute, self.key.fused) as taps:
            run_forwards(taps, forwards, model_forward)
        self._reshard()

    def update(self, shape: tuple[int, int]) -> None:
        self.model.train()
        self._forward(shape, entropy=False).mean().backward()

    def optimizer(self) -> Callable[[], None]:
        """Returns a function that clips gradients and makes a step of AdamW, as torch does by default on a GPU."""
        trained = self.trained()
        adam = torch.optim.AdamW(trained, lr=1e-6, foreach=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
            adam.step()

        return step

    def _reshard(self) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.reshard()


def _config(key: Key, layers: int) -> Any:
    """Returns the config of one rank's model."""
    values: dict[str, Any] = {"num_experts": 0, **json.loads(key.model)}
    heads = values["num_attention_heads"]
    values = {"head_dim": values["hidden_size"] // heads, "num_key_value_heads": heads} | values
    ranks = {"num_attention_heads": key.tp, "intermediate_size": key.tp, "vocab_size": key.tp, "num_experts": key.ep}
    ranks["num_key_value_heads"] = min(key.tp, values["num_key_value_heads"])
    values |= {name: values[name] // number for name, number in ranks.items()}
    if values["num_experts"] < values.get("num_experts_per_tok", 0):
        raise PlanError(f"{key.ep} expert-parallel ranks: one has fewer experts than a token visits; not counted")
    # An expert-parallel rank has fewer experts, and gets as many visits of tokens as its own tokens make.
    return AutoConfig.for_model(values.pop("model_type"), num_hidden_layers=layers, use_cache=False, **values)


def _tables(key: Key, shape: tuple[int, int]) -> MicroBatchPass:
    """Returns the product's pass over sequences of prompt, reasoning and answer. Made outside of the fake mode: it indexes."""
    segments_BL = torch.full(shape, int(Segment.REASONING))
    segments_BL[:, : key.prompt], segments_BL[:, -key.answer :] = int(Segment.OUTSIDE), int(Segment.ANSWER)
    packed, layout = packed_rows(torch.zeros(shape, dtype=torch.long), segments_BL, None)
    assert key.importance is not None
    return MicroBatchPass(Request(key.importance, key.probe, num_draws=key.draws), packed, layout)


@contextmanager
def _one_rank_of(ranks: int) -> Iterator[DeviceMesh]:
    if distributed.is_initialized():
        raise PlanError("a process group exists: count in a process of its own, for example with `oar plan`")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield distributed.init_device_mesh("cpu", (ranks,))
    finally:
        distributed.destroy_process_group()


Found = dict[str, dict[str, float]]


def measure(
    key: Key, layers: int, shapes: dict[str, tuple[int, int]], flops: bool = False
) -> tuple[Found, dict[str, float]]:
    """Runs each phase of `shapes` on fake tensors; returns what the meter found in it, and parameters and bytes of states.

    With `flops`, which do not depend on it, nothing is sharded, and there is no optimizer.
    """
    tables = {phase: _tables(key, shape) for phase, shape in shapes.items() if phase == "importance"}
    meter, fsdp = Meter(json.loads(key.model)["hidden_size"], key.sequence_split), key.strategy == "fsdp2" and not flops
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        mesh = stack.enter_context(_one_rank_of(key.shards)) if fsdp else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        step = Step(key, layers, meter)
        states = step.numbers()
        if mesh is not None:
            step.shard(mesh)
        states["weights"] = meter.live
        if not flops:
            meter.begin("warm-up", 8)
            step.log_probs((1, 8))  # FSDP's first forward prepares its buffers
        for phase, shape in shapes.items():
            if phase == "update" and not flops:
                meter.begin("an earlier micro-batch", 8)
                step.update((1, 8))
                states["gradients"] = meter.live - meter.start
            meter.begin(phase, shape[0] * shape[1])
            if phase == "importance":
                step.importance(shape, tables[phase])
            else:
                getattr(step, phase.replace("-", "_"))(shape)
        if "update" in shapes and fsdp:
            stepped = step.optimizer()
            meter.begin("an earlier step", 0)
            stepped()
            states["optimizer"] = meter.live - meter.start
            meter.begin("step", 0)
            stepped()
            update, found = meter.found["update"], meter.found["step"]
            update["optimizer"] = found["first layer"]
            update |= {name: update[name] + found[name] for name in ("number", "collective bytes")}
    return {phase: dict(meter.found[phase]) for phase in shapes}, states


def count(key: Key) -> Counts:
    """Counts a step. Raises PlanError; see `count.counts`."""
    phases = ["log-probs", *(["importance"] if key.importance else []), "update"]
    tokens = dict.fromkeys(phases, min(key.log_prob_tokens, key.update_tokens))
    tokens |= {"log-probs": key.log_prob_tokens, "update": key.update_tokens}
    number = {phase: max(1, round(t / key.length)) for phase, t in tokens.items()}
    shapes = {phase: (number[phase], tokens[phase] // number[phase]) for phase in phases}
    (low, states_low), (high, states_high) = (measure(key, layers, shapes) for layers in DEPTHS)

    def lines(phase: str, names: dict[str, str]) -> dict[str, Linear]:
        a, b = low[phase], high[phase]
        return {name: _line(DEPTHS, a[key], b[key]) for name, key in names.items() if key in a}

    unit, depths = key.prompt + key.answer + 64, (1, 2)
    grid = [[measure(key, n, {p: (1, unit * i) for p in phases}, True)[0] for i in (1, 2, 3)] for n in depths]

    def flops(of: Callable[[dict[str, dict[str, float]]], float]) -> Flops:
        parts = [_powers(unit, *(of(found) for found in row)) for row in grid]
        pairs = [_line(depths, *pair) for pair in zip(*parts, strict=True)]
        return Flops(tuple(one.base for one in pairs), tuple(one.layer for one in pairs))

    of = {phase: flops(lambda found, phase=phase: found[phase]["flops"]) for phase in phases}
    of["layers"] = flops(lambda found: found["log-probs"]["layers flops"])
    of["head"] = flops(lambda found: found["log-probs"]["flops"] - found["log-probs"]["layers flops"])
    if key.importance:
        of["added"] = flops(lambda found: found["importance"]["flops"] - found["log-probs"]["flops"])
    state = {name: _line(DEPTHS, states_low[name], states_high[name]) for name in states_low}
    parameters = {name: state.pop(name) for name in ("all", "experts", "embedding", "trained")}
    moments = {phase: lines(phase, {name: name for name in MOMENTS}) for phase in phases}
    names = {"number": "number", "bytes": "collective bytes"}
    return Counts(parameters, state, of, moments, {phase: lines(phase, names) for phase in phases})


def _line(depths: tuple[int, int], low: float, high: float) -> Linear:
    slope = (high - low) / (depths[1] - depths[0])
    return Linear(low - depths[0] * slope, slope)


def _powers(unit: int, one: float, two: float, three: float) -> tuple[float, float, float]:
    """Returns c0, c1, c2 of the polynomial that has these values at `unit`, `2 unit` and `3 unit`."""
    second = (three - 2 * two + one) / (2 * unit**2)
    first = (two - one) / unit - 3 * unit * second
    return one - first * unit - second * unit**2, first, second
