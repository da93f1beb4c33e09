"""The plan of a run: memory and seconds by phase, hours, what OAR adds, and whether it fits.

Memory is that of one GPU, in bytes, for a full micro-batch of sequences of the maximum length. Model states follow ZeRO (arXiv
1910.02054, section 3). FLOPs, and FSDP's activations and traffic, were counted; Megatron's are computed, tensor by tensor
(arXiv 2205.05198, section 4). Seconds follow a roofline model of arithmetic, memory and links at assumed efficiencies.
"""

import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.hosts.verl.settings import resolve, switched_on, trainer_of
from oar_plugin.runs.plan import hardware
from oar_plugin.runs.plan.hardware import EXPECTED, GIB, Efficiency, Gpu
from oar_plugin.runs.plan.known import KNOWN, PlanError, counts, load_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GENERATION, LOG_PROB, REFERENCE, UPDATE, SYNC = "generation", "log-probs", "reference", "update", "weight sync"
IMPORTANCE, COPIES, GATE = OAR = ("OAR: importance", "OAR: masked copies", "OAR: gate")
TEMPORARY = "temporary"  # the part of memory with activations, logits, gathered weights
COUNTED_RANKS = 8  # most FSDP ranks that are counted: with more, only a rank's share of the states is smaller
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
Parts = dict[str, float]  # name of a part (weights, ...) -> bytes


def training_steps(config: DictConfig) -> int | None:
    """Return the number of steps in the whole run; None if the number of training rows is unknown."""
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    rows = _rows(config.data.train_files)
    return None if rows is None else rows // config.data.train_batch_size * config.trainer.total_epochs


def _rows(files: Any) -> int | None:
    """Return the number of rows in parquet files, by `known.yaml` if one is missing or broken; None: unknown."""
    paths = [Path(file) for file in ([files] if isinstance(files, str) else files)]
    if paths and all(path.is_file() for path in paths):
        import pyarrow.parquet

        with suppress(OSError, ValueError):  # an incomplete download; `oar launch` and `oar doctor` report it
            return sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)
    known = [KNOWN["rows"].get(f"{path.parent.name}/{path.stem}") for path in paths]
    return None if None in known else sum(known)


class Setup:
    """The work and the parallel layout of a composed configuration. Raise PlanError if it cannot run, or is not known."""

    def __init__(self, config: DictConfig, response: float | None, scored: float) -> None:
        data, trainer, host = config.data, config.trainer, config.actor_rollout_ref
        self.config, self.actor, self.rollout = config, host.actor, host.rollout
        self.megatron: bool = host.actor.strategy == "megatron"
        if host.actor.strategy not in ("fsdp", "fsdp2", "megatron"):
            raise PlanError(f"{ACTOR}.strategy={host.actor.strategy}: allowed: fsdp, fsdp2, megatron")
        if response is not None and response > data.max_response_length:
            raise PlanError(f"--response-length {response:g}: must be above 0 and at most {data.max_response_length}")
        self.group = f"{ACTOR}.megatron" if self.megatron else f"{ACTOR}.fsdp_config"  # keys of the trainer's engine
        self.engine, self.model = OmegaConf.select(config, self.group), load_model(str(host.model.path))
        self.oar = resolve(config) if switched_on(config) else None  # None for a run without OAR
        # The log-prob passes of its contexts. With router replay, verl records routes in a forward without a backward.
        self.extra_forwards = 0
        if self.oar is not None:
            importance, replays = (
                self.oar.importance_object,
                OmegaConf.select(config, f"{self.group}.router_replay.mode"),
            )
            self.extra_forwards = self.oar.extra_forwards + len(importance.contexts)
            self.extra_forwards += replays == "R2" and any(
                one.backward is not None for one in importance.forwards(1)[:1]
            )
        # ---- the work of a step
        self.sequences: int = data.train_batch_size * self.rollout.n
        self.updates: int = max(1, data.train_batch_size // self.actor.ppo_mini_batch_size) * self.actor.ppo_epochs
        self.max_response, self.max_length = data.max_response_length, data.max_prompt_length + data.max_response_length
        self.mean_prompt = data.max_prompt_length * hardware.MEAN_PROMPT
        self.mean_response = float(response or self.max_response * hardware.MEAN_RESPONSE)
        self.length = self.mean_prompt + self.mean_response
        # Responses generated for a step. algorithm.filter_groups replaces groups without an advantage, so all of the batch is
        # scored. Assumed: in one more round, of as many as are missing.
        filtered = bool(OmegaConf.select(config, "algorithm.filter_groups.enable"))
        self.rounds = [float(self.sequences)] + [self.sequences * (1 / scored - 1)] * filtered
        self.scored_share = 1.0 if filtered else scored
        # ---- the whole run: steps, validations, and responses generated by one of them; None: unknown
        self.steps, rows = training_steps(config), _rows(data.val_files)
        self.validations = math.ceil((self.steps or 0) / trainer.test_freq) if trainer.test_freq > 0 else 0
        self.validations += trainer.val_before_train
        self.validated = None if rows is None else rows * self.rollout.val_kwargs.n
        # ---- the trainer's layout
        self.gpus: int = trainer.nnodes * trainer.n_gpus_per_node
        self.tp = self.pp = self.cp = self.ep = self.etp = self.ulysses = self.shards = 1
        self.recompute: bool = host.model.enable_gradient_checkpointing  # recompute activations, layer by layer
        if self.megatron:
            kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
            self.tp, self.pp, self.cp, self.ep = (self.engine[f"{kind}_parallel_size"] for kind in kinds)
            self.etp = self.engine.expert_tensor_parallel_size or self.tp  # ranks that split an expert
            self.recompute = self.engine.override_transformer_config.get("recompute_granularity") == "full"
        else:  # verl copies the actor's value to fsdp_config, from which the engine reads it
            self.ulysses = max(self.actor.ulysses_sequence_parallel_size, self.engine.ulysses_sequence_parallel_size)
            self.shards = self.engine.fsdp_size if 1 <= self.engine.fsdp_size <= self.gpus else self.gpus
        # Ranks that split the tokens of a micro-batch; verl multiplies the token budget of a GPU by their number.
        self.sequence_ranks = self.cp * self.ulysses
        self.dp = self.gpus // (self.tp * self.pp * self.sequence_ranks)
        # Sequence parallelism splits activations outside attention and MLP over the tensor-parallel ranks.
        self.outer = self.tp if self.megatron and self.engine.sequence_parallel else 1
        # Bytes of a stored weight (under FSDP also of its gradient and of each Adam moment), and of an activation's element.
        self.weight = BYTES[self.engine.dtype if self.megatron else self.engine.model_dtype]
        self.element, self.fused = BYTES[self.engine.dtype], bool(host.model.use_fused_kernels)
        self.lora_rank: int = host.model.lora.rank or host.model.lora_rank  # 0: full training
        # ---- generation; in `separate_async` on GPUs of its own, overlapping with training
        self.dedicated, self.engine_tp = trainer_of(config) == "separate_async", self.rollout.tensor_model_parallel_size
        self.colocated: bool = not self.dedicated or host.hybrid_engine
        self.rollout_gpus: int = self.rollout.nnodes * self.rollout.n_gpus_per_node if self.dedicated else self.gpus
        self.replica = self.engine_tp * self.rollout.pipeline_model_parallel_size * self.rollout.data_parallel_size
        _check(self)
        work = {"model": self.model.dimensions, "recompute": self.recompute, "lora_rank": self.lora_rank}
        work["whole_layers"] = self.recompute and self.megatron
        # Width of the MLP; in a mixture of experts, the summed width of one token's experts.
        self.inner = self.model.num_experts_per_tok * self.model.moe_intermediate_size or self.model.intermediate_size
        self.work = partial(counts, "Work", self.model.num_hidden_layers, **work)
        self.parameters = self.work()["parameters"]  # "experts", "embedding", "trained" and, without adapters, "all"
        self.parameters["all"] -= self.parameters["trained"] if self.lora_rank else 0.0

    def flops(self, name: str, length: float, start: float = 0.0) -> float:
        """Return the FLOPs on tokens `start` to `length` of a sequence: of a phase, or the forward of "layers" or "head"."""
        return self.work(length=length)["flops"][name] - (self.work(length=start)["flops"][name] if start else 0.0)

    def memory(self, update: bool) -> dict[str, Parts]:
        """Return phase -> part -> bytes of an FSDP rank, and "sent", in micro-batches of the update or of log-probs."""
        chunked = self.actor.entropy_from_logits_with_chunking and not self.fused
        shape: dict[str, Any] = {"model": self.model.dimensions, "tokens": int(self.micro_batch(update))}
        shape |= {"weights": "fp32" if self.weight == 4 else "bf16", "element": "fp32" if self.element == 4 else "bf16"}
        shape |= {"recompute": self.recompute, "fused": self.fused, "lora_rank": self.lora_rank}
        shape["entropy_rows"] = self.actor.entropy_from_logits_chunk_size if chunked else 0
        return counts("Memory", self.model.num_hidden_layers, **shape, shards=min(self.shards, COUNTED_RANKS))

    def micro_batch(self, update: bool) -> float:
        """Return the maximum number of tokens in a micro-batch on one GPU, for the update or for the log-prob pass."""
        length, steps = self.max_length / self.sequence_ranks, self.updates / self.actor.ppo_epochs if update else 1
        if not self.actor.use_dynamic_bsz:
            rows = self.actor.ppo_micro_batch_size_per_gpu if update else self.rollout.log_prob_micro_batch_size_per_gpu
            if rows is None:
                raise PlanError("use_dynamic_bsz=False: ppo_ and log_prob_micro_batch_size_per_gpu must be set")
            return float(rows * length)
        budget = self.actor.ppo_max_token_len_per_gpu if update else self.rollout.log_prob_max_token_len_per_gpu
        # A micro-batch cannot hold more tokens than its rank has in total.
        return float(min(budget, math.ceil(self.sequences / steps / self.dp) * length))


def _check(s: Setup) -> None:
    """Raise PlanError with a line for each key that would end the run on its GPUs, unless verl checks it before."""
    m, engine = s.model, s.group

    def divisors(*numbers: int) -> list[int]:
        return [size for size in range(1, min(numbers) + 1) if not any(number % size for number in numbers)]

    def splits(gpus: int) -> list[int]:
        kv_heads = m.num_key_value_heads
        return [n for n in divisors(gpus, m.num_attention_heads) if kv_heads % n == 0 or n % kv_heads == 0]

    allowed: dict[str, list[Any]] = {f"{ACTOR}.ppo_mini_batch_size": divisors(s.config.data.train_batch_size)}
    allowed[f"{ROLLOUT}.tensor_model_parallel_size"] = splits(s.rollout_gpus)
    if s.megatron:
        allowed[f"{engine}.tensor_model_parallel_size"] = [n for n in splits(s.gpus) if m.vocab_size % n == 0]
        allowed[f"{engine}.pipeline_model_parallel_size"] = divisors(m.num_hidden_layers, max(1, s.gpus // s.tp))
        allowed[f"{engine}.context_parallel_size"] = divisors(max(1, s.gpus // (s.tp * s.pp)))
        allowed[f"{engine}.expert_model_parallel_size"] = divisors(m.num_experts or 1, max(1, s.gpus // (s.pp * s.etp)))
    else:
        allowed[f"{ACTOR}.ulysses_sequence_parallel_size"] = splits(s.gpus)
    allowed[f"{ROLLOUT}.dtype"] = list(BYTES)
    values = {key: OmegaConf.select(s.config, key) for key in allowed}
    wrong = {key: ", ".join(map(str, some)) for key, some in allowed.items() if values[key] not in some}
    faults = [f"{key}={values[key]}: allowed: {some}" for key, some in wrong.items()]
    ranks, mini = s.dp // math.gcd(s.dp, s.rollout.n), s.actor.ppo_mini_batch_size
    if ranks and mini % ranks:  # then it divides the batch too
        faults.append(f"{ACTOR}.ppo_mini_batch_size={mini}: allowed: multiples of {ranks}")
    budget = math.ceil(s.max_length / s.sequence_ranks) if s.actor.use_dynamic_bsz else 0
    least = {f"{ACTOR}.ppo_max_token_len_per_gpu": budget, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": budget}
    for key, number in {**least, f"{ROLLOUT}.max_model_len": s.max_length}.items():
        if (value := OmegaConf.select(s.config, key)) is not None and value < number:
            faults.append(f"{key}={value}: allowed: at least {number}")
    if s.max_length > m.max_position_embeddings:
        longest = m.max_position_embeddings - s.max_length + s.max_response
        faults.append(f"data.max_response_length={s.max_response}: allowed for {m.name}: at most {longest}")
    if faults:
        raise PlanError("\n".join(faults))


# ---- memory


def step_memory(s: Setup, gpu: Gpu) -> dict[str, Parts]:
    """Return phase -> parts. Weight sync needs less memory than generation, masked copies less than log-probs."""
    on_cpu = s.actor.strategy == "fsdp2" and s.engine.offload_policy
    updating = {} if on_cpu else dict(zip(("weights", "gradients", "optimizer"), states(s), strict=True))
    # Megatron's gradient buffers are where its weights are; FSDP's gradients exist only during the update.
    waiting = updating | ({} if s.megatron and not s.engine.param_offload else {"gradients": 0.0})
    waiting |= {"optimizer": 0.0} if s.engine.optimizer_offload else {}
    engine, trainer = engine_memory(s, gpu), {"other": hardware.CONTEXT}
    phases = {"generation, GPUs of its own": engine | trainer} if s.dedicated else {}
    if s.colocated:
        phases["generation"] = waiting | ({"weights": 0.0} if s.engine.param_offload else {}) | engine | trainer
        trainer |= {} if s.rollout.free_cache_engine else engine
    phases[LOG_PROB] = waiting | trainer | {TEMPORARY: _temporary(s, LOG_PROB, False)}
    if s.oar is not None and (forwards := s.oar.importance_object.forwards(1)):
        # Its micro-batches have the smaller of the two sizes. Without a backward it is a log-prob pass.
        phase = "importance" if any(forward.backward is not None for forward in forwards) else LOG_PROB
        size = _temporary(s, phase, s.micro_batch(True) < s.micro_batch(False))
        phases[f"importance ({s.oar.importance})"] = waiting | trainer | {TEMPORARY: size}
    phases[UPDATE] = updating | trainer | {TEMPORARY: _temporary(s, UPDATE, True)}
    return phases


def local_parameters(s: Setup) -> dict[int, float]:
    """Return the number of parameters on the largest rank, by the number of ranks that split a pipeline stage's."""
    if not s.megatron:
        return {s.shards: s.parameters["all"] / s.shards}
    all_, embedding, experts = (s.parameters[name] for name in ("all", "embedding", "experts"))
    ends = 1 if s.model.tie_word_embeddings else 2
    # Tensor-parallel ranks split layers, and embedding or vocabulary projection; expert-parallel ranks split experts.
    local = {s.tp: ((all_ - experts - ends * embedding) / s.pp + embedding * (ends if s.pp == 1 else 1)) / s.tp}
    local[s.ep * s.etp] = local.get(s.ep * s.etp, 0.0) + experts / s.pp / (s.ep * s.etp)
    return local


def states(s: Setup) -> tuple[float, float, float]:
    """Return the bytes of (weights, gradients, optimizer) on one GPU, with nothing offloaded."""
    held = sum(local_parameters(s).values())
    adapters = s.parameters["trained"] / (s.tp * s.pp * s.shards) if s.lora_rank else 0.0
    weights, trained = s.weight * (held + adapters), adapters or held
    if not s.megatron:
        return weights, s.weight * trained, 2 * s.weight * trained
    # The ranks that hold the same parameters share their moments.
    shared = sum(number * ranks * s.pp / s.gpus for ranks, number in local_parameters(s).items()) / held
    return weights, 4 * trained, 12 * trained * (shared if s.engine.use_distributed_optimizer else 1)


def cache_bytes(s: Setup) -> float:
    """Return the bytes of a token's keys and values on one GPU; with more ranks than key-value heads, each has one head."""
    heads = max(1, s.model.num_key_value_heads // s.engine_tp)
    return 2.0 * s.model.num_hidden_layers * heads * s.model.head_dim * BYTES[s.rollout.dtype]


def engine_memory(s: Setup, gpu: Gpu) -> Parts:
    """Return the bytes of one GPU that vLLM uses for weights and workspace, and the rest of its share: the KV cache."""
    working = s.rollout.max_num_batched_tokens * (4 * s.model.hidden_size + 3 * s.inner / s.engine_tp)
    # The sampler holds float32 logits of all sequences, and sorts and normalises them.
    sampling = 3 * 4.0 * s.rollout.max_num_seqs * s.model.vocab_size
    used = BYTES[s.rollout.dtype] * (s.parameters["all"] / s.engine_tp + working) + sampling + hardware.ENGINE_OVERHEAD
    return {"vLLM": used, "KV cache": max(0.0, s.rollout.gpu_memory_utilization * gpu.memory - used)}


def cached_tokens(s: Setup, gpu: Gpu) -> float:
    """Return how many tokens fit into the KV cache of one engine."""
    return engine_memory(s, gpu)["KV cache"] / cache_bytes(s) * s.replica / s.engine_tp


def _temporary(s: Setup, phase: str, update: bool) -> float:
    """Return the peak of a phase's temporary tensors in bytes, in micro-batches of the update or of log-probs."""
    e, m, trained = s.element, s.model, phase == UPDATE
    if not s.megatron:
        parts = s.memory(update)[phase]
        if trained:  # the optimizer's temporary tensors are a rank's share of the weights
            parts["optimizer"] *= 0.0 if s.engine.offload_policy else min(s.shards, COUNTED_RANKS) / s.shards
        return max(parts.values())
    entry = e * m.hidden_size / s.outer
    # The entropy needs a copy of the logits, the cross entropy a float32 copy. The chunks of importance are smaller.
    logits = 0.0 if s.fused else (e + 4 if trained else 2 * e + 4) * m.vocab_size / s.tp
    if phase == LOG_PROB:
        return (2 * entry + logits) * s.micro_batch(update)
    query, key = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    # Inputs of norms; inputs of the linear layers for weight gradients, which an importance pass does not have.
    outside = 2 * e * m.hidden_size * (1 + trained)
    if m.num_experts:  # an expert that is split over ranks gets its tokens on each of them
        outside += e * m.num_experts_per_tok * m.hidden_size * (1 + trained) * s.etp + (e + 4) * m.num_experts
    # Queries, output, keys, values; a float32 per head; Qwen3 normalises queries and keys.
    attention = e * (query + key) * (3 if m.model_type.startswith("qwen3") else 2) + 4 * m.num_attention_heads
    layer = outside / s.outer + (attention + e * (2 + trained) * s.inner) / s.tp
    # Gradients of the residual stream and in the MLP, whose last product has been freed by then.
    going_back = entry + (3 - trained) * e * s.inner / s.tp + (layer if s.recompute else 0)
    # In the 1F1B schedule the first stage holds one micro-batch per pipeline stage (arXiv 2104.04473, section 2.2).
    kept = s.pp * (m.num_hidden_layers // s.pp) * (entry if s.recompute else layer)
    return (kept + max(entry * (1 + trained) + logits, going_back)) * s.micro_batch(update)


# ---- FLOPs and seconds


def step_flops(s: Setup) -> dict[str, float]:
    """Return phase -> FLOPs over all GPUs. OAR's phases count only the part of a pass that runs."""
    passed, layers = s.flops(LOG_PROB, s.length), s.flops("layers", s.length)
    decoding = s.flops("layers", s.length, s.mean_prompt) + s.flops("head", s.mean_response)
    flops = {
        GENERATION: sum(s.rounds) * (s.flops("layers", s.mean_prompt) / s.rollout.n + decoding),
        LOG_PROB: s.sequences * passed,
        UPDATE: s.sequences * s.actor.ppo_epochs * s.flops(UPDATE, s.length),
    }
    if s.actor.use_kl_loss or s.config.algorithm.use_kl_in_reward:
        flops[REFERENCE] = flops[LOG_PROB]
    if s.oar is None:
        return flops
    answer = 1 if s.oar.probe == "last" else hardware.ANSWER  # rows that the probe reads
    importance, reasoning, scored = (
        s.oar.importance_object,
        max(1.0, s.mean_response - answer),
        s.sequences * s.scored_share,
    )
    rows = {"reasoning": reasoning, "later": reasoning + answer}
    added = s.extra_forwards * layers + s.oar.backwards * (s.flops("importance", s.length) - passed)
    added += s.oar.num_draws * 2 * s.flops("head", sum(rows.get(one.rows, answer) for one in importance.backwards))
    if importance.reads and not any(backward.of_reasoning for backward in importance.backwards):
        added += s.flops("head", reasoning)
    added += len(importance.contexts) * s.flops("head", s.length)
    flops |= {IMPORTANCE: scored * added} if added else {}
    if s.oar.copies is not None:  # masked copies, and one forward of the unmasked response
        units = max(1.0, reasoning / s.oar.perturbation.span)
        number = s.oar.budget * units if s.oar.budget <= 1 else min(units, s.oar.budget)
        # With a shared prefix, a copy's forward starts at its first masked token: on average mid-way in the reasoning.
        start = s.mean_prompt + reasoning / 2 if s.oar.offloads or (s.ulysses == 1 and not s.fused) else 0.0
        flops[COPIES] = scored * (number * (s.flops("layers", s.length, start) + s.flops("head", answer)) + layers)
    return flops


def step_seconds(s: Setup, gpu: Gpu, efficiency: Efficiency) -> dict[str, float]:
    """Return phase -> seconds of one step."""
    flops, oar, peak = step_flops(s), s.oar, gpu.tflops * 1e12

    def link(sent: float, group: int) -> float:  # at link speed if the group fits one node, else at network speed
        speed = gpu.link if group <= s.config.trainer.n_gpus_per_node else gpu.network
        return sent / (speed * 1e9 * efficiency.link)

    def trainer(phase: str, rate: float, share: float, forwards: float, backwards: float) -> float:
        tokens, steps = s.sequences * s.length * share / s.dp / s.sequence_ranks, s.updates if phase == UPDATE else 1
        micro_batches = max(1, steps * math.ceil(tokens / steps / s.micro_batch(phase == UPDATE)))
        # The last factor adds the pipeline bubble (arXiv 2104.04473, section 2.2).
        arithmetic = flops[phase] / (s.gpus * peak * rate) * (1 + (s.pp - 1) / micro_batches)
        # Communication of FSDP and of the optimizer overlaps with arithmetic.
        overlapped, waited = _sent(s, tokens, micro_batches, forwards, backwards, phase == UPDATE)
        overlapped = link(overlapped, s.gpus if s.megatron else s.shards)
        return max(arithmetic, overlapped) + link(waited, max(s.tp * s.ulysses, s.ep * s.etp))

    seconds = {
        GENERATION: sum(generation_seconds(s, gpu, efficiency, sequences) for sequences in s.rounds if sequences)
    }
    seconds[LOG_PROB] = trainer(LOG_PROB, efficiency.inference, 1.0, 1, 0)
    if REFERENCE in flops:
        seconds[REFERENCE] = seconds[LOG_PROB]
    if oar is not None:
        if IMPORTANCE in flops:
            rate = efficiency.training if oar.backwards else efficiency.inference
            seconds[IMPORTANCE] = trainer(IMPORTANCE, rate, s.scored_share, s.extra_forwards, oar.backwards)
        if COPIES in flops:
            hidden = oar.perturbation.share_while_generating * seconds[GENERATION] if oar.offloads else 0.0
            gpus = s.rollout_gpus if oar.offloads else s.gpus
            seconds[COPIES] = max(0.0, flops[COPIES] / (gpus * peak * efficiency.inference) - hidden)
        gate = hardware.GATE_SECONDS_PER_TOKEN / s.dp + hardware.DRIVER_SECONDS_PER_TOKEN
        seconds[GATE] = gate * s.sequences * s.max_response
    seconds[UPDATE] = trainer(UPDATE, efficiency.training, s.actor.ppo_epochs, 1, 1)
    # Weight sync: every trainer rank gathers the whole model; engines on other GPUs receive it over the network.
    moved, ranks = s.parameters["trained"], s.pp * max(s.tp, s.ep * s.etp) if s.megatron else s.shards
    seconds[SYNC] = link(s.weight * moved * _ring(ranks), ranks)
    if s.dedicated:
        seconds[SYNC] += link(BYTES[s.rollout.dtype] * moved, s.gpus + s.rollout_gpus)
    return seconds


def _ring(ranks: int) -> float:
    """Return the share of a tensor that a rank sends in an all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def _sent(s: Setup, tokens: float, count: int, forwards: float, backwards: float, trains: bool) -> tuple[float, float]:
    """Return the bytes that a GPU sends in `count` micro-batches: (overlapped with arithmetic, not overlapped)."""
    m, passes = s.model, forwards + backwards * (2 if s.recompute else 1)
    each = m.num_hidden_layers / s.pp * s.element * tokens
    if s.megatron:
        # The optimizer reduces gradients (float32) and gathers weights. Tensor parallelism sends the residual stream four times
        # per layer and pass: a gather and a scatter each for attention and MLP.
        reduced = sum(number * _ring(s.gpus // (ranks * s.pp)) for ranks, number in local_parameters(s).items())
        stream = (2 if m.num_experts else 4) * m.hidden_size * _ring(s.tp)
        # Tokens go to their experts and back; the ranks of a split expert gather them.
        stream += 2 * m.num_experts_per_tok * m.hidden_size / s.outer * (_ring(s.ep) + s.etp - 1)
        again = 0.5 if trains and s.outer > 1 else 0.0
        return s.updates * (4 + s.weight) * reduced if trains else 0.0, (passes + again) * stream * each
    sent = s.memory(trains).get("sent", {})  # one rank sends nothing
    plain, scored, update = (sent.get(phase, 0.0) for phase in (LOG_PROB, "importance", UPDATE))
    gathered = update if trains else forwards * plain + backwards * (scored - plain)
    # Ulysses exchanges queries, keys, values and outputs around attention.
    heads = (2 * m.num_attention_heads + 2 * max(m.num_key_value_heads, s.ulysses)) * m.head_dim
    return count * gathered * _ring(s.shards), passes * heads * _ring(s.ulysses) * each


def generation_seconds(s: Setup, gpu: Gpu, efficiency: Efficiency, sequences: float) -> float:
    """Return the seconds until the longest of `sequences` responses is done.

    Each decoding step reads the weights once, and the cache of every running sequence (arXiv 2211.05102, section 2.1). The
    cache size limits how many sequences run together. After the mean length, sequences finish at an even rate.
    """
    m, engines, latency = s.model, s.rollout_gpus // s.replica, efficiency.decode_overhead_s
    latency += 2 * m.num_hidden_layers * efficiency.all_reduce_s if s.engine_tp > 1 else 0.0
    together = max(1.0, min(sequences / engines, s.rollout.max_num_seqs, cached_tokens(s, gpu) / s.length))
    compute = gpu.tflops * 1e12 * efficiency.inference * s.engine_tp
    token_flops = s.flops("layers", 2.0, 1.0) + s.flops("head", 1)

    def token_seconds(running: float, seen: float) -> float:
        unvisited = (1 - m.num_experts_per_tok / m.num_experts) ** running if m.num_experts else 0.0
        weights = BYTES[s.rollout.dtype] * (s.parameters["all"] - s.parameters["experts"] * unvisited) / s.engine_tp
        reading = (weights + running * seen * cache_bytes(s)) / (gpu.bandwidth * 1e9 * efficiency.decoding)
        return max(reading, running * token_flops / compute) + latency

    prefill = sequences / s.rollout.n * s.flops("layers", s.mean_prompt) / (engines * compute)
    waves, seen = sequences / engines / together, s.mean_prompt + s.mean_response / 2
    steady = waves * s.mean_response * token_seconds(together, seen)
    return prefill + steady + (s.max_response - s.mean_response) * token_seconds(together / 4, s.length)


# ---- the plan


class Plan:
    """Projections for a composed configuration. Raise PlanError if it cannot run, or if its model is unknown.

    `response` is the mean length in tokens (None: a share of the maximum), `scored` the share of responses with an advantage.
    """

    def __init__(
        self, config: DictConfig, gpu: Gpu | None = None, response: float | None = None, scored: float = hardware.SCORED
    ) -> None:
        self.setup = s = Setup(config, response, scored)
        self.gpu = gpu = gpu or hardware.choose_gpu()
        self.memory = step_memory(s, gpu)  # phase -> part -> bytes on one GPU
        # Phase -> bytes: (projected, with what fragmentation and libraries may add).
        self.range = {phase: _range(parts) for phase, parts in self.memory.items()}
        # Free bytes, (least, most); negative if it does not fit.
        least, most = (max(sizes) for sizes in zip(*self.range.values(), strict=True))
        self.headroom = gpu.memory - most, gpu.memory - least
        # Sequences of maximum length that one engine's cache holds; and the phase that comes closest to all memory.
        self.cached = cached_tokens(s, gpu) / (s.rollout.max_model_len or s.max_length)
        self.peak = max(self.range, key=lambda phase: self.range[phase][self.headroom[1] >= 0])
        self.fits = self.headroom[1] >= 0 and self.cached >= 1
        self.verdict = "does not fit" if not self.fits else "fits tightly" if self.headroom[0] < 0 else "fits"
        self.flops = step_flops(s)  # phase -> FLOPs of one step, over all GPUs
        self.seconds = step_seconds(s, gpu, EXPECTED)  # phase -> seconds of one step
        self.oar = sum(self.seconds.get(phase, 0.0) for phase in OAR)
        self.step = _step(s, self.seconds)
        self.to_grpo = self.step / _step(s, {phase: t for phase, t in self.seconds.items() if phase not in OAR})

    @property
    def hours(self) -> list[float] | None:
        """Hours of the run, validations included: [expected, least, most]. None if the number of steps is unknown."""
        s, hours = self.setup, []
        for efficiency in (EXPECTED, hardware.GOOD, hardware.POOR):
            each = generation_seconds(s, self.gpu, efficiency, s.validated) if s.validated else 0.0
            steps = (s.steps or 0) * _step(s, step_seconds(s, self.gpu, efficiency))
            hours.append((steps + s.validations * each) / 3600)
        return None if s.steps is None else hours

    @property
    def margin(self) -> str:
        """How much memory the largest phase needs."""
        cache = "" if self.cached >= 1 else "; vLLM's cache holds less than one sequence"
        return f"{in_gib(self.range[self.peak])} of {self.gpu.memory_gib:g} GiB in {self.peak}{cache}"

    @property
    def advice(self) -> str:
        """The keys that change how much memory a run needs; recipes/README.md says what each does."""
        keys = f"{ACTOR}.entropy_from_logits_with_chunking=True, {self.setup.group}.optimizer_offload=True"
        return f"try {keys}, a smaller {ACTOR}.ppo_max_token_len_per_gpu, or more trainer.nnodes"

    @property
    def summary(self) -> str:
        """A sentence with the steps, hours and GPU-hours of the run."""
        s, gpus = self.setup, self.setup.gpus + (self.setup.rollout_gpus if self.setup.dedicated else 0)
        if (hours := self.hours) is None:
            return "Hours are unknown: data.train_files has an unknown row count. Set trainer.total_training_steps=N."
        one, all_ = ([f"{n * h:,.{0 if n * hours[0] > 9 else 1}f}" for h in hours] for n in (1, gpus))
        share = 1 - (s.steps or 0) * self.step / 3600 / (hours[0] or 1)
        validation = "without validation (unknown rows in data.val_files)"
        if s.validated is not None:
            validation = f"with {s.validations} validations ({share:.1%} of the time)"
        return (
            f"The run: {s.steps} steps, {one[0]} hours ({one[1]} to {one[2]}), {all_[0]} GPU-hours on {gpus} "
            f"GPU{'s' * (gpus > 1)} ({all_[1]} to {all_[2]}), {validation}, without rewards and checkpoints."
        )

    @property
    def sentences(self) -> list[str]:
        """What is projected, and what is assumed."""
        s, e, adds = self.setup, EXPECTED, "Without OAR."
        if s.oar is not None:
            adds = f"OAR ({s.oar.importance}) adds {self.oar:.1f} s to a step: {self.to_grpo:.2f} x the same step of GRPO, "
            adds += f"with {s.scored_share:.0%} of the responses scored (--scored-share)."
        more = sum(s.rounds) / s.sequences
        filtered = f"algorithm.filter_groups generates {more:.1f} x a batch (--scored-share); " if more > 1 else ""
        return [
            f"{self.gpu.name} ({self.gpu.memory_gib:g} GiB), projected, not measured. {s.model.name}: "
            f"{s.parameters['all'] / 1e9:.2f}B parameters, data parallel {s.dp}; an engine's cache holds {self.cached:.0f} "
            "sequences of maximum length.",
            adds,
            self.summary,
            f"Assumed: responses of {s.mean_response:.0f} tokens on average (--response-length), prompts of "
            f"{s.mean_prompt:.0f}; {filtered}of the datasheet {e.training:.0%} of the arithmetic in training, "
            f"{e.inference:.0%} in inference, {e.decoding:.0%} of the memory's bandwidth, {e.link:.0%} of the links. The range "
            f"is from a very good run to an untuned one. Upper bounds of memory add {hardware.WORKSPACES / GIB:g} GiB for "
            f"libraries and {hardware.FRAGMENTATION:.0%} of temporary tensors for fragmentation. No run on GPUs was measured.",
        ]

    def to_dict(self) -> dict[str, Any]:
        s, plain = self.setup, {key: value for key, value in vars(self).items() if key not in ("setup", "gpu")}
        plain |= {"hours": self.hours, "steps": s.steps, "mean_prompt": s.mean_prompt, "mean_response": s.mean_response}
        return {"projection": True, **plain, "gpus": s.gpus, "gpu": vars(self.gpu)}


def in_gib(sizes: tuple[float, float], digits: int = 1) -> str:
    """Return the least and the most number of bytes in GiB: one number if both are the same."""
    return " to ".join(dict.fromkeys(f"{size / GIB:.{digits}f}" for size in sizes))


def _range(parts: Parts) -> tuple[float, float]:
    least, temporary = sum(parts.values()), parts.get(TEMPORARY, 0.0)
    return least, least + (hardware.WORKSPACES + hardware.FRAGMENTATION * temporary if temporary else 0.0)


def _step(s: Setup, seconds: dict[str, float]) -> float:
    """Return the seconds of a step. Generation and training run one after the other; in `separate_async` they overlap."""
    training = sum(seconds.values()) - seconds[GENERATION]
    return max(seconds[GENERATION], training) if s.dedicated else seconds[GENERATION] + training
