"""What a composed verl configuration says about sizes: workload, parallel layout, what lies where, and what cannot work.

`read_setup` turns the configuration into a `Setup`, the only thing that the other modules of the planner read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.hosts.verl.settings import resolve, switched_on
from oar_plugin.plan.shape import ModelShape, load_shape

Recompute = Literal["none", "selective", "full"]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}

# Without better knowledge a response is half as long as it may be, a prompt a quarter.
MEAN_RESPONSE_SHARE, MEAN_PROMPT_SHARE = 0.5, 0.25
ANSWER_TOKENS = 8


class LayoutError(ValueError):
    """A configuration that cannot run: one line a fault, each with key, value and what is allowed."""


@dataclass(frozen=True)
class Workload:
    """The sequences of a step.

    Attributes:
        prompts: of a step.
        responses: of a prompt.
        max_prompt: tokens.
        max_response: tokens.
        mean_prompt: tokens, expected.
        mean_response: tokens, expected.
        scored_share: responses whose advantage is not zero; only those get importance.
        answer: tokens of an answer.
        updates: optimizer steps of a step.
        epochs: how often a step's responses are trained on.
    """

    prompts: int
    responses: int
    max_prompt: int
    max_response: int
    mean_prompt: float
    mean_response: float
    scored_share: float = 0.5
    answer: int = ANSWER_TOKENS
    updates: int = 1
    epochs: int = 1

    @property
    def sequences(self) -> int:
        """Responses of a step."""
        return self.prompts * self.responses

    @property
    def mean_length(self) -> float:
        """Tokens of prompt and response, expected."""
        return self.mean_prompt + self.mean_response

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt + self.max_response

    @property
    def tokens(self) -> float:
        """Tokens of a step, prompts counted for each response, as training sees them."""
        return self.sequences * self.mean_length


@dataclass(frozen=True)
class Layout:
    """How the trainer is spread over its GPUs.

    Attributes:
        engine: `fsdp` (both generations) or `megatron`.
        gpus: of the trainer.
        gpus_per_node: of a node.
        shards: GPUs that share one copy of the weights under FSDP.
        ulysses: sequence parallel size of FSDP.
        tp, pp, vpp, cp, ep: Megatron's tensor, pipeline, virtual pipeline, context and expert parallel sizes.
        sequence_parallel: of Megatron.
        distributed_optimizer: of Megatron.
    """

    engine: Literal["fsdp", "megatron"]
    gpus: int
    gpus_per_node: int
    shards: int = 1
    ulysses: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True

    @property
    def dp(self) -> int:
        """Groups that work on sequences of their own."""
        return self.gpus // (self.ulysses if self.engine == "fsdp" else self.tp * self.pp * self.cp)

    @property
    def sequence_ranks(self) -> int:
        """GPUs that share the tokens of a micro-batch: verl multiplies the token budget of one GPU with it."""
        return self.ulysses if self.engine == "fsdp" else self.cp


@dataclass(frozen=True)
class Training:
    """What the trainer keeps, and how much it takes at once.

    Attributes:
        weight_bytes: of a stored weight; its gradient and each of Adam's moments are as large under FSDP.
        compute_bytes: of an activation.
        update_tokens: most tokens of a micro-batch of the update on one GPU.
        log_prob_tokens: the same of the log-prob pass.
        recompute: of activations.
        chunk: rows of logits at a time for the entropy; None for all.
        fused_kernels: logits are never formed.
        offload_weights: weights and gradients wait on the host when they are not needed.
        offload_optimizer: the same of the optimizer.
        offload_policy: FSDP2 keeps everything on the host and brings a layer at a time.
        host_optimizer: share of Megatron's optimizer that stays on the host for good.
        lora_rank: 0 for full training.
        reference: a reference model takes a log-prob pass of its own.
    """

    weight_bytes: int = 4
    compute_bytes: int = 2
    update_tokens: int = 16384
    log_prob_tokens: int = 16384
    recompute: Recompute = "full"
    chunk: int | None = 2048
    fused_kernels: bool = False
    offload_weights: bool = False
    offload_optimizer: bool = False
    offload_policy: bool = False
    host_optimizer: float = 0.0
    lora_rank: int = 0
    reference: bool = False


@dataclass(frozen=True)
class Rollout:
    """vLLM.

    Attributes:
        gpus: that generate.
        tp: tensor parallel size of an engine.
        replica: GPUs of an engine (tensor, pipeline and data parallel).
        memory_share: of a GPU's memory that vLLM takes.
        max_length: longest sequence.
        max_sequences: at once, of an engine.
        max_batched_tokens: of a forward.
        weight_bytes: of a weight and of a cache entry.
        sleeps: gives its memory back while the trainer works.
        colocated: on the trainer's GPUs.
        dedicated: on GPUs of its own (`separate_async`), too.
        sync_bucket: bytes of the buffer that carries weights over.
    """

    gpus: int
    tp: int
    replica: int
    memory_share: float
    max_length: int
    max_sequences: int
    max_batched_tokens: int
    weight_bytes: int = 2
    sleeps: bool = True
    colocated: bool = True
    dedicated: bool = False
    sync_bucket: int = 2**31

    @property
    def replicas(self) -> int:
        """Engines."""
        return self.gpus // self.replica


@dataclass(frozen=True)
class Setup:
    """Everything a plan is made from; `oar` is None for a run without OAR."""

    shape: ModelShape
    workload: Workload
    layout: Layout
    training: Training
    rollout: Rollout
    oar: OarConfig | None


def read_setup(
    config: DictConfig,
    *,
    response_length: float | None = None,
    prompt_length: float | None = None,
    scored_share: float = 0.5,
    model: str | None = None,
) -> Setup:
    """Read a composed configuration.

    Args:
        config: verl's whole configuration.
        response_length: expected mean.
        prompt_length: expected mean.
        scored_share: responses whose advantage is not zero.
        model: instead of `actor_rollout_ref.model.path`.

    Raises:
        LayoutError: the configuration cannot run, or an argument is out of range.
        ShapeError: the model is not known.
    """
    shape = load_shape(model or str(_get(config, f"{MODEL}.path")))
    setup = Setup(
        shape=shape,
        workload=_workload(config, response_length, prompt_length, scored_share),
        layout=_layout(config),
        training=_training(config),
        rollout=_rollout(config),
        oar=None,
    )
    faults = list(_faults(config, setup))
    try:
        oar = resolve(config) if switched_on(config) else None
    except OarConfigError as error:
        faults += str(error).splitlines()
        oar = None
    if oar is not None and setup.layout.engine == "megatron" and shape.experts:
        faults.append(
            f"{MODEL}.path={shape.name} with {ACTOR}.strategy=megatron and algorithm.adv_estimator=oar: OAR serves no mixture "
            "of experts under Megatron; allowed: actor.strategy=fsdp2, or a dense model"
        )
    if faults:
        raise LayoutError("\n".join(faults))
    training = _micro_batches(config, setup.training, setup.workload, setup.layout)
    return replace(setup, oar=oar, training=training)


def with_overrides(config: DictConfig, overrides: dict[str, Any]) -> DictConfig:
    """A copy of a configuration with some keys changed, interpolations included."""
    changed = config.copy()
    OmegaConf.set_struct(changed, False)
    for key, value in overrides.items():
        OmegaConf.update(changed, key, value, merge=True, force_add=True)
    return changed


def _get(config: DictConfig, key: str, default: Any = None) -> Any:
    value = OmegaConf.select(config, key)
    return default if value is None else value


def on_cluster(config: DictConfig, gpus: int | None, gpus_per_node: int | None) -> DictConfig:
    """The configuration for another number of GPUs; of a node, as many as the configuration says unless given.

    Raises:
        LayoutError: the GPUs do not fill whole nodes.
    """
    if gpus is None and gpus_per_node is None:
        return config
    per_node, nodes = _cluster(config)
    per_node = per_node if gpus_per_node is None else gpus_per_node
    total = per_node * nodes if gpus is None else gpus
    if total < 1 or per_node < 1:
        raise LayoutError(f"gpus={total}, gpus per node={per_node}: both must be at least 1")
    per_node = min(per_node, total)
    if total % per_node:
        raise LayoutError(f"gpus={total}: must be a multiple of {per_node}, the GPUs of a node")
    return with_overrides(config, {"trainer.nnodes": total // per_node, "trainer.n_gpus_per_node": per_node})


def _generates_apart(config: DictConfig) -> bool:
    """Whether the run generates on GPUs of its own."""
    return bool(_get(config, "trainer.v1.trainer_mode", "sync") == "separate_async")


def _cluster(config: DictConfig) -> tuple[int, int]:
    """GPUs of a node, and nodes."""
    return int(_get(config, "trainer.n_gpus_per_node", 8)), int(_get(config, "trainer.nnodes", 1))


def _workload(config: DictConfig, response: float | None, prompt: float | None, share: float) -> Workload:
    max_prompt = int(_get(config, "data.max_prompt_length", 512))
    max_response = int(_get(config, "data.max_response_length", 512))
    if response is not None and not 0 < response <= max_response:
        raise LayoutError(f"response_length={response}: must be in (0, {max_response}], data.max_response_length")
    if prompt is not None and not 0 < prompt <= max_prompt:
        raise LayoutError(f"prompt_length={prompt}: must be in (0, {max_prompt}], data.max_prompt_length")
    if not 0 <= share <= 1:
        raise LayoutError(f"scored_share={share}: must be in [0, 1]")
    batch = int(_get(config, "data.train_batch_size"))
    mini = int(_get(config, f"{ACTOR}.ppo_mini_batch_size", batch))
    epochs = int(_get(config, f"{ACTOR}.ppo_epochs", 1))
    return Workload(
        prompts=batch,
        responses=int(_get(config, f"{ROLLOUT}.n", 1)),
        max_prompt=max_prompt,
        max_response=max_response,
        mean_prompt=float(prompt or max_prompt * MEAN_PROMPT_SHARE),
        mean_response=float(response or max_response * MEAN_RESPONSE_SHARE),
        scored_share=share,
        updates=max(1, batch // mini) * epochs,
        epochs=epochs,
    )


def _layout(config: DictConfig) -> Layout:
    per_node, nodes = _cluster(config)
    total = per_node * nodes
    strategy = _get(config, f"{ACTOR}.strategy")
    if strategy in ("fsdp", "fsdp2"):
        size = int(_get(config, f"{ACTOR}.fsdp_config.fsdp_size", -1))
        # verl copies the first to the second, which the engine reads.
        places = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
        ulysses = max(int(_get(config, place, 1)) for place in places)
        shards = total if size < 1 or size > total else size
        return Layout("fsdp", total, per_node, shards=shards, ulysses=ulysses)
    if strategy != "megatron":
        raise LayoutError(f"{ACTOR}.strategy={strategy}: not known to the planner; allowed: fsdp, fsdp2, megatron")

    def size_of(name: str) -> int:
        return int(_get(config, f"{ACTOR}.megatron.{name}_parallel_size", 1))

    tp = size_of("tensor_model")
    return Layout(
        "megatron",
        total,
        per_node,
        tp=tp,
        pp=size_of("pipeline_model"),
        vpp=size_of("virtual_pipeline_model"),
        cp=int(_get(config, f"{ACTOR}.megatron.context_parallel_size", 1)),
        ep=size_of("expert_model"),
        sequence_parallel=tp > 1 and bool(_get(config, f"{ACTOR}.megatron.sequence_parallel", True)),
        distributed_optimizer=bool(_get(config, f"{ACTOR}.megatron.use_distributed_optimizer", True)),
    )


def _training(config: DictConfig) -> Training:
    megatron = _get(config, f"{ACTOR}.strategy") == "megatron"
    group = f"{ACTOR}.megatron" if megatron else f"{ACTOR}.fsdp_config"
    rank = int(_get(config, f"{MODEL}.lora.rank", 0)) or int(_get(config, f"{MODEL}.lora_rank", 0))
    if megatron:
        granularity = _get(config, f"{group}.override_transformer_config.recompute_granularity", "none")
        recompute: Recompute = granularity if granularity in ("full", "selective") else "none"
        on_host = _get(config, f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload", False)
        host_optimizer = float(
            _get(config, f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction", 1.0) if on_host else 0.0
        )
        weight_bytes = DTYPE_BYTES[str(_get(config, f"{group}.dtype", "bfloat16"))]
    else:
        recompute = "full" if _get(config, f"{MODEL}.enable_gradient_checkpointing", True) else "none"
        host_optimizer = 0.0
        weight_bytes = DTYPE_BYTES[str(_get(config, f"{group}.model_dtype", "fp32"))]
    chunked = _get(config, f"{ACTOR}.entropy_from_logits_with_chunking", False)
    return Training(
        weight_bytes=weight_bytes,
        update_tokens=int(_get(config, f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)),
        log_prob_tokens=int(_get(config, f"{ROLLOUT}.log_prob_max_token_len_per_gpu", 16384)),
        recompute=recompute,
        chunk=int(_get(config, f"{ACTOR}.entropy_from_logits_chunk_size", 2048)) if chunked else None,
        fused_kernels=bool(_get(config, f"{MODEL}.use_fused_kernels", False)),
        offload_weights=bool(_get(config, f"{group}.param_offload", False)),
        offload_optimizer=bool(_get(config, f"{group}.optimizer_offload", False)),
        offload_policy=_get(config, f"{ACTOR}.strategy") == "fsdp2"
        and bool(_get(config, f"{group}.offload_policy", False)),
        host_optimizer=host_optimizer,
        lora_rank=rank,
        reference=bool(_get(config, f"{ACTOR}.use_kl_loss", False))
        or bool(_get(config, "algorithm.use_kl_in_reward", False)),
    )


def _micro_batches(config: DictConfig, training: Training, workload: Workload, layout: Layout) -> Training:
    """The most tokens of micro-batches, whether they are cut by tokens or by sequences."""
    length = workload.max_length / layout.sequence_ranks
    if _get(config, f"{ACTOR}.use_dynamic_bsz", False):
        # A rank cannot have more in one micro-batch than it has in all.
        ours = math.ceil(workload.sequences / workload.updates * workload.epochs / layout.dp) * length
        whole = math.ceil(workload.sequences / layout.dp) * length
        return replace(
            training,
            update_tokens=math.ceil(min(training.update_tokens, ours)),
            log_prob_tokens=math.ceil(min(training.log_prob_tokens, whole)),
        )
    rows = int(_get(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0))
    log_prob_rows = int(_get(config, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 0))
    if not rows or not log_prob_rows:
        raise LayoutError(
            f"{ACTOR}.use_dynamic_bsz=False with {ACTOR}.ppo_micro_batch_size_per_gpu={rows or None} and "
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={log_prob_rows or None}: both must be numbers; or "
            f"{ACTOR}.use_dynamic_bsz=True"
        )
    return replace(training, update_tokens=math.ceil(rows * length), log_prob_tokens=math.ceil(log_prob_rows * length))


def _rollout(config: DictConfig) -> Rollout:
    per_node, nodes = _cluster(config)
    total = per_node * nodes
    dedicated = _generates_apart(config)
    colocated = not dedicated or bool(_get(config, "actor_rollout_ref.hybrid_engine", True))
    if dedicated:
        own = int(_get(config, f"{ROLLOUT}.nnodes", 0)) * int(_get(config, f"{ROLLOUT}.n_gpus_per_node", 0))
        if own < 1:
            raise LayoutError(
                f"{ROLLOUT}.nnodes={_get(config, f'{ROLLOUT}.nnodes')} with trainer.v1.trainer_mode=separate_async: must be at "
                "least 1, because that trainer generates on GPUs of its own"
            )
        total = own
    tp = int(_get(config, f"{ROLLOUT}.tensor_model_parallel_size", 1))
    pp = int(_get(config, f"{ROLLOUT}.pipeline_model_parallel_size", 1))
    replica = tp * pp * int(_get(config, f"{ROLLOUT}.data_parallel_size", 1))
    longest = int(_get(config, "data.max_prompt_length", 512)) + int(_get(config, "data.max_response_length", 512))
    return Rollout(
        gpus=total,
        tp=tp,
        replica=replica,
        memory_share=float(_get(config, f"{ROLLOUT}.gpu_memory_utilization", 0.5)),
        max_length=int(_get(config, f"{ROLLOUT}.max_model_len", longest)),
        max_sequences=int(_get(config, f"{ROLLOUT}.max_num_seqs", 256)),
        max_batched_tokens=int(_get(config, f"{ROLLOUT}.max_num_batched_tokens", 8192)),
        weight_bytes=DTYPE_BYTES[str(_get(config, f"{ROLLOUT}.dtype", "bfloat16"))],
        sleeps=bool(_get(config, f"{ROLLOUT}.free_cache_engine", True))
        and bool(_get(config, f"{ROLLOUT}.enable_sleep_mode", True)),
        colocated=colocated,
        dedicated=dedicated,
        sync_bucket=int(_get(config, f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 2048)) << 20,
    )


def _faults(config: DictConfig, setup: Setup) -> Iterator[str]:
    """What cannot run: key, value, what is allowed."""
    shape, work, layout = setup.shape, setup.workload, setup.layout
    mini = int(_get(config, f"{ACTOR}.ppo_mini_batch_size", work.prompts))
    if mini > work.prompts or work.prompts % mini:
        yield (
            f"{ACTOR}.ppo_mini_batch_size={mini}: must divide data.train_batch_size={work.prompts}; allowed: "
            f"{_listed(_divisors(work.prompts))}"
        )
    if layout.engine == "fsdp":
        yield from _fsdp_faults(config, setup)
    else:
        yield from _megatron_faults(setup)
    if layout.gpus >= 1 and layout.dp >= 1:
        for key, rows in (("data.train_batch_size", work.prompts), (f"{ACTOR}.ppo_mini_batch_size", mini)):
            if rows * work.responses % layout.dp:
                yield (
                    f"{key}={rows} x {ROLLOUT}.n={work.responses} = {rows * work.responses} responses: must be divisible by "
                    f"the data parallel size {layout.dp}; allowed: multiples of "
                    f"{layout.dp // math.gcd(layout.dp, work.responses)}"
                )
    yield from _rollout_faults(setup)
    cycle = int(_get(config, "trainer.v1.separate_async.parameter_sync_step", 1))
    if _generates_apart(config) and work.prompts != cycle * mini:
        yield (
            f"data.train_batch_size={work.prompts} with trainer.v1.trainer_mode=separate_async: must be "
            f"trainer.v1.separate_async.parameter_sync_step={cycle} x {ACTOR}.ppo_mini_batch_size={mini}; allowed: "
            f"{cycle * mini}"
        )
    if _get(config, f"{ACTOR}.use_dynamic_bsz", False):
        for key in (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"):
            budget = int(_get(config, key, 16384))
            if budget * layout.sequence_ranks < work.max_length:
                yield (
                    f"{key}={budget}: a sequence of {work.max_length} tokens (data.max_prompt_length + "
                    f"data.max_response_length) does not fit into one micro-batch; allowed: at least "
                    f"{math.ceil(work.max_length / layout.sequence_ranks)}"
                )
    if shape.max_positions and work.max_length > shape.max_positions:
        yield (
            f"data.max_response_length={work.max_response} with data.max_prompt_length={work.max_prompt}: {shape.name} reads "
            f"{shape.max_positions} positions; allowed: at most {max(0, shape.max_positions - work.max_prompt)}"
        )


def _fsdp_faults(config: DictConfig, setup: Setup) -> Iterator[str]:
    shape, layout = setup.shape, setup.layout
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    allowed = _head_splits(shape, layout.gpus)
    if layout.ulysses not in allowed:
        yield (
            f"{key}={layout.ulysses}: must divide the {layout.gpus} GPUs and the {shape.heads} heads of {shape.name}, and "
            f"divide or be a multiple of its {shape.kv_heads} key-value heads; allowed: {_listed(allowed)}"
        )
    if layout.ulysses > 1 and not _get(config, f"{MODEL}.use_remove_padding", False):
        yield f"{key}={layout.ulysses} with {MODEL}.use_remove_padding=False: verl needs packed sequences; allowed: True"
    if layout.gpus % layout.shards:
        yield (
            f"{ACTOR}.fsdp_config.fsdp_size={layout.shards}: must divide the {layout.gpus} GPUs; allowed: -1, "
            f"{_listed(_divisors(layout.gpus))}"
        )


def _megatron_faults(setup: Setup) -> Iterator[str]:
    shape, layout = setup.shape, setup.layout
    group = f"{ACTOR}.megatron"
    tensor = [
        n
        for n in _divisors(shape.heads)
        if (shape.kv_heads % n == 0 or n % shape.kv_heads == 0) and shape.vocab % n == 0 and n <= layout.gpus
    ]
    if layout.tp not in tensor:
        yield (
            f"{group}.tensor_model_parallel_size={layout.tp}: must divide the {shape.heads} heads and the vocabulary "
            f"{shape.vocab} of {shape.name}, and divide or be a multiple of its {shape.kv_heads} key-value heads; allowed: "
            f"{_listed(tensor)}"
        )
    if shape.layers % (layout.pp * layout.vpp):
        what = f" x virtual_pipeline_model_parallel_size={layout.vpp}" if layout.vpp > 1 else ""
        yield (
            f"{group}.pipeline_model_parallel_size={layout.pp}{what}: must divide the {shape.layers} layers of {shape.name}; "
            f"allowed: {_listed([n for n in _divisors(shape.layers) if n <= layout.gpus])}"
        )
    together = layout.tp * layout.pp * layout.cp
    if layout.gpus % together:
        yield (
            f"{group}: tensor {layout.tp} x pipeline {layout.pp} x context {layout.cp} = {together}: must divide the "
            f"{layout.gpus} GPUs of trainer.nnodes x trainer.n_gpus_per_node"
        )
    if layout.ep > 1 and (not shape.experts or shape.experts % layout.ep):
        allowed = _divisors(shape.experts) if shape.experts else [1]
        yield (
            f"{group}.expert_model_parallel_size={layout.ep}: must divide the {shape.experts} experts of {shape.name}; "
            f"allowed: {_listed(allowed)}"
        )


def _rollout_faults(setup: Setup) -> Iterator[str]:
    shape, work, rollout = setup.shape, setup.workload, setup.rollout
    allowed = _head_splits(shape, rollout.gpus)
    if rollout.tp not in allowed:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={rollout.tp}: must divide the {rollout.gpus} GPUs and the {shape.heads} "
            f"heads of {shape.name}, and divide or be a multiple of its {shape.kv_heads} key-value heads; allowed: "
            f"{_listed(allowed)}"
        )
    elif rollout.gpus % rollout.replica:
        yield (
            f"{ROLLOUT}: tensor x pipeline x data parallel size = {rollout.replica}: must divide the {rollout.gpus} GPUs; "
            f"allowed: {_listed(_divisors(rollout.gpus))}"
        )
    if rollout.max_length < work.max_length:
        yield (
            f"{ROLLOUT}.max_model_len={rollout.max_length}: must hold data.max_prompt_length + data.max_response_length; "
            f"allowed: at least {work.max_length}"
        )
    if not 0 < rollout.memory_share < 1:
        yield f"{ROLLOUT}.gpu_memory_utilization={rollout.memory_share}: must be between 0 and 1"


def _head_splits(shape: ModelShape, gpus: int) -> list[int]:
    """Over how many of `gpus` the attention heads can be split, key-value heads shared out or repeated."""
    return [n for n in _divisors(math.gcd(shape.heads, gpus)) if shape.kv_heads % n == 0 or n % shape.kv_heads == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(values: list[int]) -> str:
    return ", ".join(str(v) for v in values)
