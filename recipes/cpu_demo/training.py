"""One run of verl in the demo: its settings, where it writes, and how far it is."""

import shlex
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.tiny import verl_run
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.verl_run import read_metrics
from recipes.cpu_demo import word_problems
from verl_cpu import cpu_overrides
from verl_cpu.session import TIMED_OUT, Session, run_verl

Method = Literal["oar", "grpo"]

TASK = TASKS["parallel"]
LONGEST_RUN_S = 3600.0


@dataclass(frozen=True)
class Setup:
    """What is trained, and at which size."""

    prompts: int
    responses: int
    longest: tuple[int, int]  # tokens of a prompt and of a response
    learning_rate: float
    dump_every: int
    more: tuple[str, ...] = ()  # overrides


SMOLLM2 = (
    # The embeddings are one tensor of 108 MB, which must fit into a bucket.
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",
    # Logits of 49,152 tokens at each position: the memory of all 16 responses at once would be twice that of the rest.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
)
SETUPS = {
    "tiny": Setup(16, 8, (TASK.prompt_length, TASK.max_response_length), 5e-4, 5),
    "smollm2": Setup(4, 4, (word_problems.PROMPT_TOKENS, 64), 1e-5, 1, SMOLLM2),
}

STAGES = (
    # what verl prints when the stage ends, what is being awaited until then
    ("All configuration checks passed", "verl is being imported"),
    ("Started a local Ray instance", "Ray starts"),
    ("dataloader initialized", "verl's trainer starts and reads the data"),
    ("model engine initialized", "the actor loads the model (FSDP)"),
    ("'serve'", "the rollout server starts"),
    ("Training Progress", "the rollout server loads the model (vLLM)"),
)

CAUSES = {
    "No space left on device": "the disk is full: free some space, or choose another directory with --out",
    "OutOfMemoryError": "too little memory: close other programs, or take a larger machine",
    "Cannot allocate memory": "too little memory: close other programs, or take a larger machine",
    "Address already in use": "a port was taken by another program: start again",
    "OarConfigError": "a setting of OAR cannot work",
}
"""What stands in the log of a run that failed, and what to do about it."""


class TrainingFailed(RuntimeError):
    """verl ended before its last step. The message says where to read more."""


@dataclass(frozen=True)
class Run:
    """One method's run. `parent` holds `model/` and `problems.parquet`; everything it writes lies in `parent/METHOD`."""

    parent: Path
    method: Method
    model: str  # of SETUPS
    steps: int
    seed: int

    @property
    def folder(self) -> Path:
        return self.parent / self.method

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def script_file(self) -> Path:
        return self.folder / "verl_command.sh"

    @property
    def weights_folder(self) -> Path:
        return self.folder / "token_weights"

    @property
    def trained_model(self) -> Path:
        return self.folder / "checkpoint" / f"global_step_{self.steps}" / "actor" / "huggingface"

    def arguments(self) -> list[str]:
        """Hydra overrides. The two methods differ in `algorithm.*` and the folder they write to."""
        setup = SETUPS[self.model]
        dump = {"dir": verl_run.quoted(self.weights_folder), "every": setup.dump_every, "groups": 4}
        oar = [f"algorithm.oar.dump.{key}={value}" for key, value in dump.items()]
        model, problems = self.parent / "model", self.parent / "problems.parquet"
        sizes = (setup.prompts, setup.responses), setup.longest
        return [
            *cpu_overrides(),
            f"algorithm.adv_estimator={self.method}",
            *(oar if self.method == "oar" else []),
            f"data.seed={self.seed}",
            *verl_run.training_overrides(
                model, problems, self.folder / "checkpoint", self.steps, self.seed, setup.learning_rate, *sizes
            ),
            *setup.more,
        ]

    def script(self) -> str:
        """A shell script that does the same run; overrides given to it win."""
        environment = verl_run.training_environment(self.metrics_file).items()
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment)
        command = [shlex.quote(sys.executable), "-m verl.trainer.main_ppo", *map(shlex.quote, self.arguments()), '"$@"']
        return f"#!/usr/bin/env bash\nset -euo pipefail\n{exports}\n\n" + " \\\n  ".join(command) + "\n"


class Watch:
    """Shows how far a run is: a bar in a terminal, elsewhere a line at most every ten seconds when there is something new."""

    def __init__(self, run: Run, console: Console) -> None:
        self.run, self.console = run, console
        self.started = time.monotonic()
        self.stage = 0
        self.peak_bytes = 0
        self.start_up_seconds = 0.0
        self.session: Session | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def on_start(self, session: Session) -> None:
        self.session = session

    def on_line(self, line: str) -> None:
        """Recognise the end of a stage of verl's start-up."""
        self.stage = next((i + 1 for i in range(self.stage, len(STAGES)) if STAGES[i][0] in line), self.stage)

    def status(self) -> tuple[int, str]:
        """Steps done, and one line: what is going on."""
        metrics = read_metrics(self.run.metrics_file)
        if not metrics:
            waiting = STAGES[self.stage][1] if self.stage < len(STAGES) else "the first step"
            return 0, f"starting verl ({min(self.stage + 1, len(STAGES))}/{len(STAGES)}): {waiting}"
        if not self.start_up_seconds:
            self.start_up_seconds = max(1.0, time.monotonic() - self.started - metrics[0].get("timing_s/step", 0.0))
        rewards = [row[verl_run.REWARD] for row in metrics[-5:]]
        line = f"step {len(metrics)}/{self.run.steps}   reward {sum(rewards) / len(rewards):.2f}"
        times = [row["timing_s/step"] for row in metrics[1:]][-5:]  # the first step still imports
        if not times:
            return len(metrics), line
        seconds = sum(times) / len(times)
        left = (self.run.steps - len(metrics)) * seconds
        return len(metrics), f"{line}   {seconds:.1f} s a step   {clock(left)} left"

    def _watch(self) -> None:
        columns = (SpinnerColumn(), TextColumn("[bold]{task.description}[/]"), BarColumn(20), TimeElapsedColumn())
        status_column = TextColumn("[dim]{task.fields[status]}[/]")
        terminal = self.console.is_terminal
        with Progress(*columns, status_column, console=self.console, transient=True, disable=not terminal) as progress:
            bar = progress.add_task(f"Training with {self.run.method.upper()}", total=self.run.steps, status="")
            said = ""
            for second in range(10**6):
                if self._ended.wait(1.0):
                    return
                if second % 5 == 0 and self.session is not None:
                    self.peak_bytes = max(self.peak_bytes, self.session.memory())
                done, status = self.status()
                progress.update(bar, completed=done, status=status)
                if not terminal and second % 10 == 0 and status != said:
                    self.console.print(f"  {clock(time.monotonic() - self.started)}  {status}")
                    said = status


def run_training(run: Run, console: Console) -> dict[str, Any]:
    """Run verl to its last step.

    Returns:
        `metrics` of each step, and `seconds`, `start_up_seconds` and `peak_bytes` of the whole run.

    Raises:
        TrainingFailed: verl ended early.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    run.script_file.write_text(run.script(), encoding="utf-8")
    run.script_file.chmod(0o755)
    log = run.folder / "verl.log"
    environment = verl_run.training_environment(run.metrics_file)
    with Watch(run, console) as watch:
        code = run_verl(run.arguments(), environment, log, LONGEST_RUN_S, watch.on_line, watch.on_start)
    if code == TIMED_OUT:
        raise TrainingFailed(f"verl did not finish within {LONGEST_RUN_S / 60:.0f} minutes (its output: {log})")
    watch.status()
    metrics = read_metrics(run.metrics_file)
    if code != 0 or len(metrics) < run.steps or not run.trained_model.exists():
        raise TrainingFailed(f"{diagnose(log)} (exit status {code}; all of its output: {log})")
    seconds = time.monotonic() - watch.started
    console.print(
        f"Training with {run.method.upper()}: {run.steps} steps in {clock(seconds)}, "
        f"of which {clock(watch.start_up_seconds)} for verl to start"
    )
    return {
        "metrics": metrics,
        "seconds": seconds,
        "start_up_seconds": watch.start_up_seconds,
        "peak_bytes": watch.peak_bytes,
    }


def diagnose(log_file: Path) -> str:
    """One line on why a run failed, from its log."""
    text = log_file.read_text(encoding="utf-8", errors="replace") if log_file.exists() else ""
    for mark, advice in CAUSES.items():
        if mark in text:
            return advice
    errors = [line.strip() for line in text.splitlines() if "Error" in line and "not available" not in line]
    return f"verl stopped: {errors[-1][:300]}" if errors else "verl stopped before its last step"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
