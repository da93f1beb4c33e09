"""Puts a plan together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from omegaconf import DictConfig

from oar_plugin.plan.communication import Traffic, step_traffic
from oar_plugin.plan.compute import StepFlops, step_flops
from oar_plugin.plan.hardware import Efficiency, Gpu, choose_gpu
from oar_plugin.plan.layout import Setup, on_cluster, read_setup
from oar_plugin.plan.memory import KvCache, PhaseMemory, engine_memory, phases
from oar_plugin.plan.timing import StepSeconds, step_seconds

Verdict = Literal["fits", "fits tightly", "does not fit"]
TIGHT = 0.10  # headroom, as a share of the GPU's memory


@dataclass(frozen=True)
class Plan:
    """What a run would take. Times and memory are projections.

    Attributes:
        setup: what was read from the configuration.
        gpu: what it is planned for.
        efficiency: assumptions behind the times.
        memory: of one GPU, by phase.
        cache: of an engine.
        flops: of a step over all GPUs.
        traffic: bytes that a GPU sends in a step.
        seconds: of a step.
    """

    setup: Setup
    gpu: Gpu
    efficiency: Efficiency
    memory: list[PhaseMemory]
    cache: KvCache
    flops: StepFlops
    traffic: Traffic
    seconds: StepSeconds

    @property
    def peak(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.memory, key=lambda phase: phase.total)

    @property
    def headroom(self) -> float:
        """Bytes that the peak leaves; negative where it does not fit."""
        return self.gpu.memory - self.peak.total

    @property
    def verdict(self) -> Verdict:
        """In words."""
        if self.headroom < 0 or self.cache.sequences < 1:
            return "does not fit"
        return "fits tightly" if self.headroom < TIGHT * self.gpu.memory else "fits"

    @property
    def fits(self) -> bool:
        """Whether it runs; tightly counts."""
        return self.verdict != "does not fit"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; bytes, FLOPs and seconds."""
        setup = asdict(self.setup)
        setup["oar"] = None if self.setup.oar is None else self.setup.oar.model_dump(mode="json")
        seconds = asdict(self.seconds)
        return {
            "projection": True,
            "verdict": self.verdict,
            "fits": self.fits,
            "gpu": asdict(self.gpu),
            "peak_phase": self.peak.name,
            "peak_bytes": self.peak.total,
            "headroom_bytes": self.headroom,
            "memory": [{"phase": phase.name, "bytes": phase.parts, "total": phase.total} for phase in self.memory],
            "kv_cache": asdict(self.cache),
            "flops": {**asdict(self.flops), "total": self.flops.total},
            "sent_bytes_per_gpu": self.traffic.sent,
            "seconds": {**seconds, "total": self.seconds.total, "oar_share": self.seconds.oar_share},
            "efficiency": asdict(self.efficiency),
            "setup": setup,
        }


def plan(
    config: DictConfig,
    *,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    gpu: Gpu | str | None = None,
    response_length: float | None = None,
    prompt_length: float | None = None,
    scored_share: float = 0.5,
    model: str | None = None,
    efficiency: Efficiency | None = None,
) -> Plan:
    """Plan a run.

    Args:
        config: composed, as `oar_plugin.hosts.verl.recipe.compose_recipe` returns it.
        gpus: of the trainer, instead of `trainer.nnodes` x `trainer.n_gpus_per_node`.
        gpus_per_node: instead of `trainer.n_gpus_per_node`.
        gpu: a name of `hardware.GPUS`, or figures of your own (`hardware.choose_gpu`).
        response_length: expected mean, tokens; half of the longest if not given.
        prompt_length: expected mean, tokens; a quarter of the longest if not given.
        scored_share: responses whose advantage is not zero; only those get importance.
        model: path or name, instead of `actor_rollout_ref.model.path`.
        efficiency: assumptions behind the times.

    Raises:
        LayoutError: a configuration that cannot run.
        ShapeError: a model that is not known.
        ValueError: an unknown GPU.
    """
    card = gpu if isinstance(gpu, Gpu) else choose_gpu(gpu)
    setup = read_setup(
        on_cluster(config, gpus, gpus_per_node),
        response_length=response_length,
        prompt_length=prompt_length,
        scored_share=scored_share,
        model=model,
    )
    return plan_setup(setup, card, efficiency)


def plan_setup(setup: Setup, gpu: Gpu, efficiency: Efficiency | None = None) -> Plan:
    """Plan what was read from a configuration; see `plan`."""
    assumed = efficiency or Efficiency()
    flops, traffic = step_flops(setup), step_traffic(setup)
    cache = engine_memory(setup, gpu)[3]
    return Plan(
        setup=setup,
        gpu=gpu,
        efficiency=assumed,
        memory=phases(setup, gpu),
        cache=cache,
        flops=flops,
        traffic=traffic,
        seconds=step_seconds(setup, flops, traffic, cache, gpu, assumed),
    )
