"""Which trainings a study wants, what of it is on disk, and its report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from benchmarks.importance import DEFAULT
from benchmarks.learning import alignment, comparison, training
from benchmarks.learning.training import CONTROLS, Record, Run, Training
from benchmarks.machine import describe_machine, load_average, threads
from benchmarks.report import Report, Table
from benchmarks.study import Progress, check_at_least_one
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.warm_start import learned_model
from oar_plugin.credit.importance import IMPORTANCES, importance_of

TOO_HARD = ("lookup", "tracking")
"""Tasks that models of this size do not learn in a warm start."""
OFFERED = tuple(name for name in TASKS if name not in TOO_HARD)
TITLE = "Does it learn faster?"
UNSEEN = 2**31 - 1
"""A seed that no run has: the policy that --alignment measures saw none of its problems."""

_TASKS_HELP = (
    f"Any of {', '.join(OFFERED)}. parallel: the answer lists all results; chain: each result needs the last one; _terse: "
    "hardly any filler; _wordy: twice as much, so longer responses."
)
_METHODS_HELP = (
    "grpo; uniform (even credit through the gate) and oracle (the causal tokens are known) as controls; every importance of "
    f"the package: {', '.join(IMPORTANCES)}; or python:MODULE:CLASS."
)


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(help=_TASKS_HELP)] = OFFERED[:1]
    methods: Annotated[tuple[str, ...], tyro.conf.arg(help=_METHODS_HELP)] = ("grpo", DEFAULT)
    lr: tuple[float, ...] = (6e-4,)
    """Learning rates. Of several, each method gets the one with the best mean reward on --choose-seeds."""
    choose_seeds: tuple[int, ...] = ()
    """Seeds that learning rates are chosen on."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds that methods are judged on, at their chosen rates; none that a rate was chosen on."""
    warm_starts: int = 1
    """Different models to start from, those that did not learn the task left out; seeds take turns."""
    results: Path = Path("learning_runs")
    """Folder of the finished runs."""
    cache: Path | None = None
    """Folder of the warm models. None: ~/.cache/oar_plugin."""
    threads: int = 1
    """CPU threads."""
    finished: bool = False
    """Train nothing: report on the runs that are finished."""
    variants: bool = False
    """Train nothing: a line for every setting that has a finished run of --steps steps in --results, against GRPO at the same
    learning rate."""
    through_verl: bool = False
    """Train with real verl, Ray and vLLM on this machine's CPU, five to ten minutes a run; needs the extra [cpu]."""
    alignment: int | None = None
    """Train nothing: compare gradients over so many batches, against an average over five times as many."""
    after: int = 0
    """Steps of GRPO before --alignment measures."""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Train nothing: show the report of this JSON file again."""
    out: Path | None = None
    """Folder to write the report to: Markdown, JSON and a picture."""

    def check(self) -> None:
        """Raises: ValueError for what cannot work."""
        if not set(self.tasks) <= set(OFFERED):
            raise ValueError(f"--tasks {' '.join(self.tasks)}: allowed are {', '.join(OFFERED)}")
        if not (self.tasks and self.methods and self.lr and self.seeds):
            raise ValueError("--tasks, --methods, --lr and --seeds need at least one each")
        check_at_least_one(self, "warm_starts", "steps", "prompts", "evaluate_every")
        if both := set(self.seeds) & set(self.choose_seeds):
            raise ValueError(f"--choose-seeds and --seeds share {min(both)}: a rate is judged on other seeds")
        if len(self.lr) > 1 and not self.choose_seeds and self.alignment is None:
            raise ValueError("--lr: of several rates one is chosen on --choose-seeds, which has none")
        if self.alignment is not None and self.alignment < 2:
            raise ValueError(f"--alignment {self.alignment}: must be at least 2")
        if self.through_verl and (self.positive_only or {"uniform", "oracle"} & set(self.methods)):
            raise ValueError("--through-verl: uniform, oracle and --positive-only are not served by verl")
        for method in set(self.methods) - set(CONTROLS):
            try:
                importance_of(method)
            except ValueError as error:
                raise ValueError(f"--methods {method}: {error}; or {', '.join(CONTROLS)}") from None
        if self.copies < 2 or min(self.lr) <= 0:
            raise ValueError("--copies must be at least 2, a group to compare in, and --lr above 0")
        self.grid(self.seeds)[-1].config()

    def grid(self, seeds: Sequence[int]) -> list[Run]:
        """Every task, method and rate; seeds outermost, so that a study that is cut short has whole seeds."""
        shared = {field.name: getattr(self, field.name) for field in fields(Training)}
        runs = [
            Run(task=task, method=method, lr=lr, seed=seed, warm_start=seed % self.warm_starts, **shared)
            for seed, task, method, lr in itertools.product(seeds, self.tasks, self.methods, self.lr)
        ]
        return [run.baseline if run.method == "grpo" else run for run in runs]


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises ValueError for settings that cannot work, TrainingFailed where verl ended early."""
    if settings.source is not None:
        return shown_again(settings.source)
    settings.check()
    with threads(settings.threads):
        machine = describe_machine(torch.device("cpu"))
        if settings.alignment is not None:
            report = _alignment(settings, settings.alignment, progress)
        elif settings.variants:
            report = _variants(settings)
        else:
            # The page of the paper's gate is older than the others, and so is its name.
            gate = "cpu" if settings.gate == "bi_level" else settings.gate.rpartition(":")[2]
            stem = "learning_verl" if settings.through_verl else f"learning_{gate}"
            report = _page(*study(settings, progress), settings.through_verl, stem)
    if settings.finished or settings.variants:
        report.notes = [*report.notes, "Trained earlier: the records do not say on what machine."]
    else:
        report.machine = {**machine, "load_average_after": load_average()}
    return report


def study(settings: Settings, progress: Progress) -> tuple[list[Record], list[Record]]:
    """The records that learning rates are chosen on, and those that methods are judged on; what is on disk is not repeated.

    Raises:
        ValueError: nothing is finished and nothing may be trained.
    """
    folder = settings.results / "verl" if settings.through_verl else settings.results
    folder.mkdir(parents=True, exist_ok=True)
    choices, wanted = settings.grid(settings.choose_seeds), settings.grid(settings.seeds)
    of = len(choices) + len(wanted) // len(settings.lr)

    def records(runs: Sequence[Run], done: int) -> list[Record]:
        found = []
        for number, run in enumerate(runs, start=done):
            progress(f"{run.task} {run.method} lr {run.lr:g} seed {run.seed}", number, of)
            file = run.file(folder)
            if not file.exists() and not settings.finished:
                if settings.through_verl:
                    from benchmarks.learning import verl

                    record = verl.train(run, file.with_suffix("").resolve(), settings.cache)
                else:
                    record = training.train(run, learned_model(TASKS[run.task], run.warm_start, settings.cache))
                part = file.with_suffix(".part")  # whole or not at all
                part.write_text(json.dumps(asdict(record)))
                part.replace(file)
            if file.exists():
                found.append(read(file))
        return found

    choosing = records(choices, 0)
    chosen = {arm.run for task in settings.tasks for arm in comparison.best(comparison.arms(choosing, task))}
    judged = records([run for run in wanted if len(settings.lr) == 1 or run.arm in chosen], len(choices))
    if not judged:
        raise ValueError(f"--finished: {folder} holds no run of this study; leave --finished out to train them")
    return choosing, judged


def read(file: Path) -> Record:
    return Record.from_values(json.loads(file.read_text()))


def _page(choosing: Sequence[Record], judged: Sequence[Record], through_verl: bool, stem: str) -> Report:
    tables = comparison.tables(choosing, judged)
    notes = [*comparison.notes(choosing, judged, through_verl), *comparison.grids(tables)]
    runs = {"through_verl": through_verl, "chosen_on": _values(choosing), "judged_on": _values(judged)}
    return Report(TITLE, stem, "", {}, tables, notes, runs, figure=lambda: comparison.draw(judged))


def _values(records: Sequence[Record]) -> list[dict[str, Any]]:
    """For the JSON, as `Record.from_values` reads it: what a page needs of each step."""
    values = [asdict(record) for record in records]
    for each in values:
        each["steps"] = [{name: step[name] for name in comparison.SHOWN if name in step} for step in each["steps"]]
    return values


def shown_again(file: Path) -> Report:
    """The report of a JSON file. Without the single runs, which the first pages do not hold, there is no picture."""
    if not file.is_file():
        raise ValueError(f"--from {file}: there is no such file")
    content = json.loads(file.read_text())
    if "judged_on" in (runs := content.get("runs", {})):
        choosing, judged = ([Record.from_values(r) for r in runs[name]] for name in ("chosen_on", "judged_on"))
        report = _page(choosing, judged, runs["through_verl"], file.stem)
    elif "tasks" in content:
        tables = [Table(**table) for of_task in content["tasks"].values() for table in of_task]
        notes = [*content["notes"], *comparison.grids(tables), f"Measured by `{content['command']}`."]
        report = Report(TITLE, file.stem, "", {}, tables, notes, {})
    else:
        raise ValueError(f"--from {file}: it holds no runs, and so no page can be made of it")
    report.machine = content["machine"]
    return report


def _variants(settings: Settings) -> Report:
    found = [read(file) for file in sorted(settings.results.glob("*.json"))]
    records = [record for record in found if record.run.steps == settings.steps]
    if not records:
        raise ValueError(f"--variants: {settings.results} holds no run of {settings.steps} steps (--results, --steps)")
    tables, runs = comparison.variants(records), {"finished": _values(records)}
    return Report(
        "Every training that was finished", "learning_variants", "", {}, tables, comparison.how_to_read(), runs
    )


def _alignment(settings: Settings, batches: int, progress: Progress) -> Report:
    """A table a task, at the first learning rate and seed."""
    tables, runs = [], dict[str, alignment.Aligned]()
    for task in settings.tasks:
        chosen = [run for run in settings.grid(settings.seeds[:1]) if run.task == task and run.lr == settings.lr[0]]
        model = learned_model(TASKS[task], chosen[0].warm_start, settings.cache)
        if settings.after:
            before = replace(chosen[0], method="grpo", seed=UNSEEN, steps=settings.after, evaluate_every=settings.after)
            training.train(before, model)
        runs[task] = alignment.align(chosen, model, batches, progress)
        tables.append(alignment.table(task, runs[task], settings.after))
    return Report(
        "Whose steps follow the policy gradient?", "learning_alignment", "", {}, tables, alignment.NOTES, runs
    )
