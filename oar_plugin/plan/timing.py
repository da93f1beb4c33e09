"""Seconds of a step by phase: a roofline over arithmetic, memory and links with stated efficiencies. Projections."""

from __future__ import annotations

from dataclasses import dataclass

from oar_plugin.plan.communication import OVERLAPPED, Phase, Traffic, micro_batches
from oar_plugin.plan.compute import StepFlops
from oar_plugin.plan.hardware import Efficiency, Gpu
from oar_plugin.plan.layout import Setup
from oar_plugin.plan.memory import KvCache, kv_bytes_per_token


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, as projected.

    Attributes:
        generation: of all responses, to the end of the longest.
        log_prob: pass for log-probs and entropy.
        reference: of a reference model.
        importance: what importance adds to the log-prob pass.
        copies: what masked copies add and generation does not hide.
        update: of the actor.
        weight_sync: to the engines.
        overlapped: generation and training run side by side (`separate_async`).
    """

    generation: float
    log_prob: float
    reference: float
    importance: float
    copies: float
    update: float
    weight_sync: float
    overlapped: bool = False

    @property
    def oar(self) -> float:
        """What OAR adds to the trainer's work."""
        return self.importance + self.copies

    @property
    def training(self) -> float:
        """All that the trainer's GPUs do."""
        return self.log_prob + self.reference + self.oar + self.update + self.weight_sync

    @property
    def total(self) -> float:
        return max(self.generation, self.training) if self.overlapped else self.generation + self.training

    @property
    def oar_share(self) -> float:
        """What OAR takes of a step."""
        return self.oar / self.total

    @property
    def ratio_to_grpo(self) -> float:
        """The step over the same step without OAR."""
        without = self.training - self.oar
        plain = max(self.generation, without) if self.overlapped else self.generation + without
        return self.total / plain


def step_seconds(
    setup: Setup, flops: StepFlops, traffic: Traffic, cache: KvCache, gpu: Gpu, efficiency: Efficiency
) -> StepSeconds:
    """Project a step."""
    gpus = setup.layout.gpus
    rates = {"training": efficiency.training, "inference": efficiency.inference}

    def arithmetic(operations: float, kind: str) -> float:
        return operations / (gpus * gpu.tflops * 1e12 * rates[kind])

    def phase(name: Phase, operations: float, kind: str, factor: float = 1.0) -> float:
        hidden, exposed = link_seconds(setup, traffic, name, gpu, efficiency)
        return max(arithmetic(operations, kind) * factor, hidden) + exposed

    generation = generation_seconds(setup, cache, gpu, efficiency)
    copies = 0.0
    if flops.copies and setup.oar is not None and setup.oar.offloads:
        engines = flops.copies / (setup.rollout.gpus * gpu.tflops * 1e12 * efficiency.inference)
        copies = max(0.0, engines - setup.oar.perturbation.share_while_generating * generation)
    elif flops.copies:
        copies = phase("copies", flops.copies, "inference")
    bubble = pipeline_factor(setup, setup.training.update_tokens)
    return StepSeconds(
        generation=generation,
        log_prob=phase("log_prob", flops.log_prob, "inference", pipeline_factor(setup, setup.training.log_prob_tokens)),
        reference=phase(
            "reference", flops.reference, "inference", pipeline_factor(setup, setup.training.log_prob_tokens)
        ),
        importance=phase("importance", flops.importance, "training", bubble) if flops.importance else 0.0,
        copies=copies,
        update=phase("update", flops.update, "training", bubble),
        weight_sync=sum(link_seconds(setup, traffic, "weight_sync", gpu, efficiency)),
        overlapped=setup.rollout.dedicated,
    )


def pipeline_factor(setup: Setup, budget: int) -> float:
    """How much longer a pipeline takes than its work: `1 + (p - 1) / (v m)` for `m` micro-batches (arXiv 2104.04473, 2.2)."""
    layout, work = setup.layout, setup.workload
    if layout.pp == 1:
        return 1.0
    tokens = work.tokens * work.epochs / work.updates / layout.dp / layout.sequence_ranks
    return 1 + (layout.pp - 1) / (layout.vpp * micro_batches(tokens, budget))


def link_seconds(setup: Setup, traffic: Traffic, phase: Phase, gpu: Gpu, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds of a phase on the links: those that overlap with arithmetic, and those that are waited for.

    A group that fits into a node talks over its links, a larger one at the speed of the network.
    """
    layout = setup.layout
    hidden = exposed = 0.0
    for kind, amount in traffic.sent.get(phase, {}).items():
        speed = (gpu.link if _group(setup, kind) <= layout.gpus_per_node else gpu.network) * 1e9 * efficiency.link
        if kind in OVERLAPPED:
            hidden += amount / speed
        else:
            exposed += amount / speed
    return hidden, exposed


def _group(setup: Setup, kind: str) -> int:
    """GPUs from the first to the last of a group, as the ranks are numbered."""
    layout = setup.layout
    if kind.startswith("FSDP"):
        return layout.shards
    if kind == "weight sync":
        return layout.shards if layout.engine == "fsdp" else layout.tp * layout.pp * layout.ep
    if kind.startswith("Ulysses"):
        return layout.ulysses
    if kind.startswith(("TP", "OAR rows")):
        return layout.tp
    if kind.startswith("CP") or kind == "OAR pooled logits":
        return layout.tp * layout.cp if layout.engine == "megatron" else layout.ulysses
    return layout.gpus


def generation_seconds(setup: Setup, cache: KvCache, gpu: Gpu, efficiency: Efficiency) -> float:
    """Seconds until the longest response is done.

    Decoding reads the weights and the cache of every running sequence once a token (arXiv 2211.05102, section 2.1). Sequences
    run together as far as cache and `max_num_seqs` allow; after the mean length they leave evenly until the longest has ended.
    """
    shape, work, rollout = setup.shape, setup.workload, setup.rollout
    here = work.sequences / rollout.replicas
    together = max(1.0, min(here, rollout.max_sequences, cache.tokens / work.mean_length))
    waves = here / together
    bandwidth = gpu.bandwidth * 1e9 * efficiency.decode_bandwidth
    per_token = kv_bytes_per_token(shape, rollout.tp, rollout.weight_bytes)
    compute = gpu.tflops * 1e12 * efficiency.inference * rollout.tp

    def seconds_of_a_token(running: float, seen: float) -> float:
        weights = rollout.weight_bytes * _weights_read(setup, running) / rollout.tp
        reading = (weights + running * seen * per_token) / bandwidth
        arithmetic = running * 2.0 * (shape.active_weights + shape.embedding) / compute
        latency = 2 * shape.layers * efficiency.all_reduce_s if rollout.tp > 1 else 0.0
        return max(reading, arithmetic) + latency + efficiency.decode_overhead_s

    prefill = work.prompts * work.mean_prompt * 2.0 * shape.active_weights / (rollout.replicas * compute)
    steady = waves * work.mean_response * seconds_of_a_token(together, work.mean_prompt + work.mean_response / 2)
    tail = (work.max_response - work.mean_response) * seconds_of_a_token(
        together / 4, work.mean_prompt + work.mean_response
    )
    return prefill + steady + tail


def _weights_read(setup: Setup, running: float) -> float:
    """Parameters that a decoding step reads: of experts, those that at least one sequence visits."""
    shape = setup.shape
    if not shape.experts:
        return float(shape.parameters)
    visited = 1 - (1 - shape.experts_per_token / shape.experts) ** running
    return shape.parameters - shape.expert_parameters * (1 - visited)
