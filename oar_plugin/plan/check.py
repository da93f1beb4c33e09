"""Formulas of the planner against what small models count and take on this machine.

Parameters are counted, FLOPs counted by torch's `FlopCounterMode`, memory measured as the peak of live tensor bytes
(`benchmarks.memory`), communication counted in a run of two processes, the size of the cache taken from vLLM. The
same functions give a plan's figures; here they get float32, one device and the batch at hand.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import describe_machine
from benchmarks.memory import peak_bytes
from benchmarks.step.passes import CHUNK, Passes
from benchmarks.tiny.random_models import Architecture, Batch, Shape, build_batch, build_shape
from oar_plugin.config import OarConfig
from oar_plugin.passes.request import Request
from oar_plugin.plan import compute
from oar_plugin.plan.activations import LayerStyle, forward_working, held
from oar_plugin.plan.layout import Recompute
from oar_plugin.plan.memory import answer_rows_bytes, kv_bytes_per_token, logits_in_forward, logits_in_update
from oar_plugin.plan.shape import ModelShape, shape_of

LIMIT = 0.15
RESPONSES, MICRO_BATCH = 8, 4
PROMPT, RESPONSE, ANSWER = 64, 192, 8
LENGTH = PROMPT + RESPONSE

MODELS: dict[str, tuple[Architecture, Shape]] = {
    "qwen2, tied, 4k tokens": ("qwen2", Shape(256, 704, 4, 4, 2, vocab=4096)),
    "qwen2, tied, 32k tokens": ("qwen2", Shape(256, 704, 4, 4, 2, vocab=32_000)),
    "llama, untied, grouped heads": ("llama", Shape(384, 1024, 4, 6, 2, tied=False, vocab=8192)),
    "qwen2, deep and narrow": ("qwen2", Shape(128, 512, 16, 4, 1, vocab=2048)),
}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """One figure.

    Attributes:
        model: which.
        quantity: what, with its unit.
        predicted: by the formula.
        found: counted or measured.
    """

    model: str
    quantity: str
    predicted: float
    found: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.found - 1

    @property
    def passed(self) -> bool:
        """Parameters and cache must be exact."""
        exact = self.quantity.startswith(("parameters", "KV cache"))
        return self.predicted == self.found if exact else abs(self.error) < LIMIT


@dataclass(frozen=True)
class CheckResult:
    """All figures, and where they were taken."""

    comparisons: list[Comparison]
    machine: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every figure is within its limit."""
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """The figure that is furthest off."""
        return max(self.comparisons, key=lambda c: abs(c.error))


def run_check(progress: Progress = lambda what: None) -> CheckResult:
    """Compare everything; takes about a minute on two cores."""
    comparisons: list[Comparison] = []
    for name in MODELS:
        progress(name)
        comparisons += list(compare_dense(name))
    progress("mixture of experts")
    comparisons += list(compare_experts())
    progress("collectives of two processes")
    from oar_plugin.plan.collectives import compare_collectives

    comparisons += [Comparison(*values) for values in compare_collectives()]
    if importlib.util.find_spec("vllm"):
        progress("vLLM's cache")
        comparisons += list(compare_cache())
    return CheckResult(comparisons, describe_machine(torch.device("cpu")))


# ---- dense models: parameters, FLOPs, memory


def compare_dense(name: str) -> Iterator[Comparison]:
    """One of `MODELS`."""
    architecture, dimensions = MODELS[name]
    device = torch.device("cpu")
    model = build_shape(dimensions, architecture, dimensions.vocab, LENGTH, torch.float32, device, 0)
    shape = shape_of(model.config, name)
    yield Comparison(name, "parameters", shape.parameters, sum(p.numel() for p in model.parameters()))

    passes = build_passes(model, build_batch(RESPONSES, PROMPT, RESPONSE, ANSWER, RESPONSES, device, 0))
    passes.update(1)  # Adam's moments exist from the first step on
    for recompute in (False, True):
        how = ", recomputation" if recompute else ""
        for what, work, flops, memory in _passes(passes, shape, recompute):
            if what == "log-probs" and recompute:
                continue
            yield Comparison(name, f"FLOPs, {what}{how}", flops, count_flops(work))
            yield Comparison(name, f"peak bytes, {what}{how}", memory, peak_bytes(work, device))


def build_passes(model: nn.Module, batch: Batch) -> Passes:
    """The passes over a batch with the default importance."""
    return Passes(model, batch, Request.from_config(OarConfig.parse({}), 1, RESPONSE), MICRO_BATCH)


def _passes(
    passes: Passes, shape: ModelShape, checkpointing: bool
) -> Iterator[tuple[str, Callable[[], object], float, float]]:
    """Name, work, predicted FLOPs of the batch and predicted peak of a micro-batch, of each pass."""
    recompute: Recompute = "full" if checkpointing else "none"
    tokens, rows = RESPONSES * LENGTH, RESPONSES * ANSWER
    forward = compute.forward(shape, tokens, LENGTH, causal=1.0)
    backward = compute.importance_backward(shape, tokens, LENGTH, rows, recompute, causal=1.0)
    update = compute.update(shape, tokens, LENGTH, recompute, causal=1.0)
    batches = RESPONSES // MICRO_BATCH
    yield "log-probs", lambda: passes.log_prob(batches), forward, log_prob_peak(shape)
    yield (
        "log-probs and importance",
        lambda: passes.fused(batches, checkpointing),
        forward + backward,
        importance_peak(shape, recompute),
    )
    yield "update", lambda: passes.update(batches, checkpointing), update, update_peak(shape, recompute)


def log_prob_peak(shape: ModelShape) -> float:
    """Peak of a log-prob pass on one device in float32."""
    tokens = MICRO_BATCH * LENGTH
    logits = logits_in_forward(shape.vocab, 4, False, tokens, CHUNK)
    return max(logits, forward_working(shape, LayerStyle("hf", 4)) * tokens)


def importance_peak(shape: ModelShape, recompute: Recompute) -> float:
    """Peak of the fused pass on one device in float32."""
    tokens = MICRO_BATCH * LENGTH
    kept = held(shape, LayerStyle("hf", 4), "none", recompute)
    at_head, at_probe = answer_rows_bytes(MICRO_BATCH * ANSWER, shape.vocab, 4)
    logits = logits_in_forward(shape.vocab, 4, False, tokens, CHUNK)
    return max(kept.head * tokens + max(logits + at_head, at_probe), kept.layer * tokens)


def update_peak(shape: ModelShape, recompute: Recompute) -> float:
    """Peak of an update on one device in float32: all gradients, and the vocabulary projection's before it is added to them.

    Where embeddings are tied that one waits for the input embedding's, to the end of the backward.
    """
    tokens = MICRO_BATCH * LENGTH
    kept = held(shape, LayerStyle("hf", 4), "all", recompute)
    logits = logits_in_update(shape.vocab, 4, False) * tokens
    projection = 4.0 * (shape.embedding + shape.hidden * tokens)
    waiting = 4.0 * shape.embedding if shape.tied else 0.0
    return 4.0 * shape.parameters + max(kept.head * tokens + logits + projection, kept.layer * tokens + waiting)


def count_flops(work: Callable[[], object]) -> float:
    """FLOPs that torch counts; CPU's flash attention by torch's own formulas for the GPU's, heads shared by groups included."""
    aten = torch.ops.aten
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        },
    )
    with counter:
        work()
    return float(counter.get_total_flops())


def _attention_forward(query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(query, _like(query, key), _like(query, value)))


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any
) -> int:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return int(sdpa_backward_flop_count(gradient, query, _like(query, key), _like(query, value)))


def _like(query: torch.Size, other: torch.Size) -> torch.Size:
    """With as many heads as the queries have."""
    return torch.Size((other[0], query[1], *other[2:]))


# ---- a mixture of experts: parameters and FLOPs


def compare_experts() -> Iterator[Comparison]:
    """A small Qwen3 with experts: parameters, FLOPs, and peaks.

    FLOPs with the implementation that visits the experts one by one, because torch's counter does not know grouped products;
    peaks with grouped products, transformers' default.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    name = "qwen3_moe, 8 experts, 2 a token"
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    shape = shape_of(config, name)
    yield Comparison(name, "parameters", shape.parameters, sum(p.numel() for p in model.parameters()))
    passes = build_passes(model, build_batch(RESPONSES, PROMPT, RESPONSE, ANSWER, RESPONSES, torch.device("cpu"), 0))
    model.set_experts_implementation("eager")
    for what, work, flops, _ in _passes(passes, shape, False):
        yield Comparison(name, f"FLOPs, {what}", flops, count_flops(work))
    model.set_experts_implementation("grouped_mm")
    for recompute in (False, True):
        for what, work, _, memory in _passes(passes, shape, recompute):
            if what != "log-probs":
                how = ", recomputation" if recompute else ""
                yield Comparison(name, f"peak bytes, {what}{how}", memory, peak_bytes(work, torch.device("cpu")))


# ---- vLLM's cache


def compare_cache() -> Iterator[Comparison]:
    """Bytes that vLLM says a token takes in a layer's cache, times the layers, for some models and tensor parallel sizes."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from oar_plugin.plan.shape import load_shape

    block = 16
    for model, tp in (("Qwen/Qwen2.5-7B", 2), ("Qwen/Qwen2.5-1.5B", 8), ("Qwen/Qwen3-30B-A3B", 4)):
        shape = load_shape(model)
        spec = FullAttentionSpec(
            block_size=block, num_kv_heads=max(1, shape.kv_heads // tp), head_size=shape.head_dim, dtype=torch.bfloat16
        )
        found = spec.page_size_bytes / block * shape.layers
        yield Comparison(f"{model}, TP {tp}", "KV cache, bytes a token", kv_bytes_per_token(shape, tp, 2), found)


# ---- reports


def table(result: CheckResult) -> Table:
    """For the terminal."""
    shown = Table(title=f"the planner's formulas against counted and measured figures (limit {LIMIT:.0%})")
    for column in ("model", "quantity", "predicted", "found", "error"):
        shown.add_column(column, justify="right" if column in ("predicted", "found", "error") else "left")
    for c in result.comparisons:
        colour = "green" if c.passed else "red"
        shown.add_row(c.model, c.quantity, f"{c.predicted:,.0f}", f"{c.found:,.0f}", f"[{colour}]{c.error:+.1%}[/]")
    return shown


def notes(result: CheckResult) -> list[str]:
    """What the table is about."""
    batch = f"{RESPONSES} sequences of {LENGTH} tokens, {MICRO_BATCH} at a time"
    return [
        f"{'Every' if result.passed else 'NOT every'} figure is within its limit; largest error {result.worst.error:+.1%} "
        f"({result.worst.model}: {result.worst.quantity}).",
        f"float32 on a CPU; {batch}. Peaks are those of live tensors, without an allocator's fragmentation or "
        "a kernel's scratch memory.",
        "Not checked here: bf16, GPU kernels, tensor, pipeline, context, expert and Ulysses parallel traffic, Megatron's "
        "activations, times.",
    ]


def markdown(result: CheckResult) -> str:
    """The same as a page."""
    lines = ["# The planner's formulas against small models", "", "`oar plan --check` writes this page.", ""]
    lines += [f"{note}\n" for note in notes(result)]
    lines += ["| model | quantity | predicted | found | error |", "|---|---|---|---|---|"]
    for c in result.comparisons:
        mark = "" if c.passed else " (over the limit)"
        lines.append(f"| {c.model} | {c.quantity} | {c.predicted:,.0f} | {c.found:,.0f} | {c.error:+.1%}{mark} |")
    machine = result.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers"))
    lines += ["", f"{machine['cpu']}; {versions}, Python {machine['python']}."]
    return "\n".join(lines) + "\n"


def to_json(result: CheckResult) -> str:
    """Everything."""
    values = [{**asdict(c), "error": c.error, "passed": c.passed} for c in result.comparisons]
    return json.dumps(
        {"limit": LIMIT, "passed": result.passed, "comparisons": values, "machine": result.machine}, indent=1
    )
