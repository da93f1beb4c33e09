"""One rank's training step on fake tensors, with a meter for FLOPs, bytes and collectives (`count.py` says what it counts)."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Forward, importance_of
from oar_plugin.passes.gradient import MicroBatchPass, SetTap, run_forwards
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps
from oar_plugin.runs.plan.count import ANSWER, PROMPT, Counts, Key, Polynomial
from oar_plugin.runs.plan.meter import Meter, Numbers
from oar_plugin.runs.plan.models import PlanError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEPTHS = 3, 4  # numbers of layers; from three on, FSDP's prefetches have their final form
LONGER = 0, 1024, 2048  # tokens beyond those of the key: FLOPs are a polynomial of degree 2


def _attend(
    _: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, scaling: float, **___: Any
) -> tuple[Tensor, None]:
    """Causal attention that keeps what flash-attn keeps: queries, keys, values, output, and a float32 per row and head."""
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("counted", _attend)


class _CrossEntropy(torch.autograd.Function):
    """Log-probs. Like flash-attn's kernel, the backward overwrites the logits; Megatron's keeps a float32 softmax (`wide`)."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, wide: bool) -> Tensor:
        ctx.dtype, ctx.kept_TV = logits_TV.dtype, logits_TV.float() if wide else logits_TV
        return logits_TV.new_zeros(len(logits_TV), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None]:
        kept_TV, ctx.kept_TV = ctx.kept_TV, None
        gradient_T1 = gradient_T[:, None].to(kept_TV.dtype)  # a CPU would copy for mixed types
        return kept_TV.mul_(gradient_T1).to(ctx.dtype), None


class _Kernel(torch.autograd.Function):
    """A fused kernel of Megatron: keeps its inputs and nothing else. The output is like the first of them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.zeros_like(inputs[0], memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
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
    """One rank's model and the phases of its step, each for one sequence of `length` tokens."""

    def __init__(self, key: Key, layers: int, meter: Meter) -> None:
        self.key, self.meter, self.noise_free = key, meter, False
        self.model: Any = AutoModelForCausalLM.from_config(
            _config(key, layers),
            dtype=DTYPES[key.weights if key.strategy == "fsdp2" else key.element],
            attn_implementation="counted",
            **({"experts_implementation": "grouped_mm"} if "num_experts_per_tok" in key.model else {}),
        )
        if key.recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if key.fused:
            from verl.models.transformers.dense_common import forward_with_torch_backend

            self.model.forward = MethodType(forward_with_torch_backend, self.model)
        if key.lora_rank:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=key.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            with patch.object(nn.Module, "to", lambda module, *_, **__: module):  # fails for parameters that are fake
                self.model = get_peft_model(self.model, adapters)
            self.model.enable_input_require_grads()
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
        """Return the numbers of parameters, before they are sharded."""
        named, embedding = dict(self.model.named_parameters()), self.model.get_input_embeddings().weight
        experts = [one for name, one in named.items() if ".experts." in name]
        lists = {"all": list(named.values()), "trained": self.trained(), "experts": experts, "embedding": [embedding]}
        return {name: float(sum(one.numel() for one in of)) for name, of in lists.items()}

    def _begin_forward(self, *_: Any) -> None:
        self.in_forward = True
        self.meter.at("first layer")

    def _after_first_layer(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if self.in_forward:  # not in a recomputation
            self.meter.at("forward")
            self._on_gradient(output, "first layer")

    def _decoded(self, _: nn.Module, __: Any, output: Any) -> None:
        self.in_forward = False
        flops = self.meter.found["flops"]
        flops["layers"] = flops[self.meter.phase]
        if output.last_hidden_state.requires_grad:
            self.meter.note("kept")
        self.meter.at("noise-free" if self.noise_free else "logits")
        self._on_gradient(output.last_hidden_state, "backward")

    def _on_gradient(self, tensor: Tensor, moment: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.meter.at(moment))

    def _forward(self, length: int, entropy: bool) -> Tensor:
        """The host's forward: log-probs `[T]`; with `entropy` also the entropy, which nothing reads."""
        token_BL = torch.zeros(1, length, dtype=torch.long)
        if self.key.fused:
            output = self.model(input_ids=token_BL, use_cache=False, return_dict=True)
            return output.log_probs.flatten()
        return self._log_probs(self.model(input_ids=token_BL, use_cache=False).logits[0], entropy)

    def _log_probs(self, logits_TV: Tensor, entropy: bool) -> Tensor:
        megatron = self.key.strategy == "megatron"
        if entropy and megatron:  # of a copy, because the cross entropy may overwrite the logits
            _vocabulary_parallel_entropy(logits_TV.clone())
        elif entropy:
            _entropy(logits_TV, self.key.entropy_rows)
        return _CrossEntropy.apply(logits_TV, megatron)

    def log_probs(self, length: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self._forward(length, entropy=True)
        self._reshard()

    def importance(self, length: int, tables: MicroBatchPass) -> None:
        """The product's gradient pass over a sequence that is scored, log-probs and entropy included."""
        self.model.eval()

        def model_forward(forward: Forward, set_tap: SetTap) -> None:
            set_tap(tables)
            self.noise_free = forward.backward is None
            token_BL = torch.zeros(1, length, dtype=torch.long)
            output = self.model(input_ids=token_BL, use_cache=False, return_dict=True)
            if forward.log_probs and not self.key.fused:
                self._log_probs(output.logits.detach()[0], entropy=True)

        with ModelTaps(self.model, self.key.recompute, self.key.fused) as taps:
            run_forwards(taps, tables.importance.forwards(tables.request.num_draws), model_forward)
        self.noise_free = False
        self._reshard()

    def update(self, length: int) -> None:
        self.model.train()
        self._forward(length, entropy=False).mean().backward()

    def optimizer(self) -> Callable[[], None]:
        """Return a function that clips gradients and makes a step of AdamW, as torch does by default on a GPU."""
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
    """Return the config of one rank's model."""
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


def tables_of(key: Key, length: int) -> MicroBatchPass | None:
    """Return the product's pass over a sequence of prompt, reasoning and answer; None if the importance needs no forward.

    It indexes tensors, so it is made outside of the fake mode.
    """
    if not importance_of(key.importance).forwards(key.draws):
        return None
    segments_BL = torch.full((1, length), int(Segment.REASONING))
    segments_BL[:, :PROMPT], segments_BL[:, -ANSWER:] = int(Segment.OUTSIDE), int(Segment.ANSWER)
    packed, layout = packed_rows(torch.zeros(1, length, dtype=torch.long), segments_BL, None)
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


def measure(key: Key, layers: int, length: int) -> Numbers:
    """Run a step for one sequence of `length` tokens on fake tensors; return the sections of `count.Counts`, as numbers."""
    tables, fsdp = tables_of(key, length), key.strategy == "fsdp2"
    meter = Meter(json.loads(key.model)["hidden_size"], key.sequence_split)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        mesh = stack.enter_context(_one_rank_of(key.shards)) if fsdp else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        step, states = Step(key, layers, meter), meter.found["states"]
        meter.found["parameters"].update(step.numbers())
        if mesh is not None:
            step.shard(mesh)
        states["weights"] = meter.live
        meter.begin("warm-up")
        step.log_probs(8)  # FSDP's first forward prepares its buffers
        meter.begin("log-probs", length)
        step.log_probs(length)
        meter.found["flops"]["head"] = meter.found["flops"]["log-probs"] - meter.found["flops"]["layers"]
        layers_flops = meter.found["flops"]["layers"]
        if tables is not None:
            meter.begin("importance", length)
            step.importance(length, tables)
        meter.begin("warm-up")
        step.update(8)
        states["gradients"] = meter.live - meter.start
        meter.begin("update", length)
        step.update(length)
        meter.found["flops"]["layers"] = layers_flops
        if fsdp:
            stepped = step.optimizer()
            meter.begin("warm-up")
            stepped()
            states["optimizer"] = meter.live - meter.start
            meter.begin("update")
            meter.at("optimizer")
            stepped()
    for extra in ("build", "warm-up"):
        meter.found.pop(extra, None)
        for section in meter.found.values():
            section.pop(extra, None)
    return meter.found


def count(key: Key) -> Counts:
    """Count a step. Raises PlanError; see `count.counts`."""
    grid = [[measure(key, layers, key.tokens + longer) for longer in LONGER] for layers in DEPTHS]

    def polynomial(section: str, name: str) -> Polynomial:
        low, high = ([found[section][name] for found in row] for row in grid)
        if section == "flops":
            low, high = (_powers(key.tokens, *values) for values in (low, high))
        slopes = [(b - a) / (DEPTHS[1] - DEPTHS[0]) for a, b in zip(low, high, strict=True)]
        base = [a - DEPTHS[0] * slope for a, slope in zip(low, slopes, strict=True)]
        degrees = 3 if section == "flops" else 1  # other numbers are those of `key.tokens`
        return Polynomial(tuple(base[:degrees]), tuple(slopes[:degrees]))

    return {section: {name: polynomial(section, name) for name in numbers} for section, numbers in grid[0][0].items()}


def _powers(start: int, one: float, two: float, three: float) -> list[float]:
    """Return c0, c1, c2 of the polynomial with these values at `start + LONGER`."""
    unit = LONGER[1]
    second = (three - 2 * two + one) / (2 * unit**2)
    first = (two - one) / unit - second * (2 * start + unit)
    return [one - first * start - second * start**2, first, second]
