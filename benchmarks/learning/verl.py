"""The trainings of a plan `through_verl`: real verl, Ray and vLLM on the CPU stack. A confirmation, minutes a run.

The same models, problems in the same order, and the same settings of the optimizer as the small trainer's; the sampling noise
is vLLM's.
"""

import random
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks.learning.tasks import TASKS
from benchmarks.learning.training import HELD_OUT, Record, Run, digest_of
from benchmarks.tiny.data import write_problems
from benchmarks.tiny.verl_run import read_metrics, training_environment, training_overrides
from benchmarks.tiny.warm_start import accuracy
from benchmarks.tiny.words import make_tokenizer
from verl_cpu import cpu_overrides
from verl_cpu.session import run_verl

LONGEST_RUN_S = 3600.0
_METRICS = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "length": "response_length/mean",
    "gradient_norm": "actor/grad_norm",
    "ess_ratio": "oar/ess_ratio",
    "fallback/any": "oar/fallback/any",
    "sample_seconds": "timing_s/gen",
}
"""verl's names for what a record holds of a step."""


def train(run: Run, model: PreTrainedModel, folder: Path) -> Record:
    """Train with verl. The log stays in `folder`, the weights do not. Raises RuntimeError where verl ended early."""
    task = TASKS[run.task]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    rng = random.Random(run.draw)
    write_problems(folder / "problems.parquet", [task.problem(rng) for _ in range(run.steps * run.prompts)])
    metrics_file, log = folder / "metrics.jsonl", folder / "verl.log"
    metrics_file.unlink(missing_ok=True)
    arguments = [*cpu_overrides(), *overrides(run, folder)]
    code = run_verl(arguments, training_environment(metrics_file), log, LONGEST_RUN_S)
    metrics = read_metrics(metrics_file)
    if code != 0 or len(metrics) < run.steps:
        done = f"after {len(metrics)} of {run.steps} steps"
        raise RuntimeError(f"{run.task}: verl stopped {done} (exit status {code}; all of its output: {log})")
    trained = type(model).from_pretrained(folder / "checkpoint" / f"global_step_{run.steps}" / "actor" / "huggingface")
    for made in ("model", "checkpoint"):
        shutil.rmtree(folder / made)
    held_out = accuracy(trained.eval(), task, HELD_OUT, greedy=False)
    return Record(run, digest_of(model), [_entry(step) for step in metrics], held_out)


def overrides(run: Run, folder: Path) -> list[str]:
    """What verl is told beside `cpu_overrides`."""
    method = ["algorithm.adv_estimator=grpo"]
    if run.credit.importance is not None:
        settings = run.credit.config(run.seed).model_dump(exclude_unset=True) | {"answer_patterns": "[hash]"}
        told = (f"algorithm.oar.{name}={value}" for name, value in settings.items() if value is not None)
        method = ["algorithm.adv_estimator=oar", *told]
    same = ["data.shuffle=False", "actor_rollout_ref.actor.optim.weight_decay=0"]  # as in the small trainer
    paths = folder / "model", folder / "problems.parquet", folder / "checkpoint"
    task = TASKS[run.task]
    sizes = (run.prompts, run.copies), (task.prompt_length, task.max_response_length)
    return [*method, *same, *training_overrides(*paths, run.steps, run.seed, run.lr, *sizes)]


def _entry(step: dict[str, Any]) -> dict[str, float]:
    """A step of a record from verl's metrics."""
    entry = {name: float(step[key]) for name, key in _METRICS.items() if key in step}
    importance = step.get("timing_s/oar", 0.0)
    rest = step["timing_s/step"] - importance - step["timing_s/gen"]
    return {**entry, "importance_seconds": importance, "update_seconds": rest}
