"""Memory, FLOPs and seconds of each phase of a training step.

Memory is that of one GPU, in bytes, for a full micro-batch of sequences of the maximum length. FLOPs, and under FSDP the bytes
and collectives of the passes, are counted (`count.py`). Model states follow ZeRO (arXiv 1910.02054, section 3). FSDP shards
weights, gradients and both Adam moments, all in one dtype. Megatron keeps 2 (weight) + 4 (gradient) bytes per local weight, and
its distributed optimizer shards 12 (float32 weight and both moments) over the data-parallel ranks. Its activations and traffic
are not counted but computed, tensor by tensor (arXiv 2205.05198, section 4).

Seconds follow a roofline model of arithmetic, memory and links at assumed efficiencies.
"""

import math

from oar_plugin.runs.plan import hardware
from oar_plugin.runs.plan.hardware import Efficiency, Gpu
from oar_plugin.runs.plan.setup import BYTES, COUNTED_RANKS, Setup

Parts = dict[str, float]  # name of a part (weights, logits, ...) -> bytes
GENERATION, LOG_PROB, REFERENCE, UPDATE, SYNC = "generation", "log-probs", "reference", "update", "weight sync"
IMPORTANCE, COPIES, GATE = OAR = ("OAR: importance", "OAR: masked copies", "OAR: gate")
TEMPORARY = "temporary"  # the part with activations, logits, gathered weights


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
    beside = engine if s.colocated and not s.rollout.free_cache_engine else {}
    trainer = context | beside
    phases = {"generation, GPUs of its own": engine | context} if s.dedicated else {}
    if s.colocated:
        phases["generation"] = waiting | ({"weights": 0.0} if s.engine.param_offload else {}) | engine | context
    temporary = _megatron_temporary if s.megatron else _fsdp_temporary
    phases[LOG_PROB] = waiting | trainer | {TEMPORARY: temporary(s, LOG_PROB, False)}
    if s.oar is not None and (forwards := s.oar.importance_object.forwards(1)):
        # Its micro-batches have the smaller of the two sizes. Without a backward it is a log-prob pass.
        counted = "importance" if any(forward.backward is not None for forward in forwards) else LOG_PROB
        size = temporary(s, counted, s.micro_batch(True) < s.micro_batch(False))
        phases[f"importance ({s.oar.importance})"] = waiting | trainer | {TEMPORARY: size}
    phases[UPDATE] = updating | trainer | {TEMPORARY: temporary(s, UPDATE, True)}
    return phases


def local_parameters(s: Setup) -> dict[int, float]:
    """Return the number of parameters on the largest Megatron rank, by the number of ranks that split a stage's.

    Tensor-parallel ranks split layers, and embedding or vocabulary projection; expert-parallel ranks split experts.
    """
    embeddings = 1 if s.model.config.tie_word_embeddings else 2
    embedding, experts = s.parameters("embedding"), s.parameters("experts")
    layers = s.parameters() - experts - embeddings * embedding
    local = {s.tp: (layers / s.pp + embedding * (embeddings if s.pp == 1 else 1)) / s.tp}
    local[s.ep * s.etp] = local.get(s.ep * s.etp, 0.0) + experts / s.pp / (s.ep * s.etp)
    return local


def states(s: Setup) -> tuple[float, float, float]:
    """Return the bytes of (weights, gradients, optimizer) on one GPU, with nothing offloaded."""
    w, adapters = s.weight_bytes, s.parameters("trained") if s.lora_rank else 0.0
    local = local_parameters(s) if s.megatron else {s.shards: s.parameters() / s.shards}
    held = sum(local.values())
    trained = adapters / (s.tp * s.pp if s.megatron else s.shards) if adapters else held
    weights = w * (held + (trained if adapters else 0.0))
    if s.megatron:
        # The ranks that hold the same parameters share their moments.
        shared = sum(number * ranks * s.pp / s.gpus for ranks, number in local.items()) / held
        return weights, 4 * trained, 12 * trained * (shared if s.engine.use_distributed_optimizer else 1)
    return weights, w * trained, 2 * w * trained


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


def _fsdp_temporary(s: Setup, phase: str, update: bool) -> float:
    """Return the counted peak of a phase's temporary tensors, in bytes, in micro-batches of the update or of log-probs."""
    parts = {name: of.at(s.model.layers) for name, of in s.memory(update)[phase].items()}
    if "optimizer" in parts:  # its temporary tensors are a rank's share of the weights
        parts["optimizer"] *= 0.0 if s.engine.offload_policy else min(s.shards, COUNTED_RANKS) / s.shards
    return max(parts.values())


def _megatron_temporary(s: Setup, phase: str, update: bool) -> float:
    """Return the peak of a phase's activations and logits on one Megatron rank, in bytes."""
    e, model, tokens, trained = s.element, s.model, s.micro_batch(update), phase == UPDATE
    entry = e * model.hidden / s.outer
    # The entropy needs a copy of the logits, the cross entropy a float32 copy. The chunks of importance are smaller.
    logits = 0.0 if s.fused else (e + 4 if trained else 2 * e + 4) * model.vocab / s.tp
    if phase == LOG_PROB:
        return (2 * entry + logits) * tokens
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # Inputs of norms; inputs of the linear layers for weight gradients, which an importance pass does not have.
    outside = 2 * e * model.hidden * (1 + trained)
    attention = e * (2 * query + 2 * key) + 4 * model.heads  # queries, output, keys, values; a float32 per head
    if model.config.model_type.startswith("qwen3"):
        attention += e * (query + key)
    if model.experts:
        # An expert that is split over ranks gets its tokens on each of them.
        outside += e * model.visits * model.hidden * (1 + trained) * s.etp + (e + 4) * model.experts
    layer = outside / s.outer + (attention + e * (2 + trained) * model.inner) / s.tp
    # Gradients of the residual stream and in the MLP, whose last product has been freed by then.
    going_back = entry + (3 - trained) * e * model.inner / s.tp + (layer if s.recompute else 0)
    # In the 1F1B schedule the first stage holds one micro-batch per pipeline stage (arXiv 2104.04473, section 2.2).
    kept = s.pp * (model.layers // s.pp) * (entry if s.recompute else layer)
    return (kept + max(entry * (1 + trained) + logits, going_back)) * tokens


def step_flops(s: Setup) -> dict[str, float]:
    """Return phase -> FLOPs over all GPUs. OAR's phases count only the part of a pass that runs."""
    length, refers = s.mean_length, s.actor.use_kl_loss or s.config.algorithm.use_kl_in_reward
    decoding = s.layers_flops(length, s.mean_prompt) + s.head_flops(s.mean_response)
    flops = {
        GENERATION: sum(s.rounds) * (s.layers_flops(s.mean_prompt) / s.rollout.n + decoding),
        LOG_PROB: s.sequences * s.flops(LOG_PROB, length),
        REFERENCE: s.sequences * s.flops(LOG_PROB, length) if refers else 0.0,
        UPDATE: s.sequences * s.actor.ppo_epochs * s.flops(UPDATE, length),
    }
    if s.oar is None:
        return flops
    importance, reasoning = s.oar.importance_object, max(1.0, s.mean_response - s.answer_rows)
    of = {"reasoning": reasoning, "later": reasoning + s.answer_rows}
    rows = [of.get(backward.rows, s.answer_rows) for backward in importance.backwards]
    backward = s.flops("importance", length) - s.flops(LOG_PROB, length)
    added = s.extra_forwards * s.layers_flops(length) + s.oar.backwards * backward
    added += s.oar.num_draws * 2 * s.head_flops(sum(rows))
    if importance.reads and not any(backward.of_reasoning for backward in importance.backwards):
        added += (1 + len(importance.contexts)) * s.head_flops(reasoning)
    scored = s.sequences * s.scored_share
    copies = 0.0
    if s.oar.copies is not None:  # masked copies, and one forward of the unmasked response
        units = max(1.0, reasoning / s.oar.perturbation.span)
        number = s.oar.budget * units if s.oar.budget <= 1 else min(units, s.oar.budget)
        # With a shared prefix, a copy's forward starts at its first masked token: on average mid-way in the reasoning.
        start = s.mean_prompt + reasoning / 2 if s.oar.offloads or (s.ulysses == 1 and not s.fused) else 0.0
        copies = number * (s.layers_flops(length, start) + s.head_flops(s.answer_rows))
        copies += s.layers_flops(length)
    return flops | {IMPORTANCE: scored * added, COPIES: scored * copies}


def step_seconds(s: Setup, gpu: Gpu, efficiency: Efficiency) -> dict[str, float]:
    """Return phase -> seconds of one step."""
    flops, oar = step_flops(s), s.oar
    generation = sum(generation_seconds(s, gpu, efficiency, sequences) for sequences in s.rounds if sequences)

    def trainer(phase: str, rate: float, share: float, forwards: float, backwards: float) -> float:
        """Return the seconds of a phase.

        Communication of FSDP and of the optimizer overlaps with arithmetic; that of tensor parallelism and Ulysses does not.
        """
        tokens = s.sequences * s.mean_length * share / s.dp / s.sequence_ranks
        steps = s.updates if phase == UPDATE else 1
        micro_batches = max(1, steps * math.ceil(tokens / steps / s.micro_batch(phase == UPDATE)))
        # The last factor adds the pipeline bubble (arXiv 2104.04473, section 2.2).
        arithmetic = flops[phase] / (s.gpus * gpu.tflops * 1e12 * rate) * (1 + (s.pp - 1) / micro_batches)
        overlapped, waited = _sent(s, tokens, micro_batches, forwards, backwards, phase == UPDATE)
        states = _link(s, gpu, efficiency, overlapped, s.gpus if s.megatron else s.shards)
        return max(arithmetic, states) + _link(s, gpu, efficiency, waited, max(s.tp * s.ulysses, s.ep * s.etp))

    seconds = {GENERATION: generation, LOG_PROB: trainer(LOG_PROB, efficiency.inference, 1.0, 1, 0)}
    if flops[REFERENCE]:
        seconds[REFERENCE] = seconds[LOG_PROB]
    if oar is not None:
        if flops[IMPORTANCE]:
            rate = efficiency.training if oar.backwards else efficiency.inference
            seconds[IMPORTANCE] = trainer(IMPORTANCE, rate, s.scored_share, s.extra_forwards, oar.backwards)
        if flops[COPIES]:
            hidden = oar.perturbation.share_while_generating * generation if oar.offloads else 0.0
            rate = (s.rollout_gpus if oar.offloads else s.gpus) * gpu.tflops * 1e12 * efficiency.inference
            seconds[COPIES] = max(0.0, flops[COPIES] / rate - hidden)
        gate = hardware.GATE_SECONDS_PER_TOKEN / s.dp + hardware.DRIVER_SECONDS_PER_TOKEN
        seconds[GATE] = gate * s.sequences * s.max_response
    seconds[UPDATE] = trainer(UPDATE, efficiency.training, s.actor.ppo_epochs, 1, 1)
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


def _sent(s: Setup, tokens: float, count: int, forwards: float, backwards: float, trains: bool) -> tuple[float, float]:
    """Return the bytes that a GPU sends in `count` micro-batches: (overlapped with arithmetic, not overlapped)."""
    model, e = s.model, s.element
    passes = forwards + backwards * (2 if s.recompute else 1)
    if s.megatron:
        # The optimizer reduces gradients (float32) and gathers weights. Tensor parallelism sends the residual stream four times
        # per layer and pass: a gather and a scatter each for attention and MLP.
        reduced = sum(number * _ring(s.gpus // (ranks * s.pp)) for ranks, number in local_parameters(s).items())
        states = s.updates * (4 + s.weight_bytes) * reduced
        again = 0.5 if trains and s.outer > 1 else 0.0
        stream = 4 * model.hidden * _ring(s.tp)
        if model.experts:  # tokens go to their experts and back; the ranks of a split expert gather them
            stream = 2 * model.hidden * _ring(s.tp)
            stream += 2 * model.visits * model.hidden / s.outer * (_ring(s.ep) + s.etp - 1)
        stream *= model.layers / s.pp * e * tokens
        return states if trains else 0.0, (passes + again) * stream
    sent = {
        phase: of.at(model.layers) for phase, of in s.memory(trains).get("sent", {}).items()
    }  # one rank sends nothing
    plain, scored, update = (sent.get(phase, 0.0) for phase in (LOG_PROB, "importance", UPDATE))
    gathered = update if trains else forwards * plain + backwards * (scored - plain)
    # Ulysses exchanges queries, keys, values and outputs around attention.
    heads = (2 * model.heads + 2 * max(model.kv_heads, s.ulysses)) * model.head_dim
    return count * gathered * _ring(s.shards), passes * model.layers * e * tokens * heads * _ring(s.ulysses)


def generation_seconds(s: Setup, gpu: Gpu, efficiency: Efficiency, sequences: float) -> float:
    """Return the seconds until the longest of `sequences` responses is done.

    Each decoding step reads the weights once, and the cache of every running sequence (arXiv 2211.05102, section 2.1). The
    cache size limits how many sequences run together. After the mean length, sequences finish at an even rate until the
    longest one is done.
    """
    model, tp, engines = s.model, s.rollout.tensor_model_parallel_size, s.rollout_gpus // s.replica
    together = max(1.0, min(sequences / engines, s.rollout.max_num_seqs, cached_tokens(s, gpu) / s.mean_length))
    compute = gpu.tflops * 1e12 * efficiency.inference * tp
    token_flops = s.layers_flops(2.0, 1.0) + s.head_flops(1)

    def token_seconds(running: float, seen: float) -> float:
        unvisited = (1 - model.visits / model.experts) ** running if model.experts else 0.0
        read = s.parameters() - s.parameters("experts") * unvisited
        reading = BYTES[s.rollout.dtype] * read / tp + running * seen * cache_bytes(s)
        latency = efficiency.decode_overhead_s + (2 * model.layers * efficiency.all_reduce_s if tp > 1 else 0.0)
        return max(reading / (gpu.bandwidth * 1e9 * efficiency.decoding), running * token_flops / compute) + latency

    prefill = sequences / s.rollout.n * s.layers_flops(s.mean_prompt) / (engines * compute)
    waves = sequences / engines / together
    steady = waves * s.mean_response * token_seconds(together, s.mean_prompt + s.mean_response / 2)
    return prefill + steady + (s.max_response - s.mean_response) * token_seconds(together / 4, s.mean_length)
