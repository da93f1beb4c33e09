"""Bytes of one GPU by phase of a step, at a full micro-batch of the longest sequences.

States follow ZeRO (arXiv 1910.02054, section 3): FSDP divides weights, gradients and Adam's two moments, of one type, over the
shards; Megatron keeps 2 + 4 bytes per weight of its part of the model, and divides 12 over the data-parallel ranks.
Activations are counted by tensor. transformers' norms work in float32 and its MLP saves three products; Megatron fuses both
(arXiv 2205.05198, section 4). An importance pass freezes the weights, so nothing is saved for their gradients.
"""

from oar_plugin.passes.rows import CHUNK
from oar_plugin.runs.plan.hardware import CONTEXT, ENGINE_OVERHEAD, TRAINER_OVERHEAD, Gpu
from oar_plugin.runs.plan.setup import BYTES, Setup

Parts = dict[str, float]  # part (weights, logits, ...) -> bytes


def step_memory(s: Setup, gpu: Gpu) -> dict[str, Parts]:
    """Return the parts by phase. Weight sync needs less than generation, masked copies less than log-probs: left out."""
    weights, gradients, optimizer = states(s)
    on_cpu = s.actor.strategy == "fsdp2" and s.engine.offload_policy
    updating: Parts = {} if on_cpu else {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    # Megatron's gradient buffers exist while its weights are on the GPU; FSDP's only during the update.
    waiting = updating | {"gradients": gradients if s.megatron and not s.engine.param_offload else 0.0}
    waiting |= {"optimizer": 0.0} if s.engine.optimizer_offload else {}
    engine, context = engine_memory(s, gpu), {"other": CONTEXT}
    trainer = {"other": CONTEXT + TRAINER_OVERHEAD} | (
        engine if s.colocated and not s.rollout.free_cache_engine else {}
    )
    phases = {"generation, GPUs of its own": engine | context} if s.dedicated else {}
    if s.colocated:
        phases["generation"] = waiting | ({"weights": 0.0} if s.engine.param_offload else {}) | engine | context
    phases["log-probs"] = waiting | _log_prob(s, s.micro_batch(False)) | trainer
    if s.oar is not None and s.oar.importance_object.forwards(s.oar.num_draws):
        phases[f"importance ({s.oar.importance})"] = waiting | _importance(s) | trainer
    phases["update"] = updating | _update(s, gradients) | trainer
    return phases


def local_parameters(s: Setup) -> float:
    """Return the parameters of the largest Megatron rank: its layers, and embedding or vocabulary projection."""
    embeddings = 1 if s.model.config.tie_word_embeddings else 2
    layers = s.model.parameters - embeddings * s.model.embedding
    return (layers / s.pp + s.model.embedding * (embeddings if s.pp == 1 else 1)) / s.tp


def states(s: Setup) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer while all of them are on the GPU."""
    w, adapters = s.weight_bytes, s.model.adapters * s.lora_rank
    held = local_parameters(s) if s.megatron else s.model.parameters / s.shards
    trained = adapters / (s.tp * s.pp if s.megatron else s.shards) if adapters else held
    weights = w * (held + (trained if adapters else 0.0))
    if s.megatron:
        replicas = s.gpus / (s.tp * s.pp) if s.engine.use_distributed_optimizer else 1
        return weights, 4 * trained, 12 * trained / replicas
    return weights, w * trained, 2 * w * trained


def cache_bytes(s: Setup) -> float:
    """Return the bytes of a token's keys and values on one GPU of an engine; heads are copied where ranks are more."""
    heads = max(1, s.model.kv_heads // s.rollout.tensor_model_parallel_size)
    return 2.0 * s.model.layers * heads * s.model.head_dim * BYTES[s.rollout.dtype]


def cached_tokens(s: Setup, gpu: Gpu) -> float:
    """Return how many tokens the cache of one engine holds."""
    return engine_memory(s, gpu)["KV cache"] / cache_bytes(s) * s.replica / s.rollout.tensor_model_parallel_size


def engine_memory(s: Setup, gpu: Gpu) -> Parts:
    """Return vLLM's weights with its workspace, and the cache, which gets the rest of its share."""
    e, tp = BYTES[s.rollout.dtype], s.rollout.tensor_model_parallel_size
    working = s.rollout.max_num_batched_tokens * e * (4 * s.model.hidden + 3 * s.model.inner / tp)
    # float32 logits of all sequences are sorted and normalised.
    sampling = 3 * 4.0 * s.rollout.max_num_seqs * s.model.vocab
    used = e * s.model.parameters / tp + working + sampling + ENGINE_OVERHEAD
    return {"vLLM": used, "KV cache": max(0.0, s.rollout.gpu_memory_utilization * gpu.memory - used)}


def activations(s: Setup, trained: bool) -> tuple[float, float]:
    """Return bytes per token of an update (`trained`) or importance pass: after the forward, in the last layer's backward."""
    e, model, entry = s.element, s.model, s.element * s.model.hidden / s.outer
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # A norm's float32 input, and the normalised values where its scale is trained.
    norm = e if s.megatron else 4 + (e if trained and not s.lora_rank else 0)
    inputs = e * model.hidden if trained else 0  # of the projections
    outside = 2 * (norm * model.hidden + inputs)
    attention = e * (2 * query + 2 * key) + 4 * model.heads  # queries, keys, values, output, a float32 per head
    if model.config.model_type.startswith("qwen3"):
        attention += norm * (query + key)
    if model.experts:
        outside += e * model.visits * model.hidden * (1 + trained) + (e + 4) * model.config.num_experts
    products = (2 if s.megatron else 3) + trained
    layer = outside / s.outer + (attention + e * products * model.inner) / s.tp
    final = norm * model.hidden / s.outer + (entry if trained else 0)
    # Gradients of residual, product, gate and up; the last product is free by then.
    going_back = entry + (3 - trained) * e * model.inner / s.tp
    # One forward, one backward: the first stage keeps one micro-batch per stage (arXiv 2104.04473, 2.2).
    kept = s.pp * (model.layers // s.pp) * (entry if s.recompute else layer)
    return kept + final, kept + going_back + (layer if s.recompute else 0)


def forward_logits(s: Setup, tokens: float) -> float:
    """Return the bytes of a log-prob pass's logits and entropy: a copy, or float32 copies of some rows at a time."""
    if s.megatron:  # clones the logits for the entropy; its cross entropy takes a float32 copy
        return _vocab(s) * (2 * s.element + 4) * tokens
    if not s.actor.entropy_from_logits_with_chunking:
        return _vocab(s) * 2 * s.element * tokens
    rows, copies = min(tokens, s.actor.entropy_from_logits_chunk_size), 2 if s.element == 4 else 3
    return _vocab(s) * (s.element * tokens + copies * 4 * rows)


def _vocab(s: Setup) -> float:
    """Return the columns of the logits on one GPU; 0 with kernels that never form them."""
    return 0.0 if s.config.actor_rollout_ref.model.use_fused_kernels else s.model.vocab / s.tp


def _gathered(s: Setup, gradients: bool) -> tuple[float, float]:
    """Return the bytes of FSDP's gathered weights and gradients: of the root (vocabulary projection), and of layers.

    One layer computes, the next is gathered, one buffer is the source; two gradients are in flight in float32.
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
    # Of a chunk of rows: logits and coefficients; in float32 logits, at a temperature, softmax, its root, signs and their bits.
    chunk = (2 * e + 24) * min(CHUNK, rows) * _vocab(s)
    if not importance.backwards:
        return _log_prob(s, tokens, chunk)
    root, passing = _gathered(s, gradients=False)
    head, layer = activations(s, trained=False)
    logits = 0.0 if importance.noisy else forward_logits(s, tokens)  # a perturbed forward follows the host's
    return _most(
        {"activations": head * tokens, "logits": logits, "OAR": chunk, "gathered": root + passing / 3},
        {"activations": layer * tokens, "OAR": e * s.model.hidden * tokens / s.outer, "gathered": root + passing},
    )


def _update(s: Setup, gradients: float) -> Parts:
    tokens, (root, passing) = s.micro_batch(True), _gathered(s, gradients=True)
    head, layer = activations(s, trained=True)
    # Flash attention's cross entropy writes the gradient over the logits; Megatron's keeps a float32 softmax beside them.
    logits = (s.element + (4 if s.megatron else 0)) * _vocab(s) * tokens
    return _most(
        {"activations": head * tokens, "logits": logits, "gathered": root + passing / 3},
        {"activations": layer * tokens, "gathered": root + passing},
        # The optimizer's step: torch's foreach AdamW takes the root of the second moment of all weights at once.
        {"activations": 0.0 if s.megatron or s.engine.offload_policy else gradients},
    )


def _most(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))
