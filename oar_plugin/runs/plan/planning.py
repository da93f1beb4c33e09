"""The plan of a run, and suggested changes that make it fit."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from omegaconf import DictConfig

from oar_plugin.runs.plan.hardware import EXPECTED, GIB, GOOD, POOR, TIGHT, Gpu, choose_gpu
from oar_plugin.runs.plan.memory import cached_tokens, step_memory
from oar_plugin.runs.plan.models import PlanError
from oar_plugin.runs.plan.seconds import GENERATION, OAR, generation_seconds, step_flops, step_seconds
from oar_plugin.runs.plan.setup import ACTOR, ROLLOUT, Expected, Setup, with_overrides

Change = tuple[dict[str, Any], str]  # overrides for verl's command line, and what they do
BUDGETS = (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu")


class Plan:
    """Projections for a composed configuration. Raise PlanError if it cannot run, or if its model is unknown."""

    def __init__(self, config: DictConfig, gpu: Gpu | None = None, expected: Expected | None = None) -> None:
        self.setup = s = Setup(config, expected)
        self.gpu = card = gpu or choose_gpu()
        self.memory = step_memory(s, card)  # phase -> part -> bytes on one GPU
        self.peak = max(self.memory, key=lambda phase: sum(self.memory[phase].values()))
        # Free bytes in the peak phase; negative if it does not fit.
        self.headroom = card.memory - sum(self.memory[self.peak].values())
        longest = s.rollout.max_model_len or s.max_length
        self.cached = cached_tokens(s, card) / longest  # sequences of maximum length that one engine's cache holds
        self.fits = self.headroom >= 0 and self.cached >= 1
        tight = self.headroom < TIGHT * card.memory
        self.verdict = "does not fit" if not self.fits else "fits tightly" if tight else "fits"

        self.flops = step_flops(s)  # phase -> FLOPs of one step, over all GPUs
        self.seconds = step_seconds(s, card, EXPECTED)  # phase -> seconds of one step
        self.step = _step(s, self.seconds)
        self.oar = sum(self.seconds.get(phase, 0.0) for phase in OAR)
        self.to_grpo = self.step / _step(s, {phase: t for phase, t in self.seconds.items() if phase not in OAR})

    @property
    def hours(self) -> list[float] | None:
        """Hours of the run, validations included: [expected, least, most]. None if the number of steps is unknown."""
        s, hours = self.setup, []
        for efficiency in (EXPECTED, GOOD, POOR):
            validation = generation_seconds(s, self.gpu, efficiency, s.validated) if s.validated else 0.0
            hours.append(((s.steps or 0) * _step(s, step_seconds(s, self.gpu, efficiency)) + validation) / 3600)
        return None if s.steps is None else hours

    def to_dict(self) -> dict[str, Any]:
        s, plain = self.setup, {key: value for key, value in vars(self).items() if key not in ("setup", "gpu")}
        work = {"hours": self.hours, "steps": s.steps, "mean_prompt": s.mean_prompt, "mean_response": s.mean_response}
        return {"projection": True, **plain, **work, "gpus": s.gpus, "gpu": asdict(self.gpu)}


def _step(s: Setup, seconds: dict[str, float]) -> float:
    """Return the seconds of a step. Generation and training run one after the other; in `separate_async` they overlap."""
    generation = seconds[GENERATION]
    training = sum(seconds.values()) - generation
    return max(generation, training) if s.dedicated else generation + training


class Suggestion(NamedTuple):
    overrides: dict[str, Any]
    reason: str
    plan: Plan


def suggest(current: Plan, replan: Callable[[DictConfig], Plan]) -> list[Suggestion]:
    """Return changes that make a run fit, or that give more room to a run that fits tightly.

    Kinds of changes are tried from cheap to costly; each kind contributes its mildest change that is sufficient. If no single
    change suffices, several are combined. The list is empty if the run fits already, or if nothing helps.

    Args:
        replan: plans a changed configuration; every suggestion carries the plan that it returned.
    """
    if current.verdict == "fits":
        return []

    def attempt(*changes: Change) -> Suggestion:
        overrides = {key: value for change, _ in changes for key, value in change.items()}
        try:
            made = replan(with_overrides(current.setup.config, overrides))
        except PlanError:
            made = current
        return Suggestion(overrides, "; ".join(reason for _, reason in changes), made)

    def single(kinds: list[list[Change]]) -> list[Suggestion]:
        enough = ("fits",) if current.fits else ("fits", "fits tightly")
        firsts = (next((made for made in map(attempt, kind) if made.plan.verdict in enough), None) for kind in kinds)
        return [made for made in firsts if made is not None]

    def together(kinds: list[list[Change]]) -> list[Suggestion]:
        """Add the best change of each kind until the run fits; then drop the changes that are not needed."""
        taken: list[Change] = []
        best = Suggestion({}, "", current)
        for kind in kinds:
            tried = [] if best.plan.fits else [(attempt(*taken, change), change) for change in kind]
            made, change = min(tried, key=lambda pair: _missing(pair[0].plan), default=(best, None))
            if change is not None and _missing(made.plan) < _missing(best.plan):
                taken, best = [*taken, change], made
        for change in list(taken):
            rest = [other for other in taken if other is not change]
            if (made := attempt(*rest)).plan.fits:
                taken, best = rest, made
        return [best] if best.plan.fits else []

    cheap, costly = _cheap(current.setup), _costly(current.setup)
    suggestions = single(cheap) or ([] if current.fits else together(cheap))
    suggestions += single(costly)
    return suggestions or ([] if current.fits else together(cheap + costly))


def _missing(made: Plan) -> float:
    """Return the missing bytes, summed over all phases, so that an improvement below the peak counts too.

    A cache that holds less than one sequence adds up to 1 GiB.
    """
    over = (sum(parts.values()) - made.gpu.memory for parts in made.memory.values())
    return sum(max(0.0, missing) for missing in over) + max(0.0, 1 - made.cached) * GIB


def _cheap(s: Setup) -> list[list[Change]]:
    """Return kinds of changes that keep the layout, from cheap to costly; each kind lists its changes from mild to strong."""
    engine = f"{ACTOR}.megatron" if s.megatron else f"{ACTOR}.fsdp_config"
    chunks = {f"{ACTOR}.entropy_from_logits_with_chunking": True}
    share, tp = s.rollout.gpu_memory_utilization, s.rollout.tensor_model_parallel_size
    shares = [round(share + step, 2) for step in (0.1, 0.2, 0.3, -0.1, -0.2, -0.3) if 0.2 <= share + step <= 0.9]
    least = math.ceil(s.max_length / s.sequence_ranks)
    budgets = [max(least, int(s.micro_batch(True) * part) // 256 * 256) for part in (0.5, 0.25)]
    optimizer = {f"{engine}.optimizer_offload": True}
    return [
        [(chunks, "the entropy is computed for a few rows of logits at a time")],
        [
            ({f"{ROLLOUT}.gpu_memory_utilization": each}, "a different share of the GPU memory for vLLM")
            for each in shares
        ],
        [(dict.fromkeys(BUDGETS, size), "smaller micro-batches") for size in (*budgets, least)],
        [
            (optimizer, "the optimizer is on the CPU outside the update"),
            ({**optimizer, f"{engine}.param_offload": True}, "weights and optimizer are on the CPU while not in use"),
        ],
        [
            ({f"{ROLLOUT}.tensor_model_parallel_size": tp * n}, "each engine's weights are split over more GPUs")
            for n in (2, 4)
        ],
    ]


def _costly(s: Setup) -> list[list[Change]]:
    """Return kinds of changes that cost more: other layouts, an update from CPU memory, and more GPUs."""
    nodes = [({"trainer.nnodes": s.config.trainer.nnodes * n}, f"{s.gpus * n} GPUs") for n in (2, 4, 8)]
    if s.megatron:
        ranks = {"tensor": s.tp, "pipeline": s.pp}.items()
        key = f"{ACTOR}.megatron.{{}}_model_parallel_size"
        return [[({key.format(kind): 2 * size}, "the model is split over more GPUs") for kind, size in ranks], nodes]
    budget = max(math.ceil(s.max_length / s.sequence_ranks / 2), int(s.micro_batch(True) / 2))
    split = {**dict.fromkeys(BUDGETS, budget), f"{ACTOR}.ulysses_sequence_parallel_size": s.ulysses * 2}
    on_cpu = {f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.fsdp_config.offload_policy": True}
    return [
        [(split, "each sequence is split over more GPUs")],
        [(on_cpu, "weights, gradients and optimizer stay on the CPU: the update is slow")],
        nodes,
    ]
