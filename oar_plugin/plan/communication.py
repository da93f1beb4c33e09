"""Bytes that one GPU sends in a step, by kind.

Of collectives over `n` ranks a ring sends `(n - 1) / n` of the gathered or reduced tensor, twice that for an all-reduce. FSDP
gathers every weight in the compute type for a forward and once more for a backward, and reduces gradients in float32
(ZeRO-3, arXiv 1910.02054, section 7.2). Tensor parallelism with sequence parallelism gathers and scatters the residual stream
twice a layer and direction (Korthikanti et al. 2022, arXiv 2205.05198, figure 5). Ulysses exchanges heads for positions
(arXiv 2309.14509). What the importance pass adds under Megatron: hosts/verl/MEGATRON.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from oar_plugin.credit.importance import Importance, Rows
from oar_plugin.credit.vocabulary import VocabularyShard
from oar_plugin.plan.compute import answer_rows, rows_of, rows_read
from oar_plugin.plan.layout import Setup
from oar_plugin.plan.memory import stage_parameters
from oar_plugin.plan.shape import ModelShape

Phase = Literal["log_prob", "reference", "importance", "copies", "update", "weight_sync"]
# Kinds that overlap with arithmetic in the frameworks' schedules; the others are waited for.
OVERLAPPED = ("FSDP all-gather", "FSDP reduce-scatter", "optimizer reduce-scatter", "optimizer all-gather", "CP ring")
READING = 12  # bytes a row: an entropy or a log-prob over the vocabulary's shards is a maximum and two sums in float32


@dataclass
class Traffic:
    """Bytes of one GPU.

    Attributes:
        sent: by phase and kind.
    """

    sent: dict[Phase, dict[str, float]] = field(default_factory=dict)

    def add(self, phase: Phase, kind: str, amount: float) -> None:
        """Count some bytes; zeros are left out."""
        if amount > 0:
            kinds = self.sent.setdefault(phase, {})
            kinds[kind] = kinds.get(kind, 0.0) + amount

    def of(self, phase: Phase) -> float:
        """All bytes of a phase."""
        return sum(self.sent.get(phase, {}).values())

    @property
    def by_kind(self) -> dict[str, float]:
        """Bytes by kind over all phases."""
        kinds: dict[str, float] = {}
        for phase in self.sent.values():
            for kind, amount in phase.items():
                kinds[kind] = kinds.get(kind, 0.0) + amount
        return kinds


def ring(ranks: int) -> float:
    """Share of a tensor that a rank sends in an all-gather or reduce-scatter over a ring."""
    return (ranks - 1) / ranks


def fsdp_gather(parameters: float, shards: int, element: int) -> float:
    """Bytes of gathering weights once."""
    return element * parameters * ring(shards)


def fsdp_reduce(parameters: float, shards: int, element: int = 4) -> float:
    """Bytes of reducing their gradients once."""
    return element * parameters * ring(shards)


def tensor_parallel(shape: ModelShape, tokens: float, tp: int, element: int, layers: float) -> float:
    """Bytes of tensor parallelism in one direction of `layers` layers: two all-reduces a layer, or the same in halves."""
    return layers * 4 * element * tokens * shape.hidden * ring(tp)


def ulysses(shape: ModelShape, tokens: float, ranks: int, element: int) -> float:
    """Bytes of the exchanges around attention in one direction of all layers, for `tokens` tokens on this rank.

    Queries, keys and values out, the result back; fewer key-value heads than ranks are repeated first.
    """
    heads = 2 * shape.heads + 2 * max(shape.kv_heads, ranks)
    return shape.layers * element * tokens * heads * shape.head_dim * ring(ranks)


def micro_batches(tokens: float, budget: int) -> int:
    """How many a rank runs, at least."""
    return max(1, math.ceil(tokens / budget))


def step_traffic(setup: Setup) -> Traffic:
    """Bytes of a step."""
    traffic = Traffic()
    if setup.layout.engine == "fsdp":
        _fsdp(setup, traffic)
    else:
        _megatron(setup, traffic)
    _weight_sync(setup, traffic)
    return traffic


@dataclass(frozen=True)
class _Pass:
    """Tokens of one rank, its micro-batches, and how often it goes through the layers."""

    phase: Phase
    tokens: float
    micro_batches: int
    forwards: float
    backwards: float
    trains: bool = False


def _passes(setup: Setup) -> list[_Pass]:
    """What a rank runs. Tokens are those of its share of a sequence."""
    work, training, layout, oar = setup.workload, setup.training, setup.layout, setup.oar
    tokens = work.tokens / layout.dp / layout.sequence_ranks
    recomputes = 1.0 if training.recompute == "full" else 0.0
    plain = micro_batches(tokens, training.log_prob_tokens)
    passes = [_Pass("log_prob", tokens, plain, 1, 0)]
    if training.reference:
        passes.append(_Pass("reference", tokens, plain, 1, 0))
    if oar is not None and oar.importance_object.forwards(oar.num_draws) and work.scored_share:
        scored = tokens * work.scored_share
        # Its micro-batches are the update's; their forwards were counted with the log-probs as if none were scored.
        budget = min(training.update_tokens, training.log_prob_tokens)
        forwards = oar.extra_forwards + oar.backwards * recomputes
        passes.append(_Pass("importance", scored, micro_batches(scored, budget), forwards, oar.backwards))
    steps = max(1, work.updates)
    each = micro_batches(tokens * work.epochs / steps, training.update_tokens)
    passes.append(_Pass("update", tokens * work.epochs, steps * each, 1 + recomputes, 1, trains=True))
    return passes


def _fsdp(setup: Setup, traffic: Traffic) -> None:
    shape, layout, training = setup.shape, setup.layout, setup.training
    e = training.compute_bytes
    gather = fsdp_gather(shape.parameters, layout.shards, e)
    trained = shape.lora_parameters(training.lora_rank) if training.lora_rank else shape.parameters
    for one in _passes(setup):
        # A recomputed layer is still gathered for its backward: one gathering serves both.
        forwards = one.forwards - (one.backwards if training.recompute == "full" else 0)
        traffic.add(one.phase, "FSDP all-gather", one.micro_batches * (forwards + one.backwards) * gather)
        if one.trains:
            reduced = fsdp_reduce(trained, layout.shards)
            traffic.add(one.phase, "FSDP reduce-scatter", one.micro_batches * reduced)
            replicas = layout.gpus // layout.shards
            across = 2 * 4 * trained / layout.shards * ring(replicas)
            traffic.add(one.phase, "HSDP all-reduce", one.micro_batches * across)
        if layout.ulysses > 1:
            exchanged = ulysses(shape, one.tokens, layout.ulysses, e)
            traffic.add(one.phase, "Ulysses all-to-all", (one.forwards + one.backwards) * exchanged)
    if setup.oar is not None:
        for kind, payload in (("OAR pooled logits", _pooled_logits(setup)), ("OAR scores", _scores(setup))):
            traffic.add("importance", kind, 2 * payload * ring(layout.ulysses))
    _copies(setup, traffic, gather)


def _copies(setup: Setup, traffic: Traffic, gather: float) -> None:
    """Masked copies in the actor: each of their forwards gathers the weights again."""
    from oar_plugin.plan.compute import masked_copies

    oar, work = setup.oar, setup.workload
    if oar is None or oar.copies is None or oar.offloads:
        return
    per_response = masked_copies(setup.shape, oar, work, setup.layout.ulysses == 1) / (2.0 * setup.shape.active_weights)
    responses = work.sequences * work.scored_share / setup.layout.dp
    forwards = responses * max(2, math.ceil(per_response / setup.training.log_prob_tokens))
    traffic.add("copies", "FSDP all-gather", forwards * gather)


def _megatron(setup: Setup, traffic: Traffic) -> None:
    shape, layout, training, work = setup.shape, setup.layout, setup.training, setup.workload
    e = training.compute_bytes
    layers = shape.layers / layout.pp
    for one in _passes(setup):
        directions = one.forwards + one.backwards
        per_layer = tensor_parallel(shape, one.tokens, layout.tp, e, layers)
        # With sequence parallelism a weight gradient gathers the layer's inputs once more.
        again = 0.5 * one.backwards if one.trains and layout.sequence_parallel else 0.0
        kind = "TP all-gather, reduce-scatter" if layout.sequence_parallel else "TP all-reduce"
        traffic.add(one.phase, kind, (directions + again) * per_layer)
        boundary = e * one.tokens * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
        if layout.pp > 1:
            # Recomputation stays inside a stage.
            across = one.forwards - (one.backwards if training.recompute == "full" else 0) + one.backwards
            traffic.add(one.phase, "PP sends", across * boundary * layout.vpp)
        passed = e * 2 * shape.key / layout.tp * one.tokens * (layout.cp - 1) * layers
        traffic.add(one.phase, "CP ring", (one.forwards + 2 * one.backwards) * passed)
        if layout.ep > 1:
            routed = 2 * e * one.tokens * shape.experts_per_token * shape.hidden * ring(layout.ep)
            moe = shape.moe_layers / layout.pp
            traffic.add(
                one.phase, "EP all-to-all", directions * moe * routed / (layout.tp if layout.sequence_parallel else 1)
            )
        if one.trains:
            local, replicas = stage_parameters(shape, layout), layout.gpus // (layout.tp * layout.pp)
            trained = (
                shape.lora_parameters(training.lora_rank) / (layout.tp * layout.pp) if training.lora_rank else local
            )
            traffic.add(one.phase, "optimizer reduce-scatter", work.updates * 4 * trained * ring(replicas))
            if layout.distributed_optimizer:
                traffic.add(
                    one.phase, "optimizer all-gather", work.updates * training.weight_bytes * trained * ring(replicas)
                )
            else:
                traffic.add(one.phase, "optimizer all-gather", work.updates * 4 * trained * ring(replicas))
    if setup.oar is not None:
        for kind, amount in megatron_importance(setup).items():
            traffic.add("importance", kind, amount)


def megatron_importance(setup: Setup) -> dict[str, float]:
    """Bytes of what the importance pass adds on the rank that sends most, after hosts/verl/MEGATRON.md.

    A ring sends an all-reduce as up to twice its payload, which is what is returned.
    """
    oar, layout, work, shape = setup.oar, setup.layout, setup.workload, setup.shape
    assert oar is not None
    importance, responses = oar.importance_object, _responses(setup)
    row = setup.training.compute_bytes * shape.hidden  # of hidden states, or their gradient
    gathered = row if layout.sequence_parallel else 0
    read = responses * rows_read(oar, work)
    tensor = read * (gathered + len(importance.reads) * READING)
    if importance.noisy:
        tensor += responses * answer_rows(oar, work) * gathered
    for number, backward in enumerate(importance.backwards):
        rows = responses * rows_of(backward, oar, work)
        pooled = backward.rows == "probe" and oar.probe != "answer_joint"
        of_vocabulary = _coefficient_bytes(importance, number, pooled) * (responses if pooled else rows)
        if backward.rows == "reasoning":
            of_vocabulary += rows * len(importance.reads) * READING
        tensor += oar.num_draws * (rows * (gathered + row) + of_vocabulary)
    groups = (layout.cp > 1) + (layout.tp * layout.pp > 1)
    return {
        "OAR rows": 2 * tensor * ring(layout.tp),
        "OAR pooled logits": 2 * _pooled_logits(setup) / layout.tp * ring(layout.cp),
        "OAR scores": 2 * groups * _scores(setup) * ring(max(layout.tp * layout.pp, layout.cp)),
    }


def _responses(setup: Setup) -> float:
    """That a data-parallel rank scores."""
    return setup.workload.sequences * setup.workload.scored_share / setup.layout.dp


def _pooled_logits(setup: Setup) -> float:
    """Bytes of the logits that are pooled over the ranks of a sequence."""
    oar = setup.oar
    assert oar is not None
    importance = oar.importance_object
    backwards = sum(backward.rows == "probe" for backward in importance.backwards)
    if oar.probe == "answer_joint" or not backwards:
        return 0.0
    return 4 * _responses(setup) * setup.shape.vocab * (oar.num_draws * backwards + importance.noisy)


def _scores(setup: Setup) -> float:
    """Bytes of what the ranks have measured of each token."""
    assert setup.oar is not None
    importance = setup.oar.importance_object
    return 4 * _responses(setup) * setup.workload.mean_length * (len(importance.backwards) + len(importance.reads))


def _coefficient_bytes(importance: Importance, number: int, pooled: bool) -> int:
    """What a vocabulary-parallel rank sends for the coefficients of one row: they are made of one, and counted."""
    sent = 0

    def counted(tensor: Tensor) -> Tensor:
        nonlocal sent
        sent += tensor.numel() * tensor.element_size()
        return tensor

    row, zero = torch.zeros(1, 8), torch.zeros(1, dtype=torch.long)
    vocabulary = VocabularyShard(0, counted, counted)
    importance.coefficients(
        number, Rows(row, None if pooled else zero, zero, torch.ones(1), row, vocabulary=vocabulary)
    )
    return sent


def _weight_sync(setup: Setup, traffic: Traffic) -> None:
    """Every trainer rank gathers the whole model, tensor by tensor; engines on GPUs of their own get it over the network."""
    shape, layout, training = setup.shape, setup.layout, setup.training
    moved = shape.lora_parameters(training.lora_rank) if training.lora_rank else shape.parameters
    ranks = layout.shards if layout.engine == "fsdp" else layout.tp * layout.pp * layout.ep
    traffic.add("weight_sync", "weight sync", training.weight_bytes * moved * ring(ranks))
    if setup.rollout.dedicated:
        traffic.add("weight_sync", "weights to the rollout GPUs", setup.rollout.weight_bytes * moved)
