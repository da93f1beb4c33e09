"""The trainings of `oar bench learning` through real verl, Ray and vLLM, on the CPU stack: a confirmation, minutes a run.

The same tasks, problems in the same order, and the same settings of the optimizer as the small trainer's; the models
have two heads in place of four, because vLLM serves no narrower ones on a CPU, and the sampling noise is vLLM's.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.learning.credit import is_importance, method_of
from benchmarks.learning.measure import CREDIT_SETTINGS, HELD_OUT, Record, Run
from benchmarks.tiny.tasks import TASKS, Problem
from benchmarks.tiny.warm_start import WarmStart, accuracy, learned_model
from benchmarks.tiny.words import SPECIAL, VOCABULARY, text
from oar_plugin.credit.importance import IMPORTANCES
from oar_plugin.hosts.verl.cpu import cpu_environment, cpu_overrides
from oar_plugin.hosts.verl.cpu.session import run_verl
from recipes.cpu_demo.training import TrainingFailed, diagnose, read_metrics, training_overrides

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WARM_START = WarmStart(heads=2)
"""Of width 32: the narrowest that vLLM has on a CPU."""
LONGEST_RUN_S = 3600.0


def check(run: Run) -> None:
    """Raises: ValueError for a setting that verl's trainer does not have."""
    if method_of(run.method) is not None and not is_importance(run.method):
        raise ValueError(
            f"--through-verl: method {run.method!r} is not served; allowed: grpo, {', '.join(IMPORTANCES)}, or "
            "python:<module>:<class>"
        )
    if run.positive_only:
        raise ValueError("--through-verl: --positive-only is not served; leave it out")


def train(run: Run, folder: Path, cache: Path | None) -> Record:
    """Train with verl; see `Record`. The log stays in `folder`, the trained weights do not.

    Raises:
        TrainingFailed: verl ended early.
    """
    task = TASKS[run.task]
    folder.mkdir(parents=True, exist_ok=True)
    model = learned_model(task, run.warm_start, cache, WARM_START)
    model.save_pretrained(folder / "model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(1000 + run.seed)
    write_problems(folder / "problems.parquet", [task.problem(rng) for _ in range(run.steps * run.prompts)])
    metrics_file, log = folder / "metrics.jsonl", folder / "verl.log"
    metrics_file.unlink(missing_ok=True)
    environment = {**cpu_environment(), "VERL_FILE_LOGGER_PATH": str(metrics_file)}
    code = run_verl([*cpu_overrides(), *overrides(run, folder)], environment, log, LONGEST_RUN_S)
    metrics = read_metrics(metrics_file)
    if code != 0 or len(metrics) < run.steps:
        raise TrainingFailed(f"{run.task} {run.method}: {diagnose(log)} (exit status {code}; all of its output: {log})")
    record = Record(run, [_entry(step) for step in metrics])
    record.held_out[0] = accuracy(model, task, HELD_OUT, greedy=False)
    trained = folder / "checkpoint" / f"global_step_{run.steps}" / "actor" / "huggingface"
    record.held_out[run.steps] = accuracy(type(model).from_pretrained(trained).eval(), task, HELD_OUT, greedy=False)
    record.seconds = sum(step["timing_s/step"] for step in metrics)
    record.importance_seconds = sum(step.get("timing_s/oar", 0.0) for step in metrics)
    for made in ("model", "checkpoint"):
        shutil.rmtree(folder / made)
    return record


def overrides(run: Run, folder: Path) -> list[str]:
    """What verl is told beside `cpu_overrides`."""
    method = ["algorithm.adv_estimator=grpo"]
    if method_of(run.method) is not None:
        settings = run.config().model_dump(include={"importance", "seed", *CREDIT_SETTINGS}, exclude_none=True)
        settings["answer_patterns"] = "[hash]"
        method = ["algorithm.adv_estimator=oar", *(f"algorithm.oar.{name}={value}" for name, value in settings.items())]
    task, problems = TASKS[run.task], folder / "problems.parquet"
    return [
        *method,
        "data.shuffle=False",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        *training_overrides(
            folder / "model",
            (problems, problems),
            folder / "checkpoint",
            run.steps,
            run.seed,
            run.lr,
            (run.prompts, run.copies),
            (task.prompt_length, task.max_response_length),
        ),
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The vocabulary of the tasks as a tokenizer: a token is a word with the space before it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word if word in SPECIAL else f"\u0120{word}": index for index, word in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def write_problems(file: Path, problems: list[Problem]) -> None:
    """As verl reads them, in this order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {
            "data_source": "oar_bench",
            "prompt": [{"role": "user", "content": text(problem.prompt)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": text(problem.answer)},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def _entry(step: dict[str, Any]) -> dict[str, float]:
    """A step of a record from verl's metrics."""
    importance = step.get("timing_s/oar", 0.0)
    names = {
        "reward": "critic/score/mean",
        "entropy": "actor/entropy",
        "length": "response_length/mean",
        "gradient_norm": "actor/grad_norm",
        "ess_ratio": "oar/ess_ratio",
        "top10_mass": "oar/top10_mass",
        "sample_seconds": "timing_s/gen",
    }
    found = {name: float(step[key]) for name, key in names.items() if key in step}
    rest = step["timing_s/step"] - importance - step["timing_s/gen"]
    return {**found, "importance_seconds": importance, "update_seconds": rest}
