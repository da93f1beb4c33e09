"""One run of verl in the demo: its settings, where it writes, and a live view of how far it is."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from oar_plugin.hosts.verl.cpu import cpu_environment, cpu_overrides
from oar_plugin.hosts.verl.cpu.session import TIMED_OUT, Session, run_verl
from recipes.cpu_demo.warm_start import MAX_NEW_TOKENS

Method = Literal["oar", "grpo"]

PROMPTS, RESPONSES = 16, 8
MICRO_BATCH = 32
LEARNING_RATE = 5e-4
MAX_PROMPT_TOKENS = 32
REWARD = "critic/score/mean"
GIGABYTE = 1024**3

STAGES = (
    # what verl prints when the stage ends, what is being awaited until then
    ("All configuration checks passed", "verl is being imported"),
    ("Started a local Ray instance", "Ray starts"),
    ("dataloader initialized", "verl's trainer starts and reads the data"),
    ("model engine initialized", "the actor loads the model (FSDP)"),
    ("'serve'", "the rollout server starts"),
    ("Training Progress", "the rollout server loads the model (vLLM)"),
)


class TrainingFailed(Exception):
    """verl ended before its last step. The message says where to read more."""


@dataclass(frozen=True)
class Run:
    """Where one run of verl reads and writes. Everything lies below ``folder``."""

    folder: Path
    method: Method
    model: Path
    train_file: Path
    validation_file: Path
    steps: int
    seed: int

    @property
    def metrics_file(self) -> Path:
        """verl's ``file`` logger: one JSON object a step."""
        return self.folder / "metrics.jsonl"

    @property
    def log_file(self) -> Path:
        """All output of all processes."""
        return self.folder / "verl.log"

    @property
    def script_file(self) -> Path:
        """The run as a shell script, to repeat or to change."""
        return self.folder / "verl_command.sh"

    @property
    def weights_folder(self) -> Path:
        """What ``algorithm.oar.dump_dir`` names."""
        return self.folder / "token_weights"

    @property
    def trained_model(self) -> Path:
        """The model after the last step, as ``AutoModelForCausalLM`` reads it."""
        return self.folder / "checkpoint" / f"global_step_{self.steps}" / "actor" / "huggingface"

    def overrides(self) -> list[str]:
        """What makes this run of verl different from any other on a CPU."""
        method = (
            [
                "algorithm.adv_estimator=oar",
                f"algorithm.oar.dump_dir={_quoted(self.weights_folder)}",
                f"algorithm.oar.dump_responses={RESPONSES}",
            ]
            if self.method == "oar"
            else ["algorithm.adv_estimator=grpo"]
        )
        return [
            *method,
            f"data.seed={self.seed}",
            *training_overrides(
                self.model,
                (self.train_file, self.validation_file),
                self.folder / "checkpoint",
                self.steps,
                self.seed,
                LEARNING_RATE,
                (PROMPTS, RESPONSES),
                (MAX_PROMPT_TOKENS, MAX_NEW_TOKENS),
            ),
        ]

    def arguments(self) -> list[str]:
        """All Hydra overrides."""
        return [*cpu_overrides(), *self.overrides()]

    def environment(self) -> dict[str, str]:
        """Environment variables on top of the caller's."""
        return {**cpu_environment(), "VERL_FILE_LOGGER_PATH": str(self.metrics_file)}

    def script(self) -> str:
        """A shell script that does the same run; overrides given to it win."""
        lines = [
            "#!/usr/bin/env bash",
            f"# The demo's run with {self.method.upper()}, as verl saw it.",
            "set -euo pipefail",
        ]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment().items()]
        command = [shlex.quote(sys.executable), "-m verl.trainer.main_ppo", *map(shlex.quote, self.arguments()), '"$@"']
        return "\n".join([*lines, "", " \\\n  ".join(command), ""])


def training_overrides(
    model: Path,
    data: tuple[Path, Path],
    checkpoints: Path,
    steps: int,
    seed: int,
    lr: float,
    batch: tuple[int, int],
    longest: tuple[int, int],
) -> list[str]:
    """Hydra overrides of a training of a small model with the demo's reward: clipped, without a KL term, saved at its end.

    Args:
        model: folder of model and tokenizer.
        data: parquet files, of training and of validation.
        checkpoints: folder for the model after the last step.
        steps: of the training, one update each.
        seed: of the sampling.
        lr: learning rate.
        batch: prompts, and responses to each.
        longest: tokens of a prompt and of a response.
    """
    (prompts, responses), (prompt, response) = batch, longest
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    micro_batch = math.gcd(MICRO_BATCH, prompts * responses)  # verl wants a divisor of the batch
    return [
        f"data.train_files={_quoted(data[0])}",
        f"data.val_files={_quoted(data[1])}",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"actor_rollout_ref.model.path={_quoted(model)}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.optim.lr={lr}",
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={micro_batch}",
        f"{actor}.clip_ratio_low=0.2",
        f"{actor}.clip_ratio_high=0.28",
        f"{actor}.use_kl_loss=False",
        f"{actor}.checkpoint.save_contents=[hf_model]",
        f"{rollout}.n={responses}",
        f"{rollout}.seed={seed}",
        f"{rollout}.max_model_len={prompt + response}",
        f"{rollout}.max_num_batched_tokens=4096",
        f"{rollout}.max_num_seqs={prompts * responses}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={micro_batch}",
        # Room for twice the batch, 100 MB, in place of the 1 GB that vLLM would take.
        f"+{rollout}.engine_kwargs.vllm.num_gpu_blocks_override={2 * prompts * responses}",
        "reward.custom_reward_function.path=pkg://recipes.cpu_demo.reward",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1",
        f"trainer.save_freq={steps}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={_quoted(checkpoints)}",
        "trainer.logger=[console,file]",
    ]


def _quoted(path: Path) -> str:
    """A path as Hydra reads it: in quotes where it would take a character for its own syntax."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """verl's metrics, one flat dictionary a training step, with ``step`` in it. A half-written line is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().split("\n")[:-1]:
        record = json.loads(line)
        found.append({"step": record["step"], **record["data"]})
    return [row for row in found if REWARD in row]


@dataclass
class Outcome:
    """What a finished run cost."""

    seconds: float
    start_up_seconds: float
    peak_bytes: int


@dataclass
class TrainingView:
    """Shows how far a run is. Give it verl's output line by line; rich draws it again several times a second."""

    run: Run
    started: float = field(default_factory=time.monotonic)
    stage: int = 0
    first_step_at: float | None = None
    peak_bytes: int = 0
    metrics: list[dict[str, Any]] = field(default_factory=list)
    _looked_at: float = 0.0
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def on_line(self, line: str) -> None:
        """Recognise the end of a stage of verl's start-up."""
        for index in range(self.stage, len(STAGES)):
            if STAGES[index][0] in line:
                self.stage = index + 1
        self.refresh()

    def refresh(self) -> None:
        """Read the metrics that verl has written since."""
        now = time.monotonic()
        if now - self._looked_at < 0.5:
            return
        self._looked_at = now
        self.metrics = read_metrics(self.run.metrics_file)
        if self.metrics:
            self.stage = len(STAGES)
            self.first_step_at = self.first_step_at or now - self.metrics[0].get("timing_s/step", 0.0)

    def title(self) -> str:
        """Name of the run."""
        return f"Training with {self.run.method.upper()}"

    def status(self) -> str:
        """One line: what is going on."""
        self.refresh()
        if not self.metrics:
            waiting = STAGES[self.stage][1] if self.stage < len(STAGES) else "the first step"
            return f"starting verl ({min(self.stage + 1, len(STAGES))}/{len(STAGES)}): {waiting}"
        rewards = [row[REWARD] for row in self.metrics[-5:]]
        line = f"step {len(self.metrics)}/{self.run.steps}   reward {sum(rewards) / len(rewards):.2f}"
        times = [row["timing_s/step"] for row in self.metrics[1:]][-5:]  # the first step still imports
        if not times:
            return line
        seconds = sum(times) / len(times)
        left = (self.run.steps - len(self.metrics)) * seconds
        return f"{line}   {seconds:.1f} s a step   {_clock(left)} left"

    def __rich__(self) -> RenderableType:
        status = self.status()
        table = Table.grid(padding=(0, 1))
        table.add_row(
            self._spinner,
            Text(self.title(), style="bold"),
            ProgressBar(total=self.run.steps, completed=len(self.metrics), width=30),
            Text(_clock(time.monotonic() - self.started), style="cyan"),
        )
        return Group(table, Text(f"  {status}", style="dim"))


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def train(run: Run, console: Console, timeout_s: float = 1800.0) -> Outcome:
    """Run verl to its last step.

    Raises:
        TrainingFailed: verl ended early.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    run.script_file.write_text(run.script())
    run.script_file.chmod(0o755)
    view = TrainingView(run)
    ended = threading.Event()

    def watch_memory(session: Session) -> None:
        while not ended.wait(5.0):
            view.peak_bytes = max(view.peak_bytes, session.memory())

    def on_start(session: Session) -> None:
        threading.Thread(target=watch_memory, args=(session,), daemon=True).start()

    shown: AbstractContextManager[object] = (
        Live(view, console=console, refresh_per_second=4, transient=True)
        if console.is_terminal
        else _PlainReporter(view, console)
    )
    try:
        with shown:
            code = run_verl(
                run.arguments(), run.environment(), run.log_file, timeout_s, on_line=view.on_line, on_start=on_start
            )
    finally:
        ended.set()
    if code == TIMED_OUT:
        raise TrainingFailed(f"verl did not finish within {timeout_s / 60:.0f} minutes (its output: {run.log_file})")
    metrics = read_metrics(run.metrics_file)
    if code != 0 or len(metrics) < run.steps or not run.trained_model.exists():
        raise TrainingFailed(f"{diagnose(run.log_file)} (exit status {code}; all of its output: {run.log_file})")
    seconds = time.monotonic() - view.started
    start_up = max(0.0, (view.first_step_at or view.started) - view.started)
    console.print(
        f"{view.title()}: {run.steps} steps in {_clock(seconds)}, of which {_clock(start_up)} for verl to start",
        highlight=False,
    )
    return Outcome(seconds, start_up, view.peak_bytes)


class _PlainReporter:
    """Where there is no terminal: a line whenever there is something new to say, at most every ten seconds."""

    def __init__(self, view: TrainingView, console: Console) -> None:
        self.view, self.console = view, console
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> _PlainReporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _report(self) -> None:
        said = ""
        while not self._ended.wait(10.0):
            line = self.view.status()
            if line != said:
                self.console.print(f"  {_clock(time.monotonic() - self.view.started)}  {line}", highlight=False)
                said = line


CAUSES: Mapping[str, str] = {
    "No space left on device": "the disk is full: free some space, or choose another directory with --out",
    "OutOfMemoryError": "too little memory: close other programs, or take a machine with 8 GB",
    "Cannot allocate memory": "too little memory: close other programs, or take a machine with 8 GB",
    "Address already in use": "a port was taken by another program: start the demo again",
    "OarConfigError": "a setting of OAR cannot work",
}


def diagnose(log_file: Path) -> str:
    """One line on why a run failed, from its log."""
    text = log_file.read_text(errors="replace") if log_file.exists() else ""
    for mark, advice in CAUSES.items():
        if mark in text:
            return advice
    errors = [line.strip() for line in text.splitlines() if "Error" in line and "not available" not in line]
    return f"verl stopped: {errors[-1][:300]}" if errors else "verl stopped before its last step"
