"""Can the weights be believed? Every estimator of importance against exact OAR-P, and where it is known against the truth.

A *source* is a model with responses it wrote: a task whose causal tokens are known and a model seed, or a user's own model
and file. On each source every estimator scores the same responses. Exact OAR-P in float32 is the reference.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from benchmarks.fidelity.estimators import (
    REFERENCE,
    Estimator,
    Work,
    decoder_layers,
    load_estimators,
    package_estimators,
)
from benchmarks.fidelity.responses import MicroBatch, Response, micro_batches
from benchmarks.fidelity.scores import area, deletion_curve, rank_correlation, recall, top_overlap
from benchmarks.machine import Device, check_device, choose_device, describe_machine, load_average, timed
from oar_plugin.config import OarConfig
from oar_plugin.credit.probe import PROBES, Probe
from oar_plugin.passes.taps import check_model

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

_DEFAULT = OarConfig()

Progress = Callable[[str], None]
"""Called with a description as each piece of work begins."""


@dataclass(frozen=True)
class Settings:
    """What is run. The defaults are those of the command line.

    Attributes:
        tasks: with known causal tokens; not used with a model of one's own.
        seeds: models a task.
        responses: sampled from each model; of a file, at most as many are read as this says (0: all).
        curves: responses of each source that get a deletion curve.
        dtypes: of weights and computation. The reference is float32 whatever they are.
        probe: the outcome that is watched.
        micro_batch: responses at a time.
        rounds: of the timing, on the first micro-batch of each task.
        also: files with further estimators.
        model: a folder with a causal LM; None for the tasks.
        responses_file: its responses.
        answer_patterns: how answers are written in them.
        device: where it runs.
        seed: of the sampling, signs and noise.
    """

    tasks: tuple[str, ...] = ("parallel", "lookup", "tracking", "chain")
    seeds: int = 3
    responses: int = 48
    curves: int = 12
    dtypes: tuple[Dtype, ...] = DTYPES
    probe: Probe = _DEFAULT.probe
    micro_batch: int = 8
    rounds: int = 3
    also: tuple[Path, ...] = ()
    model: Path | None = None
    responses_file: Path | None = None
    answer_patterns: tuple[str, ...] = _DEFAULT.answer_patterns
    device: Device = "auto"
    seed: int = 0

    def check(self) -> None:
        """Raises: ValueError with the argument at fault."""
        for name in ("seeds", "micro_batch", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.curves < 0 or self.responses < 0:
            raise ValueError("--curves and --responses: must not be negative")
        if self.model is None and self.responses < 2:
            raise ValueError(f"--responses {self.responses}: must be at least 2")
        if (self.model is None) != (self.responses_file is None):
            raise ValueError("--model and --responses-file belong together: a model, and what it wrote")
        if not self.dtypes or any(dtype not in DTYPES for dtype in self.dtypes):
            raise ValueError(f"--dtypes {' '.join(self.dtypes)}: allowed: {', '.join(DTYPES)}")
        if self.probe not in PROBES:
            raise ValueError(f"--probe {self.probe}: allowed: {', '.join(PROBES)}")
        check_device(self.device)


@dataclass(frozen=True)
class Source:
    """A model and what it wrote.

    Attributes:
        name: of the task, or of the model.
        seed: of the model.
        model: in eval mode, float32.
        responses: whose answer was found.
        unusable: responses without an answer or without reasoning.
        pad_token: what masked copies hold.
        right: share of right answers among all that were sampled; None where nobody knows.
        faithful: share of answers that repeat the results that the model wrote itself; None where nobody knows.
    """

    name: str
    seed: int
    model: nn.Module
    responses: list[Response]
    unusable: int
    pad_token: int
    right: float | None = None
    faithful: float | None = None


@dataclass(frozen=True)
class Judged:
    """One estimator on one response.

    Attributes:
        spearman: rank correlation with exact OAR-P (float32).
        overlap: of the top 20 % with exact OAR-P's.
        recall: of the causal tokens; NaN where they are not known.
        area: under the deletion curve; NaN where none was drawn.
        recall_gap: its recall less exact OAR-P's.
    """

    spearman: float
    overlap: float
    recall: float
    area: float
    recall_gap: float


@dataclass(frozen=True)
class Cost:
    """What an estimator takes, a micro-batch.

    Attributes:
        forward: passes forward over the micro-batch, in tokens that really went through the layers.
        backward: the same, backward.
        seconds: median over rounds, over those of one plain forward with logits (`plain`).
        plain: median seconds of that forward.
    """

    forward: float
    backward: float
    seconds: float
    plain: float


@dataclass(frozen=True)
class Example:
    """A response with everybody's scores.

    Attributes:
        task: name of the source.
        response: itself.
        scores: `[R]` by estimator.
    """

    task: str
    response: Response
    scores: dict[str, Tensor]


@dataclass
class Measured:
    """One source in one dtype.

    Attributes:
        task: name of the source.
        seed: of the model.
        dtype: of the computation.
        correct: one a response.
        reasoning: reasoning tokens, one a response.
        judged: one a response, by estimator.
        curves: mean deletion curve, by estimator.
        costs: by estimator; of the first model of each task only.
        failed: by estimator, why it gave no scores.
        unusable: responses without an answer.
        right: share of right answers.
        faithful: see `Source`.
    """

    task: str
    seed: int
    dtype: Dtype
    correct: list[bool | None]
    reasoning: list[int]
    judged: dict[str, list[Judged]]
    curves: dict[str, list[float]]
    costs: dict[str, Cost]
    failed: dict[str, str]
    unusable: int
    right: float | None
    faithful: float | None


@dataclass
class Result:
    """What was measured."""

    settings: Settings
    machine: dict[str, Any]
    estimators: list[Estimator]
    measured: list[Measured] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    seconds: float = 0.0


def estimators(settings: Settings) -> list[Estimator]:
    """The package's and those of `--also`.

    Raises:
        ValueError: a file cannot be used, or a name comes twice.
    """
    found = [*package_estimators(), *(one for file in settings.also for one in load_estimators(file))]
    names = [estimator.name for estimator in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--also: the name {twice[0]!r} is taken; give the estimator another one")
    return found


def pieces_of_work(settings: Settings) -> int:
    """How often `measure` calls `progress`."""
    return (len(settings.tasks) * settings.seeds if settings.model is None else 1) * len(settings.dtypes)


def measure(settings: Settings, sources: Iterator[Source], progress: Progress) -> Result:
    """Judge every estimator on every source.

    Raises:
        ValueError: settings or an extra file cannot be used.
    """
    device = choose_device(settings.device)
    result = Result(settings, describe_machine(device), estimators(settings))

    def run() -> None:
        for source in sources:
            check_model(source.model)
            decoder_layers(source.model)
            reference: list[Tensor] | None = None
            for dtype in settings.dtypes:
                progress(f"{source.name}, seed {source.seed}, {dtype}")
                known = {m.task for m in result.measured if m.dtype == dtype}
                measured, scores = _judge(
                    settings, source, dtype, result.estimators, reference, device, time=source.name not in known
                )
                result.measured.append(measured)
                if reference is None:
                    reference = scores[REFERENCE]
                    if source.name not in known:
                        result.examples += _examples(source, scores)

    result.seconds, _ = timed(run, device)
    result.machine["load_average_after"] = load_average()
    return result


def _judge(
    settings: Settings,
    source: Source,
    dtype: Dtype,
    every: Sequence[Estimator],
    reference: list[Tensor] | None,
    device: torch.device,
    time: bool,
) -> tuple[Measured, dict[str, list[Tensor]]]:
    model = source.model if dtype == "float32" else copy.deepcopy(source.model)
    model = model.to(device=device, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
    batches = list(
        micro_batches(source.responses, settings.micro_batch, source.pad_token, settings.seed, device, settings.probe)
    )
    if reference is None and dtype != "float32":
        exact = next(estimator for estimator in every if estimator.name == REFERENCE)
        wide = copy.deepcopy(source.model).to(device=device, dtype=torch.float32).eval()
        reference = _scores(wide, batches, exact)
    scores: dict[str, list[Tensor]] = {}
    failed: dict[str, str] = {}
    for estimator in every:
        try:
            scores[estimator.name] = _scores(model, batches, estimator)
        except Exception as error:
            if estimator.name == REFERENCE:
                raise
            failed[estimator.name] = f"{type(error).__name__}: {error}"  # one bad candidate must not lose a run
    curves: dict[str, list[list[float]]] = {name: [] for name in scores}
    for index in range(min(settings.curves, len(source.responses)) if dtype == "float32" else 0):
        here = {name: rows[index] for name, rows in scores.items()}
        for name, curve in deletion_curve(model, source.responses[index], here, source.pad_token).items():
            curves[name].append(curve)
    exact_scores = reference or scores[REFERENCE]
    measured = Measured(
        source.name,
        source.seed,
        dtype,
        [response.correct for response in source.responses],
        [len(response.reasoning_R) for response in source.responses],
        {
            name: [
                _judged(response, row, exact_scores[index], curves[name], index)
                for index, (response, row) in enumerate(zip(source.responses, rows, strict=True))
            ]
            for name, rows in scores.items()
        },
        {name: [statistics.fmean(point) for point in zip(*rows, strict=True)] for name, rows in curves.items() if rows},
        _costs(model, batches[0][1], [e for e in every if e.name in scores], settings.rounds, device) if time else {},
        failed,
        source.unusable,
        source.right,
        source.faithful,
    )
    return measured, scores


def _scores(model: nn.Module, batches: Sequence[tuple[list[int], MicroBatch]], estimator: Estimator) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for indices, batch in batches:
        score_BT = estimator.score(model, batch)
        if score_BT.shape != batch.token_BT.shape:
            raise ValueError(f"scores of shape {tuple(score_BT.shape)}, expected {tuple(batch.token_BT.shape)}")
        for row, index in enumerate(indices):
            score_R = score_BT[row].detach().double().cpu()[batch.responses[row].reasoning_R]
            if not bool(torch.isfinite(score_R).all()):
                raise ValueError("scores that are not finite")
            found[index] = score_R
    return [found[index] for index in range(len(found))]


def _judged(
    response: Response, score_R: Tensor, reference_R: Tensor, curves: Sequence[Sequence[float]], index: int
) -> Judged:
    found = gap = math.nan
    if response.causal_T is not None:
        causal_R = response.causal_T[response.reasoning_R]
        found = recall(score_R, causal_R)
        gap = found - recall(reference_R, causal_R)
    return Judged(
        rank_correlation(score_R, reference_R),
        top_overlap(score_R, reference_R),
        found,
        area(curves[index]) if index < len(curves) else math.nan,
        gap,
    )


def _costs(
    model: nn.Module, batch: MicroBatch, every: Sequence[Estimator], rounds: int, device: torch.device
) -> dict[str, Cost]:
    """All in turn within a round, so that a machine that slows down slows all of them."""
    tokens = batch.token_BT.numel()
    work: dict[str, Work] = {}
    for estimator in every:
        with Work(model) as work[estimator.name]:
            estimator.score(model, batch)
    seconds: dict[str, list[float]] = {estimator.name: [] for estimator in every}
    plain: list[float] = []
    for _ in range(rounds):
        with torch.no_grad():
            plain.append(timed(partial(model, input_ids=batch.token_BT, use_cache=False), device)[0])
        for estimator in every:
            seconds[estimator.name].append(timed(partial(estimator.score, model, batch), device)[0])
    base = statistics.median(plain)
    return {
        name: Cost(work[name].forward / tokens, work[name].backward / tokens, statistics.median(values) / base, base)
        for name, values in seconds.items()
    }


def _examples(source: Source, scores: dict[str, list[Tensor]]) -> list[Example]:
    """The first right and the first wrong response; of a user's file the first three."""
    chosen: list[int] = []
    if source.responses[0].correct is None:
        chosen = list(range(min(3, len(source.responses))))
    for wanted in (True, False):
        chosen += [index for index, response in enumerate(source.responses) if response.correct is wanted][:1]
    return [
        Example(source.name, source.responses[index], {name: rows[index] for name, rows in scores.items()})
        for index in chosen
    ]
