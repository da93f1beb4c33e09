"""Memory, FLOPs and seconds of each phase of a training step.

Memory is that of one GPU, in bytes, for a full micro-batch of sequences of the maximum length. FLOPs and bytes of the trainer's
passes are counted (`count.py`); the engine's are computed here. Megatron keeps 4 (gradient) bytes per local weight, and its
distributed optimizer shards 12 (float32 weight and both Adam moments) over the data-parallel ranks (ZeRO, arXiv 1910.02054).
Seconds follow a roofline model of arithmetic, memory and links at assumed efficiencies.
"""

import math

from oar_plugin.runs.plan import hardware
from oar_plugin.runs.plan.count import Polynomial
from oar_plugin.runs.plan.hardware import ANSWER, Efficiency, Gpu
from oar_plugin.runs.plan.setup import BYTES, Setup

Parts = dict[str, float]  # name of a part (weights, KV cache, ...) -> bytes
GENERATION, LOG_PROB, REFERENCE, UPDATE, SYNC = "generation", "log-probs", "reference", "update", "weight sync"
IMPORTANCE, COPIES, GATE = OAR = ("OAR: importance", "OAR: masked copies", "OAR: gate")
PASSING = "temporary"
"""The part of a phase's tensors that come and go: activations, logits, gathered weights, temporaries."""


def step_memory(s: Setup, gpu: Gpu) -> dict[str, Parts]:
    """Return phase -> parts.

    Two phases are left out: weight sync needs less memory than generation, and masked copies need less than log-probs.
    """
    weights, gradients, optimizer = states(s)
    on_cpu = s.actor.strategy == "fsdp2" and s.engine.offload_policy
    updating: Parts = {} if on_cpu else {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    # Megatron's gradient buffers exist whenever its weights are on the GPU; FSDP's gradients only during the update.
    waiting = updating | {"gradients": gradients if s.megatron and not s.engine.param_offload else 0.0}
    waiting |= {"optimizer": 0.0} if s.engine.optimizer_offload else {}
    engine, context = engine_memory(s, gpu), {"other": hardware.CONTEXT}
    trainer = context | (engine if s.colocated and not s.rollout.free_cache_engine else {})
    phases = {"generation, GPUs of its own": engine | context} if s.dedicated else {}
    if s.colocated:
        phases["generation"] = waiting | ({"weights": 0.0} if s.engine.param_offload else {}) | engine | context
    phases[LOG_PROB] = waiting | trainer | {PASSING: _passing(s, s.log_prob_counts[LOG_PROB])}
    if s.passes and s.oar is not None:  # its micro-batches have the smaller of the two sizes
        counted = s.counts if s.micro_batch(True) < s.micro_batch(False) else s.log_prob_counts
        phases[f"importance ({s.oar.importance})"] = waiting | trainer | {PASSING: _passing(s, counted["importance"])}
    phases[UPDATE] = updating | trainer | {PASSING: _passing(s, s.counts[UPDATE])}
    return phases


def _passing(s: Setup, phase: dict[str, Polynomial]) -> float:
    """Return the peak of a phase's tensors that come and go, in bytes.

    In the 1F1B schedule the first stage holds one micro-batch per pipeline stage (arXiv 2104.04473, section 2.2), and the last
    stage, which has the logits, one.
    """
    moments = {name: of.at(s.model.layers // s.pp) for name, of in phase.items()}
    more = (s.pp - 1) * moments.get("kept", 0.0)
    if not s.megatron and phase is s.counts[UPDATE]:
        # The optimizer's temporaries are of the size of a rank's share of the weights.
        moments["optimizer"] *= 0.0 if s.engine.offload_policy else s.shrunk
    return max(size + (0.0 if name in ("logits", "optimizer") else more) for name, size in moments.items())


def states(s: Setup) -> tuple[float, float, float]:
    """Return the bytes of (weights, gradients, optimizer) on one GPU, with nothing offloaded."""
    c, layers = s.counts, s.model.layers / s.pp
    if not s.megatron:
        weights, gradients, optimizer = (of.at(layers) * s.shrunk for of in c["states"].values())
        return weights, gradients, optimizer
    # The first stage has the embedding, the last stage the projection.
    ends = 0.5 if s.pp > 1 and not s.model.config.tie_word_embeddings else 1.0
    of = c["parameters"]
    held, trained = (of[name].base[0] * ends + of[name].layer[0] * layers for name in ("all", "trained"))
    experts = of["experts"].at(layers)
    # The ranks that hold the same parameters share their moments.
    shared = ((held - experts) * s.tp + experts * s.ep * s.etp) * s.pp / s.gpus / held
    return (
        s.weight_bytes * held,
        4 * trained,
        12 * trained * (shared if s.engine.use_distributed_optimizer else 1),
    )


def cache_bytes(s: Setup) -> float:
    """Return the bytes of one token's keys and values on one GPU of an engine.

    With more tensor-parallel ranks than key-value heads, each rank holds a copy of one head.
    """
    heads = max(1, s.model.kv_heads // s.rollout.tensor_model_parallel_size)
    return 2.0 * s.model.layers * heads * s.model.head_dim * BYTES[s.rollout.dtype]


def cached_tokens(s: Setup, gpu: Gpu) -> float:
    """Return how many tokens fit into the KV cache of one engine."""
    return engine_memory(s, gpu)["KV cache"] / cache_bytes(s) * s.replica / s.rollout.tensor_model_parallel_size


def engine_memory(s: Setup, gpu: Gpu) -> Parts:
    """Return the bytes of one GPU that vLLM uses for weights and workspace, and the rest of its share: the KV cache."""
    e, tp = BYTES[s.rollout.dtype], s.rollout.tensor_model_parallel_size
    working = s.rollout.max_num_batched_tokens * e * (4 * s.model.hidden + 3 * s.model.inner / tp)
    # The sampler holds float32 logits of all sequences, and sorts and normalises them.
    sampling = 3 * 4.0 * s.rollout.max_num_seqs * s.model.vocab
    used = e * s.parameters() / tp + working + sampling + hardware.ENGINE_OVERHEAD
    return {"vLLM": used, "KV cache": max(0.0, s.rollout.gpu_memory_utilization * gpu.memory - used)}


def step_flops(s: Setup) -> dict[str, float]:
    """Return phase -> FLOPs over all GPUs. OAR's phases count only the part of a pass that runs."""
    length, layers, counted = s.mean_length, s.model.layers, s.whole["flops"]

    def forward(end: float, start: float = 0.0) -> float:
        """Return the FLOPs of the layers' forward on tokens `start` to `end` of one sequence; earlier tokens are cached."""
        return counted["layers"].at(layers, end) - (counted["layers"].at(layers, start) if start else 0.0)

    def head(rows: float) -> float:
        return counted["head"].at(layers, rows)

    phases = {name: of.at(layers, length) for name, of in counted.items()}
    decoding = forward(length, s.mean_prompt) + head(s.mean_response)
    flops = {
        GENERATION: sum(s.rounds) * (forward(s.mean_prompt) / s.rollout.n + decoding),
        LOG_PROB: s.sequences * phases["log-probs"],
        REFERENCE: 0.0,
        UPDATE: s.sequences * s.actor.ppo_epochs * phases["update"],
    }
    if s.actor.use_kl_loss or s.config.algorithm.use_kl_in_reward:
        flops[REFERENCE] = flops[LOG_PROB]
    if s.oar is None:
        return flops
    scored = s.sequences * s.scored_share
    added = phases["importance"] - phases["log-probs"] if s.passes else 0.0
    added += forward(length) if s.replays and s.oar.backwards else 0.0
    copies = 0.0
    if s.oar.copies is not None:  # masked copies, and one forward of the unmasked response
        reasoning = max(1.0, s.mean_response - ANSWER)
        units = max(1.0, reasoning / s.oar.perturbation.span)
        number = s.oar.budget * units if s.oar.budget <= 1 else min(units, s.oar.budget)
        # With a shared prefix, a copy's forward starts at its first masked token: on average mid-way in the reasoning.
        start = s.mean_prompt + reasoning / 2 if s.oar.offloads or (s.ulysses == 1 and not s.fused) else 0.0
        copies = number * (forward(length, start) + head(ANSWER)) + forward(length)
    return flops | {IMPORTANCE: scored * added, COPIES: scored * copies}


def step_seconds(s: Setup, gpu: Gpu, efficiency: Efficiency) -> dict[str, float]:
    """Return phase -> seconds of one step."""
    flops, oar = step_flops(s), s.oar
    generation = sum(generation_seconds(s, gpu, efficiency, sequences) for sequences in s.rounds if sequences)

    def trainer(phase: str, rate: float, share: float = 1.0) -> float:
        """Return the seconds of a phase.

        Communication of FSDP and of the optimizer overlaps with arithmetic; that of tensor parallelism and Ulysses does not.
        """
        tokens = s.sequences * s.mean_length * share / s.dp / s.sequence_ranks
        steps = s.updates if phase == UPDATE else 1
        micro_batches = max(1, steps * math.ceil(tokens / steps / s.micro_batch(phase == UPDATE)))
        # The last factor adds the pipeline bubble (arXiv 2104.04473, section 2.2).
        arithmetic = flops[phase] / (s.gpus * gpu.tflops * 1e12 * rate) * (1 + (s.pp - 1) / micro_batches)
        overlapped, waited = _sent(s, phase, tokens, micro_batches)
        states = _link(s, gpu, efficiency, overlapped, s.gpus if s.megatron else s.shards)
        return max(arithmetic, states) + _link(s, gpu, efficiency, waited, max(s.tp * s.ulysses, s.ep * s.etp))

    seconds = {GENERATION: generation, LOG_PROB: trainer(LOG_PROB, efficiency.inference)}
    if flops[REFERENCE]:
        seconds[REFERENCE] = seconds[LOG_PROB]
    if oar is not None:
        if flops[IMPORTANCE]:
            rate = efficiency.training if oar.backwards else efficiency.inference
            seconds[IMPORTANCE] = trainer(IMPORTANCE, rate, s.scored_share)
        if flops[COPIES]:
            hidden = oar.perturbation.share_while_generating * generation if oar.offloads else 0.0
            rate = (s.rollout_gpus if oar.offloads else s.gpus) * gpu.tflops * 1e12 * efficiency.inference
            seconds[COPIES] = max(0.0, flops[COPIES] / rate - hidden)
        gate = hardware.GATE_SECONDS_PER_TOKEN / s.dp + hardware.DRIVER_SECONDS_PER_TOKEN
        seconds[GATE] = gate * s.sequences * s.max_response
    seconds[UPDATE] = trainer(UPDATE, efficiency.training, s.actor.ppo_epochs)
    # Weight sync: every trainer rank gathers the whole model; engines on other GPUs receive it over the network.
    moved = s.parameters("trained")
    ranks = s.pp * max(s.tp, s.ep * s.etp) if s.megatron else s.shards
    seconds[SYNC] = _link(s, gpu, efficiency, s.weight_bytes * moved * _ring(ranks), ranks)
    if s.dedicated:
        seconds[SYNC] += _link(s, gpu, efficiency, BYTES[s.rollout.dtype] * moved, s.gpus + s.rollout_gpus)
    return seconds


def _link(s: Setup, gpu: Gpu, efficiency: Efficiency, sent: float, group: int) -> float:
    """Return the seconds to send `sent` bytes: at link speed if `group` fits one node, else at network speed."""
    return sent / ((gpu.link if group <= s.config.trainer.n_gpus_per_node else gpu.network) * 1e9 * efficiency.link)


def _ring(ranks: int) -> float:
    """Return the share of a tensor that a rank sends in an all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def _sent(s: Setup, phase: str, tokens: float, count: int) -> tuple[float, float]:
    """Return the bytes that a GPU sends in `count` micro-batches: (overlapped with arithmetic, not overlapped).

    FSDP's collectives are counted; those of Megatron and Ulysses are not.
    """
    model, e, c = s.model, s.element, s.counts
    again = 2 if s.recompute else 1
    passes = {LOG_PROB: 1.0, UPDATE: 1.0 + again}.get(
        phase, s.oar.extra_forwards + s.oar.backwards * again if s.oar else 0.0
    )
    if s.megatron:
        # The optimizer reduces gradients (float32) and gathers weights. Tensor parallelism sends the residual stream four times
        # per layer and pass: a gather and a scatter each for attention and MLP.
        layers = model.layers / s.pp
        experts = c["parameters"]["experts"].at(layers)
        dense = c["parameters"]["all"].at(layers) - experts
        reduced = dense * _ring(s.gpus // (s.tp * s.pp)) + experts * _ring(max(1, s.gpus // (s.ep * s.etp * s.pp)))
        stream = 4 * model.hidden * _ring(s.tp)
        if model.experts:  # tokens go to their experts and back; the ranks of a split expert gather them
            stream = 2 * model.hidden * _ring(s.tp)
            stream += 2 * model.visits * model.hidden / s.outer * (_ring(s.ep) + s.etp - 1)
        passes += 0.5 if phase == UPDATE and s.outer > 1 else 0.0
        states = s.updates * (4 + s.weight_bytes) * reduced if phase == UPDATE else 0.0
        return states, passes * stream * layers * e * tokens
    sent = {name: of.at(model.layers) for name, of in c.get("sent", {}).items()}  # one rank sends nothing
    added = sent.get("importance", 0.0) - sent.get(LOG_PROB, 0.0)
    # Ulysses exchanges queries, keys, values and outputs around attention.
    heads = (2 * model.heads + 2 * max(model.kv_heads, s.ulysses)) * model.head_dim
    waited = passes * model.layers * e * tokens * heads * _ring(s.ulysses)
    return count * sent.get(phase, added) * _ring(s.shards), waited


def generation_seconds(s: Setup, gpu: Gpu, efficiency: Efficiency, sequences: float) -> float:
    """Return the seconds until the longest of `sequences` responses is done.

    Each decoding step reads the weights once, and the cache of every running sequence (arXiv 2211.05102, section 2.1). The
    cache size limits how many sequences run together. After the mean length, sequences finish at an even rate until the
    longest one is done.
    """
    model, tp, engines = s.model, s.rollout.tensor_model_parallel_size, s.rollout_gpus // s.replica
    together = max(1.0, min(sequences / engines, s.rollout.max_num_seqs, cached_tokens(s, gpu) / s.mean_length))
    compute = gpu.tflops * 1e12 * efficiency.inference * tp
    layers, head = (s.whole["flops"][name] for name in ("layers", "head"))
    token_flops = layers.at(model.layers, 1) + head.at(model.layers, 1)

    def token_seconds(running: float, seen: float) -> float:
        unvisited = (1 - model.visits / model.experts) ** running if model.experts else 0.0
        read = s.parameters() - s.parameters("experts") * unvisited
        reading = BYTES[s.rollout.dtype] * read / tp + running * seen * cache_bytes(s)
        latency = efficiency.decode_overhead_s + (2 * model.layers * efficiency.all_reduce_s if tp > 1 else 0.0)
        return max(reading / (gpu.bandwidth * 1e9 * efficiency.decoding), running * token_flops / compute) + latency

    prefill = sequences / s.rollout.n * layers.at(model.layers, s.mean_prompt) / (engines * compute)
    waves = sequences / engines / together
    steady = waves * s.mean_response * token_seconds(together, s.mean_prompt + s.mean_response / 2)
    return prefill + steady + (s.max_response - s.mean_response) * token_seconds(together / 4, s.mean_length)
