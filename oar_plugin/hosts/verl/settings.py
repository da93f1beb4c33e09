"""Whether a verl configuration switches OAR on, and whether OAR supports it. Checked once, at the start of a run."""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from secrets import randbelow
from typing import Any, NamedTuple, get_args

import yaml
from omegaconf import DictConfig, OmegaConf

from oar_plugin.config import BaseEstimator, OarConfig, OarConfigError
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.vllm.versions import installed
from oar_plugin.output import say, write_whole

ESTIMATOR = "oar"
OARS = re.compile(r"[+~]*(oar=|algorithm\.oar\b)")  # an override of OAR's keys
RAY_TRAINER = "ray_trainer"  # the feature in `capabilities` of `trainer.use_v1=False`
# Base estimators under which equal rewards in a group make all of its advantages zero. Others normalise over the batch.
ZERO_WHEN_EQUAL = ("grpo", "rloo", "opo")
STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}  # the actor's -> its feature in `capabilities`


class Refused(NamedTuple):
    """A setting of verl's with values that OAR does not support."""

    key: str
    allowed: list[Any]  # None: not set
    reason: str
    in_model: str | None = None  # the attribute of a built Megatron model's transformer config that shows the setting

    def fault(self, value: Any, key: str | None = None) -> str:
        """Key, value, reason and what is allowed; `key`: where the value was found, if not in verl's configuration."""
        allowed = ", ".join(str(one) for one in self.allowed if one is not None) or "null"
        return f"{key or self.key}={value}: {self.reason}; allowed: {f'{self.key}=' if key else ''}{allowed}"


REFUSED = {
    when: [Refused(**one) for one in table]
    for when, table in yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text("utf-8")).items()
}
_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MANAGER = "oar_plugin.hosts.verl.agent_loop.OarAgentLoopManager"
SEEDS = ("algorithm.oar.seed", f"{_ROLLOUT}.seed", f"{_ACTOR}.data_loader_seed")  # in recipes all are `data.seed`
_BACKEND = "algorithm.oar.perturbation.backend"
# The engine's keys for most tokens of prompt and response; keys for most tokens of a micro-batch -> key that switches it on.
_ROOMS = "max_model_len", "engine_kwargs.vllm.max_model_len", "engine_kwargs.sglang.context_length"
_MICRO_BATCHES = {
    f"{_ACTOR}.ppo_max_token_len_per_gpu": f"{_ACTOR}.use_dynamic_bsz",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
}


def switched_on(config: DictConfig) -> bool:
    """Whether the configuration has `algorithm.adv_estimator=oar`."""
    return OmegaConf.is_config(config) and str(OmegaConf.select(config, "algorithm.adv_estimator")) == ESTIMATOR


def trainer_of(config: DictConfig) -> str:
    """The feature in `capabilities` of the trainer that a configuration is for."""
    # A group `rollout` at the top is in the configurations of `verl.experimental` only, whose trainers do not read `use_v1`.
    # verl 0.8 has no key `use_v1`, and no trainer but this one.
    if not OmegaConf.select(config, "trainer.use_v1") or OmegaConf.select(config, "rollout") is not None:
        return RAY_TRAINER
    return str(OmegaConf.select(config, "trainer.v1.trainer_mode"))


def context_parallel(config: DictConfig) -> int:
    """How many GPUs share a sequence in training. verl copies the actor's own key to fsdp_config, which the engine reads."""
    keys = "ulysses_sequence", "fsdp_config.ulysses_sequence", "megatron.context"
    return max(_number(config, f"{_ACTOR}.{key}_parallel_size") for key in keys)


def _number(config: DictConfig, key: str) -> int:
    return int(OmegaConf.select(config, key) or 1)


def length_limits(config: DictConfig, positions: int = sys.maxsize) -> tuple[int, int]:
    """Most tokens of a response, and of prompt and response together, that verl's engines make; `positions`: the model's."""
    rollout, keys = config.actor_rollout_ref.rollout, ("prompt_length", "response_length", *_ROOMS)
    prompt, response, *rooms = (OmegaConf.select(rollout, key) or sys.maxsize for key in keys)
    room = min(positions, *rooms) - (rollout.get("name") == "sglang")  # which leaves the last position free
    return min(response, config.data.max_response_length), min(prompt + response, room)


def unused(config: DictConfig, words: Sequence[str]) -> str | None:
    """A sentence if overrides set OAR's keys for another estimator, which does not read them."""
    used, ours = str(OmegaConf.select(config, "algorithm.adv_estimator")), [word for word in words if OARS.match(word)]
    if used == ESTIMATOR or not ours:
        return None
    base = used if used in get_args(BaseEstimator) else "grpo"
    meant = f"OAR on top of an estimator is algorithm.adv_estimator=oar algorithm.oar.base_estimator={base}"
    return f"{ours[0]} is unused with algorithm.adv_estimator={used}; {meant}"


def doubts(config: DictConfig, words: Sequence[str]) -> Iterator[tuple[str, bool, str]]:
    """Yield a subject, whether verl's run ends with an error, and a sentence for settings that do not do what they say.

    `words` are the overrides of a command line.
    """
    data, trainer, mini = config.data, trainer_of(config), config.actor_rollout_ref.actor.ppo_mini_batch_size
    prompt, response = data.max_prompt_length, data.max_response_length
    if text := unused(config, words):
        yield "estimator", False, text
    total = prompt + response + (config.actor_rollout_ref.rollout.get("name") == "sglang")
    needed = {"prompt_length": prompt, "response_length": response, **dict.fromkeys(_ROOMS, total)}
    given = {key: OmegaConf.select(config, f"{_ROLLOUT}.{key}") or sys.maxsize for key in needed}
    if short := {key: given[key] - least for key, least in needed.items() if given[key] < least}:
        left, key = min((max(0, response + less), key) for key, less in short.items())
        limit = f"{_ROLLOUT}.{key} leaves {left} tokens after data.max_prompt_length={prompt}"
        allowed = ", ".join(f"{key}={needed[key]}" for key in short) + ", or shorter responses"
        text = f"data.max_response_length={response}: {limit}; longer ones are cut, without weights; allowed: {allowed}"
        yield "lengths", False, text
    longest = math.ceil(min(prompt + response, length_limits(config)[1]) / context_parallel(config))
    sizes = {key: OmegaConf.select(config, key) for key, on in _MICRO_BATCHES.items() if OmegaConf.select(config, on)}
    if small := [f"{key}={size}" for key, size in sizes.items() if size < longest]:
        text = f"{', '.join(small)}: verl stops with an error at a sequence that is longer than a micro-batch"
        yield "micro-batches", False, f"{text}; allowed: at least {longest}"
    whole = mini * _number(config, f"trainer.v1.{trainer}.parameter_sync_step")
    size, exact = data.train_batch_size, trainer == "separate_async"
    if size != whole if exact else size % whole:
        ends = exact or trainer == RAY_TRAINER
        does = "verl stops with an error" if ends else "verl fills each batch with empty responses"
        text = f"data.train_batch_size={size} with {_ACTOR}.ppo_mini_batch_size={mini}: {does}"
        yield "batch", ends, f"{text}; allowed for {trainer}: {'' if exact else 'a multiple of '}{whole}"


def parsed(algorithm: DictConfig) -> OarConfig:
    """OAR's settings, from verl's group `algorithm`. OarConfigError: one that cannot work."""
    group = OmegaConf.select(algorithm, "oar")
    settings = OmegaConf.to_container(group, resolve=True) if OmegaConf.is_config(group) else group
    if settings is not None and not isinstance(settings, Mapping):
        raise OarConfigError(f"algorithm.oar={settings!r}: must be a group of settings, such as algorithm.oar.tau=0.4")
    given: dict[Any, Any] = dict(settings or {})
    # For a seed that is null see `draw_seed`.
    return OarConfig.parse({key: value for key, value in given.items() if (key, value) != ("seed", None)})


def draw_seed(config: DictConfig) -> None:
    """Before workers get the configuration: gives null `SEEDS` (`data.seed=null`) a number, drawn once for the run's folder."""
    if unset := [key for key in SEEDS if OmegaConf.select(config, key, default=0) is None]:
        file = Path(config.trainer.default_local_dir, "seed.txt")
        if not file.is_file():
            write_whole(file, str(randbelow(2**31)))
        seed = int(file.read_text("utf-8"))
        for key in unset:
            OmegaConf.update(config, key, seed)
        say(f"oar: {', '.join(unset)}: {seed}, drawn for this run, kept in {file}", sys.stderr)


def resolve(config: DictConfig, here: bool = False) -> OarConfig:
    """OAR's settings, after a check of everything in verl's configuration that OAR depends on. OarConfigError: it failed.

    `here`: also whether the installed verl has what the configuration needs. For drivers: it imports a lot.
    """
    oar = parsed(config.algorithm)
    if faults := list(_faults(config, oar)) or list(_unfit(config, oar) if here else ()):
        raise OarConfigError("\n".join(faults))
    return oar


def _unfit(config: DictConfig, oar: OarConfig) -> Iterator[str]:
    for name, value in capabilities.external_modules().items():
        fault = f"this verl ({capabilities.host_version()}) does not load OAR by itself"
        yield f"algorithm.adv_estimator=oar: {fault}; set the environment variable {name}={value} on every node"
    trainer, strategy = trainer_of(config), config.actor_rollout_ref.actor.strategy
    # A key with its value -> the feature that each of its possible values needs.
    choices: dict[tuple[str, str], Mapping[str, str]] = {(f"{_ACTOR}.strategy", strategy): STRATEGIES}
    if trainer != RAY_TRAINER:
        choices["trainer.v1.trainer_mode", trainer] = {mode: mode for mode in capabilities.TRAINERS}
    elif OmegaConf.select(config, "trainer.use_v1") is None:
        choices["algorithm.adv_estimator", ESTIMATOR] = {ESTIMATOR: RAY_TRAINER}
    else:
        choices["trainer.use_v1", "False"] = {"False": RAY_TRAINER, "True": "sync"}
    if oar.offloads and installed() is None:
        yield f"{_BACKEND}=rollout: vLLM is not installed; allowed: with vLLM, or {_BACKEND}=actor"
    elif oar.offloads:
        choices[_BACKEND, "rollout"] = {"rollout": "offload", "actor": STRATEGIES[strategy]}
    for (key, value), features in choices.items():
        if lacking := capabilities.missing(features[value]):
            allowed = [other for other, feature in features.items() if not capabilities.missing(feature)]
            fault = f"not supported on this verl ({capabilities.host_version()}), which lacks what OAR builds on"
            said = ", ".join(allowed) or "nothing on this verl"
            yield f"{key}={value}: {fault} ({'; '.join(lacking)}); allowed: {said}"


def _faults(config: DictConfig, oar: OarConfig) -> Iterator[str]:
    megatron = OmegaConf.select(config, f"{_ACTOR}.strategy") == "megatron"
    ray_trainer = trainer_of(config) == RAY_TRAINER
    if ray_trainer and oar.offloads:
        has_v1 = OmegaConf.select(config, "trainer.use_v1") is not None
        of_trainer = " (trainer.use_v1=False, or a trainer of verl.experimental)" if has_v1 else ""
        allowed = f"actor{', or one of the trainers of trainer.v1' if has_v1 else ''}"
        yield f"{_BACKEND}=rollout with RayPPOTrainer{of_trainer}: its agent loops score no copies; allowed: {allowed}"
    engines = oar.offloads and not ray_trainer
    needed = {"always": True, "v1": not ray_trainer, "megatron": megatron, "engines": engines}
    needed["fused"] = not megatron and OmegaConf.select(config, f"{_MODEL}.use_fused_kernels")
    for refused in (one for when, table in REFUSED.items() if needed[when] for one in table):
        value = OmegaConf.select(config, refused.key)
        if value not in refused.allowed:
            yield refused.fault(value)
    if megatron:
        yield from _virtual_pipeline_faults(config)
    if OmegaConf.select(config, f"{_ACTOR}.policy_loss.loss_mode") == "geo_mean":
        reason = "it takes the mean of a response's advantages, which weights do not change"
        yield f"{_ACTOR}.policy_loss.loss_mode=geo_mean: {reason}; allowed: verl's other losses"


def _virtual_pipeline_faults(config: DictConfig) -> Iterator[str]:
    """An interleaved schedule takes whole groups of micro-batches: of a rank's rows with an advantage, and of its others."""
    megatron, size_key = f"{_ACTOR}.megatron", f"{_ACTOR}.ppo_mini_batch_size"
    kinds = ("pipeline_model", "tensor_model", "virtual_pipeline_model")
    stages, tensor, virtual = (_number(config, f"{megatron}.{kind}_parallel_size") for kind in kinds)
    if virtual == 1:
        return
    group_key = f"{megatron}.override_transformer_config.microbatch_group_size_per_vp_stage"
    group = int(OmegaConf.select(config, group_key) or stages)
    gpus = _number(config, "trainer.nnodes") * _number(config, "trainer.n_gpus_per_node")
    ranks = max(1, gpus // (stages * tensor * context_parallel(config)))
    prompts, responses = _number(config, size_key), _number(config, f"{_ROLLOUT}.n")
    # verl pads batches to whole mini-batches.
    if prompts * responses % (ranks * group):
        step = math.lcm(ranks * group, responses) // responses
        given = f"{size_key}={prompts}, times {_ROLLOUT}.n={responses}, on {ranks} data-parallel ranks"
        rows = f"a multiple of {group} rows per rank ({group_key}, by default the number of pipeline stages)"
        yield f"{given}: under a virtual pipeline OAR needs {rows}; allowed: {size_key} a multiple of {step}"
