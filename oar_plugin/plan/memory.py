"""Memory of one GPU in each phase of a step, by what takes it.

States after ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054, section 3): FSDP keeps `(w + g + 2 w) N / shards` with `w` bytes a
weight and a gradient of the same type; Megatron keeps `2 N + 4 N` for weights and gradient buffer of its part of the model and
`12 N / (DP CP)` for master weights and moments under the distributed optimizer. Activations: `activations.py`. What the
importance pass adds: hosts/verl/MEGATRON.md.

Peaks are those of a full micro-batch (`ppo_max_token_len_per_gpu` tokens) of the longest sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from oar_plugin.config import OarConfig
from oar_plugin.passes.rows import CHUNK
from oar_plugin.plan.activations import Held, LayerStyle, Trained, forward_working, held
from oar_plugin.plan.compute import answer_rows
from oar_plugin.plan.hardware import GIB, Gpu
from oar_plugin.plan.layout import Layout, Setup, Training
from oar_plugin.plan.shape import ModelShape

# Assumptions, in bytes, printed with every plan.
CONTEXT = 1.0 * GIB  # CUDA contexts of trainer and engine, and what NCCL allocates for its communicators
TRAINER_OVERHEAD = 1.0 * GIB  # fragmentation and libraries' workspaces while the trainer works
ENGINE_OVERHEAD = 1.0 * GIB  # CUDA graphs and workspaces inside vLLM's share

STATES = ("weights", "gradients", "optimizer")
PARTS = (*STATES, "activations", "logits", "oar", "communication", "rollout", "kv_cache", "other")


@dataclass(frozen=True)
class PhaseMemory:
    """One phase on the GPU that takes most.

    Attributes:
        name: of the phase.
        parts: bytes by what takes them, keys from `PARTS`.
    """

    name: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class KvCache:
    """The cache of one engine.

    Attributes:
        bytes_per_token: on each of its GPUs.
        tokens: that it holds.
        sequences: of the longest length that run at once; below one, the engine cannot serve the longest sequence.
    """

    bytes_per_token: float
    tokens: float
    sequences: float


@dataclass(frozen=True)
class States:
    """Bytes that persist on one GPU while the trainer has everything there."""

    weights: float
    gradients: float
    optimizer: float


# ---- what stays


def kv_bytes_per_token(shape: ModelShape, tp: int, element: int) -> float:
    """Keys and values of a token on one GPU of an engine: `2 L kv_heads head_dim` elements, heads divided by TP.

    Heads are copied where there are fewer than ranks, as vLLM does (`FullAttentionSpec.page_size_bytes` over the block size).
    """
    return 2.0 * shape.layers * max(1, shape.kv_heads // tp) * shape.head_dim * element


def stage_parameters(shape: ModelShape, layout: Layout) -> float:
    """Parameters of the Megatron rank that has most: its layers, and embedding or vocabulary projection."""
    dense = (shape.layer_parameters - shape.expert_parameters) / (layout.pp * layout.tp)
    ends = shape.embedding / layout.tp * (2 if layout.pp == 1 and not shape.tied else 1)
    return dense + shape.expert_parameters / (layout.pp * layout.tp * layout.ep) + ends


def states(shape: ModelShape, layout: Layout, training: Training) -> States:
    """Weights, gradients and optimizer of one GPU."""
    w = training.weight_bytes
    if layout.engine == "fsdp":
        shard = shape.parameters / layout.shards
        trained = shape.lora_parameters(training.lora_rank) / layout.shards if training.lora_rank else shard
        adapters = trained if training.lora_rank else 0.0
        return States(w * (shard + adapters), w * trained, 2 * w * trained)
    local = stage_parameters(shape, layout)
    trained = shape.lora_parameters(training.lora_rank) / (layout.tp * layout.pp) if training.lora_rank else local
    replicas = layout.gpus / (layout.tp * layout.pp) if layout.distributed_optimizer else 1
    expert = shape.expert_parameters / layout.gpus if layout.distributed_optimizer and not training.lora_rank else 0.0
    dense = trained - (shape.expert_parameters / (layout.pp * layout.tp * layout.ep) if expert else 0.0)
    optimizer = 12 * (dense / replicas + expert) * (1 - training.host_optimizer)
    return States(w * local + (w * trained if training.lora_rank else 0.0), 4 * trained, optimizer)


# ---- what a pass holds on top


def logits_in_update(vocab: float, element: int, megatron: bool) -> float:
    """Bytes of logits a token of an update.

    FSDP: one copy, over which flash-attention's cross entropy writes the gradient (without it, more). Megatron: the logits, and
    the float32 softmax of its vocabulary-parallel cross entropy, which becomes their gradient.
    """
    return (element + 4 if megatron else element) * vocab


def logits_in_forward(vocab: float, element: int, megatron: bool, tokens: float, chunk: int | None) -> float:
    """Bytes of logits of a log-prob pass over `tokens` tokens, entropy included.

    Entropy works in float32, `chunk` rows at a time: the rows, their softmax, and its product with them. In one piece it
    takes a further copy (compiled, as verl does); Megatron clones the logits for it, and its cross entropy takes a
    float32 copy afterwards.
    """
    rows = min(tokens, chunk) if chunk is not None else tokens
    if megatron:
        entropy = 3 * element * rows if chunk is not None else element * tokens
        return vocab * (2 * element * tokens + max(4 * tokens, entropy))
    copies = (2 if element == 4 else 3) * 4 if chunk is not None else element
    return vocab * (element * tokens + copies * rows)


def answer_rows_bytes(rows: float, vocab: float, element: int) -> tuple[float, float]:
    """Bytes of the answer's logits: while the full logits are there, and when the probe's scalar is formed.

    The second after hosts/verl/MEGATRON.md: logits, their float32 copy and coefficients.
    """
    return element * rows * vocab, (element + 8) * rows * vocab


def style_of(layout: Layout, training: Training) -> LayerStyle:
    """How the trainer's layers are built."""
    if layout.engine == "fsdp":
        return LayerStyle("hf", training.compute_bytes)
    return LayerStyle("megatron", training.compute_bytes, layout.tp, layout.sequence_parallel)


def _held(setup: Setup, trained: Trained, stage: str) -> Held:
    layout = setup.layout
    style = style_of(layout, setup.training)
    if layout.pp == 1:
        return held(setup.shape, style, trained, setup.training.recompute)
    # One forward, one backward: the first stage keeps a micro-batch for each stage after it (arXiv 2104.04473, 2.2).
    first = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 1)
    in_flight = first if stage == "first" else 1 + (layout.vpp > 1) * (layout.vpp - 1) / layout.vpp
    layers = setup.shape.layers // layout.pp
    return held(setup.shape, style, trained, setup.training.recompute, layers, in_flight, last=stage == "last")


def _gathered(setup: Setup, gradients: bool) -> tuple[float, float]:
    """FSDP's gathered weights and gradients of one rank, in bytes: those of the root, which stay, and of passing layers.

    The root holds the vocabulary projection. Of the layers one computes while the next is gathered, and one buffer is copied
    from. In a backward with weight gradients each of them has a gradient, and two are in flight as float32.
    """
    shape, training, layout = setup.shape, setup.training, setup.layout
    if layout.engine != "fsdp" or layout.shards == 1:
        if layout.engine == "fsdp":  # one shard: nothing is gathered, but weights are cast to the compute type
            return training.compute_bytes * shape.embedding, 2.0 * training.compute_bytes * shape.largest_layer
        return 0.0, 0.0
    e = training.compute_bytes
    trained = gradients and not training.lora_rank
    return (2 if trained else 1) * e * shape.embedding, (3 * e + (e + 8 if trained else 0)) * shape.largest_layer


# ---- phases


def phases(setup: Setup, gpu: Gpu) -> list[PhaseMemory]:
    """Every phase of a step, in order."""
    return list(_phases(setup, gpu))


def engine_memory(setup: Setup, gpu: Gpu) -> tuple[float, float, float, KvCache]:
    """vLLM's weights, activations and cache on one GPU, in bytes, and what the cache holds."""
    shape, rollout = setup.shape, setup.rollout
    ranks = rollout.tp
    weights = rollout.weight_bytes * shape.parameters / ranks
    style = LayerStyle("megatron", rollout.weight_bytes, ranks)
    working = rollout.max_batched_tokens * forward_working(shape, style)
    # The sampler sorts and normalises float32 logits of every sequence.
    sampling = 3 * 4.0 * rollout.max_sequences * shape.vocab
    room = rollout.memory_share * gpu.memory - weights - working - sampling - ENGINE_OVERHEAD
    per_token = kv_bytes_per_token(shape, ranks, rollout.weight_bytes)
    tokens = max(0.0, room) / per_token * (rollout.replica / rollout.tp if rollout.replica > rollout.tp else 1)
    return (
        weights,
        working + sampling + ENGINE_OVERHEAD,
        max(0.0, room),
        KvCache(per_token, tokens, tokens / rollout.max_length),
    )


def _phases(setup: Setup, gpu: Gpu) -> Iterator[PhaseMemory]:
    training, rollout = setup.training, setup.rollout
    state = states(setup.shape, setup.layout, training)
    weights, working, cache, _ = engine_memory(setup, gpu)
    resident = _resident(setup, state, "generation")
    if rollout.dedicated:
        yield PhaseMemory(
            "generation, GPUs of its own", {"rollout": weights + working, "kv_cache": cache, "other": CONTEXT}
        )
    if rollout.colocated:
        engine = {"rollout": weights + working, "kv_cache": cache, "other": CONTEXT}
        yield PhaseMemory("generation", {**resident, **engine})
    yield _weight_sync(setup, state, weights)

    asleep = {}
    if rollout.colocated and not rollout.sleeps:
        asleep = {"rollout": weights + working, "kv_cache": cache}
    other = {"other": CONTEXT + TRAINER_OVERHEAD, **asleep}
    plain = _log_prob(setup, training.log_prob_tokens)
    yield PhaseMemory("log-probs", {**_resident(setup, state, "log_prob"), **plain, **other})
    if setup.oar is not None and setup.oar.importance_object.forwards(setup.oar.num_draws):
        yield PhaseMemory(
            f"log-probs with importance ({setup.oar.importance})",
            {**_resident(setup, state, "log_prob"), **_importance(setup, setup.oar), **other},
        )
    if setup.oar is not None and setup.oar.copies is not None and not setup.oar.offloads:
        yield PhaseMemory(
            f"masked copies ({setup.oar.importance})",
            {**_resident(setup, state, "log_prob"), **_copies(setup), **other},
        )
    yield PhaseMemory("update", {**_resident(setup, state, "update"), **_update(setup), **other})
    if not training.offload_policy and setup.layout.engine == "fsdp":
        # torch's foreach AdamW forms the root of the second moment for all weights at once.
        step = {"activations": state.gradients}
        yield PhaseMemory("optimizer step", {**_resident(setup, state, "update"), **step, **other})


def _resident(setup: Setup, state: States, phase: str) -> dict[str, float]:
    """The trainer's states that are on the GPU in a phase."""
    training = setup.training
    if training.offload_policy:
        return dict.fromkeys(STATES, 0.0)
    needed = phase != "generation"
    updating = phase == "update"
    buffers = setup.layout.engine == "megatron" and not training.offload_weights
    return {
        "weights": state.weights if needed or not training.offload_weights else 0.0,
        # Megatron's gradient buffers exist as long as its weights are on the GPU; verl leaves them out of a log-prob pass
        # when it moves the weights. FSDP's gradients exist during the update only.
        "gradients": state.gradients if updating or buffers else 0.0,
        "optimizer": state.optimizer if updating or not training.offload_optimizer else 0.0,
    }


def _weight_sync(setup: Setup, state: States, engine_weights: float) -> PhaseMemory:
    shape, training, rollout = setup.shape, setup.training, setup.rollout
    resident = _resident(setup, state, "generation")
    resident["weights"] = 0.0 if training.offload_policy else state.weights
    largest = max(shape.embedding, shape.expert_weights * 2 // 3) * training.weight_bytes
    parts = {**resident, "communication": largest + 2.0 * rollout.sync_bucket, "other": CONTEXT}
    return PhaseMemory("weight sync", {**parts, "rollout": engine_weights if rollout.colocated else 0.0})


def _vocab(setup: Setup) -> float:
    return setup.shape.vocab / setup.layout.tp if not setup.training.fused_kernels else 0.0


def _log_prob(setup: Setup, tokens: int, read: float = 0.0) -> dict[str, float]:
    """A forward of `tokens` tokens; `read`: bytes of rows of logits that are looked at beside."""
    layout, training = setup.layout, setup.training
    style = style_of(layout, training)
    megatron = layout.engine == "megatron"
    root, passing = _gathered(setup, gradients=False)
    hidden = 2 * style.element * setup.shape.hidden / style.outer * tokens
    logits = logits_in_forward(_vocab(setup), style.element, megatron, tokens, training.chunk)
    working = forward_working(setup.shape, style) * tokens
    if hidden + logits + read > working + passing:
        return {"activations": hidden, "logits": logits, "oar": read, "communication": root + passing / 3}
    return {"activations": working, "communication": root + passing}


def _importance(setup: Setup, oar: OarConfig) -> dict[str, float]:
    importance = oar.importance_object
    training, layout = setup.training, setup.layout
    tokens = min(training.update_tokens, training.log_prob_tokens)
    megatron = layout.engine == "megatron"
    e = training.compute_bytes
    root, passing = _gathered(setup, gradients=False)
    # A chunk of the reasoning's rows at a time: logits and coefficients, and in float32 the logits, a softmax, its root and
    # two products; the signs come from 64-bit hashes.
    chunk = (2 * e + 28) * min(CHUNK, tokens) * _vocab(setup) if importance.reasoning_rows else 0.0
    if not importance.backwards:
        return _log_prob(setup, tokens, chunk)
    rows = answer_rows(oar, setup.workload) * tokens * layout.sequence_ranks / setup.workload.mean_length
    fused = not importance.noisy
    options = []
    for stage in ("first", "last"):
        kept = _held(setup, "none", stage)
        last = layout.pp == 1 or stage == "last"
        leaf = e * setup.shape.hidden * tokens / style_of(layout, training).outer
        at_head, at_probe = answer_rows_bytes(rows if last else 0.0, _vocab(setup), e)
        at_probe = max(at_probe, chunk if last else 0.0)
        logits = logits_in_forward(_vocab(setup), e, megatron, tokens, training.chunk) if last and fused else 0.0
        options += [
            {"activations": kept.head * tokens, "logits": logits, "oar": at_head, "communication": root + passing / 3},
            {"activations": kept.head * tokens, "oar": at_probe, "communication": root + passing},
            {"activations": kept.layer * tokens, "oar": leaf, "communication": root + passing},
        ]
    return max(options, key=lambda parts: sum(parts.values()))


def _copies(setup: Setup) -> dict[str, float]:
    """Masked copies in the actor: a forward of copies, the cached prefix, and the answer's logits."""
    from oar_plugin.passes.masked_copies import ROW_VALUES

    training, layout, shape = setup.training, setup.layout, setup.shape
    tokens = training.log_prob_tokens
    style = style_of(layout, training)
    # One cache of the response, and a copy's keys and values with the prefix in front while a layer attends.
    cache = kv_bytes_per_token(shape, 1, training.compute_bytes) * setup.workload.max_length
    copies = 2 * shape.key * training.compute_bytes * 2 * tokens
    root, passing = _gathered(setup, gradients=False)
    logits = (training.compute_bytes + 16) * min(ROW_VALUES, tokens * shape.vocab)
    return {
        "activations": forward_working(shape, style) * tokens,
        "oar": cache + copies + logits,
        "communication": root + passing,
    }


def _update(setup: Setup) -> dict[str, float]:
    training, layout = setup.training, setup.layout
    tokens = training.update_tokens
    megatron = layout.engine == "megatron"
    root, passing = _gathered(setup, gradients=True)
    trained: Trained = "adapters" if training.lora_rank else "all"
    options = []
    for stage in ("first", "last"):
        kept = _held(setup, trained, stage)
        last = layout.pp == 1 or stage == "last"
        logits = logits_in_update(_vocab(setup), training.compute_bytes, megatron) * tokens if last else 0.0
        options += [
            {"activations": kept.head * tokens, "logits": logits, "communication": root + passing / 3},
            {"activations": kept.layer * tokens, "communication": root + passing},
        ]
    return max(options, key=lambda parts: sum(parts.values()))
