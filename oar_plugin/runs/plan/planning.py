"""The plan of a run: memory and seconds by phase, hours, what OAR adds, and whether it fits."""

from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig

from oar_plugin.runs.plan import costs
from oar_plugin.runs.plan.hardware import EXPECTED, FRAGMENTATION, GIB, GOOD, POOR, WORKSPACES, Gpu, choose_gpu
from oar_plugin.runs.plan.setup import ACTOR, ROLLOUT, Expected, Setup


class Plan:
    """Projections for a composed configuration. Raise PlanError if it cannot run, or if its model is unknown."""

    def __init__(self, config: DictConfig, gpu: Gpu | None = None, expected: Expected | None = None) -> None:
        self.setup = s = Setup(config, expected)
        self.gpu = card = gpu or choose_gpu()
        self.memory = costs.step_memory(s, card)  # phase -> part -> bytes on one GPU
        # Phase -> bytes: (projected, with what fragmentation and libraries may add).
        self.range = {phase: _range(parts) for phase, parts in self.memory.items()}
        # Free bytes, (least, most); negative if it does not fit.
        least, most = (max(sizes) for sizes in zip(*self.range.values(), strict=True))
        self.headroom = card.memory - most, card.memory - least
        # Sequences of maximum length that one engine's cache holds.
        self.cached = costs.cached_tokens(s, card) / (s.rollout.max_model_len or s.max_length)
        # The phase that does not fit, or comes closest to it.
        self.peak = max(self.range, key=lambda phase: self.range[phase][self.headroom[1] >= 0])
        self.fits = self.headroom[1] >= 0 and self.cached >= 1
        tight = self.headroom[0] < 0
        self.verdict = "does not fit" if not self.fits else "fits tightly" if tight else "fits"

        self.flops = costs.step_flops(s)  # phase -> FLOPs of one step, over all GPUs
        self.seconds = costs.step_seconds(s, card, EXPECTED)  # phase -> seconds of one step
        self.step = _step(s, self.seconds)
        self.oar = sum(self.seconds.get(phase, 0.0) for phase in costs.OAR)
        self.to_grpo = self.step / _step(s, {phase: t for phase, t in self.seconds.items() if phase not in costs.OAR})

    @property
    def hours(self) -> list[float] | None:
        """Hours of the run, validations included: [expected, least, most]. None if the number of steps is unknown."""
        s, hours = self.setup, []
        for efficiency in (EXPECTED, GOOD, POOR):
            each = costs.generation_seconds(s, self.gpu, efficiency, s.validated) if s.validated else 0.0
            validation = s.validations * each
            hours.append(((s.steps or 0) * _step(s, costs.step_seconds(s, self.gpu, efficiency)) + validation) / 3600)
        return None if s.steps is None else hours

    @property
    def margin(self) -> str:
        """How much memory the largest phase needs."""
        cache = "" if self.cached >= 1 else "; vLLM's cache holds less than one sequence"
        return f"{in_gib(self.range[self.peak])} of {self.gpu.memory_gib:g} GiB in {self.peak}{cache}"

    @property
    def advice(self) -> str:
        """The keys that change how much memory a run needs, from cheap to costly."""
        return (
            f"try {ACTOR}.entropy_from_logits_with_chunking=True, another {ROLLOUT}.gpu_memory_utilization, a smaller "
            f"{ACTOR}.ppo_max_token_len_per_gpu and {ROLLOUT}.log_prob_max_token_len_per_gpu, "
            f"{self.setup.group}.optimizer_offload=True and param_offload=True, a larger "
            f"{ROLLOUT}.tensor_model_parallel_size, or more trainer.nnodes (recipes/README.md says what each does)"
        )

    @property
    def summary(self) -> str:
        """A sentence with the steps, hours and GPU-hours of the run."""
        s, gpus = self.setup, self.setup.gpus + (self.setup.rollout_gpus if self.setup.dedicated else 0)
        if self.hours is None:
            return "Hours are unknown: data.train_files has an unknown row count. Set trainer.total_training_steps=N."
        validation = "without validation (the number of rows in data.val_files is unknown)"
        hours, least, most = self.hours
        if s.validated is not None:
            share = 1 - (s.steps or 0) * self.step / 3600 / hours if hours else 0.0
            validation = f"with {s.validations} validations ({share:.1%} of the time)"
        one, all_gpus = (
            [round(n * value, 0 if n * hours > 9 else 1) for value in (hours, least, most)] for n in (1, gpus)
        )
        return (
            f"The run: {s.steps} steps, {one[0]:,g} hours ({one[1]:,g} to {one[2]:,g}), {all_gpus[0]:,g} GPU-hours on "
            f"{gpus} GPU{'s' * (gpus > 1)} ({all_gpus[1]:,g} to {all_gpus[2]:,g}), {validation}, without rewards and "
            "checkpoints."
        )

    def to_dict(self) -> dict[str, Any]:
        s, plain = self.setup, {key: value for key, value in vars(self).items() if key not in ("setup", "gpu")}
        work = {"hours": self.hours, "steps": s.steps, "mean_prompt": s.mean_prompt, "mean_response": s.mean_response}
        return {"projection": True, **plain, **work, "gpus": s.gpus, "gpu": asdict(self.gpu)}


def in_gib(sizes: tuple[float, float], digits: int = 1) -> str:
    """Return the least and the most number of bytes in GiB: one number if both are the same."""
    return " to ".join(dict.fromkeys(f"{size / GIB:.{digits}f}" for size in sizes))


def _range(parts: costs.Parts) -> tuple[float, float]:
    counted = sum(parts.values())
    temporary = parts.get(costs.TEMPORARY)
    return counted, counted if temporary is None else counted + WORKSPACES + FRAGMENTATION * temporary


def _step(s: Setup, seconds: dict[str, float]) -> float:
    """Return the seconds of a step. Generation and training run one after the other; in `separate_async` they overlap."""
    generation = seconds[costs.GENERATION]
    training = sum(seconds.values()) - generation
    return max(generation, training) if s.dedicated else generation + training
