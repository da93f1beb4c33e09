"""How well each importance agrees with exact OAR-P, and with the tokens that are known to decide the answer.

Exact OAR-P replaces every reasoning token, one at a time, and looks what happens to the model's answer. By default small models
are trained on tasks whose causal tokens are known (once, then kept on disk; two or three minutes a model on one core), and
sample right and wrong responses. With --model and --responses-file the same is done for a model and responses of your own,
without what nobody knows about them.

Reported for each estimator:
  Spearman, top 20 %   agreement with exact OAR-P in float32: rank correlation, overlap of the 20 % largest scores
  causal recall        share of the known causal tokens among as many top scores
  deletion             area under the answer's probability as the tokens with the largest scores are replaced; small is good
  forward, backward    passes through the layers, counted; and seconds over those of one plain forward

examples:
  python -m benchmarks fidelity --tasks parallel --seeds 1 --responses 16       a first look
  python -m benchmarks fidelity --out DIR                                       all tasks, three models each
  python -m benchmarks fidelity --model ./my_model --responses-file mine.jsonl --dtypes float32 --out DIR
  python -m benchmarks fidelity --also my_estimators.py                         with estimators of yours

mine.jsonl has an object a line: {"prompt": "...", "response": "..."} with the chat template applied, or {"prompt_ids": [...],
"response_ids": [...]}, and optionally "correct": true or false.

my_estimators.py has a dictionary ESTIMATORS of functions (model, batch) -> scores [B, T] by name. `batch` is a
benchmarks.fidelity.responses.MicroBatch; benchmarks/candidates/fidelity/attention.py is an example.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.fidelity.estimators import (
    REFERENCE,
    Score,
    counted_work,
    loaded_estimators,
)
from benchmarks.fidelity.pictures import draw, page_of
from benchmarks.fidelity.responses import MicroBatch, micro_batches
from benchmarks.fidelity.scores import deletion_curves, judged
from benchmarks.fidelity.sources import Source, file_source, task_sources
from benchmarks.fidelity.tables import Example, Findings, notes_of, tables_of
from benchmarks.machine import Device, check_device, choose_device, describe_machine, load_average, timed
from benchmarks.report import Report
from benchmarks.study import Progress, check_at_least_one
from oar_plugin.config import OarConfig
from oar_plugin.credit.probe import Probe
from oar_plugin.passes.taps import check_model

_DEFAULT = OarConfig()


@dataclass(frozen=True)
class Settings:
    tasks: tuple[str, ...] = ("parallel", "lookup", "tracking", "chain")
    """With known causal tokens; not used with a model of your own."""
    seeds: int = 3
    """Models a task."""
    responses: int = 48
    """A model; of a file at most so many lines, 0 for all."""
    model: Path | None = None
    """Your own: a folder that transformers loads a causal LM from."""
    responses_file: Path | None = None
    """What it wrote, JSON Lines."""
    answer_patterns: tuple[str, ...] = _DEFAULT.answer_patterns
    """How answers are written there, as algorithm.oar.answer_patterns."""
    also: tuple[Path, ...] = ()
    """Files with more estimators."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Of weights and computation. The reference is float32 whatever they are."""
    probe: Probe = _DEFAULT.probe
    """The outcome that is watched."""
    curves: int = 12
    """Responses a model with a deletion curve."""
    micro_batch: int = 8
    """Responses at a time."""
    rounds: int = 3
    """Of the timing, on the first micro-batch of each task."""
    device: Device = "auto"
    """auto takes CUDA where there is one."""
    seed: int = 0
    """Of sampling, signs and noise."""
    out: Path | None = None
    """Folder for the page, the shaded responses, the JSON and the plot; without it only the terminal."""

    def check(self) -> None:
        """Raises: ValueError with the argument at fault."""
        check_at_least_one(self, "seeds", "micro_batch", "rounds")
        if self.responses < (2 if self.model is None else 0):
            raise ValueError(f"--responses {self.responses}: must be at least 2; 0 only with --model, for all")
        if (self.model is None) != (self.responses_file is None):
            raise ValueError("--model and --responses-file belong together: a model, and what it wrote")
        if not self.dtypes or len(set(self.dtypes)) < len(self.dtypes):
            raise ValueError(f"--dtypes {' '.join(self.dtypes)}: give float32, bfloat16, or both, each once")
        check_device(self.device)


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises: ValueError for settings or files that cannot be used."""
    settings.check()
    loaded_estimators(settings.also)  # complains before anything is trained
    if settings.model is None or settings.responses_file is None:
        sources = task_sources(settings.tasks, settings.seeds, settings.responses, settings.seed, progress)
        return report_on(settings, sources, progress)
    progress(f"loading {settings.model}")
    source = file_source(settings.model, settings.responses_file, settings.answer_patterns, settings.responses)
    return report_on(settings, [source], progress)


def report_on(settings: Settings, sources: Iterable[Source], progress: Progress) -> Report:
    """Judge every estimator on every source."""
    device = choose_device(settings.device)
    machine, begin = describe_machine(device), time.perf_counter()
    findings = Findings(settings.dtypes, loaded_estimators(settings.also))
    pieces = (len(settings.tasks) * settings.seeds if settings.model is None else 1) * len(settings.dtypes)
    for source in sources:
        check_model(source.model)
        with counted_work(source.model):
            pass  # complains about a model whose work cannot be counted before hours are spent on it
        cut = (source.responses, settings.micro_batch, source.pad_token, device, settings.probe, settings.seed)
        batches = list(micro_batches(*cut))
        exact = _scores(_copy(source.model, device, "float32"), batches, findings.estimators[REFERENCE])
        new_task = all(model["task"] != source.task for model in findings.models)
        for number, dtype in enumerate(settings.dtypes):
            where = f"{source.task}, seed {source.seed}, {dtype}"
            progress(where, len(findings.models) * len(settings.dtypes) + number, pieces)
            model, scores = _copy(source.model, device, dtype), {REFERENCE: exact} if dtype == "float32" else {}
            for name, score in findings.estimators.items():
                try:
                    scores[name] = scores.get(name) or _scores(model, batches, score)
                except Exception as error:  # one bad candidate must not lose a run
                    if name == REFERENCE:
                        raise
                    findings.failed.append(f"{name} on {where}: {type(error).__name__}: {error}")
            key = {"task": source.task, "seed": source.seed, "dtype": dtype}
            curves = settings.curves if dtype == "float32" else 0
            findings.judged += [{**key, **row} for row in _judged(source, scores, exact, model, curves)]
            if new_task and number == 0:
                working = {name: partial(findings.estimators[name], model, batches[0][1]) for name in scores}
                costs = _costs(model, batches[0][1], working, settings.rounds, device)
                findings.costs += [{**key, **row} for row in costs]
                findings.examples += _examples(source, scores)
        facts = ("task", "seed", "right", "faithful", "unusable")
        findings.models.append({name: getattr(source, name) for name in facts})
    machine["load_average_after"] = load_average()
    return Report(
        title="Fidelity of importance estimators",
        stem=f"fidelity{'_candidates' if settings.also else ''}_{device.type}",
        command="",
        machine=machine,
        tables=tables_of(findings),
        notes=notes_of(findings, settings.probe, settings.curves),
        runs={"settings": asdict(settings), "seconds": time.perf_counter() - begin, **findings.runs()},
        figure=partial(draw, findings),
        extra={"html": page_of(findings)},
    )


def _copy(model: nn.Module, device: torch.device, dtype: str) -> nn.Module:
    """Without the gradients that a training has left behind."""
    copied: nn.Module = copy.deepcopy(model).to(device=device, dtype=getattr(torch, dtype))
    return copied.eval().requires_grad_(False)


def _scores(model: nn.Module, batches: Sequence[tuple[list[int], MicroBatch]], score: Score) -> list[Tensor]:
    """Float64 `[R]` of each response, on the CPU."""
    found: dict[int, Tensor] = {}
    for indices, batch in batches:
        score_BT = score(model, batch)
        if score_BT.shape != batch.token_BT.shape:
            raise ValueError(f"scores of shape {tuple(score_BT.shape)}, expected {tuple(batch.token_BT.shape)}")
        for index, response, score_T in zip(indices, batch.responses, score_BT.detach().double().cpu(), strict=True):
            found[index] = score_T[response.reasoning_R]
            if not bool(torch.isfinite(found[index]).all()):
                raise ValueError("scores that are not finite")
    return [found[index] for index in range(len(found))]


def _judged(
    source: Source, scores: Mapping[str, list[Tensor]], reference: list[Tensor], model: nn.Module, curves: int
) -> Iterable[dict[str, Any]]:
    """A row for each estimator on each response."""
    for index, response in enumerate(source.responses):
        here = {name: score[index] for name, score in scores.items()}
        curve = deletion_curves(model, response, here, source.pad_token) if index < curves else {}
        for name, score_R in here.items():
            row = {"estimator": name, "response": index, "correct": response.correct, "reasoning": len(score_R)}
            yield {**row, **judged(score_R, reference[index], response.causal_R, curve.get(name))}


def _costs(
    model: nn.Module, batch: MicroBatch, work: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Passes over the micro-batch, seconds of each round, and their median over that of a plain forward with logits.

    All in turn within a round, so that a machine that slows down slows all of them.
    """
    work = {"plain forward": partial(model, input_ids=batch.token_BT, use_cache=False), **work}
    rows: list[dict[str, Any]] = []
    for name, run in work.items():
        with counted_work(model) as counted:
            run()
        passes = {way: counted[way] / batch.token_BT.numel() for way in ("forward", "backward")}
        rows.append({"estimator": name, **passes, "seconds": []})
    for _ in range(rounds):
        for row in rows:
            row["seconds"].append(timed(work[row["estimator"]], device)[0])
    plain = statistics.median(rows[0]["seconds"])
    return [{**row, "time": statistics.median(row["seconds"]) / plain} for row in rows]


def _examples(source: Source, scores: Mapping[str, list[Tensor]]) -> Iterable[Example]:
    """The first right and the first wrong response; the first three where nobody knows."""
    correct = [response.correct for response in source.responses]
    chosen = [correct.index(right) for right in (True, False) if right in correct] or range(len(correct))[:3]
    return [(source.task, source.responses[i], {name: row[i] for name, row in scores.items()}) for i in chosen]
