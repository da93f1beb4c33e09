"""A plan for people: tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from oar_plugin.plan.hardware import GIB
from oar_plugin.plan.memory import CONTEXT, ENGINE_OVERHEAD, PARTS, TRAINER_OVERHEAD
from oar_plugin.plan.planning import TIGHT, Plan
from oar_plugin.plan.verdict import Suggestion

_ROWS = {"oar": "OAR", "kv_cache": "KV cache", "rollout": "vLLM", "communication": "gathered, buffers"}


def tables(plan: Plan) -> list[Table]:
    """Memory, then work, links and seconds of a step."""
    return [memory_table(plan), step_table(plan)]


def memory_table(plan: Plan) -> Table:
    """GiB of a GPU, a column a phase."""
    shown = Table(title=f"memory of one GPU in GiB ({plan.gpu.name}: {plan.gpu.memory_gib:g})")
    shown.add_column("")
    for phase in plan.memory:
        shown.add_column(f"[bold]{phase.name}[/]" if phase is plan.peak else phase.name, justify="right")
    for part in PARTS:
        amounts = [phase.parts.get(part, 0.0) for phase in plan.memory]
        if any(amounts):
            shown.add_row(_ROWS.get(part, part), *map(_gib, amounts))
    shown.add_section()
    shown.add_row("total", *(_gib(phase.total) for phase in plan.memory))
    left = [plan.gpu.memory - phase.total for phase in plan.memory]
    colours = ["red" if x < 0 else "yellow" if x < TIGHT * plan.gpu.memory else "green" for x in left]
    shown.add_row("left", *(f"[{colour}]{x / GIB:.1f}[/]" for colour, x in zip(colours, left, strict=True)))
    return shown


def step_table(plan: Plan) -> Table:
    """FLOPs, bytes and seconds of a step, a line a phase."""
    flops, seconds, sent = plan.flops, plan.seconds, plan.traffic
    shown = Table(title=f"one step on {plan.setup.layout.gpus} GPUs (projected)")
    for name in ("phase", "PFLOPs in all", "GB sent a GPU", "seconds", "share"):
        shown.add_column(name, justify="left" if name == "phase" else "right")
    lines = [
        ("generation", flops.generation, 0.0, seconds.generation),
        ("log-prob forward", flops.log_prob, sent.of("log_prob"), seconds.log_prob),
        ("reference forward", flops.reference, sent.of("reference"), seconds.reference),
        ("OAR: importance", flops.importance, sent.of("importance"), seconds.importance),
        ("OAR: masked copies", flops.copies, sent.of("copies"), seconds.copies),
        ("update, recomputation included", flops.update, sent.of("update"), seconds.update),
        ("weights to vLLM", 0.0, sent.of("weight_sync"), seconds.weight_sync),
    ]
    for name, work, sent_bytes, time in lines:
        if work or sent_bytes:
            shown.add_row(
                name, f"{work / 1e15:.1f}", f"{sent_bytes / 1e9:.1f}", f"{time:.1f}", f"{time / seconds.total:.1%}"
            )
    total = sum(line[2] for line in lines)
    shown.add_section()
    shown.add_row("step", f"{flops.total / 1e15:.1f}", f"{total / 1e9:.1f}", f"{seconds.total:.1f}", "")
    return shown


def summary(plan: Plan) -> list[str]:
    """What the tables do not show, in lines."""
    setup, cache = plan.setup, plan.cache
    layout, work = setup.layout, setup.workload
    if layout.engine == "fsdp":
        sizes = f"FSDP over {layout.shards}" + (f", Ulysses {layout.ulysses}" if layout.ulysses > 1 else "")
    else:
        parts = ("tp", "pp", "vpp", "cp", "ep")
        sizes = "Megatron " + " x ".join(f"{p.upper()} {getattr(layout, p)}" for p in parts if getattr(layout, p) > 1)
    kinds = sorted(plan.traffic.by_kind.items(), key=lambda item: -item[1])
    lines = [
        f"{setup.shape.name}: {setup.shape.parameters / 1e9:.2f}B parameters; {sizes}, data parallel {layout.dp}; vLLM TP "
        f"{setup.rollout.tp} x {setup.rollout.replicas} engines.",
        f"KV cache of an engine: {cache.tokens:,.0f} tokens, {cache.sequences:.1f} sequences of {setup.rollout.max_length} at "
        f"once (max_num_seqs {setup.rollout.max_sequences}).",
        "Sent by a GPU in a step, GB: " + ", ".join(f"{kind} {amount / 1e9:.2f}" for kind, amount in kinds) + ".",
    ]
    if setup.oar is not None:
        lines.append(
            f"OAR ({setup.oar.importance}): {plan.seconds.oar_share:.1%} of a step, {plan.seconds.ratio_to_grpo:.2f} x the "
            f"same step of GRPO, with {work.scored_share:.0%} of the responses scored."
        )
    return lines


def assumptions(plan: Plan) -> list[str]:
    """What the projection takes for granted."""
    work, e = plan.setup.workload, plan.efficiency
    return [
        "These are projections, not measurements: memory within some GiB, times within a factor.",
        f"Mean prompt {work.mean_prompt:.0f} and response {work.mean_response:.0f} tokens (--prompt-length, "
        f"--response-length), answers of {work.answer} tokens, {work.scored_share:.0%} of the responses with an advantage "
        "(--scored-share).",
        f"Of the datasheet's figures a run gets: {e.training:.0%} of the arithmetic in training, {e.inference:.0%} in "
        f"inference, {e.decode_bandwidth:.0%} of the memory's bandwidth in decoding, {e.link:.0%} of the links.",
        f"Beside tensors: {CONTEXT / GIB:g} GiB contexts and NCCL, {TRAINER_OVERHEAD / GIB:g} GiB fragmentation in training, "
        f"{ENGINE_OVERHEAD / GIB:g} GiB inside vLLM. flash-attention is there, for attention and for the cross entropy.",
        "Reward computation, data loading, checkpoints and validation are not counted.",
    ]


def verdict_lines(plan: Plan, suggestions: Sequence[Suggestion]) -> list[str]:
    """The verdict, and what to change."""
    left = f"{abs(plan.headroom) / GIB:.1f} GiB"
    reason = (
        f"{left} left at the peak, {plan.peak.name}" if plan.headroom >= 0 else f"{left} missing in {plan.peak.name}"
    )
    if plan.cache.sequences < 1:
        longest = plan.setup.rollout.max_length
        reason += f"; vLLM's cache holds {plan.cache.tokens:,.0f} tokens, less than one sequence of {longest}"
    lines = [f"Verdict: {plan.verdict} ({reason})."]
    if suggestions:
        lines.append("Change one of these; each was planned again:")
    elif plan.verdict != "fits":
        lines.append(
            "None of the changes that the planner knows helps, alone or together: take a larger GPU or more of them."
        )
    for suggestion in suggestions:
        room = f"{suggestion.plan.verdict}, {suggestion.plan.headroom / GIB:.1f} GiB left"
        lines.append(f"  {' '.join(suggestion.arguments)}    ({suggestion.reason}; {room})")
    return lines


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f}" if amount else ""
