"""Every estimator of importance on every model: what it scores, how well, and at what cost."""

import copy
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.fidelity.estimators import REFERENCE, Score, added_estimators, counted_work
from benchmarks.fidelity.pictures import draw, page_of
from benchmarks.fidelity.responses import MicroBatch, Source, micro_batches, task_sources
from benchmarks.fidelity.scores import judged
from benchmarks.fidelity.tables import BASELINE, Findings, notes_of, tables_of
from benchmarks.machine import Device, choose_device, timed
from benchmarks.report import Progress, Report
from benchmarks.workload import check_at_least_one
from oar_plugin.config import OarConfig
from oar_plugin.credit.probe import Probe


@dataclass(frozen=True)
class Settings:
    tasks: tuple[str, ...] = ("parallel", "lookup", "chain")
    """Of the study of learning."""
    models: int = 3
    """Warm models a task, trained once and kept on disk."""
    responses: int = 48
    """A model."""
    also: tuple[str, ...] = ()
    """Importances of yours: python:<module>:<class>."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Of weights and computation. The reference is float32 whatever they are."""
    probe: Probe = OarConfig().probe
    """The outcome that is watched."""
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
        check_at_least_one(self, "models", "responses", "micro_batch", "rounds")
        if not self.dtypes or len(set(self.dtypes)) < len(self.dtypes):
            raise ValueError(f"--dtypes {' '.join(self.dtypes)}: give float32, bfloat16, or both, each once")
        added_estimators(self.also)


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises: ValueError for a task that is unknown or has no models."""
    sources = task_sources(settings.tasks, settings.models, settings.responses, settings.seed, progress)
    return report_on(settings, sources, progress)


def report_on(settings: Settings, sources: Iterable[Source], progress: Progress) -> Report:
    """Judge every estimator on every source."""
    device = choose_device(settings.device)
    findings = Findings(settings.dtypes, added_estimators(settings.also))
    for source in sources:
        batches = list(micro_batches(source.responses, settings.micro_batch, device, settings.probe, settings.seed))
        exact = _scores(_copy(source.model, device, "float32"), batches, findings.estimators[REFERENCE])
        facts = ("task", "number", "right", "faithful", "unusable")
        findings.models.append({name: getattr(source, name) for name in facts})
        for place, dtype in enumerate(settings.dtypes):
            where = f"{source.task}, model {source.number}, {dtype}"
            done = (len(findings.models) - 1) * len(settings.dtypes) + place
            progress(where, done, len(settings.tasks) * settings.models * len(settings.dtypes))
            model, scores = _copy(source.model, device, dtype), {REFERENCE: exact} if dtype == "float32" else {}
            for name, score in findings.estimators.items():
                scores[name] = scores.get(name) or _scores(model, batches, score)
            key = {"task": source.task, "model": f"model {source.number}", "dtype": dtype}
            findings.judged += [{**key, **row} for row in _judged(source, scores, exact)]
            if source.number == 0 and place == 0:
                working = {name: partial(findings.estimators[name], model, batches[0][1]) for name in scores}
                costs = _costs(model, batches[0][1], working, settings.rounds, device)
                findings.costs += [{"task": source.task, **row} for row in costs]
                right = [response.right for response in source.responses]
                for i in [right.index(wanted) for wanted in (True, False) if wanted in right]:
                    example = {name: of_responses[i] for name, of_responses in scores.items()}
                    findings.examples.append((source.task, source.responses[i], example))
    return Report(
        title="Fidelity of importance estimators",
        stem=f"fidelity_{device.type}",
        tables=tables_of(findings),
        notes=notes_of(findings, settings.probe),
        runs={"settings": asdict(settings), **findings.runs()},
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
        for index, response, score_T in zip(indices, batch.responses, score_BT.detach().double().cpu(), strict=True):
            found[index] = score_T[response.reasoning_R]
            if not bool(torch.isfinite(found[index]).all()):
                raise ValueError("scores that are not finite")
    return [found[index] for index in range(len(found))]


def _judged(source: Source, scores: Mapping[str, list[Tensor]], reference: list[Tensor]) -> Iterable[dict[str, Any]]:
    """A row for each estimator on each response."""
    for index, response in enumerate(source.responses):
        here = {name: of_responses[index] for name, of_responses in scores.items()}
        causal_R = response.causal_T[response.reasoning_R]
        rows = {name: judged(score_R, reference[index], causal_R) for name, score_R in here.items()}
        for name, row in rows.items():
            yield {
                "estimator": name,
                "response": index,
                "answer": "right" if response.right else "wrong",
                "reasoning": len(causal_R),
                **row,
                "gain": row["overlap"] - rows[BASELINE]["overlap"],
            }


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
            row["seconds"].append(timed(work[row["estimator"]], device))
    plain = statistics.median(rows[0]["seconds"])
    return [{**row, "time": statistics.median(row["seconds"]) / plain} for row in rows]
