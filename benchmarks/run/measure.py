"""Whole runs of verl on a CPU whose steps are GRPO's and OAR's in turn, and what each phase of them takes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from benchmarks.importance import DEFAULT, check_importance
from benchmarks.run.assets import FINDER, REWARD
from benchmarks.run.steps import CPU_SECONDS, HOST_ADVANTAGE, METHOD, WARM_UP
from oar_plugin.hosts.verl.cpu import cpu_environment, cpu_overrides

Checkpointing = Literal["on", "off"]

LONGEST_RUN_S = 3600.0
_LOG_TAIL = 25
SIZES = ("1m", "10m", "50m", "0.1b", "0.5b")
"""vLLM serves no smaller heads on a CPU, and larger ones take hours."""


class RunFailed(RuntimeError):
    """A run of verl ended early; the message holds the end of its log."""


class NotComparable(RuntimeError):
    """GRPO's and OAR's steps did not do the same work, so that no ratio may be told."""


@dataclass(frozen=True)
class Settings:
    """What is run. The defaults are those of the command line.

    Attributes:
        size: of the model, a key of `benchmarks.tiny.random_models.SHAPES`.
        prompts: a step.
        n: responses a prompt.
        prompt_length: tokens, exactly.
        response_length: tokens, exactly.
        scored_share: share of the prompts whose responses have unequal rewards, and so an advantage.
        importance: `algorithm.oar.importance`.
        checkpointing: activation checkpointing in the actor, which verl has on unless told otherwise.
        micro_batch: sequences at a time, in the log-prob pass and in the update.
        steps: counted steps of each method in a run.
        rounds: runs of verl.
        control: also run GRPO alone, with verl's own trainer.
        seed: of weights and sampling.
    """

    size: str = "10m"
    prompts: int = 4
    n: int = 4
    prompt_length: int = 32
    response_length: int = 128
    scored_share: float = 0.5
    importance: str = DEFAULT
    checkpointing: Checkpointing = "on"
    micro_batch: int = 8
    steps: int = 6
    rounds: int = 2
    control: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raises: ValueError with the argument at fault."""
        for name in ("prompts", "micro_batch", "steps", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.size not in SIZES:
            raise ValueError(f"--size {self.size}: allowed: {', '.join(SIZES)}")
        check_importance(self.importance, copies=True)
        if self.n < 2:
            raise ValueError(f"--n {self.n}: must be at least 2, or no response has an advantage over another")
        if self.prompt_length < 8:
            raise ValueError(
                f"--prompt-length {self.prompt_length}: must be at least 8, the digits of the prompt's number"
            )
        if self.response_length < 32:
            raise ValueError(
                f"--response-length {self.response_length}: must be at least 32, eight of them are the answer"
            )
        if not 0 < self.scored_share <= 1 or not (self.scored_share * self.prompts).is_integer():
            raise ValueError(
                f"--scored-share {self.scored_share}: must be in (0, 1] and make a whole number of the {self.prompts} "
                "prompts (--prompts)"
            )
        if self.responses % self.micro_batch:
            raise ValueError(f"--micro-batch {self.micro_batch}: must divide the {self.responses} responses of a step")

    @property
    def responses(self) -> int:
        return self.prompts * self.n

    @property
    def steps_of_a_run(self) -> int:
        """With the warm-up."""
        return WARM_UP + 2 * self.steps

    @property
    def steps_of_control(self) -> int:
        """With the warm-up."""
        return WARM_UP + self.steps


@dataclass(frozen=True)
class Phases:
    """Seconds of one step. Together they are verl's `timing_s/step`.

    Attributes:
        generation: until the last response is there and rewarded.
        log_probs: old log-probs and entropy.
        importance: what OAR adds by its own account, `timing_s/oar`: marking rows, its backward, the gate.
        advantage: verl's own.
        update: of the actor.
        weight_sync: the actor's weights on their way to the engine.
        rest: what no timer covers.
    """

    generation: float
    log_probs: float
    importance: float
    advantage: float
    update: float
    weight_sync: float
    rest: float

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """In the order of a step."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True)
class Step:
    """One counted step.

    Attributes:
        run: which run of verl, from 1.
        step: verl's number of it, from 1.
        oar: whether it was OAR's.
        seconds: verl's `timing_s/step`.
        cpu_seconds: processor seconds of all processes, with verl's bookkeeping after the step; None in the control.
        phases: where the seconds went.
        work: what has to be equal in all steps: lengths, rewards.
        scored: share of the rows that got importance; None in a GRPO step.
    """

    run: int
    step: int
    oar: bool
    seconds: float
    cpu_seconds: float | None
    phases: Phases
    work: dict[str, float]
    scored: float | None


@dataclass
class Result:
    """What was measured; `steps` without the warm-up, in the order in which they ran."""

    settings: Settings
    machine: dict[str, Any]
    parameters: int
    vocabulary: int
    steps: list[Step]
    control: list[Step]

    def of(self, oar: bool) -> list[Step]:
        """The steps of one method."""
        return [step for step in self.steps if step.oar == oar]

    def pairs(self) -> list[tuple[Step, Step]]:
        """GRPO's and OAR's step of each pair of neighbours."""
        found = []
        for first, second in zip(self.steps[::2], self.steps[1::2], strict=True):
            found.append((second, first) if first.oar else (first, second))
        return found


_WORK = (
    "prompt_length/mean",
    "response_length/mean",
    "response_length/min",
    "response_length/max",
    "critic/score/mean",
)


def parse_step(metrics: dict[str, Any], run: int) -> Step:
    """A step from what verl's `file` logger wrote of it, with `step` in it."""
    oar_seconds = metrics.get("timing_s/oar", 0.0)
    advantage = metrics["timing_s/adv"]
    host_advantage = metrics.get(f"timing_s/{HOST_ADVANTAGE}", advantage)
    # `timing_s/oar` counts the gate, which verl's timer of the advantage has too, and parts of the log-prob pass.
    within_log_probs = oar_seconds - (advantage - host_advantage) if oar_seconds else 0.0
    known = {
        "generation": metrics["timing_s/gen"],
        "log_probs": metrics["timing_s/old_log_prob"] - within_log_probs,
        "importance": oar_seconds,
        "advantage": host_advantage,
        "update": metrics["timing_s/update_actor"],
        "weight_sync": metrics["timing_s/update_weights"],
    }
    seconds = metrics["timing_s/step"]
    return Step(
        run=run,
        step=metrics["step"],
        oar=bool(metrics.get(METHOD, 0.0)),
        seconds=seconds,
        cpu_seconds=metrics.get(CPU_SECONDS),
        phases=Phases(**known, rest=seconds - math.fsum(known.values())),
        work={name: metrics[name] for name in _WORK},
        scored=metrics.get("oar/scored"),
    )


def check_comparable(settings: Settings, steps: Sequence[Step], control: Sequence[Step] = ()) -> None:
    """That all steps did the work that was asked for.

    Raises:
        NotComparable: with the figure at fault.
    """
    rewarded = settings.n // 2 / settings.n * settings.scored_share
    expected = {
        "prompt_length/mean": settings.prompt_length,
        "response_length/mean": settings.response_length,
        "response_length/min": settings.response_length,
        "response_length/max": settings.response_length,
        "critic/score/mean": rewarded,
    }
    for step in [*steps, *control]:
        name = f"{'OAR' if step.oar else 'GRPO'}'s step {step.step} of run {step.run}"
        for key, value in expected.items():
            if not math.isclose(step.work[key], value, abs_tol=1e-6):
                raise NotComparable(f"{name} has {key} {step.work[key]:g} in place of {value:g}")
        if step.oar and (step.scored is None or not math.isclose(step.scored, settings.scored_share, abs_tol=1e-6)):
            raise NotComparable(
                f"{name} has oar/scored {step.scored} in place of {settings.scored_share:g} (--scored-share)"
            )
        if not step.oar and step.scored is not None:
            raise NotComparable(f"{name} has oar/scored {step.scored}: a GRPO step scores nothing")
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        if first.oar == second.oar or first.run != second.run:
            raise NotComparable(f"steps {first.step} and {second.step} of run {first.run} are not one of each method")


def overrides(settings: Settings, folder: Path, name: str, oar: bool, steps: int) -> list[str]:
    """Hydra overrides of one run, on top of those of any CPU run.

    Args:
        settings: of the measurement.
        folder: with the assets.
        name: of the run, a folder below.
        oar: whether OAR is on at all.
        steps: with the warm-up.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    length = settings.prompt_length + settings.response_length
    method = [
        "algorithm.adv_estimator=oar",
        f"algorithm.oar.importance={settings.importance}",
        f"algorithm.oar.answer_patterns=['{FINDER}']",
    ]
    return [
        *cpu_overrides(),
        *(method if oar else ["algorithm.adv_estimator=grpo"]),
        f"data.train_files={_quoted(folder / 'prompts.parquet')}",
        f"data.val_files={_quoted(folder / 'prompts.parquet')}",
        f"data.train_batch_size={settings.prompts}",
        "data.shuffle=False",  # each batch has its share of prompts with a signal
        f"data.max_prompt_length={settings.prompt_length}",
        # One more than is generated: a response as long as allowed counts as cut off, and is not scored.
        f"data.max_response_length={settings.response_length + 1}",
        f"{rollout}.response_length={settings.response_length}",
        f"{rollout}.ignore_eos=True",
        f"{rollout}.n={settings.n}",
        f"{rollout}.seed={settings.seed}",
        f"{rollout}.max_model_len={length + 1}",
        f"{rollout}.max_num_batched_tokens={max(2048, length + 1)}",
        f"{rollout}.max_num_seqs={settings.responses}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={settings.micro_batch}",
        f"actor_rollout_ref.model.path={_quoted(folder / 'model')}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={settings.checkpointing == 'on'}",
        f"{actor}.optim.lr=0",  # the update does all its work, and the model stays the same for both methods
        f"{actor}.ppo_mini_batch_size={settings.prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={settings.micro_batch}",
        f"{actor}.use_kl_loss=False",
        f"reward.custom_reward_function.path={REWARD}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={_quoted(folder / name / 'checkpoints')}",
        f"trainer.project_name={name}",
        "trainer.experiment_name=run",
        f"hydra.run.dir={_quoted(folder / name / 'hydra')}",
    ]


def _quoted(path: Path) -> str:
    """A path as Hydra reads it: in quotes where it would take a character for its own syntax."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def steps_in_all(settings: Settings) -> int:
    """Pieces of work that `measure` tells `progress` about."""
    return settings.rounds * settings.steps_of_a_run + settings.control * settings.steps_of_control


def measure(settings: Settings, progress: Callable[[str], None] = lambda what: None) -> Result:
    """Run everything.

    Args:
        settings: see there.
        progress: called when a step begins, with a description.

    Raises:
        ValueError: an argument that cannot work, or a machine that is not one for the CPU stack.
        RunFailed: verl ended early.
        NotComparable: the steps did not do the same work.
    """
    settings.check()
    _check_machine()
    import torch

    from benchmarks.machine import describe_machine, load_average
    from benchmarks.tiny.random_models import SHAPES
    from oar_plugin.hosts.vllm.versions import installed

    machine = describe_machine(torch.device("cpu"))
    machine |= {"verl": importlib.metadata.version("verl"), "vllm": installed()}
    machine["torch_threads"] = int(cpu_environment()["OMP_NUM_THREADS"])  # in verl's processes, not in this one
    folder = Path(tempfile.mkdtemp(prefix="oar-bench-"))
    parameters = _write_assets(settings, folder)
    runs = settings.rounds + settings.control
    steps: list[Step] = []
    control: list[Step] = []
    try:
        for run in range(1, runs + 1):
            alone = run > settings.rounds
            what = f"run {run} of {runs}" + (" (GRPO alone)" if alone else "")
            (control if alone else steps).extend(_run(settings, folder, run, not alone, what, progress))
    except RunFailed:
        raise  # what is in the folder tells why
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    check_comparable(settings, steps, control)
    machine["load_average_after"] = load_average()
    return Result(settings, machine, parameters, SHAPES[settings.size].vocab, steps, control)


def _check_machine() -> None:
    for name in ("verl", "vllm"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed; `oar doctor` says what is missing for whole runs on a CPU")
    from oar_plugin.hosts.verl.cpu import wanted

    if not wanted():
        raise ValueError(
            "this command measures verl's CPU stack, and PyTorch sees an accelerator or is not a CPU build"
        )


def _write_assets(settings: Settings, folder: Path) -> int:
    from benchmarks.run.assets import write_assets

    return write_assets(
        folder,
        settings.size,
        max(settings.steps_of_a_run, settings.steps_of_control),
        settings.prompts,
        round(settings.scored_share * settings.prompts),
        settings.prompt_length,
        settings.prompt_length + settings.response_length + 1,
        settings.seed,
    )


def _run(
    settings: Settings, folder: Path, run: int, alternating: bool, what: str, progress: Callable[[str], None]
) -> list[Step]:
    """One run of verl: its steps without the warm-up."""
    from oar_plugin.hosts.verl.cpu.session import TIMED_OUT, run_verl

    name = f"run_{run}"
    (folder / name).mkdir()
    log, written = folder / name / "verl.log", folder / name / "metrics.jsonl"
    total = settings.steps_of_a_run if alternating else settings.steps_of_control
    environment = {**cpu_environment(), "VERL_FILE_LOGGER_PATH": str(written)}
    if alternating:
        environment["VERL_USE_EXTERNAL_MODULES"] = "benchmarks.run.trainer"
    progress(f"{what}: verl starts, step 1 of {total}")
    told, looked_at = 1, 0.0

    def on_line(line: str) -> None:
        nonlocal told, looked_at
        if told == total or (now := time.monotonic()) - looked_at < 0.5:
            return
        looked_at = now
        while told < min(total, len(_read(written)) + 1):
            told += 1
            progress(f"{what}: step {told} of {total}")

    status = run_verl(
        overrides(settings, folder, name, alternating, total), environment, log, LONGEST_RUN_S, on_line=on_line
    )
    lines = _read(written)
    if status != 0 or len(lines) < total:
        how = "was ended after an hour" if status == TIMED_OUT else f"ended with exit status {status}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
        raise RunFailed(
            f"{what}: verl {how} after {len(lines)} of {total} steps. The end of its log:\n{tail}\nAll of it: {log}"
        )
    while told < total:
        told += 1
        progress(f"{what}: step {told} of {total}")
    return [parse_step(line, run) for line in lines[WARM_UP:]]


def _read(path: Path) -> list[dict[str, Any]]:
    """verl's metrics, one flat dictionary a training step, with `step` in it; without a line that is half-written."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [{"step": record["step"], **record["data"]} for record in records if "timing_s/step" in record["data"]]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """An interval that covers the median of what `values` are drawn from, whatever their distribution (sign test).

    Returns:
        Two of the values; None where there are too few of them (fewer than six for 95 %).
    """
    ordered, n = sorted(values), len(values)
    below, best = 0.0, None
    for place in range(n // 2):
        below += math.comb(n, place) / 2**n  # that the median lies below the value at `place`
        if 1 - 2 * below < confidence:
            break
        best = (ordered[place], ordered[n - 1 - place])
    return best


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The median over pairs of (GRPO, OAR) of OAR / GRPO."""
    return statistics.median(oar / grpo for grpo, oar in pairs)
