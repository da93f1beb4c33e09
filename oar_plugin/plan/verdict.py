"""What to change when a run does not fit, or fits tightly. Every suggestion was planned again and fits.

Changes are tried in order of what they cost a run: first those that cost nothing, then smaller micro-batches, then moving
states to the host, then other layouts, then more GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from oar_plugin.plan.layout import ACTOR, MODEL, ROLLOUT, LayoutError, Setup, with_overrides
from oar_plugin.plan.planning import Plan

Replan = Callable[[DictConfig], Plan]
Overrides = dict[str, Any]
Kind = list[tuple[Overrides, str]]
"""Changes of one kind from mild to strong, each with what it does."""

MORE_GPUS = (2, 4, 8)


@dataclass(frozen=True)
class Suggestion:
    """A change after which the run fits.

    Attributes:
        overrides: to add to verl's command line.
        reason: what it does.
        plan: with the change.
    """

    overrides: Overrides
    reason: str
    plan: Plan

    @property
    def arguments(self) -> list[str]:
        """As on the command line."""
        return [f"{key}={value}" for key, value in self.overrides.items()]


def suggest(config: DictConfig, current: Plan, replan: Replan) -> list[Suggestion]:
    """Changes that make a run fit, or relieve one that fits tightly.

    Args:
        config: the composed configuration.
        current: its plan.
        replan: plans a changed configuration under the same arguments.

    Returns:
        Of each kind the mildest single change that suffices, cheapest kind first; before the costly kinds, or where no single
        change suffices, the fewest and mildest that do together. Empty when there is room enough, or when nothing helps.
    """
    if current.verdict == "fits":
        return []
    cheap, costly = list(_cheap_changes(current.setup)), list(_costly_changes(current.setup))
    found = _single(config, current, replan, cheap)
    if not found and not current.fits:
        found = _together(config, current, replan, cheap)
    found += _single(config, current, replan, costly)
    if not found and not current.fits:
        found = _together(config, current, replan, [*cheap, *costly])
    return found


def _single(config: DictConfig, current: Plan, replan: Replan, kinds: list[Kind]) -> list[Suggestion]:
    found = []
    for kind in kinds:
        for overrides, reason in kind:
            better = _try(config, overrides, replan)
            if better is not None and (better.fits if not current.fits else better.verdict == "fits"):
                found.append(Suggestion(overrides, reason, better))
                break
    return found


def _try(config: DictConfig, overrides: Overrides, replan: Replan) -> Plan | None:
    try:
        return replan(with_overrides(config, overrides))
    except LayoutError:
        return None


def _together(config: DictConfig, current: Plan, replan: Replan, kinds: list[Kind]) -> list[Suggestion]:
    """Make the strongest change of each kind until the run fits; then drop or weaken what is not needed."""
    taken: dict[int, tuple[Overrides, str]] = {}
    best = current
    for number, kind in enumerate(kinds):
        for change in reversed(kind):
            better = _try(config, _merged({**taken, number: change}), replan)
            if better is not None and _shortfall(better) < _shortfall(best):
                taken[number], best = change, better
                break
        if best.fits:
            break
    if not best.fits:
        return []
    for number in list(taken):
        without = {other: change for other, change in taken.items() if other != number}
        for attempt in (without, *({**taken, number: change} for change in kinds[number])):
            better = _try(config, _merged(attempt), replan)
            if better is not None and better.fits:
                taken, best = attempt, better
                break
    return [Suggestion(_merged(taken), "; ".join(reason for _, reason in taken.values()), best)]


def _shortfall(plan: Plan) -> float:
    """Bytes missing over all phases, so that a change to a phase below the peak counts too."""
    over = sum(max(0.0, phase.total - plan.gpu.memory) for phase in plan.memory)
    sequence = plan.cache.bytes_per_token * plan.setup.rollout.max_length
    return over + max(0.0, 1 - plan.cache.sequences) * sequence


def _merged(changes: dict[int, tuple[Overrides, str]]) -> Overrides:
    merged: Overrides = {}
    for overrides, _ in changes.values():
        merged.update(overrides)
    return merged


def _cheap_changes(setup: Setup) -> Iterator[Kind]:
    """Changes within the same layout, each kind from mild to strong."""
    training = setup.training
    megatron = setup.layout.engine == "megatron"
    group = f"{ACTOR}.megatron" if megatron else f"{ACTOR}.fsdp_config"
    if training.chunk is None:
        yield [({f"{ACTOR}.entropy_from_logits_with_chunking": True}, "entropy of a few rows of logits at a time")]
    if training.recompute != "full":
        full = {
            f"{group}.override_transformer_config.recompute_granularity": "full",
            f"{group}.override_transformer_config.recompute_method": "uniform",
            f"{group}.override_transformer_config.recompute_num_layers": 1,
        }
        yield [(full if megatron else {f"{MODEL}.enable_gradient_checkpointing": True}, "recomputes activations")]
    yield _other_shares(setup)
    yield _smaller_micro_batches(setup)
    optimizer = {f"{group}.optimizer_offload": True}
    both = {**optimizer, f"{group}.param_offload": True}
    offload: Kind = []
    if not training.offload_policy and not training.offload_optimizer:
        offload.append((optimizer, "the optimizer waits on the host outside of the update"))
    if not training.offload_policy and not training.offload_weights:
        offload.append((both, "weights and optimizer wait on the host while they are not needed"))
    yield offload
    yield [
        ({f"{ROLLOUT}.tensor_model_parallel_size": setup.rollout.tp * factor}, "an engine's weights on more GPUs")
        for factor in (2, 4)
    ]


def _costly_changes(setup: Setup) -> Iterator[Kind]:
    """Other layouts, a slow update, more GPUs."""
    training, layout, work = setup.training, setup.layout, setup.workload
    if layout.engine == "megatron":
        group = f"{ACTOR}.megatron"
        if layout.tp < layout.gpus_per_node:
            yield [({f"{group}.tensor_model_parallel_size": layout.tp * 2}, "the model on more GPUs")]
        yield [({f"{group}.pipeline_model_parallel_size": layout.pp * 2}, "the model on more GPUs")]
    else:
        longest = math.ceil(work.max_length / (layout.ulysses * 2))
        budget = max(longest, training.update_tokens // 2)
        split = {
            f"{ACTOR}.ulysses_sequence_parallel_size": layout.ulysses * 2,
            f"{ACTOR}.ppo_max_token_len_per_gpu": budget,
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu": budget,
        }
        yield [(split, "sequences on several GPUs, each with a part of the tokens")]
        if not training.offload_policy:
            policy = {f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.fsdp_config.offload_policy": True}
            yield [(policy, "weights, gradients and optimizer stay on the host: a slow update")]
    nodes = layout.gpus // layout.gpus_per_node
    yield [
        (
            {"trainer.nnodes": nodes * factor, "trainer.n_gpus_per_node": layout.gpus_per_node},
            f"{layout.gpus * factor} GPUs",
        )
        for factor in MORE_GPUS
    ]


def _other_shares(setup: Setup) -> Kind:
    """vLLM's share of the memory, down and up: too large for what is resident, or too small for a sequence."""
    key, share = f"{ROLLOUT}.gpu_memory_utilization", setup.rollout.memory_share
    down = [round(share - step, 2) for step in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5) if share - step >= 0.2]
    up = [round(share + step, 2) for step in (0.1, 0.2, 0.3, 0.4) if share + step <= 0.9]
    return [({key: value}, "vLLM takes less of the memory") for value in down] + [
        ({key: value}, "vLLM takes more of the memory for its cache") for value in up
    ]


def _smaller_micro_batches(setup: Setup) -> Kind:
    least = math.ceil(setup.workload.max_length / setup.layout.sequence_ranks)
    budget = setup.training.update_tokens
    sizes = sorted(
        {max(least, int(budget * share) // 256 * 256) for share in (0.75, 0.5, 0.375, 0.25, 0.125)}, reverse=True
    )
    return [
        (
            {f"{ACTOR}.ppo_max_token_len_per_gpu": size, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": size},
            "smaller micro-batches",
        )
        for size in [*sizes, least]
        if size < max(budget, setup.training.log_prob_tokens)
    ]
