"""Counts of whole models, as a page. Each model is counted in a process of its own, because a process group is made for it."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.count import derived, fake_step, real
from benchmarks.count.derived import ANSWER, LAYERS, PROMPT, added_flops, copies_flops
from benchmarks.count.shapes import Counts, Memory, Work, at, dimensions
from benchmarks.report import Progress, Report, Table
from oar_plugin.credit.importance import IMPORTANCES
from oar_plugin.runs.plan.known import KNOWN, load_model

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Yi-1.5-34B", "Qwen3-30B-A3B")
MORE = ("Qwen2.5-7B",)
JUDGED = ("Qwen2.5-7B", "Qwen2.5-32B", "Qwen3-30B-A3B")  # with every importance
RESPONSES, TOKENS, RANKS = (1024, 4096, 8192, 16384), 16384, (1, 8, 512)
PHASES = "log-probs", "importance", "update"
CHECKPOINTING, WHOLE, LORA = "checkpointing", "whole activations", "LoRA 32"
SHARES = (0.3, 0.6, 1.0)
ALIKE = {one.backwards: name for name, one in reversed(IMPORTANCES.items()) if one.backwards}
KINDS = [name for name in IMPORTANCES if name in ALIKE.values()]
"""The first importance with each kind of backward; the others cost the same."""
SPANS = {"oar_p": 1, "oar_p, spans of 8": 8}
"""Tokens that a copy masks."""


@dataclass(frozen=True)
class Settings:
    models: tuple[str, ...] = MODELS
    """Names that `oar plan` knows."""
    processes: int = 2
    """Models counted at once."""
    out: Path | None = None
    """Folder for the page and the JSON; without it only the terminal."""

    def check(self) -> None:
        """Raises: ValueError with the argument at fault."""
        if unknown := [name for name in self.models if name not in KNOWN["models"]]:
            raise ValueError(f"--models {' '.join(unknown)}: unknown; allowed: {', '.join(KNOWN['models'])}")


def count_model(name: str) -> dict[str, Counts]:
    """Return the counts of a model: FLOPs by kind, bytes by layout."""
    model = dimensions(load_model(name))
    memory = Memory(model, TOKENS, shards=64)
    keys: dict[str, Work | Memory] = {CHECKPOINTING: Work(model), WHOLE: Work(model, recompute=False)}
    keys |= {"64 ranks": memory, f"64 ranks, {WHOLE}": replace(memory, recompute=False)}
    if name in MORE:
        keys |= {f"{ranks} rank{'s' * (ranks > 1)}": replace(memory, shards=ranks) for ranks in RANKS}
        keys |= {"64 ranks, fused": replace(memory, fused=True), "64 ranks, LoRA 32": replace(memory, lora_rank=32)}
        keys[LORA] = Work(model, lora_rank=32)
    return {layout: fake_step.count(key) for layout, key in keys.items()}


def measure(settings: Settings, progress: Progress) -> Report:
    with ProcessPoolExecutor(settings.processes, get_context("spawn")) as pool:
        futures = {name: pool.submit(count_model, name) for name in settings.models}
        counts: dict[str, dict[str, Counts]] = {}
        for name, future in futures.items():
            progress(f"counting {name}", len(counts), len(futures))
            counts[name] = future.result()
    tables = [
        _flops(counts),
        _ratios(counts),
        _copies(counts),
        *derived.tables({name: of[CHECKPOINTING] for name, of in counts.items()}),
        _bytes(counts),
        _traffic(counts),
        check(),
    ]
    return Report("What a training step costs, counted", "count", tables, [*NOTES, *derived.NOTES], dict(counts))


def _flops(all_counts: dict[str, dict[str, Counts]]) -> Table:
    rows = []
    for name, counts in all_counts.items():
        for response in RESPONSES:
            kinds = (_phases(counts[kind], LAYERS[name], PROMPT + response) for kind in (CHECKPOINTING, WHOLE))
            rows.append([name, f"{response:,}", *(f"{value / 1e12:,.1f}" for kind in kinds for value in kind)])
    columns = [
        f"{one}, {kind}" for kind in ("checkpointing", "whole") for one in ("log-probs", "fisher adds", "update")
    ]
    return Table("TFLOP of one response", ["model", "response", *columns], rows)


def _phases(counts: Counts, layers: int, length: int) -> tuple[float, float, float]:
    """FLOPs of log-probs, of what importance adds to them, and of the update."""
    plain, scored, update = (at(counts["flops"][phase], layers, length) for phase in PHASES)
    return plain, scored - plain, update


def _ratio(counts: Counts, layers: int, length: int, added: float) -> list[str]:
    plain, _, update = _phases(counts, layers, length)
    return [f"{share * added / (plain + update):.3g}" for share in SHARES]


def _ratios(all_counts: dict[str, dict[str, Counts]]) -> Table:
    rows = []
    for name, counts in all_counts.items():
        for importance in KINDS if name in JUDGED else KINDS[:1]:
            for response in (4096, 16384):
                one, length = counts[CHECKPOINTING], PROMPT + response
                added = added_flops(one, LAYERS[name], length, IMPORTANCES[importance])
                rows.append([name, importance, f"{response:,}", *_ratio(one, LAYERS[name], length, added)])
    title = "What OAR adds, in units of the FLOPs of log-probs and update, by the share of rows that are scored"
    return Table(title, ["model", "importance", "response", *(f"{share:.0%}" for share in SHARES)], rows)


def _copies(all_counts: dict[str, dict[str, Counts]]) -> Table:
    rows = []
    for name in (name for name in all_counts if name in JUDGED):
        counts = all_counts[name][CHECKPOINTING]
        for label, span in SPANS.items():
            for prefix in (True, False):
                added = copies_flops(counts, LAYERS[name], PROMPT + 4096, (4096 - ANSWER) / span, prefix)
                how = "cached" if prefix else "computed again"
                rows.append([name, label, how, *_ratio(counts, LAYERS[name], PROMPT + 4096, added)])
    columns = ["model", "importance", "prefix", *(f"{share:.0%}" for share in SHARES)]
    return Table("The same for masked copies of 4,096 tokens (derived from the forward's polynomial)", columns, rows)


def _bytes(all_counts: dict[str, dict[str, Counts]]) -> Table:
    rows = []
    for name, counts in all_counts.items():
        for layout, one in counts.items():
            phases = [one[phase].items() for phase in PHASES if phase in one]  # none in counts of FLOPs
            peaks = [max((at(of, LAYERS[name]) / 2**30, part) for part, of in phase) for phase in phases]
            rows += [[name, layout, *(f"{peak:,.1f} ({part})" for peak, part in peaks)]] if peaks else []
    title = f"Peak GiB of a phase above weights, gradients and optimizer, {TOKENS:,} tokens in a micro-batch"
    return Table(title, ["model", "layout", *PHASES], rows)


def _traffic(all_counts: dict[str, dict[str, Counts]]) -> Table:
    rows = []
    for name, counts in all_counts.items():
        for phase in PHASES:
            number, size = (at(counts["64 ranks"][what][phase], LAYERS[name]) for what in ("collectives", "sent"))
            rows.append([name, phase, f"{number:,.0f}", f"{size / 2**30:,.1f}"])
    return Table("FSDP2's collectives of one micro-batch", ["model", "phase", "number", "GiB of whole tensors"], rows)


def check() -> Table:
    """A small model on real tensors, beside its counts."""
    rows, keys = [], [replace(real.SMALL, element="fp32"), replace(real.SMALL, recompute=False)]
    for key, peaks in zip(keys, real.measured(keys), strict=True):
        how = f"{key.element}, {CHECKPOINTING if key.recompute else WHOLE}"
        for what, value in real.counted(fake_step.measure(key, real.LAYERS, key.tokens)).items():
            difference = f"{value / peaks[what] - 1:+.1%}"
            rows.append([what, how, f"{value / 2**20:.2f}", f"{peaks[what] / 2**20:.2f}", difference])
    columns = ["peak MiB", "model", "counted", "measured", "difference"]
    return Table("Counts beside real tensors: FSDP2 on one CPU rank (PyTorch's profiler)", columns, rows)


NOTES = [
    f"FLOPs are matrix products and attention, with half of the products of causal attention. Prompts have {PROMPT} tokens, "
    f"answers {ANSWER}; a response's length is without the prompt.",
    "Checkpointing is by layer, in the update and in the importance pass. `oar_g` runs one more forward, with noise.",
    "Bytes are peaks of one rank of FSDP2 above weights, gradients and Adam's moments, with float32 weights, bf16 arithmetic "
    "and float32 reductions. Attention and cross entropy are those of flash-attn: its cross entropy overwrites the logits.",
    "Megatron: the FLOPs of all ranks together are these, with the whole of each layer computed again under checkpointing. Its "
    "bytes and collectives are not counted; `oar plan` computes them.",
    "Derived, not run: masked copies. Not counted: kernels' workspace, fragmentation, NCCL's buffers, and the rollout engine: "
    "vLLM's kernels do not run on tensors without data.",
    "A mixture's experts run as grouped products of transformers with all tokens, so routing does not change shapes or FLOPs.",
]
