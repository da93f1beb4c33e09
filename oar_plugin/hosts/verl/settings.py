"""Is OAR switched on in this verl configuration, and can it work? Decided once, at the start of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.importance import importance_of, of_engines, without_copies

ESTIMATOR = "oar"
TRAINER_MODES = ("sync", "colocate_async", "separate_async")
STRATEGIES = ("fsdp", "fsdp2", "megatron")
MEGATRON_TESTED = "0.16."  # versions of megatron-core that begin like this

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
    if strategy == "fsdp":
        yield from _fsdp1_faults(config, oar)
    if value("actor_rollout_ref.model.use_fused_kernels"):
        yield (
            "actor_rollout_ref.model.use_fused_kernels=True: the fused kernels never form the answer's logits, which "
            "the probe reads; allowed: False"
        )


def _fsdp1_faults(config: DictConfig, oar: OarConfig) -> Iterator[str]:
    least = OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params")
    if least and oar.actor_importance != "none" and importance_of(oar.actor_importance).reasoning_rows:
        # FSDP1 gathers a module's weights each time that it is called, a collective call. The reasoning's rows are projected
        # in chunks, and another rank may have another number of them: the ranks would wait for each other for ever.
        yield (
            f"actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params={least} with actor_rollout_ref.actor.strategy="
            f"fsdp and the actor computing {oar.actor_importance}: the vocabulary projection is wrapped by itself; allowed: 0, "
            "or actor_rollout_ref.actor.strategy=fsdp2"
        )


def _megatron_faults(config: DictConfig, oar: OarConfig) -> Iterator[str]:
    for key, allowed, reason in MEGATRON_ALLOWED:
        value = OmegaConf.select(config, key)
        if value not in allowed:
            yield f"{key}={value}: not served by OAR under Megatron ({reason}); allowed: {allowed[0]}"
    if oar.copies is not None and not oar.offloads:
        yield (
            f"algorithm.oar.importance={oar.importance} with actor_rollout_ref.actor.strategy=megatron: masked copies were not "
            f"built for its actor; allowed: {without_copies()}, or {of_engines()} with "
            "algorithm.oar.perturbation.backend=rollout"
        )
