"""Every estimator of importance on every model: what it scores, how well, and at what cost."""

import copy
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cache import cached
from benchmarks.fidelity.estimators import REFERENCE, Score, added_estimators, counted_work, package_estimators
from benchmarks.fidelity.language import LONGEST, Writer, language_source
from benchmarks.fidelity.pictures import draw, page_of
from benchmarks.fidelity.responses import Batch, Response, Source, task_sources
from benchmarks.fidelity.scores import judged, top_overlap
from benchmarks.fidelity.tables import (
    AGAIN,
    BASELINE,
    BF16,
    BY_PROBE,
    DRAWN,
    MAIN,
    Findings,
    Rows,
    notes_of,
    own_cost,
    source_row,
    tables_of,
)
from benchmarks.language import smollm2
from benchmarks.language.log_probs import log_probs
from benchmarks.language.problems import KINDS, problems
from benchmarks.machine import Device, choose_device, timed
from benchmarks.report import Progress, Report
from benchmarks.workload import check_at_least_one
from oar_plugin.config import OarConfig
from oar_plugin.credit.probe import PROBES, Probe


@dataclass(frozen=True)
class Settings:
    model: str | None = None
    """A language model: smollm2, a folder, or a name of the hub. Without one, small models are trained on tasks."""
    tasks: tuple[str, ...] = ()
    """Of the study of learning: parallel, lookup, chain; with --model: words, arithmetic, gsm8k. None: all of these."""
    questions: Path | None = None
    """For gsm8k: its file, JSON lines with question and answer."""
    temperature: float = 1.0
    """That a language model samples at."""
    models: int = 3
    """Warm models a task, trained once and kept on disk."""
    responses: int = 48
    """A warm model; with --model short ones of each kind, and half as many long ones."""
    on_all: tuple[str, ...] = ()
    """Estimators that score all responses; the others score the first --part ones of each source. None: all of them."""
    part: int = 16
    """Responses of each source, the first ones, that are judged in other ways too: bfloat16, another seed, other probes."""
    also: tuple[str, ...] = ()
    """Importances of yours: python:<module>:<class>."""
    probe: Probe = OarConfig().probe
    """The outcome that is watched. The others get a table."""
    max_tokens: int = 2048
    """Of a forward, with padding: 2.2 MB each for 135M parameters in float32. A longer response runs alone."""
    device: Device = "auto"
    """auto takes CUDA where there is one."""
    seed: int = 0
    """Of problems, sampling, signs and noise."""
    folder: Path | None = None
    """With --model: what was judged of a kind and length stays there, and is not judged again. Processes can share it, each
    with --tasks of its own; the command without --tasks then makes the page."""
    out: Path | None = None
    """Folder for the page, the shaded responses, the JSON and the plot; without it only the terminal."""

    def check(self) -> None:
        """Raises: ValueError with the argument at fault."""
        check_at_least_one(self, "models", "responses", "part", "max_tokens")
        if self.temperature <= 0:
            raise ValueError(f"--temperature {self.temperature}: must be above 0")
        known = self.estimators()
        if unknown := [name for name in self.on_all if name not in known]:
            raise ValueError(f"--on-all {unknown[0]}: allowed: {', '.join(known)}")
        if self.model is not None:
            smollm2.resolved(self.model)
            for kind in self.kinds:
                next(problems(kind, questions=self.questions))

    def estimators(self) -> dict[str, Score]:
        """Those of the package, and those of `also`; raises ValueError as `added_estimators` does."""
        return package_estimators() | added_estimators(self.also)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The tasks of a language model."""
        return self.tasks or KINDS


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises: ValueError for a task that is unknown, a model that writes no answers, or a folder of other settings."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    if settings.model is None:
        tasks = settings.tasks or ("parallel", "lookup", "chain")
        sources = task_sources(tasks, settings.models, settings.responses, settings.seed, progress)
        return report_on(settings, _of_tasks(settings, sources, progress))
    progress(f"loading {settings.model}")
    writer = Writer(settings.model, choose_device(settings.device), settings.temperature, settings.max_tokens)
    return report_on(settings, _of_language(settings, writer, progress))


def _of_tasks(settings: Settings, sources: Iterable[Source], progress: Progress) -> Iterator[Rows]:
    for source in sources:
        yield judge(settings, source, progress)


def _of_language(settings: Settings, writer: Writer, progress: Progress) -> Iterator[Rows]:
    """What `judge` returns for each kind and length, now or when it was kept in the folder."""
    # What a kind's and length's scores depend on.
    key = asdict(settings) | {"tasks": (), "out": None, "folder": None, "device": choose_device(settings.device).type}

    def judged_source(kind: str, length: str) -> Rows:
        asked = settings.responses, settings.seed, settings.questions, progress
        return judge(settings, language_source(writer, kind, length, *asked), progress)

    for kind, length in product(settings.kinds, LONGEST):
        yield cached(settings.folder, f"{kind}_{length}", key, partial(judged_source, kind, length))


def judge(settings: Settings, source: Source, progress: Progress) -> Rows:
    """Every estimator on a source."""
    device = choose_device(settings.device)
    every = settings.estimators()
    on_all = [name for name in every if not settings.on_all or name in (*settings.on_all, REFERENCE, BASELINE)]
    by_probe, again = ([name for name in names if name in every] for names in (BY_PROBE, DRAWN))
    others = [probe for probe in PROBES if probe != settings.probe]
    first = source.responses[: settings.part]
    # Name, responses, estimators, probe, seed and dtype of each way to run some of them.
    ways: list[tuple[str, list[Response], Sequence[str], Probe, int, torch.dtype]] = [
        (MAIN, source.responses, on_all, settings.probe, settings.seed, torch.float32),
        (MAIN, first, [name for name in every if name not in on_all], settings.probe, settings.seed, torch.float32),
        (BF16, first, own_cost(every), settings.probe, settings.seed, torch.bfloat16),
        (AGAIN, first, again, settings.probe, settings.seed + 1, torch.float32),
        *((probe, first, by_probe, probe, settings.seed, torch.float32) for probe in others),
    ]
    copied = functools.lru_cache(maxsize=2)(_copy)
    key = {"task": source.task, "length": source.length, "model": f"model {source.number}"}
    found: Rows = {"sources": [source_row(key, source)], "judged": [], "costs": [], "scored": []}
    rows = [(response.token_T[:1], response.token_T[1:]) for response in source.responses]
    plain = partial(log_probs, copied(source.model, device, torch.float32), rows, 1.0, settings.max_tokens)
    plain()  # the first forwards on a device take longer
    a_token = timed(plain, device) / sum(len(response.token_T) for response in source.responses)
    main: dict[str, list[Tensor]] = {}
    for way, responses, names, probe, seed, dtype in ways:
        model = copied(source.model, device, dtype)
        batch = Batch(source, responses, probe, seed, settings.max_tokens)
        tokens = int(batch.mask_BT.sum())
        scores: dict[str, list[Tensor]] = {}
        for name in names:
            progress(f"{' '.join(key.values())}, {way}: {name}")
            begin = time.perf_counter()
            with counted_work(model) as work:
                scores[name] = _scores(model, batch, every[name])
            if way == MAIN:
                passes = {direction: work[direction] / tokens for direction in ("forward", "backward")}
                passes["time"] = (time.perf_counter() - begin) / (a_token * tokens)
                found["costs"].append({**key, "estimator": name, **passes})
        if way == MAIN:
            main |= scores
        exact = scores if probe in others else main
        found["judged"] += [{**key, "way": way, **row} for row in _judged(responses, scores, exact[REFERENCE], main)]
    for index, response in enumerate(source.responses):
        of_response = {name: of_all[index] for name, of_all in main.items() if index < len(of_all)}
        found["scored"].append({**key, "response": response, "scores": of_response})
    return found


def report_on(settings: Settings, parts: Iterable[Rows]) -> Report:
    """What `judge` found, as a page."""
    findings = Findings(settings.probe, settings.part, settings.estimators())
    for part in parts:
        findings.add(part)
    device = choose_device(settings.device)
    return Report(
        title=f"Fidelity of importance estimators{f' on {settings.model}' if settings.model else ''}",
        stem=f"fidelity_{f'{Path(settings.model).name}_' if settings.model else ''}{device.type}",
        tables=tables_of(findings),
        notes=notes_of(findings, settings.model),
        runs={"settings": asdict(settings), **findings.runs()},
        figure=partial(draw, findings),
        extra={"html": page_of(findings)},
    )


def _copy(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Without the gradients that a training has left behind."""
    copied: nn.Module = copy.deepcopy(model).to(device=device, dtype=dtype)
    return copied.eval().requires_grad_(False)


def _scores(model: nn.Module, batch: Batch, score: Score) -> list[Tensor]:
    """Float64 `[R]` of each response, on the CPU."""
    pairs = zip(batch.responses, score(model, batch).detach().double().cpu(), strict=True)
    found = [score_T[response.reasoning_R] for response, score_T in pairs]
    if not all(bool(torch.isfinite(score_R).all()) for score_R in found):
        raise ValueError("scores that are not finite")
    return found


def _judged(
    responses: Sequence[Response],
    scores: Mapping[str, list[Tensor]],
    reference: list[Tensor],
    main: Mapping[str, list[Tensor]],
) -> Iterable[dict[str, Any]]:
    """A row for each estimator on each response; `own` is the overlap with its scores in float32 with the first seed."""
    for index, response in enumerate(responses):
        here = {name: of_responses[index] for name, of_responses in scores.items()}
        causal_R = response.causal_T[response.reasoning_R]
        rows = {name: judged(score_R, reference[index], causal_R) for name, score_R in here.items()}
        base = top_overlap(scores.get(BASELINE, main[BASELINE])[index], reference[index])
        for name, row in rows.items():
            yield {
                "estimator": name,
                "answer": "right" if response.right else "wrong",
                **row,
                "own": top_overlap(here[name], main[name][index]),
                "gain": row["overlap"] - base,
            }
