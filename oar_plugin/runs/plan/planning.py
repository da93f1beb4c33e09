"""The plan of a run: memory and seconds by phase, hours, what OAR adds, and whether it fits.

Memory is that of one GPU, in bytes, for a full micro-batch of sequences of the maximum length. Model states follow ZeRO (arXiv
1910.02054, section 3). FLOPs, and FSDP's activations and traffic, were counted; Megatron's are computed, tensor by tensor
(arXiv 2205.05198, section 4). Seconds follow a roofline model of arithmetic, memory and links at assumed efficiencies.
"""

import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.credit.regression import COLUMNS, FEATURES
from oar_plugin.hosts.verl.settings import resolve, switched_on, trainer_of
from oar_plugin.runs.plan import hardware
from oar_plugin.runs.plan.hardware import EXPECTED, GIB, GOOD, POOR, SCORED, Efficiency, Gpu
from oar_plugin.runs.plan.known import KNOWN, NotPlannedError, PlanError, counts, load_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GENERATION, LOG_PROB, REFERENCE, UPDATE, SYNC = "generation", "log-probs", "reference", "update", "weight sync"
IMPORTANCE, COPIES, GATE = OAR = ("OAR: importance", "OAR: masked copies", "OAR: gate")
TEMPORARY = "temporary"  # the part of memory with activations, logits, gathered weights
COUNTED_RANKS = 8  # most FSDP ranks that are counted: with more, only a rank's share of the states is smaller
HALF = 2  # bytes of an element of activations, of the engine's weights and of its cache
Parts = dict[str, float]  # name of a part of memory, or of a phase -> bytes, FLOPs or seconds


def _rows(files: Any) -> int | None:
    """Return the number of rows in files of `oar data`; None if there is another one."""
    paths = [Path(file) for file in ([files] if isinstance(files, str) else files)]
    known = [KNOWN["rows"].get(f"{path.parent.name}/{path.stem}") for path in paths]
    return None if None in known else sum(known)


class Plan:
    """Projections for a composed configuration. Raise PlanError if it cannot run, NotPlannedError if it is not known.

    `response` is the mean length in tokens (None: a share of the maximum), `scored` the share of responses with an advantage.
    """

    def __init__(
        self, config: DictConfig, gpu: Gpu | None = None, response: float | None = None, scored: float = SCORED
    ) -> None:
        data, trainer, host = config.data, config.trainer, config.actor_rollout_ref
        for key, allowed in KNOWN["planned"].items():
            if (value := OmegaConf.select(host, key)) not in (None, *allowed):
                only = ", ".join(map(str, allowed))
                raise NotPlannedError(f"not planned: actor_rollout_ref.{key}={value}; only {only}")
        self.config, self.actor, self.rollout, self.gpu = config, host.actor, host.rollout, gpu or hardware.choose_gpu()
        self.model, self.megatron = load_model(host.model.path), host.actor.strategy == "megatron"
        self.group = f"{ACTOR}.megatron" if self.megatron else f"{ACTOR}.fsdp_config"
        self.engine = OmegaConf.select(config, self.group)
        self.settings = resolve(config) if switched_on(config) else None  # None for a run without OAR
        self.extra_forwards = 0  # of importance, besides the log-prob pass
        if self.settings is not None:
            importance, replay = self.settings.importance_object, OmegaConf.select(self.engine, "router_replay.mode")
            # For router replay verl records routes in a forward without a backward.
            recording = replay == "R2" and any(one.backward is not None for one in importance.forwards(1)[:1])
            self.extra_forwards = self.settings.extra_forwards + recording
        self.sequences: int = data.train_batch_size * self.rollout.n
        self.updates: int = max(1, data.train_batch_size // self.actor.ppo_mini_batch_size) * self.actor.ppo_epochs
        self.max_length: int = data.max_prompt_length + data.max_response_length
        self.mean_prompt = data.max_prompt_length * hardware.MEAN_PROMPT
        self.mean_response = float(response or data.max_response_length * hardware.MEAN_RESPONSE)
        if self.mean_response > data.max_response_length:
            raise PlanError(f"--response-length {response:g}: must be at most {data.max_response_length}")
        self.length = self.mean_prompt + self.mean_response
        # algorithm.filter_groups replaces groups without an advantage, assumed in one more round, and scores the whole batch.
        filtered = bool(OmegaConf.select(config, "algorithm.filter_groups.enable"))
        self.rounds = [float(self.sequences)] + [self.sequences * (1 / scored - 1)] * filtered
        self.scored_share = 1.0 if filtered else scored
        # Numbers of ranks that split a tensor, the layers, a sequence, experts, one expert, and FSDP's states.
        self.gpus: int = trainer.nnodes * trainer.n_gpus_per_node
        self.tp = self.pp = self.ep = self.etp = 1
        self.shards, self.recompute = self.gpus, host.model.enable_gradient_checkpointing
        if self.megatron:
            kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
            self.tp, self.pp, self.cp, self.ep = (self.engine[f"{kind}_parallel_size"] for kind in kinds)
            self.etp = self.engine.expert_tensor_parallel_size or self.tp
            self.recompute = self.engine.override_transformer_config.get("recompute_granularity") == "full"
        else:  # verl copies the actor's value to fsdp_config, from which the engine reads it
            self.cp = max(self.actor.ulysses_sequence_parallel_size, self.engine.ulysses_sequence_parallel_size)
            self.shards = self.engine.fsdp_size if 1 <= self.engine.fsdp_size <= self.gpus else self.gpus
        # In `separate_async` engines have GPUs of their own besides, and generation overlaps with training.
        self.dedicated, self.engine_tp = trainer_of(config) == "separate_async", self.rollout.tensor_model_parallel_size
        self.rollout_gpus: int = self.rollout.nnodes * self.rollout.n_gpus_per_node if self.dedicated else self.gpus
        ranks = self.tp * self.pp * self.cp
        sizes = {
            f"{self.group}: tensor {self.tp} x pipeline {self.pp} x context {self.cp} = {ranks}": (self.gpus, ranks),
            f"{self.group}: pipeline {self.pp} x expert {self.ep}": (self.gpus, self.pp * self.ep * self.etp),
            f"{ROLLOUT}.tensor_model_parallel_size={self.engine_tp}": (self.rollout_gpus, self.engine_tp),
        }
        for what, (gpus, size) in sizes.items():
            if gpus % size:
                raise PlanError(f"{what}: must divide the {gpus} GPUs of nnodes x n_gpus_per_node")
        self.dp = self.gpus // ranks
        # Bytes of a stored weight; under FSDP also of its gradient and of each Adam moment.
        self.weight = 4 if not self.megatron and self.engine.model_dtype == "fp32" else HALF
        self.counted = {"model": self.model.dimensions, "recompute": self.recompute, "lora_rank": host.model.lora_rank}
        self.fused = bool(host.model.use_fused_kernels)
        self.parameters = self._work()["parameters"]  # "experts", "embedding", "trained" and, without adapters, "all"
        self.parameters["all"] -= self.parameters["trained"] if host.model.lora_rank else 0.0
        # The engine's cache: bytes of a token's keys and values on one GPU, where every rank has at least one head; its tokens.
        heads = max(1, self.model.num_key_value_heads // self.engine_tp)
        self.cache_bytes = 2.0 * self.model.num_hidden_layers * heads * self.model.head_dim * HALF
        self.cached_tokens = engine_memory(self)["KV cache"] / self.cache_bytes
        self.memory = step_memory(self)  # phase -> part -> bytes on one GPU
        # Phase -> bytes: (projected, with what fragmentation and libraries may add); free bytes: (least, most).
        share, fixed = hardware.FRAGMENTATION, hardware.WORKSPACES
        more = {phase: fixed + share * of[TEMPORARY] for phase, of in self.memory.items() if TEMPORARY in of}
        sums = {phase: sum(parts.values()) for phase, parts in self.memory.items()}
        self.range = {phase: (least, least + more.get(phase, 0.0)) for phase, least in sums.items()}
        total, (least, most) = self.gpu.memory_gib * GIB, (max(x) for x in zip(*self.range.values(), strict=True))
        self.headroom = total - most, total - least
        # Sequences of maximum length that one engine's cache holds; and the phase that comes closest to all memory.
        self.cached = self.cached_tokens / (self.rollout.max_model_len or self.max_length)
        self.peak = max(self.range, key=lambda phase: self.range[phase][self.headroom[1] >= 0])
        self.fits = self.headroom[1] >= 0 and self.cached >= 1
        self.verdict = "does not fit" if not self.fits else "fits tightly" if self.headroom[0] < 0 else "fits"
        cache = "" if self.cached >= 1 else "; vLLM's cache holds less than one sequence"
        self.margin = f"{in_gib(self.range[self.peak])} of {self.gpu.memory_gib:g} GiB in {self.peak}{cache}"
        keys = f"{self.group}.optimizer_offload=True, a smaller {ACTOR}.ppo_max_token_len_per_gpu"
        self.advice = f"try {keys}, or more trainer.nnodes"
        self.flops = step_flops(self)  # phase -> FLOPs of one step, over all GPUs
        self.seconds = step_seconds(self, EXPECTED)  # phase -> seconds of one step
        self.oar = sum(self.seconds.get(phase, 0.0) for phase in OAR)
        self.step = self._step(self.seconds)
        self.to_grpo = self.step / self._step({phase: t for phase, t in self.seconds.items() if phase not in OAR})
        # The run, validations included: hours as expected, at least, at most. None: unknown.
        self.steps, trained, rows = trainer.total_training_steps, _rows(data.train_files), _rows(data.val_files)
        if self.steps is None and trained is not None:
            self.steps = trained // data.train_batch_size * trainer.total_epochs
        self.validations = math.ceil((self.steps or 0) / trainer.test_freq) if trainer.test_freq > 0 else 0
        self.validations += trainer.val_before_train
        self.hours = None if self.steps is None else [self._hours(e, rows or 0) for e in (EXPECTED, GOOD, POOR)]

    def _work(self, length: float = 0.0) -> dict[str, dict[str, float]]:
        whole = self.recompute and self.megatron
        return counts("Work", self.model.num_hidden_layers, length, **self.counted, whole_layers=whole)

    def flops_of(self, name: str, length: float, start: float = 0.0) -> float:
        """Return the FLOPs on tokens `start` to `length` of a sequence: of a phase, or the forward of "layers" or "head"."""
        return self._work(length)["flops"][name] - (self._work(start)["flops"][name] if start else 0.0)

    def micro_batch(self, update: bool) -> float:
        """Return the maximum number of tokens in a micro-batch on one GPU, for the update or for the log-prob pass."""
        steps = self.updates / self.actor.ppo_epochs if update else 1
        budget = self.actor.ppo_max_token_len_per_gpu if update else self.rollout.log_prob_max_token_len_per_gpu
        # A micro-batch cannot hold more tokens than its rank has in total.
        return float(min(budget, math.ceil(self.sequences / steps / self.dp) * self.max_length / self.cp))

    def counted_memory(self, update: bool) -> dict[str, Parts]:
        """Return phase -> part -> bytes of an FSDP rank, and "sent", in micro-batches of the update or of log-probs."""
        chunked = self.actor.entropy_from_logits_with_chunking and not self.fused
        shape = self.counted | {"fused": self.fused, "shards": min(self.shards, COUNTED_RANKS), "element": "bf16"}
        shape |= {"tokens": int(self.micro_batch(update)), "weights": "fp32" if self.weight == 4 else "bf16"}
        shape["entropy_rows"] = self.actor.entropy_from_logits_chunk_size if chunked else 0
        return counts("Memory", self.model.num_hidden_layers, **shape)

    def _step(self, seconds: Parts) -> float:
        training = sum(seconds.values()) - seconds[GENERATION]
        return max(seconds[GENERATION], training) if self.dedicated else seconds[GENERATION] + training

    def _hours(self, efficiency: Efficiency, rows: int) -> float:
        responses = rows * self.rollout.val_kwargs.n
        validation = generation_seconds(self, efficiency, responses) if responses else 0.0
        return ((self.steps or 0) * self._step(step_seconds(self, efficiency)) + self.validations * validation) / 3600

    @property
    def summary(self) -> str:
        """A sentence with the steps, hours and GPU-hours of the run."""
        if self.hours is None:
            return "Hours are unknown: data.train_files has an unknown row count. Set trainer.total_training_steps=N."
        gpus = self.gpus + (self.rollout_gpus if self.dedicated else 0)
        one, all_ = ([f"{n * h:,.{0 if n * self.hours[0] > 9 else 1}f}" for h in self.hours] for n in (1, gpus))
        return (
            f"The run: {self.steps} steps, {one[0]} hours ({one[1]} to {one[2]}), {all_[0]} GPU-hours on {gpus} GPUs "
            f"({all_[1]} to {all_[2]}), with {self.validations} validations, without rewards and checkpoints."
        )

    @property
    def sentences(self) -> list[str]:
        """What is projected and assumed, and the verdict with what to try."""
        shares = ", ".join(f"{name} {value:.0%}" for name, value in list(EXPECTED._asdict().items())[:4])
        adds = f"OAR ({self.settings.importance}) adds {self.oar:.1f} s: " if self.settings else ""
        return [
            f"{self.gpu.name} ({self.gpu.memory_gib:g} GiB), projected, not measured. {self.model.name}: "
            f"{self.parameters['all'] / 1e9:.2f}B parameters on {self.gpus} GPUs, data parallel {self.dp}; an engine's cache "
            f"holds {self.cached:.0f} sequences of maximum length.",
            f"A step takes {self.step:.1f} s. {adds}{self.to_grpo:.2f} x the same step of GRPO, "
            f"with {self.scored_share:.0%} of the responses scored (--scored-share).",
            self.summary,
            f"Assumed: responses of {self.mean_response:.0f} tokens (--response-length), prompts of {self.mean_prompt:.0f}; "
            f"shares of the datasheet: {shares}. No run on GPUs was measured.",
            f"Verdict: {self.verdict} ({self.margin}).{'' if self.verdict == 'fits' else f' For more memory, {self.advice}.'}",
        ]


def in_gib(sizes: tuple[float, float], digits: int = 1) -> str:
    """Return the least and the most number of bytes in GiB: one number if both are the same."""
    return " to ".join(dict.fromkeys(f"{size / GIB:.{digits}f}" for size in sizes))


def step_memory(p: Plan) -> dict[str, Parts]:
    """Return phase -> parts. Weight sync needs less memory than generation, masked copies less than log-probs."""
    updating = dict(zip(("weights", "gradients", "optimizer"), states(p), strict=True))
    # Megatron's gradient buffers are where its weights are; FSDP's gradients exist only during the update.
    waiting = updating | ({} if p.megatron and not p.engine.param_offload else {"gradients": 0.0})
    waiting |= {"optimizer": 0.0} if p.engine.optimizer_offload else {}
    engine, other = engine_memory(p), {"other": hardware.CONTEXT}
    phases = {"generation, GPUs of its own": engine | other} if p.dedicated else {}
    if not p.dedicated or p.config.actor_rollout_ref.hybrid_engine:
        phases[GENERATION] = waiting | ({"weights": 0.0} if p.engine.param_offload else {}) | engine | other
    phases[LOG_PROB] = waiting | other | {TEMPORARY: _temporary(p, LOG_PROB, False)}
    if p.settings is not None and (forwards := p.settings.importance_object.forwards(1)):
        # Its micro-batches have the smaller of the two sizes. Without a backward it is a log-prob pass.
        phase = "importance" if any(forward.backward is not None for forward in forwards) else LOG_PROB
        size = _temporary(p, phase, p.micro_batch(True) < p.micro_batch(False))
        phases[IMPORTANCE] = waiting | other | {TEMPORARY: size}
    return phases | {UPDATE: updating | other | {TEMPORARY: _temporary(p, UPDATE, True)}}


def local_parameters(p: Plan) -> dict[int, float]:
    """Return the number of parameters on the largest rank, by the number of ranks that split a pipeline stage's."""
    all_, embedding, experts = (p.parameters[name] for name in ("all", "embedding", "experts"))
    if not p.megatron:
        return {p.shards: all_ / p.shards}
    ends = 1 if p.model.tie_word_embeddings else 2
    # Tensor-parallel ranks split layers, and embedding or vocabulary projection; expert-parallel ranks split experts.
    local = {p.tp: ((all_ - experts - ends * embedding) / p.pp + embedding * (ends if p.pp == 1 else 1)) / p.tp}
    local[p.ep * p.etp] = local.get(p.ep * p.etp, 0.0) + experts / p.pp / (p.ep * p.etp)
    return local


def states(p: Plan) -> tuple[float, float, float]:
    """Return the bytes of (weights, gradients, optimizer) on one GPU, with nothing offloaded."""
    local = local_parameters(p)
    held, adapters = sum(local.values()), p.parameters["trained"] / p.shards if p.counted["lora_rank"] else 0.0
    if p.megatron:  # the ranks that hold the same parameters share their moments
        return p.weight * held, 4 * held, 12 * sum(number * ranks * p.pp / p.gpus for ranks, number in local.items())
    return p.weight * (held + adapters), p.weight * (adapters or held), 2 * p.weight * (adapters or held)


def engine_memory(p: Plan) -> Parts:
    """Return the bytes of one GPU that vLLM uses for weights and workspace, and the rest of its share: the KV cache."""
    # 8192 is what vLLM's server takes where it is not told.
    working = (p.rollout.max_num_batched_tokens or 8192) * (4 * p.model.hidden_size + 3 * p.model.inner / p.engine_tp)
    # The sampler holds float32 logits of all sequences, and sorts and normalises them.
    sampling = 3 * 4.0 * p.rollout.max_num_seqs * p.model.vocab_size
    used = HALF * (p.parameters["all"] / p.engine_tp + working) + sampling + hardware.ENGINE_OVERHEAD
    return {"vLLM": used, "KV cache": max(0.0, p.rollout.gpu_memory_utilization * p.gpu.memory_gib * GIB - used)}


def _temporary(p: Plan, phase: str, update: bool) -> float:
    """Return the peak of a phase's temporary tensors in bytes, in micro-batches of the update or of log-probs."""
    m, trained = p.model, phase == UPDATE
    if not p.megatron:
        parts = p.counted_memory(update)[phase]
        if trained:  # the optimizer's temporary tensors are a rank's share of the weights
            parts["optimizer"] *= min(p.shards, COUNTED_RANKS) / p.shards
        return max(parts.values())
    entry = HALF * m.hidden_size / p.tp
    # The entropy needs a copy of the logits, the cross entropy a float32 copy. The chunks of importance are smaller.
    logits = 0.0 if p.fused else (6 if trained else 8) * m.vocab_size / p.tp
    if phase == LOG_PROB:
        return (2 * entry + logits) * p.micro_batch(update)
    # Inputs of norms; inputs of the linear layers for weight gradients, which an importance pass does not have.
    outside = 2 * HALF * m.hidden_size * (1 + trained)
    if m.num_experts:  # an expert that is split over ranks gets its tokens on each of them
        outside += HALF * m.num_experts_per_tok * m.hidden_size * (1 + trained) * p.etp + (HALF + 4) * m.num_experts
    # Queries, output, keys, values; a float32 per head; Qwen3 normalises queries and keys.
    heads = (m.num_attention_heads + m.num_key_value_heads) * m.head_dim
    attention = HALF * heads * (3 if m.model_type.startswith("qwen3") else 2) + 4 * m.num_attention_heads
    layer = (outside + attention + HALF * (2 + trained) * m.inner) / p.tp
    # Gradients of the residual stream and in the MLP, whose last product has been freed by then.
    going_back = entry + (3 - trained) * HALF * m.inner / p.tp + (layer if p.recompute else 0)
    # In the 1F1B schedule the first stage holds one micro-batch per pipeline stage (arXiv 2104.04473, section 2.2).
    kept = p.pp * (m.num_hidden_layers // p.pp) * (entry if p.recompute else layer)
    return (kept + max(entry * (1 + trained) + logits, going_back)) * p.micro_batch(update)


def step_flops(p: Plan) -> Parts:
    """Return phase -> FLOPs over all GPUs. OAR's phases count only the part of a pass that runs."""
    passed, layers = p.flops_of(LOG_PROB, p.length), p.flops_of("layers", p.length)
    decoding = p.flops_of("layers", p.length, p.mean_prompt) + p.flops_of("head", p.mean_response)
    flops = {
        GENERATION: sum(p.rounds) * (p.flops_of("layers", p.mean_prompt) / p.rollout.n + decoding),
        LOG_PROB: p.sequences * passed,
        UPDATE: p.sequences * p.actor.ppo_epochs * p.flops_of(UPDATE, p.length),
    }
    flops |= {REFERENCE: flops[LOG_PROB]} if p.actor.use_kl_loss or p.config.algorithm.use_kl_in_reward else {}
    if (oar := p.settings) is None:
        return flops
    answer = 1 if oar.probe == "last" else hardware.ANSWER  # rows that the probe reads
    importance, reasoning = oar.importance_object, max(1.0, p.mean_response - answer)
    rows = {"reasoning": reasoning}
    added = p.extra_forwards * layers + oar.backwards * (p.flops_of("importance", p.length) - passed)
    added += oar.num_draws * 2 * p.flops_of("head", sum(rows.get(one.rows, answer) for one in importance.backwards))
    if importance.reads and not any(backward.rows == "reasoning" for backward in importance.backwards):
        added += p.flops_of("head", reasoning)
    share = oar.amortize.share or 1.0
    added *= share
    if oar.amortize.share:  # each token is projected; of those that are learned come sums of products
        added += 2 * reasoning * (p.model.hidden_size * COLUMNS + share * FEATURES**2)
    flops |= {IMPORTANCE: p.sequences * p.scored_share * added} if added else {}
    if importance.copies:  # masked copies, and one forward of the unmasked response
        units = max(1.0, reasoning / oar.perturbation.span)
        # With a shared prefix, a copy's forward starts at its first masked token: on average mid-way in the reasoning.
        start = p.mean_prompt + reasoning / 2 if oar.offloads or (p.cp == 1 and not p.fused) else 0.0
        copy = p.flops_of("layers", p.length, start) + p.flops_of("head", answer)
        flops[COPIES] = p.sequences * p.scored_share * share * (units * copy + layers)
    return flops


def step_seconds(p: Plan, efficiency: Efficiency) -> Parts:
    """Return phase -> seconds of one step."""
    flops, oar, peak = p.flops, p.settings, p.gpu.tflops * 1e12

    def link(sent: float, group: int) -> float:  # at link speed if the group fits one node, else at network speed
        speed = p.gpu.link if group <= p.config.trainer.n_gpus_per_node else p.gpu.network
        return sent / (speed * 1e9 * efficiency.link)

    def trainer(phase: str, rate: float, share: float, forwards: float, backwards: float) -> float:
        tokens, steps = p.sequences * p.length * share / p.dp / p.cp, p.updates if phase == UPDATE else 1
        micro_batches = max(1, steps * math.ceil(tokens / steps / p.micro_batch(phase == UPDATE)))
        # The last factor adds the pipeline bubble (arXiv 2104.04473, section 2.2).
        arithmetic = flops[phase] / (p.gpus * peak * rate) * (1 + (p.pp - 1) / micro_batches)
        # Communication of FSDP and of the optimizer overlaps with arithmetic.
        overlapped, waited = _sent(p, tokens, micro_batches, forwards, backwards, phase == UPDATE)
        group = max(p.tp, p.ep * p.etp) if p.megatron else p.cp
        return max(arithmetic, link(overlapped, p.shards)) + link(waited, group)

    seconds = {GENERATION: sum(generation_seconds(p, efficiency, sequences) for sequences in p.rounds if sequences)}
    seconds[LOG_PROB] = trainer(LOG_PROB, efficiency.inference, 1.0, 1, 0)
    seconds |= {REFERENCE: seconds[LOG_PROB]} if REFERENCE in flops else {}
    if oar is not None:
        if IMPORTANCE in flops:
            rate = efficiency.training if oar.backwards else efficiency.inference
            seconds[IMPORTANCE] = trainer(IMPORTANCE, rate, p.scored_share, p.extra_forwards, oar.backwards)
        if COPIES in flops:
            hidden = oar.perturbation.share_while_generating * seconds[GENERATION] if oar.offloads else 0.0
            gpus = p.rollout_gpus if oar.offloads else p.gpus
            seconds[COPIES] = max(0.0, flops[COPIES] / (gpus * peak * efficiency.inference) - hidden)
        gate = hardware.GATE_SECONDS_PER_TOKEN / p.dp + hardware.DRIVER_SECONDS_PER_TOKEN
        seconds[GATE] = gate * p.sequences * p.config.data.max_response_length
    seconds[UPDATE] = trainer(UPDATE, efficiency.training, p.actor.ppo_epochs, 1, 1)
    # Weight sync: every trainer rank gathers the whole model; engines on other GPUs receive it over the network.
    moved, ranks = p.parameters["trained"], p.pp * max(p.tp, p.ep * p.etp) if p.megatron else p.shards
    seconds[SYNC] = link(p.weight * moved * (1 - 1 / ranks), ranks)
    seconds[SYNC] += link(HALF * moved, p.gpus + p.rollout_gpus) if p.dedicated else 0.0
    return seconds


def _sent(p: Plan, tokens: float, count: int, forwards: float, backwards: float, trains: bool) -> tuple[float, float]:
    """Return the bytes that a GPU sends in `count` micro-batches: (overlapped with arithmetic, not overlapped).

    In an all-gather or reduce-scatter over n ranks, a rank sends (1 - 1/n) of a tensor.
    """
    m, passes = p.model, forwards + backwards * (2 if p.recompute else 1)
    each = m.num_hidden_layers / p.pp * HALF * tokens
    if p.megatron:
        # The optimizer reduces gradients (float32) and gathers weights. Tensor parallelism sends the residual stream four times
        # per layer and pass: a gather and a scatter each for attention and MLP.
        reduced = sum(number * (1 - ranks * p.pp / p.gpus) for ranks, number in local_parameters(p).items())
        stream = (2 if m.num_experts else 4) * m.hidden_size * (1 - 1 / p.tp)
        # Tokens go to their experts and back; the ranks of a split expert gather them.
        stream += 2 * m.num_experts_per_tok * m.hidden_size / p.tp * (p.etp - 1 / p.ep)
        again = 0.5 if trains and p.tp > 1 else 0.0
        return p.updates * (4 + p.weight) * reduced if trains else 0.0, (passes + again) * stream * each
    sent = p.counted_memory(trains).get("sent", {})  # one rank sends nothing
    plain, scored, update = (sent.get(phase, 0.0) for phase in (LOG_PROB, "importance", UPDATE))
    gathered = update if trains else forwards * plain + backwards * (scored - plain)
    # Ulysses exchanges queries, keys, values and outputs around attention.
    heads = (2 * m.num_attention_heads + 2 * max(m.num_key_value_heads, p.cp)) * m.head_dim
    return count * gathered * (1 - 1 / p.shards), passes * heads * (1 - 1 / p.cp) * each


def generation_seconds(p: Plan, efficiency: Efficiency, sequences: float) -> float:
    """Return the seconds until the longest of `sequences` responses is done.

    Each decoding step reads the weights once, and the cache of every running sequence (arXiv 2211.05102, section 2.1). The
    cache size limits how many sequences run together. After the mean length, sequences finish at an even rate.
    """
    m, engines, latency = p.model, p.rollout_gpus // p.engine_tp, efficiency.decode_overhead_s
    latency += 2 * m.num_hidden_layers * efficiency.all_reduce_s if p.engine_tp > 1 else 0.0
    together = max(1.0, min(sequences / engines, p.rollout.max_num_seqs, p.cached_tokens / p.length))
    compute = p.gpu.tflops * 1e12 * efficiency.inference * p.engine_tp
    token_flops = p.flops_of("layers", 2.0, 1.0) + p.flops_of("head", 1)

    def token_seconds(running: float, seen: float) -> float:
        unvisited = (1 - m.num_experts_per_tok / m.num_experts) ** running if m.num_experts else 0.0
        weights = HALF * (p.parameters["all"] - p.parameters["experts"] * unvisited) / p.engine_tp
        reading = (weights + running * seen * p.cache_bytes) / (p.gpu.bandwidth * 1e9 * efficiency.decoding)
        return max(reading, running * token_flops / compute) + latency

    prefill = sequences / p.rollout.n * p.flops_of("layers", p.mean_prompt) / (engines * compute)
    waves, seen = sequences / engines / together, p.mean_prompt + p.mean_response / 2
    steady = waves * p.mean_response * token_seconds(together, seen)
    longest = p.config.data.max_response_length - p.mean_response
    return prefill + steady + longest * token_seconds(together / 4, p.length)
