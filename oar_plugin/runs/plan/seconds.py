"""FLOPs and seconds of each phase of a step, by a roofline model of arithmetic, memory and links at assumed efficiencies."""

import math

from oar_plugin.runs.plan.hardware import GATE_SECONDS_PER_TOKEN, Efficiency, Gpu
from oar_plugin.runs.plan.memory import cache_bytes, cached_tokens, local_parameters
from oar_plugin.runs.plan.setup import BYTES, Setup

GENERATION, LOG_PROB, REFERENCE, UPDATE, SYNC = "generation", "log-probs", "reference", "update", "weight sync"
IMPORTANCE, COPIES, GATE = OAR = ("OAR: importance", "OAR: masked copies", "OAR: gate")


def step_flops(s: Setup) -> dict[str, float]:
    """Return phase -> FLOPs over all GPUs, by verl's counter; OAR's phases sum the parts of passes that they run."""
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
        GENERATION: s.prompts * model.layers_flops(s.mean_prompt) + s.sequences * decoding,
        LOG_PROB: s.sequences * forward,
        REFERENCE: s.sequences * forward if s.actor.use_kl_loss or s.config.algorithm.use_kl_in_reward else 0.0,
        UPDATE: s.sequences * s.actor.ppo_epochs * (trained + again),
    }
    if s.oar is None:
        return flops
    importance, reasoning = s.oar.importance_object, max(1.0, s.mean_response - s.answer_rows)
    of = {"reasoning": reasoning, "later": reasoning + s.answer_rows}
    rows = [of.get(backward.rows, s.answer_rows) for backward in importance.backwards]
    added = s.oar.extra_forwards * model.layers_flops(length) + s.oar.backwards * (model.backward_flops(length) + again)
    added += s.oar.num_draws * 2 * model.head_flops(sum(rows))
    if importance.reads and not any(backward.of_reasoning for backward in importance.backwards):
        added += model.head_flops(reasoning)
    scored = s.sequences * s.scored_share
    copies = 0.0
    if s.oar.copies is not None:  # masked copies, and one forward of the unmasked response
        units = max(1.0, reasoning / s.oar.perturbation.span)
        number = s.oar.budget * units if s.oar.budget <= 1 else min(units, s.oar.budget)
        # With a shared prefix a copy is computed from its first masked token on, on average the middle of the reasoning.
        start = s.mean_prompt + reasoning / 2 if s.oar.offloads or s.ulysses == 1 else 0.0
        copies = number * (model.layers_flops(length, start) + model.head_flops(s.answer_rows)) + model.layers_flops(
            length
        )
    return flops | {IMPORTANCE: scored * added, COPIES: scored * copies}


def step_seconds(s: Setup, gpu: Gpu, efficiency: Efficiency) -> dict[str, float]:
    """Return phase -> seconds of one step."""
    flops, oar = step_flops(s), s.oar
    generation = generation_seconds(s, gpu, efficiency, s.sequences)

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
        return max(arithmetic, states) + _link(s, gpu, efficiency, waited, s.tp * s.ulysses)

    seconds = {GENERATION: generation, LOG_PROB: trainer(LOG_PROB, efficiency.inference, 1.0, 1, 0)}
    if flops[REFERENCE]:
        seconds[REFERENCE] = seconds[LOG_PROB]
    if oar is not None:
        if flops[IMPORTANCE]:
            rate = efficiency.training if oar.backwards else efficiency.inference
            seconds[IMPORTANCE] = trainer(IMPORTANCE, rate, s.scored_share, oar.extra_forwards, oar.backwards)
        if flops[COPIES]:
            hidden = oar.perturbation.share_while_generating * generation if oar.offloads else 0.0
            rate = (s.rollout_gpus if oar.offloads else s.gpus) * gpu.tflops * 1e12 * efficiency.inference
            seconds[COPIES] = max(0.0, flops[COPIES] / rate - hidden)
        seconds[GATE] = GATE_SECONDS_PER_TOKEN * s.sequences * s.max_response
    seconds[UPDATE] = trainer(UPDATE, efficiency.training, s.actor.ppo_epochs, 1, 1)
    # Weight sync: every trainer rank gathers the whole model; engines on other GPUs receive it over the network.
    moved, ranks = s.model.adapters * s.lora_rank or s.model.parameters, s.tp * s.pp if s.megatron else s.shards
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
        states = s.updates * (4 + s.weight_bytes) * local_parameters(s) * _ring(s.gpus // (s.tp * s.pp))
        again = 0.5 if trains and s.outer > 1 else 0.0
        stream = model.layers / s.pp * 4 * e * tokens * model.hidden * _ring(s.tp)
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
