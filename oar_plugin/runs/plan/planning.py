"""The plan of a run: memory and seconds by phase, hours, what OAR adds, and whether it fits.

Memory is that of one GPU, in bytes, for a full micro-batch of sequences of the maximum length. Model states follow ZeRO (arXiv
1910.02054, section 3). FLOPs are those of matrix products and attention. Activations are a sum of tensors (arXiv 2205.05198,
section 4), which `python -m benchmarks count` counted under FSDP: the formula is within a tenth. Seconds follow a roofline
model of arithmetic, memory and links at assumed efficiencies.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.credit.regression import COLUMNS, FEATURES
from oar_plugin.hosts.verl.settings import context_parallel, resolve, switched_on, trainer_of
from oar_plugin.runs.plan import known
from oar_plugin.runs.plan.known import ASSUMED, EXPECTED, GIB, Gpu, NotPlannedError, PlanError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GENERATION, LOG_PROB, REFERENCE, UPDATE, SYNC = "generation", "log-probs", "reference", "update", "weight sync"
IMPORTANCE, COPIES, GATE = OAR = ("OAR: importance", "OAR: masked copies", "OAR: gate")
TEMPORARY = "temporary"  # the part of memory with activations, logits, gathered weights
HALF = 2  # bytes of an element of activations, of the engine's weights and of its cache
Parts = dict[str, float]  # name of a part of memory, or of a phase -> bytes, FLOPs or seconds


class Plan:
    """Projections for a configuration, with that share of responses `scored`. PlanError: it cannot run, or is not known."""

    def __init__(self, config: DictConfig, gpu: Gpu | None = None, scored: float = ASSUMED.scored) -> None:
        host = config.actor_rollout_ref
        for key, allowed in known.KNOWN["planned"].items():
            if (value := OmegaConf.select(host, key)) not in (None, *allowed):
                only = ", ".join(map(str, allowed))
                raise NotPlannedError(f"not planned: actor_rollout_ref.{key}={value}; only {only}")
        self.config, self.actor, self.rollout, self.gpu = config, host.actor, host.rollout, gpu or known.choose_gpu()
        self.model, self.megatron = known.load_model(host.model.path), host.actor.strategy == "megatron"
        self.group = f"{ACTOR}.{'megatron' if self.megatron else 'fsdp_config'}"
        self.engine = OmegaConf.select(config, self.group)
        self.settings = resolve(config) if switched_on(config) else None  # None for a run without OAR
        self._read_layout()
        self._read_batch(scored)
        self._read_sizes()
        self.memory = step_memory(self)  # phase -> part -> bytes on one GPU
        self.range: dict[str, tuple[float, float]] = {}  # phase -> bytes: projected, with fragmentation and workspaces
        for phase, parts in self.memory.items():
            size, lost = sum(parts.values()), ASSUMED.fragmentation * parts.get(TEMPORARY, 0.0)
            self.range[phase] = size, size + lost + (ASSUMED.workspaces_gib * GIB if TEMPORARY in parts else 0.0)
        total, (least, most) = self.gpu.memory_gib * GIB, (max(x) for x in zip(*self.range.values(), strict=True))
        self.headroom = total - most, total - least
        # Sequences of maximum length that one engine's cache holds; the phase that comes closest to all memory.
        self.cached = self.cached_tokens / (self.rollout.max_model_len or self.max_length)
        peak = max(self.range, key=lambda phase: self.range[phase][least <= total])
        self.fits = least <= total and self.cached >= 1
        self.verdict = "does not fit" if not self.fits else "fits tightly" if most > total else "fits"
        less = "; vLLM's cache holds less than one sequence" if self.cached < 1 else ""
        self.margin = f"{in_gib(self.range[peak])} of {self.gpu.memory_gib:g} GiB in {peak}{less}"
        can_shrink = self.actor.ppo_max_token_len_per_gpu * self.cp > self.max_length  # a sequence must fit
        smaller = f"a smaller {ACTOR}.ppo_max_token_len_per_gpu, " * can_shrink
        self.advice = f"try {self.group}.optimizer_offload=True, {smaller}or more trainer.nnodes"
        self.passes = trainer_passes(self)
        self.seconds = step_seconds(self, EXPECTED)  # phase -> seconds of one step
        self.oar = sum(self.seconds.get(phase, 0.0) for phase in OAR)
        self.step = self._step(self.seconds)
        self.to_grpo = self.step / self._step({phase: t for phase, t in self.seconds.items() if phase not in OAR})
        # The run, validations included: hours as expected, at least, at most. None: unknown.
        trainer, rows = config.trainer, _rows(config.data.train_files)
        epochs = rows // config.data.train_batch_size * trainer.total_epochs if rows else None
        self.steps: Any = epochs if trainer.total_training_steps is None else trainer.total_training_steps
        self.validations = math.ceil((self.steps or 0) / trainer.test_freq) if trainer.test_freq > 0 else 0
        self.validations += trainer.val_before_train
        self.hours = None if self.steps is None else [self._hours(e) for e in (EXPECTED, known.GOOD, known.POOR)]

    def _read_layout(self) -> None:
        """Read the numbers of ranks that split a tensor, the layers, a sequence, experts, one expert, and FSDP's states."""
        trainer, rollout, engine = self.config.trainer, self.rollout, self.engine
        self.gpus: int = trainer.nnodes * trainer.n_gpus_per_node
        self.tp = self.pp = self.ep = self.etp = 1
        self.cp = context_parallel(self.config)
        if self.megatron:
            kinds = ("tensor_model", "pipeline_model", "expert_model")
            self.tp, self.pp, self.ep = (engine[f"{kind}_parallel_size"] for kind in kinds)
            self.etp = engine.expert_tensor_parallel_size or self.tp
            self.recompute = engine.override_transformer_config.get("recompute_granularity") == "full"
        else:
            self.recompute = self.config.actor_rollout_ref.model.enable_gradient_checkpointing
        self.shards = self.gpus if self.megatron or not 1 <= engine.fsdp_size <= self.gpus else engine.fsdp_size
        # In `separate_async` engines have GPUs of their own besides, and generation overlaps with training.
        self.dedicated, self.engine_tp = trainer_of(self.config) == "separate_async", rollout.tensor_model_parallel_size
        self.rollout_gpus: int = rollout.nnodes * rollout.n_gpus_per_node if self.dedicated else self.gpus
        ranks = self.tp * self.pp * self.cp
        for what, gpus, size in (
            (f"{self.group}: tensor {self.tp} x pipeline {self.pp} x context {self.cp} = {ranks}", self.gpus, ranks),
            (f"{self.group}: pipeline {self.pp} x expert {self.ep}", self.gpus, self.pp * self.ep * self.etp),
            (f"{ROLLOUT}.tensor_model_parallel_size={self.engine_tp}", self.rollout_gpus, self.engine_tp),
        ):
            if gpus % size:
                raise PlanError(f"{what}: must divide the {gpus} GPUs of nnodes x n_gpus_per_node")
        self.dp = self.gpus // ranks

    def _read_batch(self, scored: float) -> None:
        data = self.config.data
        self.mean_prompt = data.max_prompt_length * ASSUMED.mean_prompt
        self.mean_response = data.max_response_length * ASSUMED.mean_response
        self.length = self.mean_prompt + self.mean_response
        self.max_length = data.max_prompt_length + data.max_response_length
        self.sequences: int = data.train_batch_size * self.rollout.n
        # algorithm.filter_groups replaces groups without an advantage, assumed in one more round, and scores the whole batch.
        filtered = bool(OmegaConf.select(self.config, "algorithm.filter_groups.enable"))
        self.rounds = [self.sequences, self.sequences * (1 / scored - 1) if filtered else 0.0]
        self.scored_share = 1.0 if filtered else scored
        # The share of these whose importance is computed and not predicted. The driver deals them out evenly.
        share, rows = self.settings and self.settings.amortize.share, self.sequences * self.scored_share / self.dp
        self.computed = min(1.0, math.ceil(math.ceil(share * rows * self.dp) / self.dp) / rows) if share else 1.0
        # Rows that the probe reads, and tokens that get importance.
        self.answer = 1 if self.settings is not None and self.settings.probe == "last" else ASSUMED.answer
        self.reasoning = max(1.0, self.mean_response - self.answer)
        self.mini_batches = max(1, data.train_batch_size // self.actor.ppo_mini_batch_size)
        # Tokens of a micro-batch on one GPU, which cannot hold more than its rank has in total.
        limits = {LOG_PROB: (self.rollout.log_prob_max_token_len_per_gpu, self.dp)}
        limits[UPDATE] = self.actor.ppo_max_token_len_per_gpu, self.dp * self.mini_batches
        total = {phase: math.ceil(self.sequences / parts) * self.max_length for phase, (_, parts) in limits.items()}
        self.micro_batch = {phase: min(limit, total[phase] / self.cp) for phase, (limit, _) in limits.items()}

    def _read_sizes(self) -> None:
        model, m = self.config.actor_rollout_ref.model, self.model
        # Bytes of a stored weight; under FSDP also of its gradient and of each Adam moment.
        self.weight = 4 if not self.megatron and self.engine.model_dtype == "fp32" else HALF
        self.fused, self.lora, layers = bool(model.use_fused_kernels), int(model.lora_rank), m.num_hidden_layers
        # Elements of a layer's matrices: of all, and of those that multiply one token. Experts get no adapters.
        attention, expert = 2 * m.hidden_size * (m.queries + m.keys), 3 * m.hidden_size * m.moe_intermediate_size
        adapted = 4 * m.hidden_size + 2 * (m.queries + m.keys) + (0 if m.num_experts else 3 * (m.hidden_size + m.inner))
        adapters, embedding = self.lora * adapted, m.vocab_size * m.hidden_size
        self.used = attention + m.hidden_size * (3 * m.inner + m.num_experts) + adapters
        self.matrices = self.used + (m.num_experts - m.num_experts_per_tok) * expert
        vectors = 2 * m.hidden_size + m.biases * (m.queries + 2 * m.keys) + m.norms * 2 * m.head_dim
        every = embedding * (2 - m.tie_word_embeddings) + m.hidden_size + layers * (self.matrices + vectors)
        self.parameters = {"all": every, "trained": layers * adapters or every, "base": every - layers * adapters}
        self.parameters |= {"embedding": embedding, "experts": layers * m.num_experts * expert}
        # Bytes of a token's keys and values on one GPU of an engine, where every rank has at least one head.
        heads = max(1, m.num_key_value_heads // self.engine_tp)
        self.cache_bytes = 2.0 * layers * heads * m.head_dim * HALF
        self.cached_tokens = engine_memory(self)["KV cache"] / self.cache_bytes

    def flops_of(self, name: str, length: float, start: float = 0.0) -> float:
        """Return the FLOPs on tokens `start` to `length` of a sequence: of a phase, or the forward of "layers" or "head"."""
        m, tokens, head = self.model, length - start, 2.0 * self.parameters["embedding"] * (length - start)
        # Half of the products of all pairs, because attention is causal: two in a forward, five in a backward.
        pairs, each = 2.0 * m.num_hidden_layers * m.queries * (length**2 - start**2), 2.0 * m.num_hidden_layers * tokens
        backward = (layers := each * self.used + pairs) + 1.5 * pairs
        if self.recompute:  # torch stops at the last kept tensor: without the last product of an MLP
            spared = 0 if self.megatron or m.num_experts else m.hidden_size * (self.lora or m.inner)
            backward += layers - each * spared
        phases = {"layers": layers, "head": head, LOG_PROB: layers + head, "importance": layers + head + backward}
        gradients = self.parameters["trained"] * 2.0 * tokens if self.lora else each * self.used + head
        return (phases | {UPDATE: layers + 2 * head + backward + gradients})[name]

    def _step(self, seconds: Parts) -> float:
        training = sum(seconds.values()) - seconds[GENERATION]
        return max(seconds[GENERATION], training) if self.dedicated else seconds[GENERATION] + training

    def _hours(self, efficiency: SimpleNamespace) -> float:
        validation = generation_seconds(self, efficiency, _rows(self.config.data.val_files) * self.rollout.val_kwargs.n)
        return (self.steps * self._step(step_seconds(self, efficiency)) + self.validations * validation) / 3600

    @property
    def summary(self) -> str:
        """A sentence with the steps, hours and GPU-hours of the run."""
        if self.hours is None:
            return "Hours are unknown: data.train_files has an unknown row count. Set trainer.total_training_steps=N."
        gpus = self.gpus + (self.rollout_gpus if self.dedicated else 0)
        hours, least, most = self.hours
        time = f"{hours:,.1f} hours ({least:,.1f} to {most:,.1f}), {gpus * hours:,.0f} GPU-hours on {gpus} GPUs"
        return f"The run: {self.steps} steps, {time}, with {self.validations} validations, without rewards and checkpoints."


def _rows(files: Any) -> int:
    """Return the number of rows in files of `oar data`; 0 if there is another one."""
    paths = [Path(file) for file in ([files] if isinstance(files, str) else files)]
    rows = [known.KNOWN["rows"].get(f"{path.parent.name}/{path.stem}", 0) for path in paths]
    return sum(rows) if all(rows) else 0


def in_gib(sizes: tuple[float, float], digits: int = 1) -> str:
    """Return the least and the most number of bytes in GiB: one number if both are the same."""
    return " to ".join(dict.fromkeys(f"{size / GIB:.{digits}f}" for size in sizes))


def step_memory(p: Plan) -> dict[str, Parts]:
    """Return phase -> parts. Weight sync needs less memory than generation, masked copies less than log-probs."""
    updating = states(p)
    # Megatron's gradient buffers are where its weights are; FSDP's gradients exist only during the update.
    waiting = updating | ({} if p.megatron and not p.engine.param_offload else {"gradients": 0.0})
    waiting |= {"optimizer": 0.0} if p.engine.optimizer_offload else {}
    engine, other = engine_memory(p), {"other": ASSUMED.context_gib * GIB}
    phases = {"generation, GPUs of its own": engine | other} if p.dedicated else {}
    if not p.dedicated or p.config.actor_rollout_ref.hybrid_engine:
        phases[GENERATION] = waiting | ({"weights": 0.0} if p.engine.param_offload else {}) | engine | other
    phases[LOG_PROB] = waiting | other | {TEMPORARY: temporary(p, LOG_PROB, p.micro_batch[LOG_PROB])}
    if p.settings is not None and p.settings.importance_object.forwards(1):
        # Its micro-batches have the smaller of the two sizes. Without a backward it is a log-prob pass.
        size = temporary(p, "importance" if p.settings.backwards else LOG_PROB, min(p.micro_batch.values()))
        phases[IMPORTANCE] = waiting | other | {TEMPORARY: size}
    return phases | {UPDATE: updating | other | {TEMPORARY: temporary(p, UPDATE, p.micro_batch[UPDATE])}}


def states(p: Plan) -> Parts:
    """Return the bytes of weights, gradients and optimizer on the largest rank, with nothing offloaded."""
    n = p.parameters
    if not p.megatron:
        held, trained = p.weight * n["all"] / p.shards, p.weight * n["trained"] / p.shards
        return {"weights": held, "gradients": trained, "optimizer": 2 * trained}
    # Tensor-parallel ranks split layers, and embedding or vocabulary projection; expert-parallel ranks split experts. The ranks
    # that hold the same parameters share their moments.
    ends = 1 if p.model.tie_word_embeddings else 2
    dense = (n["all"] - n["experts"] - ends * n["embedding"]) / p.pp + n["embedding"] * (ends if p.pp == 1 else 1)
    held = dense / p.tp + n["experts"] / p.pp / (p.ep * p.etp)
    return {"weights": p.weight * held, "gradients": 4 * held, "optimizer": 12 * (dense * p.pp + n["experts"]) / p.gpus}


def engine_memory(p: Plan) -> Parts:
    """Return the bytes of one GPU that vLLM uses for weights and workspace, and the rest of its share: the KV cache."""
    # 8192 is what vLLM's server takes where it is not told.
    working = (p.rollout.max_num_batched_tokens or 8192) * (4 * p.model.hidden_size + 3 * p.model.inner / p.engine_tp)
    # The sampler holds float32 logits of all sequences, and sorts and normalises them.
    sampling = 3 * 4.0 * p.rollout.max_num_seqs * p.model.vocab_size
    used = HALF * (p.parameters["base"] / p.engine_tp + working) + sampling + ASSUMED.engine_gib * GIB
    return {"vLLM": used, "KV cache": max(0.0, p.rollout.gpu_memory_utilization * p.gpu.memory_gib * GIB - used)}


def temporary(p: Plan, phase: str, tokens: float) -> float:
    """Return the peak of a phase's temporary tensors in bytes, in micro-batches of so many tokens: of its moments the largest.

    The factors are fitted to counts of FSDP's steps. Tensor-parallel ranks of Megatron split the same tensors.
    """
    m, trains, heads = p.model, phase == UPDATE, p.model.queries + p.model.keys
    # An expert that is split over ranks gets its tokens on each of them.
    hidden, experts, gradients = m.hidden_size, m.num_experts_per_tok * p.etp * m.hidden_size, trains and not p.lora
    # Only FSDP gathers weights, in bf16.
    layer, embedding = (0.0, 0.0) if p.megatron else (HALF * p.matrices, HALF * p.parameters["embedding"])
    if p.fused:  # logits of 512 rows at a time
        ends = embedding * (2 - m.tie_word_embeddings)
        logits = max((18 if trains else 12) * 512 * m.vocab_size + ends, 2 * ends) + (3 * embedding if gradients else 0)
    elif trains:  # logits and their gradient, which is float32 in Megatron's cross entropy
        logits = HALF * ((3 if p.megatron else 2) * m.vocab_size + 4 * hidden) * tokens
    else:  # logits, and for the entropy three float32 tensors per chunk, or copies of all: one, or two (one float32)
        rows = p.actor.get("entropy_from_logits_chunk_size", 2048)  # which verl 0.8 does not name
        rows *= p.actor.entropy_from_logits_with_chunking and not p.megatron
        entropy = 12 * m.vocab_size * min(rows, tokens) or (6 if p.megatron else 2) * m.vocab_size * tokens
        logits = HALF * (m.vocab_size + (0 if phase == LOG_PROB else 3 * hidden)) * tokens + max(entropy, 2 * embedding)
    # A layer keeps its input for its backward; without checkpointing, what its products need. `width`: of the layer at work.
    kept, width = HALF * hidden, 6 * m.inner + (7 + 2 * trains) * hidden + 3 * experts + 2 * (1 + m.norms) * heads
    gathered = 2 * embedding + (3 if gradients else 1) * layer  # with gradients in bf16 and float32
    if phase == LOG_PROB:
        kept, width, gathered = 0, 3 * m.inner + 4 * hidden + 3 * experts, embedding / 2 + 2 * layer
    elif not p.recompute:  # Megatron's kernels keep less
        inputs = (1 + trains) * ((2 if p.megatron else 4) * hidden + experts) + (2 + 3 * m.norms) * heads
        kept = HALF * (inputs + (3 + trains - p.megatron) * m.inner) + 4 * m.num_attention_heads
        width -= 3 * m.inner
    # In the 1F1B schedule the first stage holds one micro-batch per pipeline stage (arXiv 2104.04473, section 2.2).
    peak = p.pp * (m.num_hidden_layers // p.pp) * kept * tokens + max(logits, HALF * width * tokens + gathered)
    # The temporary tensors of FSDP's optimizer are a rank's share of the weights.
    return max(peak, p.weight * p.parameters["trained"] / p.shards if trains and not p.megatron else 0.0) / p.tp


def trainer_passes(p: Plan) -> dict[str, tuple[float, float, int, int]]:
    """Return phase -> FLOPs over all GPUs, passes over the batch, forwards, backwards; of importance only what it adds."""
    passed, layers, epochs = p.flops_of(LOG_PROB, p.length), p.flops_of("layers", p.length), p.actor.ppo_epochs
    passes = {LOG_PROB: (p.sequences * passed, 1.0, 1, 0)}
    if p.actor.use_kl_loss or p.config.algorithm.use_kl_in_reward:
        passes[REFERENCE] = passes[LOG_PROB]
    passes[UPDATE] = p.sequences * epochs * p.flops_of(UPDATE, p.length), epochs, 1, 1
    if (oar := p.settings) is None:
        return passes
    starts = [one.rows for one in oar.importance_object.backwards]
    added = oar.forwards * layers + oar.backwards * (p.flops_of("importance", p.length) - passed)
    rows = sum(p.reasoning if start == "reasoning" else p.answer for start in starts)
    added += oar.num_draws * 2 * p.flops_of("head", rows)
    if oar.importance_object.reads and "reasoning" not in starts:
        added += p.flops_of("head", p.reasoning)
    if oar.amortize.share:  # each token is projected; of those with computed importance come sums of products
        labels = p.computed * (oar.amortize.units or p.reasoning)
        added = p.computed * added + 2 * (p.reasoning * p.model.hidden_size * COLUMNS + labels * FEATURES**2)
    if added:
        share = p.scored_share * p.computed
        passes[IMPORTANCE] = p.sequences * p.scored_share * added, share, oar.forwards, oar.backwards
    return passes


def step_seconds(p: Plan, efficiency: SimpleNamespace) -> Parts:
    """Return phase -> seconds of one step."""
    seconds = {GENERATION: sum(generation_seconds(p, efficiency, sequences) for sequences in p.rounds)}
    seconds |= {phase: pass_seconds(p, efficiency, phase) for phase in p.passes}
    if (oar := p.settings) is not None:
        if oar.importance_object.copies:
            hidden = oar.perturbation.share_while_generating * seconds[GENERATION] if oar.offloads else 0.0
            rate = (p.rollout_gpus if oar.offloads else p.gpus) * p.gpu.tflops * 1e12 * efficiency.inference
            # On engines a copy's forward starts at its first masked token, on average mid-way in the reasoning, and one forward
            # is of the unmasked response. In the actor copies are whole, and log-probs give the unmasked response.
            start = p.mean_prompt + p.reasoning / 2 if oar.offloads else 0.0
            copy = p.flops_of("layers", p.length, start) + p.flops_of("head", p.answer)
            flops = min(oar.amortize.units or math.inf, max(1.0, p.reasoning / oar.perturbation.span)) * copy
            flops += p.flops_of("layers", p.length) * oar.offloads
            scored = p.sequences * p.scored_share * ((oar.amortize.share or 1.0) if oar.offloads else p.computed)
            seconds[COPIES] = max(0.0, scored * flops / rate - hidden)
        gate = ASSUMED.gate_s / p.dp + ASSUMED.driver_s
        seconds[GATE] = gate * p.sequences * p.config.data.max_response_length
    # Weight sync: every trainer rank gathers the whole model; engines on other GPUs receive it over the network.
    moved, ranks = p.parameters["trained"], p.pp * max(p.tp, p.ep * p.etp) if p.megatron else p.shards
    seconds[SYNC] = link_seconds(p, efficiency, p.weight * moved * (1 - 1 / ranks), ranks)
    seconds[SYNC] += link_seconds(p, efficiency, HALF * moved, p.gpus + p.rollout_gpus) if p.dedicated else 0.0
    return seconds


def link_seconds(p: Plan, efficiency: SimpleNamespace, sent: float, group: int) -> float:
    """Return the seconds to send so many bytes: at link speed if the group fits one node, else at network speed."""
    speed = p.gpu.link if group <= p.config.trainer.n_gpus_per_node else p.gpu.network
    return sent / (speed * 1e9 * efficiency.link)


def pass_seconds(p: Plan, efficiency: SimpleNamespace, phase: str) -> float:
    """Return the seconds of a pass. In an all-gather or reduce-scatter over n ranks, a rank sends (1 - 1/n) of a tensor."""
    m, trains, (flops, share, forwards, backwards) = p.model, phase == UPDATE, p.passes[phase]
    tokens, steps = p.sequences * p.length * share / p.dp / p.cp, p.mini_batches * p.actor.ppo_epochs if trains else 1
    size = p.micro_batch[UPDATE if trains else LOG_PROB]
    count = max(1, steps * math.ceil(tokens / steps / size))
    # The last factor adds the pipeline bubble (arXiv 2104.04473, section 2.2).
    rate = p.gpus * p.gpu.tflops * 1e12 * (efficiency.training if backwards else efficiency.inference)
    arithmetic = flops / rate * (1 + (p.pp - 1) / count)
    if p.megatron:
        # The optimizer reduces gradients (float32) and gathers weights. Tensor parallelism sends the residual stream four times
        # per layer and pass: a gather and a scatter each for attention and MLP.
        unshared = states(p)["gradients"] / 4 - states(p)["optimizer"] / 12
        hidden, group = steps * (4 + p.weight) * unshared if trains else 0.0, max(p.tp, p.ep * p.etp)
        waited = (2 if m.num_experts else 4) * m.hidden_size * (1 - 1 / p.tp)
        # Tokens go to their experts and back; the ranks of a split expert gather them.
        waited += 2 * m.num_experts_per_tok * m.hidden_size / p.tp * (p.etp - 1 / p.ep)
    else:
        # Each forward and backward gathers the weights in bf16; gradients are reduced in float32.
        gathered = (forwards + backwards) * HALF * p.parameters["all"] + 4 * trains * p.parameters["trained"]
        hidden, group = count * gathered * (1 - 1 / p.shards), p.cp
        # Ulysses exchanges queries, keys, values and outputs around attention.
        waited = (2 * m.num_attention_heads + 2 * max(m.num_key_value_heads, p.cp)) * m.head_dim * (1 - 1 / p.cp)
    passes = forwards + backwards * (2 if p.recompute else 1) + (0.5 if p.megatron and trains and p.tp > 1 else 0.0)
    waited *= passes * m.num_hidden_layers / p.pp * HALF * tokens
    # Communication of FSDP and of the optimizer overlaps with arithmetic.
    return max(arithmetic, link_seconds(p, efficiency, hidden, p.shards)) + link_seconds(p, efficiency, waited, group)


def generation_seconds(p: Plan, efficiency: SimpleNamespace, sequences: float) -> float:
    """Return the seconds until the longest of `sequences` responses is done.

    Each decoding step reads the weights once, and the cache of every running sequence (arXiv 2211.05102, section 2.1). The
    cache size limits how many sequences run together. After the mean length, sequences finish at an even rate.
    """
    if not sequences:
        return 0.0
    m, engines, latency = p.model, p.rollout_gpus // p.engine_tp, efficiency.decode_overhead_s
    latency += 2 * m.num_hidden_layers * efficiency.all_reduce_s if p.engine_tp > 1 else 0.0
    together = max(1.0, min(sequences / engines, p.rollout.max_num_seqs, p.cached_tokens / p.length))
    compute = p.gpu.tflops * 1e12 * efficiency.inference * p.engine_tp
    token_flops = p.flops_of("layers", 2.0, 1.0) + p.flops_of("head", 1)

    def token_seconds(running: float, seen: float) -> float:
        unvisited = (1 - m.num_experts_per_tok / m.num_experts) ** running if m.num_experts else 0.0
        weights = HALF * (p.parameters["base"] - p.parameters["experts"] * unvisited) / p.engine_tp
        reading = (weights + running * seen * p.cache_bytes) / (p.gpu.bandwidth * 1e9 * efficiency.decoding)
        return max(reading, running * token_flops / compute) + latency

    seconds = sequences / p.rollout.n * p.flops_of("layers", p.mean_prompt) / (engines * compute)  # of prompts
    steps = sequences / engines / together * p.mean_response
    seconds += steps * token_seconds(together, p.mean_prompt + p.mean_response / 2)
    return seconds + (p.config.data.max_response_length - p.mean_response) * token_seconds(together / 4, p.length)
