"""Is OAR switched on in this verl configuration, and can it work? Decided once, at the start of a run."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.importance import of_engines, without_copies
from oar_plugin.hosts.verl import capabilities

ESTIMATOR = "oar"
TRAINER_MODES = tuple(capabilities.TRAINERS)
STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}  # and what of `capabilities` each needs

# What the Megatron engine does not serve: key, the values that are allowed, and why the others are not.
MEGATRON_ALLOWED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "actor_rollout_ref.actor.megatron.dynamic_context_parallel",
        (False, None),
        "its groups change with every micro-batch, and scores would be summed over the wrong ranks",
    ),
    (
        "actor_rollout_ref.actor.megatron.router_replay.mode",
        ("disabled", None),
        "routes are recorded in a forward without a backward, which OAR's log-prob pass is not",
    ),
    (
        "actor_rollout_ref.actor.megatron.use_megatron_fsdp",
        (False, None),
        "its sharded weights were not tested with a backward that freezes them",
    ),
    (
        "actor_rollout_ref.actor.megatron.override_transformer_config.fp8",
        (None, False),
        "a backward in fp8 moves its scaling history, which belongs to training",
    ),
    (
        "actor_rollout_ref.actor.megatron.dtype",
        ("bfloat16", "float32", None),
        "gradients vanish in fp16 unless they are scaled, by a number that the first stage of a pipeline does not know",
    ),
    ("actor_rollout_ref.actor.megatron.qat.enable", (False, None), "quantised layers were not tested"),
    (
        "actor_rollout_ref.model.mtp.enable",
        (False, None),
        "the extra heads call the embedding and the vocabulary projection that OAR hooks a second time",
    ),
    ("actor_rollout_ref.model.lora.rank", (0, None), "adapters under Megatron were not tested"),
)


def switched_on(config: DictConfig) -> bool:
    """Whether the run asked for `algorithm.adv_estimator=oar`."""
    return str(OmegaConf.select(config, "algorithm.adv_estimator")) == ESTIMATOR


def resolve(config: DictConfig) -> OarConfig:
    """Read and check everything that OAR depends on in verl's whole configuration.

    OarConfigError: names each key at fault, its value and what is allowed.
    """
    group = OmegaConf.select(config, "algorithm.oar")
    settings = OmegaConf.to_container(group, resolve=True) if OmegaConf.is_config(group) else group
    if settings is not None and not isinstance(settings, Mapping):
        raise OarConfigError(f"algorithm.oar={settings!r}: must be a group of settings, such as algorithm.oar.tau=0.4")
    oar = OarConfig.parse(settings)  # type: ignore[arg-type]
    faults = list(_faults(config, oar))
    if oar.offloads:
        from oar_plugin.hosts.verl import offload

        faults += offload.faults(config)
    if faults:
        raise OarConfigError("\n".join(faults))
    return oar


def resolve_here(config: DictConfig) -> OarConfig:
    """`resolve`, and check that the verl of this process has what the configuration asks for. For drivers: it imports a lot.

    OarConfigError: also names what was expected of verl, and what was found.
    """
    oar = resolve(config)
    if faults := list(_unfit(config, oar)):
        raise OarConfigError("\n".join(faults))
    return oar


def _unfit(config: DictConfig, oar: OarConfig) -> Iterator[str]:
    mode, strategy = config.trainer.v1.trainer_mode, config.actor_rollout_ref.actor.strategy
    # Key, its value, and what each value that it may have needs.
    choices: list[tuple[str, str, Mapping[str, str]]] = [
        ("trainer.v1.trainer_mode", mode, {mode: mode for mode in TRAINER_MODES}),
        ("actor_rollout_ref.actor.strategy", strategy, STRATEGIES),
    ]
    if oar.offloads:
        backends = {"rollout": "offload", "actor": STRATEGIES[strategy]}
        choices.append(("algorithm.oar.perturbation.backend", "rollout", backends))
    for key, value, features in choices:
        if lacking := capabilities.missing(features[value]):
            allowed = [other for other, feature in features.items() if not capabilities.missing(feature)]
            yield (
                f"{key}={value}: not served on this verl ({capabilities.host_version()}), which lacks what OAR builds on "
                f"({'; '.join(lacking)}); allowed: {', '.join(allowed) or 'nothing on this verl'}"
            )


def _faults(config: DictConfig, oar: OarConfig) -> Iterator[str]:
    def value(key: str) -> Any:
        return OmegaConf.select(config, key)

    if value("critic.enable"):
        yield "critic.enable=True: OAR reshapes group-relative advantages and uses no critic; allowed: null or False"
    if value("trainer.use_v1") is False:
        yield "trainer.use_v1=False: the legacy trainer has no place for token credit; allowed: True (verl's default)"
    mode = value("trainer.v1.trainer_mode")
    if mode not in TRAINER_MODES:
        yield f"trainer.v1.trainer_mode={mode}: not served by OAR; allowed: {', '.join(TRAINER_MODES)}"
    strategy = value("actor_rollout_ref.actor.strategy")
    if strategy not in STRATEGIES:
        yield f"actor_rollout_ref.actor.strategy={strategy}: not served by OAR; allowed: {', '.join(STRATEGIES)}"
    if strategy == "megatron":
        yield from _megatron_faults(config, oar)
    if value("actor_rollout_ref.actor.policy_loss.loss_mode") == "geo_mean":
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean: it takes the mean of a response's advantages, which "
            "weights leave as it is; allowed: verl's other losses"
        )
    if value("actor_rollout_ref.model.use_fused_kernels"):
        yield (
            "actor_rollout_ref.model.use_fused_kernels=True: the fused kernels never form the answer's logits, which "
            "the probe reads; allowed: False"
        )


def _megatron_faults(config: DictConfig, oar: OarConfig) -> Iterator[str]:
    for key, allowed, reason in MEGATRON_ALLOWED:
        value = OmegaConf.select(config, key)
        if value not in allowed:
            yield f"{key}={value}: not served by OAR under Megatron ({reason}); allowed: {allowed[0]}"
    yield from _virtual_pipeline_faults(config)
    if oar.copies is not None and not oar.offloads:
        yield (
            f"algorithm.oar.importance={oar.importance} with actor_rollout_ref.actor.strategy=megatron: masked copies were not "
            f"built for its actor; allowed: {without_copies()}, or {of_engines()} with "
            "algorithm.oar.perturbation.backend=rollout"
        )


def _virtual_pipeline_faults(config: DictConfig) -> Iterator[str]:
    """An interleaved schedule takes micro-batches in groups. verl makes as many of one pass; OAR splits the rows of a rank into
    those with an advantage and the others, and needs rows for whole groups in both parts."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

    def number(key: str) -> int:
        return int(OmegaConf.select(config, key) or 1)

    megatron = f"{actor}.megatron"
    stages = number(f"{megatron}.pipeline_model_parallel_size")
    if number(f"{megatron}.virtual_pipeline_model_parallel_size") == 1:
        return
    group_key = f"{megatron}.override_transformer_config.microbatch_group_size_per_vp_stage"
    group = int(OmegaConf.select(config, group_key) or stages)
    model = stages * number(f"{megatron}.tensor_model_parallel_size") * number(f"{megatron}.context_parallel_size")
    ranks = max(1, number("trainer.nnodes") * number("trainer.n_gpus_per_node") // model)
    # verl fills batches up to whole mini-batches.
    prompts, responses = number(f"{actor}.ppo_mini_batch_size"), number(f"{rollout}.n")
    if prompts * responses % (ranks * group):
        step = math.lcm(ranks * group, responses) // responses
        yield (
            f"{actor}.ppo_mini_batch_size={prompts}, times {rollout}.n={responses}, on {ranks} data-parallel ranks: under a "
            f"virtual pipeline OAR needs a multiple of {group} rows a rank ({group_key}, by default the number of pipeline "
            f"stages); allowed: {actor}.ppo_mini_batch_size a multiple of {step}"
        )
