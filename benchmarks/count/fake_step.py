"""A training step of one FSDP rank on fake tensors, under a meter (`shapes.py` says what is counted)."""

import json
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.count.meter import Meter, Numbers
from benchmarks.count.shapes import Counts, Memory, Polynomial, Work
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.passes.gradient import MicroBatchPass
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEPTHS = 3, 4  # numbers of layers; from three on, FSDP's prefetches have their final form
LENGTHS = 1024, 2048, 3072
PROMPT, ANSWER = 128, 16  # tokens; neither peaks nor FLOPs of the pass with a pooled row depend on them


def _attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, scaling: float, **___: Any) -> Any:
    """Causal attention that keeps what flash-attn keeps: queries, keys, values, output, and a float32 per row and head."""
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("counted", _attend)


class _CrossEntropy(torch.autograd.Function):
    """Log-probs. Like flash-attn's kernel, the backward overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor) -> Tensor:
        ctx.logits_TV = logits_TV
        return logits_TV.new_zeros(len(logits_TV), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> Tensor:
        logits_TV, ctx.logits_TV = ctx.logits_TV, None
        return logits_TV.mul_(gradient_T[:, None].to(logits_TV.dtype))


def _entropy(logits_TV: Tensor, rows: int) -> None:
    """verl's entropy: per chunk a float32 copy, the softmax, and one more tensor at a time. Compiled, whole: one copy."""
    if not rows:
        logits_TV.clone()
        return
    for chunk_NV in logits_TV.split(rows):
        wide_NV = chunk_NV.float()
        softmax_NV = wide_NV.softmax(-1)
        wide_NV.logsumexp(-1) - (softmax_NV * wide_NV).sum(-1)


class Step:
    """One rank's model and the phases of its step, each for one sequence of `length` tokens."""

    def __init__(self, key: Memory, layers: int, meter: Meter) -> None:
        self.key, self.meter = key, meter
        values = json.loads(key.model)
        self.model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(values.pop("model_type"), num_hidden_layers=layers, use_cache=False, **values),
            dtype=DTYPES[key.weights],
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

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard layers, embedding and projection unless they are tied, then the root, like verl's `apply_fsdp2`."""
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
        """Return the numbers of parameters; call it before `shard`."""
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
        if self.meter.phase == "log-probs":
            flops = self.meter.numbers["flops"]
            flops["layers"] = flops["log-probs"]
        self.meter.at("logits")
        self._on_gradient(output.last_hidden_state, "backward")

    def _on_gradient(self, tensor: Tensor, part: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.meter.at(part))

    def _forward(self, length: int, entropy: bool) -> Tensor:
        """Run the host's forward: log-probs `[T]`; with `entropy` also the entropy, which nothing reads."""
        token_BL = torch.zeros(1, length, dtype=torch.long)  # lives as long as the logits, and is counted
        output = self.model(input_ids=token_BL, use_cache=False, return_dict=True)
        return output.log_probs.flatten() if self.key.fused else self._log_probs(output.logits[0], entropy)

    def _log_probs(self, logits_TV: Tensor, entropy: bool) -> Tensor:
        if entropy:
            _entropy(logits_TV, self.key.entropy_rows)
        return _CrossEntropy.apply(logits_TV)

    def log_probs(self, length: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self._forward(length, entropy=True)
        self._reshard()

    def importance(self, length: int, tables: MicroBatchPass) -> None:
        """Run the package's gradient pass over a sequence that is scored, log-probs and entropy included."""
        self.model.eval()
        with ModelTaps(self.model, self.key.recompute, self.key.fused) as taps:
            for number, planned in enumerate(tables.importance.forwards(1)):
                forward = replace(planned, log_probs=number == 0)
                with taps.running(forward):
                    taps.tap = tables.tap(forward)
                    token_BL = torch.zeros(1, length, dtype=torch.long)
                    output = self.model(input_ids=token_BL, use_cache=False, return_dict=True)
                    if forward.log_probs and not self.key.fused:
                        self._log_probs(output.logits.detach()[0], entropy=True)
                    del token_BL, output  # a host has let go of them before the backward
        self._reshard()

    def update(self, length: int) -> None:
        self.model.train()
        self._forward(length, entropy=False).mean().backward()

    def optimizer(self) -> Callable[[], None]:
        """Return a function that clips gradients and makes a step of AdamW, as torch does by default on a GPU."""
        adam = torch.optim.AdamW(self.trained(), lr=1e-6, foreach=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(self.trained(), 1.0, foreach=True)
            adam.step()

        return step

    def _reshard(self) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.reshard()


def gradient_pass(length: int) -> MicroBatchPass:
    """Return the package's pass over a sequence of prompt, reasoning and answer. It indexes tensors: not in the fake mode."""
    segments_BL = torch.full((1, length), int(Segment.REASONING))
    segments_BL[:, :PROMPT], segments_BL[:, -ANSWER:] = int(Segment.OUTSIDE), int(Segment.ANSWER)
    packed, layout = packed_rows(torch.zeros(1, length, dtype=torch.long), segments_BL, torch.ones_like(segments_BL))
    return MicroBatchPass(Request.of_step(OarConfig(importance="fisher"), 1), packed, layout)


def measure(key: Memory, layers: int, length: int, sharded: bool = True) -> Numbers:
    """Return a step's `shapes.Counts`, as numbers. Without `sharded` there is no optimizer, and bytes mean nothing."""
    tables, meter = gradient_pass(length), Meter()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if sharded:
            if distributed.is_initialized():
                raise RuntimeError("a process group exists")
            distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=key.shards)
            stack.callback(distributed.destroy_process_group)
        mesh = distributed.init_device_mesh("cpu", (key.shards,)) if sharded else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        step = Step(key, layers, meter)
        meter.numbers["parameters"].update(step.numbers())
        if mesh is not None:
            step.shard(mesh)
            step.log_probs(8)  # FSDP's first forward prepares its buffers
        meter.begin("log-probs")
        step.log_probs(length)
        meter.begin("importance")
        step.importance(length, tables)
        meter.begin(None)
        if sharded:
            step.update(8)
        meter.begin("update")
        step.update(length)
        meter.begin(None)
        if sharded:
            stepped = step.optimizer()
            stepped()
            meter.begin("update", "optimizer")
            stepped()
    flops = meter.numbers["flops"]
    flops["head"] = flops["log-probs"] - flops["layers"]
    return meter.numbers


def count(key: Work | Memory) -> Counts:
    """Count a step. Raise RuntimeError if a process group exists."""
    if isinstance(key, Memory):
        low, high = (measure(key, layers, key.tokens) for layers in DEPTHS)
        kept = [section for section in low if section not in ("flops", "parameters")]
        return {one: {name: _line([low[one][name]], [high[one][name]]) for name in low[one]} for one in kept}
    own = Memory(key.model, 0, weights="bf16", recompute=key.recompute, lora_rank=key.lora_rank)
    with set_checkpoint_early_stop(not key.whole_layers):
        grid = [[measure(own, layers, length, sharded=False) for length in LENGTHS] for layers in DEPTHS]
    low, high = (row[0] for row in grid)
    flops = {name: _line(*(_powers(*(one["flops"][name] for one in row)) for row in grid)) for name in low["flops"]}
    parameters = {name: _line([number], [high["parameters"][name]]) for name, number in low["parameters"].items()}
    return {"parameters": parameters, "flops": flops}


def _line(low: list[float], high: list[float]) -> Polynomial:
    """Return the coefficients without layers and of each layer, from those at `DEPTHS`."""
    slopes = [(b - a) / (DEPTHS[1] - DEPTHS[0]) for a, b in zip(low, high, strict=True)]
    return [a - DEPTHS[0] * slope for a, slope in zip(low, slopes, strict=True)], slopes


def _powers(one: float, two: float, three: float) -> list[float]:
    """Return c0, c1, c2 of the polynomial with these values at `LENGTHS`, which are multiples of the first."""
    unit, second = LENGTHS[0], (three - 2 * two + one) / 2
    first = two - one - 3 * second
    return [one - first - second, first / unit, second / unit**2]
