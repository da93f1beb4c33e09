"""Work and layout of a composed verl configuration, and the parts of it that cannot run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.hosts.verl.settings import resolve, switched_on
from oar_plugin.runs.plan.hardware import ANSWER, MEAN_PROMPT, MEAN_RESPONSE, ROWS, SCORED
from oar_plugin.runs.plan.models import PlanError, load_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


@dataclass(frozen=True)
class Expected:
    """Values that no configuration has. Lengths are means in tokens; None: a share of the maximum length."""

    response_length: float | None = None
    prompt_length: float | None = None
    scored_share: float = SCORED
    model: str | None = None  # instead of actor_rollout_ref.model.path


def training_steps(config: DictConfig) -> int | None:
    """Return the steps of the whole run; None where the number of training rows is unknown."""
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    rows = _rows(config.data.train_files)
    return None if rows is None else rows // config.data.train_batch_size * config.trainer.total_epochs


class Setup:
    """Values derived from a configuration that verl and OAR accept (`oar_plugin.runs.recipe.check_config`).

    PlanError: the configuration cannot run, or an expected value is out of range.
    """

    def __init__(self, config: DictConfig, expected: Expected | None = None) -> None:
        expected, data, trainer, host = expected or Expected(), config.data, config.trainer, config.actor_rollout_ref
        for option, value, most in (
            ("response-length", expected.response_length, data.max_response_length),
            ("prompt-length", expected.prompt_length, data.max_prompt_length),
            ("scored-share", expected.scored_share, 1),
        ):
            if value is not None and not 0 < value <= most:
                raise PlanError(f"--{option} {value:g}: must be above 0 and at most {most}")
        if host.actor.strategy not in ("fsdp", "fsdp2", "megatron"):
            raise PlanError(f"{ACTOR}.strategy={host.actor.strategy}: not known; allowed: fsdp, fsdp2, megatron")
        self.config = config
        self.model = load_model(expected.model or str(host.model.path))
        self.oar = resolve(config) if switched_on(config) else None  # None for a run without OAR
        self.megatron: bool = host.actor.strategy == "megatron"
        self.actor, self.rollout = host.actor, host.rollout
        self.engine = self.actor.megatron if self.megatron else self.actor.fsdp_config
        # ---- the work of a step
        self.prompts: int = data.train_batch_size
        self.sequences: int = self.prompts * self.rollout.n
        self.updates: int = max(1, self.prompts // self.actor.ppo_mini_batch_size) * self.actor.ppo_epochs
        self.max_response: int = data.max_response_length
        self.max_length: int = data.max_prompt_length + self.max_response
        self.mean_prompt = float(expected.prompt_length or data.max_prompt_length * MEAN_PROMPT)
        self.mean_response = float(expected.response_length or self.max_response * MEAN_RESPONSE)
        self.mean_length = self.mean_prompt + self.mean_response
        self.scored_share = expected.scored_share
        self.answer_rows = 1 if self.oar is not None and self.oar.probe == "last" else ANSWER  # that the probe reads
        # ---- the run: steps (None: unknown), and responses of all validations
        self.steps = training_steps(config)
        validations = math.ceil((self.steps or 0) / trainer.test_freq) if trainer.test_freq > 0 else 0
        validations += trainer.val_before_train
        of_one = _rows(data.val_files)
        self.validated = None if of_one is None else validations * of_one * self.rollout.val_kwargs.n
        # ---- the trainer's layout
        self.gpus: int = trainer.nnodes * trainer.n_gpus_per_node
        kinds = ("tensor_model", "pipeline_model", "context")
        self.tp, self.pp, self.cp = (self.engine[f"{kind}_parallel_size"] if self.megatron else 1 for kind in kinds)
        self.ulysses = self.shards = 1
        if not self.megatron:
            # verl copies the first to the second, which the engine reads.
            self.ulysses = max(self.actor.ulysses_sequence_parallel_size, self.engine.ulysses_sequence_parallel_size)
            size = self.engine.fsdp_size
            self.shards = size if 1 <= size <= self.gpus else self.gpus  # GPUs that share one copy of the weights
        # GPUs that share the tokens of a micro-batch: verl multiplies the token budget of one GPU by it.
        self.sequence_ranks: int = self.cp * self.ulysses
        self.dp: int = self.gpus // (self.tp * self.pp * self.sequence_ranks)
        # The divisor by sequence parallelism of tensors that tensor parallelism does not divide.
        self.outer: int = self.tp if self.megatron and self.engine.sequence_parallel else 1
        # Of a stored weight; under FSDP also of its gradient and each of Adam's moments.
        self.weight_bytes = BYTES[self.engine.dtype if self.megatron else self.engine.model_dtype]
        self.element = BYTES[self.engine.dtype]  # bytes of an activation
        self.recompute: bool = host.model.enable_gradient_checkpointing  # activations, layer by layer
        if self.megatron:
            self.recompute = self.engine.override_transformer_config.get("recompute_granularity") == "full"
        self.lora_rank: int = host.model.lora.rank or host.model.lora_rank  # 0: full training
        # ---- generation, which may have GPUs of its own and overlap with training
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
        self.dedicated: bool = trainer.v1.trainer_mode == "separate_async"
        self.colocated: bool = not self.dedicated or host.hybrid_engine
        self.rollout_gpus: int = self.rollout.nnodes * self.rollout.n_gpus_per_node if self.dedicated else self.gpus
        self.replica = math.prod(self.rollout[size] for size in sizes)  # GPUs of one engine
        if faults := list(_faults(self)):
            raise PlanError("\n".join(faults))

    def micro_batch(self, update: bool) -> float:
        """Return the maximum tokens of a micro-batch on one GPU, of the update or of the log-prob pass."""
        rows = self.actor.ppo_micro_batch_size_per_gpu if update else self.rollout.log_prob_micro_batch_size_per_gpu
        length = self.max_length / self.sequence_ranks
        if not self.actor.use_dynamic_bsz:
            return float(rows * length)
        budget = self.actor.ppo_max_token_len_per_gpu if update else self.rollout.log_prob_max_token_len_per_gpu
        steps = self.updates / self.actor.ppo_epochs if update else 1
        # One micro-batch cannot have more tokens than the rank has in all.
        return float(min(budget, math.ceil(self.sequences / steps / self.dp) * length))


def with_overrides(config: DictConfig, overrides: dict[str, Any]) -> DictConfig:
    """Return a copy with other values for some keys, also where these are interpolations."""
    changed = config.copy()
    OmegaConf.set_struct(changed, False)
    for key, value in overrides.items():
        OmegaConf.update(changed, key, value, merge=True, force_add=True)
    return changed


def on_gpus(config: DictConfig, gpus: int) -> DictConfig:
    """Return the configuration on another number of GPUs. PlanError: they do not fill nodes of the same size."""
    per_node = min(int(config.trainer.n_gpus_per_node), gpus)
    if gpus < 1 or gpus % per_node:
        raise PlanError(f"--gpus {gpus}: must be a multiple of {config.trainer.n_gpus_per_node}, the GPUs of a node")
    return with_overrides(config, {"trainer.nnodes": gpus // per_node, "trainer.n_gpus_per_node": per_node})


def _rows(files: Any) -> int | None:
    """Return the rows of parquet files, counted, or as on the hub where a file is missing; None: unknown or broken file."""
    paths = [Path(file) for file in ([files] if isinstance(files, str) else files)]
    if paths and all(path.is_file() for path in paths):
        import pyarrow.parquet

        try:
            return sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)
        except (OSError, ValueError):  # for example half a download: `oar launch` and `oar doctor` name it
            return None
    known = [ROWS.get(f"{path.parent.name}/{path.stem}") for path in paths]
    return None if None in known else sum(rows or 0 for rows in known)


def _faults(s: Setup) -> Iterator[str]:
    """Yield a line per fault: key, value, rule, and allowed values."""
    model, mini, n = s.model, s.actor.ppo_mini_batch_size, s.rollout.n
    group = f"{ACTOR}.megatron" if s.megatron else f"{ACTOR}.fsdp_config"

    def fault(key: str, rule: str, allowed: Any) -> str:
        listed = ", ".join(map(str, allowed)) if isinstance(allowed, list) else allowed
        return f"{key}={OmegaConf.select(s.config, key)}: {rule}; allowed: {listed}"

    def divisors(number: int, heads: bool = False) -> list[int]:
        return [size for size in range(1, number + 1) if number % size == 0 and (not heads or splits(size))]

    def splits(ranks: int) -> bool:
        return model.heads % ranks == 0 and (model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0)

    heads = (
        f"the {model.heads} heads of {model.name}, and divide or be a multiple of its {model.kv_heads} key-value heads"
    )
    if s.prompts % mini:
        rule = f"must divide data.train_batch_size={s.prompts}"
        yield fault(f"{ACTOR}.ppo_mini_batch_size", rule, divisors(s.prompts))
    if s.megatron:
        tensor = [size for size in range(1, s.gpus + 1) if splits(size) and model.vocab % size == 0]
        if s.tp not in tensor:
            rule = f"must divide the vocabulary {model.vocab}, {heads}"
            yield fault(f"{group}.tensor_model_parallel_size", rule, tensor)
        if model.layers % s.pp:
            rule = f"must divide the {model.layers} layers of {model.name}"
            yield fault(f"{group}.pipeline_model_parallel_size", rule, divisors(model.layers))
        if s.gpus % (together := s.tp * s.pp * s.cp):
            rule = f"must divide the {s.gpus} GPUs of trainer.nnodes x trainer.n_gpus_per_node"
            yield f"{group}: tensor {s.tp} x pipeline {s.pp} x context {s.cp} = {together}: {rule}"
        if (virtual := s.engine.virtual_pipeline_model_parallel_size or 1) > 1:
            yield f"{group}.virtual_pipeline_model_parallel_size={virtual}: not known to the planner; allowed: null"
        if model.experts:
            rule = "the planner knows no mixture of experts under Megatron, and OAR serves none there"
            yield fault("actor_rollout_ref.model.path", rule, "a dense model, or actor.strategy=fsdp2")
    elif s.ulysses not in (allowed := divisors(s.gpus, heads=True)):
        yield fault(f"{ACTOR}.ulysses_sequence_parallel_size", f"must divide the {s.gpus} GPUs, {heads}", allowed)
    elif s.gpus % s.shards:
        yield fault(f"{group}.fsdp_size", f"must divide the {s.gpus} GPUs", [-1, *divisors(s.gpus)])
    for key, rows in (("data.train_batch_size", s.prompts), (f"{ACTOR}.ppo_mini_batch_size", mini)):
        if s.dp and rows * n % s.dp:
            rule = f"times {ROLLOUT}.n={n} must be divisible by the data parallel size {s.dp}"
            yield fault(key, rule, f"multiples of {s.dp // math.gcd(s.dp, n)}")
    if not s.rollout_gpus:
        yield fault(f"{ROLLOUT}.nnodes", "separate_async generates on GPUs of its own", "at least 1")
    elif s.rollout_gpus % s.replica or not splits(s.rollout.tensor_model_parallel_size):
        rule = f"an engine's {s.replica} GPUs must divide {s.rollout_gpus}, {heads}"
        yield fault(f"{ROLLOUT}.tensor_model_parallel_size", rule, divisors(s.rollout_gpus, heads=True))
    if s.rollout.dtype not in BYTES:
        yield fault(f"{ROLLOUT}.dtype", "how many bytes an element has must be known", list(BYTES))
    if s.rollout.max_model_len and s.rollout.max_model_len < s.max_length:
        rule = "must hold data.max_prompt_length + data.max_response_length"
        yield fault(f"{ROLLOUT}.max_model_len", rule, f"at least {s.max_length}")
    cycle = int(s.config.trainer.v1.separate_async.parameter_sync_step)
    if s.dedicated and s.prompts != cycle * mini:
        rule = f"must be trainer.v1.separate_async.parameter_sync_step={cycle} x {ACTOR}.ppo_mini_batch_size={mini}"
        yield fault("data.train_batch_size", rule, cycle * mini)
    least, positions = math.ceil(s.max_length / s.sequence_ranks), model.config.max_position_embeddings
    for key in (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"):
        if s.actor.use_dynamic_bsz and OmegaConf.select(s.config, key) < least:
            yield fault(key, f"a sequence of {s.max_length} tokens must fit into one micro-batch", f"at least {least}")
    if s.max_length > positions:
        rule = f"with data.max_prompt_length more than the {positions} positions of {model.name}"
        yield fault("data.max_response_length", rule, f"at most {max(0, positions + s.max_response - s.max_length)}")
