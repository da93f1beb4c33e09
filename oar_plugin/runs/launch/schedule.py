"""How long a run takes, how often it saves, how long a job may be: what follows from its plan."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from omegaconf import DictConfig

from oar_plugin.runs.launch.finding import importable
from oar_plugin.runs.plan.planning import Plan
from oar_plugin.runs.plan.setup import Setup

DAY_H = 24
# Assumed of a save: bytes a second that all ranks together write to shared storage, and what it takes beside that.
WRITTEN_PER_S, SAVE_OVERHEAD_S = 1e9, 10.0
# Of a job: rewards and what the planner does not know, as a share; start and first loading of the model.
MARGIN, START_H = 0.2, 0.5
FAILURES = 5  # after so many starts more than planned, a job that fails is not started again
SAVE_FREQ = 20  # of recipe/base.yaml: a recipe with another one has chosen it
CALLBACK = "verl.trainer.ppo.checkpoint_callback"  # verl 0.9.1 has it
KEEP_BEST = "oar_plugin.runs.best_checkpoint.KeepBest"


class Schedule(NamedTuple):
    """Of a job, and of the checkpoints that let it go on."""

    save_freq: int | None  # steps between two checkpoints; None: the plan is not known
    job_h: int  # hours to ask for; a longer run takes several jobs
    restarts: int  # a job that failed is not started again after so many


def schedule(made: Plan | None, limit_h: int = DAY_H) -> Schedule:
    """From a plan, where there is one, and the longest job in hours."""
    if made is None:
        return Schedule(None, limit_h, FAILURES)
    every = save_freq(made, limit_h)
    if made.hours is None:
        return Schedule(every, limit_h, FAILURES)
    saving_h = (made.setup.steps or 0) / every * save_seconds(made.setup) / 3600
    whole = (made.hours[2] + saving_h) * (1 + MARGIN) + START_H
    return Schedule(every, min(limit_h, math.ceil(whole)), FAILURES + math.ceil(whole / limit_h))


def added_overrides(config: DictConfig, given: Sequence[str], every: int | None) -> list[str]:
    """How often a run saves, and that its best checkpoint is kept, unless recipe or command line (`given`) say it."""
    keys = {word.lstrip("+~").partition("=")[0] for word in given}
    added: dict[str, str] = {}
    if every is not None and config.trainer.save_freq == SAVE_FREQ:
        added["trainer.save_freq"] = f"trainer.save_freq={every}"
    if config.trainer.save_freq > 0 and importable(CALLBACK) and not config.trainer.checkpoint_callback_class:
        # ++ because the node may have a verl that does not know the key, and then ignores it.
        added["trainer.checkpoint_callback_class"] = f"++trainer.checkpoint_callback_class={KEEP_BEST}"
    return [word for key, word in added.items() if key not in keys]


def checkpoint_bytes(s: Setup) -> float:
    """Of a checkpoint with optimizer: what verl writes for weights, and for Adam (under Megatron a float32 copy as well)."""
    trained = s.model.adapters * s.lora_rank or s.model.parameters
    return float(s.weight_bytes * s.model.parameters + (12 if s.megatron else 2 * s.weight_bytes) * trained)


def save_seconds(s: Setup) -> float:
    return SAVE_OVERHEAD_S + checkpoint_bytes(s) / WRITTEN_PER_S


def save_freq(made: Plan, limit_h: float) -> int:
    """Steps between two checkpoints that lose least, where a run is cut off once in `limit_h` hours.

    Young's rule (doi 10.1145/361147.361115): the root of twice the seconds of a save times those between two cuts. Then less,
    so that every checkpoint or every validation falls on the other: the best checkpoint is one that was validated. The steps
    are GRPO's, so that a run and its baseline choose among the same checkpoints.
    """
    seconds = math.sqrt(2 * save_seconds(made.setup) * limit_h * 3600)
    steps, tested = max(1, int(seconds * made.to_grpo / made.step)), made.setup.config.trainer.test_freq
    if tested <= 0:
        return steps
    return steps // tested * tested or max(size for size in range(1, steps + 1) if tested % size == 0)


def disk_bytes(s: Setup, config: DictConfig) -> float:
    """Of all checkpoints that a run keeps, the best one among them."""
    kept = config.trainer.max_actor_ckpt_to_keep or (s.steps or 0) // config.trainer.save_freq
    for_hub = "hf_model" in config.actor_rollout_ref.actor.checkpoint.save_contents
    weights = s.weight_bytes * s.model.parameters if for_hub else 0
    return (checkpoint_bytes(s) + weights) * (max(2, kept) + 1)


def in_words(made: Plan) -> str:
    """Steps, hours and GPU-hours of a run."""
    s, gpus = made.setup, made.setup.gpus + (made.setup.rollout_gpus if made.setup.dedicated else 0)
    if made.hours is None:
        return "Hours are not known, as the rows of data.train_files are not: add trainer.total_training_steps=N."
    validation = "with validation"
    if s.validated is None:
        validation = "without validation, as the rows of data.val_files are not known"
    hours, least, most = made.hours
    return (
        f"The run: {s.steps} steps, {hours:.0f} hours ({least:.0f} to {most:.0f}), {hours * gpus:,.0f} GPU-hours on "
        f"{gpus} GPUs ({least * gpus:,.0f} to {most * gpus:,.0f}), {validation}, without rewards and checkpoints."
    )
