"""Memory, FLOPs and seconds of each phase of a training step.

Memory is that of one GPU, in bytes, for a full micro-batch of sequences of the maximum length. Model states follow ZeRO (arXiv
1910.02054, section 3). FSDP shards weights, gradients and both Adam moments, all in one dtype. Megatron keeps 2 (weight) + 4
(gradient) bytes per local weight, and its distributed optimizer shards 12 (float32 weight and both moments) over the
data-parallel ranks. Activations are counted tensor by tensor. For the backward, transformers keeps float32 inputs of norms and
three tensors of the MLP's width; Megatron's fused kernels keep less (arXiv 2205.05198, section 4). An importance pass freezes
the weights, so it keeps no tensors for weight gradients.

Seconds follow a roofline model of arithmetic, memory and links at assumed efficiencies.
"""

import math

from oar_plugin.passes.rows import CHUNK
from oar_plugin.runs.plan import hardware
from oar_plugin.runs.plan.hardware import Efficiency, Gpu
from oar_plugin.runs.plan.setup import BYTES, Setup

Parts = dict[str, float]  # name of a part (weights, logits, ...) -> bytes
GENERATION, LOG_PROB, REFERENCE, UPDATE, SYNC = "generation", "log-probs", "reference", "update", "weight sync"
IMPORTANCE, COPIES, GATE = OAR = ("OAR: importance", "OAR: masked copies", "OAR: gate")


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
    trainer = {"other": hardware.CONTEXT + hardware.TRAINER_OVERHEAD} | beside
    phases = {"generation, GPUs of its own": engine | context} if s.dedicated else {}
    if s.colocated:
        phases["generation"] = waiting | ({"weights": 0.0} if s.engine.param_offload else {}) | engine | context
    phases["log-probs"] = waiting | _log_prob(s, s.micro_batch(False)) | trainer
    if s.oar is not None and s.oar.importance_object.forwards(s.oar.num_draws):
        phases[f"importance ({s.oar.importance})"] = waiting | _importance(s) | trainer
    phases["update"] = updating | _update(s, gradients) | trainer
    return phases


def local_parameters(s: Setup) -> dict[int, float]:
    """Return the number of parameters on the largest Megatron rank, by the number of ranks that split a stage's.

    Tensor-parallel ranks split layers, and embedding or vocabulary projection; expert-parallel ranks split experts.
    """
    embeddings = 1 if s.model.config.tie_word_embeddings else 2
    layers = s.model.parameters - s.model.experts - embeddings * s.model.embedding
    local = {s.tp: (layers / s.pp + s.model.embedding * (embeddings if s.pp == 1 else 1)) / s.tp}
    ranks = s.ep * s.etp
    local[ranks] = local.get(ranks, 0.0) + s.model.experts / s.pp / ranks
    return local


def states(s: Setup) -> tuple[float, float, float]:
    """Return the bytes of (weights, gradients, optimizer) on one GPU, with nothing offloaded."""
    w, adapters = s.weight_bytes, s.model.adapters * s.lora_rank
    local = local_parameters(s) if s.megatron else {s.shards: s.model.parameters / s.shards}
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
    used = e * s.model.parameters / tp + working + sampling + hardware.ENGINE_OVERHEAD
    return {"vLLM": used, "KV cache": max(0.0, s.rollout.gpu_memory_utilization * gpu.memory - used)}


def activations(s: Setup, trained: bool) -> tuple[float, float]:
    """Return the bytes of activations per token at two moments: after the forward, and in the last layer's backward.

    `trained` is True for an update, and False for an importance pass, whose weights are frozen.
    """
    e, model, entry = s.element, s.model, s.element * s.model.hidden / s.outer
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # Per element of a norm: its float32 input, and the normalised values if its scale is trained.
    norm = e if s.megatron else 4 + (e if trained and not s.lora_rank else 0)
    inputs = e * model.hidden if trained else 0  # inputs of the linear layers, kept for weight gradients
    outside = 2 * (norm * model.hidden + inputs)
    attention = e * (2 * query + 2 * key) + 4 * model.heads  # queries, output, keys, values; a float32 per head
    if model.config.model_type.startswith("qwen3"):
        attention += norm * (query + key)
    if model.experts:
        # An expert that is split over ranks gets its tokens on each of them.
        outside += e * model.visits * model.hidden * (1 + trained) * s.etp + (e + 4) * model.config.num_experts
    products = (2 if s.megatron else 3) + trained
    layer = outside / s.outer + (attention + e * products * model.inner) / s.tp
    final = norm * model.hidden / s.outer + (entry if trained else 0)
    # Gradients of the residual stream and in the MLP, whose last product has been freed by then.
    going_back = entry + (3 - trained) * e * model.inner / s.tp
    # In the 1F1B schedule the first stage holds one micro-batch per pipeline stage (arXiv 2104.04473, section 2.2).
    kept = s.pp * (model.layers // s.pp) * (entry if s.recompute else layer)
    return kept + final, kept + going_back + (layer if s.recompute else 0)


def forward_logits(s: Setup, tokens: float) -> float:
    """Return the bytes of a log-prob pass's logits and of the temporary tensors for their entropy.

    Without chunking the entropy needs a copy of all logits; with chunking, float32 copies of one chunk of rows.
    """
    if s.megatron:  # the entropy needs a copy of the logits, the cross entropy a float32 copy
        return _vocab(s) * (2 * s.element + 4) * tokens
    if not s.actor.entropy_from_logits_with_chunking:
        return _vocab(s) * 2 * s.element * tokens
    rows, copies = min(tokens, s.actor.entropy_from_logits_chunk_size), 2 if s.element == 4 else 3
    return _vocab(s) * (s.element * tokens + copies * 4 * rows)


def _vocab(s: Setup) -> float:
    """Return how many columns of the logits one GPU holds; 0 with fused kernels, which never materialise logits."""
    return 0.0 if s.fused else s.model.vocab / s.tp


def _gathered(s: Setup, gradients: bool) -> tuple[float, float]:
    """Return the bytes of unsharded weights and gradients under FSDP: (of the vocabulary projection, of the layers).

    Three copies of a layer's weights exist: the layer that computes, the prefetched next layer, and the all-gather's buffer.
    `gradients` adds the gradients of one layer, and float32 gradients of two layers in communication.
    """
    if s.megatron:
        return 0.0, 0.0
    e, trained = s.element, gradients and not s.lora_rank
    return (2 if trained else 1) * e * s.model.embedding, (3 * e + (e + 8 if trained else 0)) * s.model.layer


def _log_prob(s: Setup, tokens: float, chunk: float = 0.0) -> Parts:
    root, passing = _gathered(s, gradients=False)
    hidden = 2 * s.element * s.model.hidden / s.outer * tokens
    return {"activations": hidden, "logits": forward_logits(s, tokens), "OAR": chunk, "gathered": root + passing / 3}


def _importance(s: Setup) -> Parts:
    assert s.oar is not None
    importance, tokens, e = s.oar.importance_object, min(s.micro_batch(True), s.micro_batch(False)), s.element
    answers = s.answer_rows * tokens * s.sequence_ranks / s.mean_length if importance.backwards else 0.0
    rows = tokens if importance.reasoning_rows else answers
    # Tensors of one chunk of rows. In the model's dtype: logits, coefficients. With 4 bytes per element: logits, logits divided
    # by the temperature, softmax, its square root, random signs, the bits of the signs.
    chunk = (2 * e + 24) * min(CHUNK, rows) * s.model.vocab / s.tp
    if not importance.backwards:
        return _log_prob(s, tokens, chunk)
    root, passing = _gathered(s, gradients=False)
    head, layer = activations(s, trained=False)
    # An importance with noise runs a forward of its own.
    logits = 0.0 if importance.noisy else forward_logits(s, tokens)
    return _most(
        {"activations": head * tokens, "logits": logits, "OAR": chunk, "gathered": root + passing / 3},
        {"activations": layer * tokens, "OAR": e * s.model.hidden * tokens / s.outer, "gathered": root + passing},
    )


def _update(s: Setup, gradients: float) -> Parts:
    tokens, (root, passing) = s.micro_batch(True), _gathered(s, gradients=True)
    head, layer = activations(s, trained=True)
    # flash-attn's cross entropy overwrites the logits with their gradient; Megatron's also keeps a float32 softmax.
    logits = (s.element + (4 if s.megatron else 0)) * _vocab(s) * tokens
    return _most(
        {"activations": head * tokens, "logits": logits, "gathered": root + passing / 3},
        {"activations": layer * tokens, "gathered": root + passing},
        # The optimizer's step: torch's foreach AdamW allocates the square roots of all second moments at once.
        {"activations": 0.0 if s.megatron or s.engine.offload_policy else gradients},
    )


def _most(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def step_flops(s: Setup) -> dict[str, float]:
    """Return phase -> FLOPs over all GPUs, by verl's counter. OAR's phases count only the part of a pass that runs."""
    model, length = s.model, s.mean_length
    trained = model.training_flops(length)
    forward = trained / 3
    if s.lora_rank:  # the frozen weights get no gradients
        trained = forward + model.backward_flops(length) + model.head_flops(length)
    again = model.layers_flops(length) if s.recompute else 0.0
    if s.recompute and not s.megatron and not model.experts:  # torch does not recompute a layer's last projection
        again -= 2.0 * model.hidden * model.inner * model.layers * length
    decoding = model.layers_flops(length, s.mean_prompt) + model.head_flops(s.mean_response)
    flops = {
        GENERATION: sum(s.rounds) * (model.layers_flops(s.mean_prompt) / s.rollout.n + decoding),
        LOG_PROB: s.sequences * forward,
        REFERENCE: s.sequences * forward if s.actor.use_kl_loss or s.config.algorithm.use_kl_in_reward else 0.0,
        UPDATE: s.sequences * s.actor.ppo_epochs * (trained + again),
    }
    if s.oar is None:
        return flops
    importance, reasoning = s.oar.importance_object, max(1.0, s.mean_response - s.answer_rows)
    of = {"reasoning": reasoning, "later": reasoning + s.answer_rows}
    rows = [of.get(backward.rows, s.answer_rows) for backward in importance.backwards]
    added = s.extra_forwards * model.layers_flops(length) + s.oar.backwards * (model.backward_flops(length) + again)
    added += s.oar.num_draws * 2 * model.head_flops(sum(rows))
    if importance.reads and not any(backward.of_reasoning for backward in importance.backwards):
        added += (1 + len(importance.contexts)) * model.head_flops(reasoning)
    scored = s.sequences * s.scored_share
    copies = 0.0
    if s.oar.copies is not None:  # masked copies, and one forward of the unmasked response
        units = max(1.0, reasoning / s.oar.perturbation.span)
        number = s.oar.budget * units if s.oar.budget <= 1 else min(units, s.oar.budget)
        # With a shared prefix, a copy's forward starts at its first masked token: on average mid-way in the reasoning.
        start = s.mean_prompt + reasoning / 2 if s.oar.offloads or (s.ulysses == 1 and not s.fused) else 0.0
        copies = number * (model.layers_flops(length, start) + model.head_flops(s.answer_rows))
        copies += model.layers_flops(length)
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
    moved = s.model.adapters * s.lora_rank or s.model.parameters
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
    # FSDP gathers weights for each forward and backward, and reduces float32 gradients. Ulysses exchanges queries, keys, values
    # and outputs around attention.
    reduced = 4 * (model.adapters * s.lora_rank or model.parameters) if trains else 0.0
    gathered = (forwards + backwards) * e * model.parameters + reduced
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
    token_flops = model.layers_flops(2.0, 1.0) + model.head_flops(1)

    def token_seconds(running: float, seen: float) -> float:
        unvisited = (1 - model.visits / model.config.num_experts) ** running if model.experts else 0.0
        read = model.parameters - model.experts * unvisited
        reading = BYTES[s.rollout.dtype] * read / tp + running * seen * cache_bytes(s)
        latency = efficiency.decode_overhead_s + (2 * model.layers * efficiency.all_reduce_s if tp > 1 else 0.0)
        return max(reading / (gpu.bandwidth * 1e9 * efficiency.decoding), running * token_flops / compute) + latency

    prefill = sequences / s.rollout.n * model.layers_flops(s.mean_prompt) / (engines * compute)
    waves = sequences / engines / together
    steady = waves * s.mean_response * token_seconds(together, s.mean_prompt + s.mean_response / 2)
    return prefill + steady + (s.max_response - s.mean_response) * token_seconds(together / 4, s.mean_length)
