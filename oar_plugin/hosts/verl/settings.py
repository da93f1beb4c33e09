"""Is OAR switched on in this verl configuration, and can it work? Decided once, at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.config import OarConfig, OarConfigError

ESTIMATOR = "oar"
TRAINER_MODES = ("sync", "colocate_async", "separate_async")
STRATEGIES = ("fsdp", "fsdp2")
CRITIC_BASED = ("gae",)


def switched_on(config: DictConfig) -> bool:
    """Whether the run asked for `algorithm.adv_estimator=oar`."""
    return str(OmegaConf.select(config, "algorithm.adv_estimator")) == ESTIMATOR


def resolve(config: DictConfig) -> OarConfig:
    """Read and check everything that OAR depends on.

    Args:
        config: verl's whole configuration.

    Raises:
        OarConfigError: names each key at fault, its value and what is allowed.
    """
    group = OmegaConf.select(config, "algorithm.oar")
    settings = OmegaConf.to_container(group, resolve=True) if OmegaConf.is_config(group) else group
    if settings is not None and not isinstance(settings, Mapping):
        raise OarConfigError(f"algorithm.oar={settings!r}: must be a group of settings, such as algorithm.oar.tau=0.4")
    faults = list(_faults(config, settings))
    if faults:
        raise OarConfigError("\n".join(faults))
    return OarConfig.parse(settings)  # type: ignore[arg-type]


def _faults(config: DictConfig, settings: Any) -> Iterator[str]:
    def value(key: str) -> Any:
        return OmegaConf.select(config, key)

    base = (settings or {}).get("base_estimator", "grpo")
    if base in CRITIC_BASED:
        yield (
            f"algorithm.oar.base_estimator={base}: a critic already gives each token its own advantage, which OAR's "
            "weights would distort; allowed: grpo, rloo, reinforce_plus_plus_baseline, opo"
        )
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
    if value("actor_rollout_ref.model.use_fused_kernels"):
        yield (
            "actor_rollout_ref.model.use_fused_kernels=True: the fused kernels never form the answer's logits, which "
            "the probe reads; allowed: False"
        )
