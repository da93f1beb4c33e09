"""Which trainings a study wants, what of it is on disk, and its report."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.learning import comparison, training
from benchmarks.learning.training import CONTROLS, CREDIT, Record, Run, Training
from benchmarks.report import Progress, Report
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.warm_start import WarmStart, learned_model
from benchmarks.workload import DEFAULT, check_at_least_one
from oar_plugin.credit.gate import GATES
from oar_plugin.credit.importance import IMPORTANCES, importance_of

TOO_HARD = ("lookup", "tracking")
"""Tasks that models of this size do not learn in a warm start."""
OFFERED = tuple(name for name in TASKS if name not in TOO_HARD)
SCALE = tuple(field.name for field in fields(Training) if field.name not in CREDIT)
"""What all trainings of a page have in common."""
EARLIER = "Trained earlier: the records do not say on what machine."

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
    threads: int = 1
    """CPU threads."""
    finished: bool = False
    """Train nothing: report on the runs that are finished."""
    variants: bool = False
    """Train nothing: a line for every credit setting that has a finished run in --results, against GRPO at the same learning
    rate."""
    through_verl: bool = False
    """Train with real verl, Ray and vLLM on this machine's CPU, five to ten minutes a run; needs the extra [cpu]."""
    out: Path | None = None
    """Folder to write the report to: Markdown, JSON and a picture."""

    def check(self) -> None:
        """Raises: ValueError for what cannot work."""
        if not set(self.tasks) <= set(OFFERED):
            raise ValueError(f"--tasks {' '.join(self.tasks)}: allowed are {', '.join(OFFERED)}")
        if not (self.tasks and self.methods and self.lr and self.seeds):
            raise ValueError("--tasks, --methods, --lr and --seeds need at least one each")
        check_at_least_one(self, "warm_starts", "steps", "prompts", "evaluate_every", "threads")
        if both := set(self.seeds) & set(self.choose_seeds):
            raise ValueError(f"--choose-seeds and --seeds share {min(both)}: a rate is judged on other seeds")
        if len(self.lr) > 1 and not self.choose_seeds:
            raise ValueError("--lr: of several rates one is chosen on --choose-seeds, which has none")
        if self.through_verl and (self.positive_only or {"uniform", "oracle"} & set(self.methods)):
            raise ValueError("--through-verl: uniform, oracle and --positive-only are not served by verl")
        for method in set(self.methods) - set(CONTROLS):
            try:
                importance_of(method)
            except ValueError as error:
                raise ValueError(f"--methods {method}: {error}; or {', '.join(CONTROLS)}") from None
        check_names("--methods", [*CONTROLS, *IMPORTANCES, *self.methods])
        check_names("--gate", [*GATES, self.gate])
        if self.copies < 2 or min(self.lr) <= 0:
            raise ValueError("--copies must be at least 2, a group to compare in, and --lr above 0")
        self.grid(self.seeds)[-1].config()

    def grid(self, seeds: Sequence[int]) -> list[Run]:
        """Every task, method and rate; seeds outermost, so that a study that is cut short has whole seeds."""
        scale, credit = ({name: getattr(self, name) for name in names} for names in (SCALE, CREDIT))
        runs = []
        for seed, task, method, lr in itertools.product(seeds, self.tasks, self.methods, self.lr):
            # Plain GRPO has no credit to set, and is the same whatever the others are set to.
            own = scale if method == "grpo" else scale | credit
            runs.append(Run(task=task, method=method, lr=lr, seed=seed, warm_start=seed % self.warm_starts, **own))
        return runs


def check_names(option: str, values: Iterable[str]) -> None:
    """Raises: ValueError, where two values would be one arm: pages call each by what stands behind its last colon."""
    known: dict[str, str] = {}
    for value in values:
        name = value.rpartition(":")[2]
        if (other := known.setdefault(name, value)) != value:
            raise ValueError(f"{option}: a page would take {other} and {value} for one, as it calls both {name}")


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises ValueError where nothing is finished and nothing may be trained, RuntimeError where a training failed."""
    if settings.variants:
        return _variants(settings)
    choosing = records(settings, settings.grid(settings.choose_seeds), progress)
    chosen = comparison.best(comparison.by_run(comparison.by_step(choosing)))
    wanted = settings.grid(settings.seeds)
    if len(settings.lr) > 1:
        wanted = [run for run in wanted if (run.task, run.name, run.lr) in chosen]
    judged = records(settings, wanted, progress)
    if not judged:
        raise ValueError(
            f"--finished: {settings.results} holds no run of this study; leave --finished out to train them"
        )
    # The page of the paper's gate is older than the others, and so is its name.
    gate = "cpu" if settings.gate == "bi_level" else settings.gate.rpartition(":")[2]
    return Report(
        "Does it learn faster?",
        "learning_verl" if settings.through_verl else f"learning_{gate}",
        comparison.tables(choosing, judged),
        [*comparison.notes(choosing, judged, settings.through_verl), *([EARLIER] if settings.finished else [])],
        {"chosen_on": _plain(choosing), "judged_on": _plain(judged)},
        figure=lambda: comparison.draw(judged),
        machine=None if settings.finished else {},
    )


def records(settings: Settings, runs: Sequence[Run], progress: Progress) -> list[Record]:
    """Those on disk, and the others trained now; with --finished only those on disk."""
    folder = settings.results / "verl" if settings.through_verl else settings.results
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, run in enumerate(runs):
        progress(f"{run.task} {run.method} lr {run.lr:g} seed {run.seed}", number, len(runs))
        file = run.file(folder)
        if not file.exists() and not settings.finished:
            part = file.with_suffix(".part")  # whole or not at all
            part.write_text(json.dumps(asdict(_train(run, file, settings.through_verl, progress))))
            part.replace(file)
        if file.exists():
            found.append(read(file))
    return found


def _train(run: Run, file: Path, through_verl: bool, progress: Progress) -> Record:
    start = WarmStart(heads=2) if through_verl else WarmStart()  # vLLM serves no heads below 32 on a CPU
    model = learned_model(TASKS[run.task], run.warm_start, start, progress)
    if not through_verl:
        return training.train(run, model)
    from benchmarks.learning import verl

    return verl.train(run, model, file.with_suffix("").resolve())


def read(file: Path) -> Record:
    values = json.loads(file.read_text())
    held_out = {int(step): share for step, share in values["held_out"].items()}
    return Record(Run(**values["run"]), values["steps"], held_out)


def _plain(records: Sequence[Record]) -> list[dict[str, Any]]:
    """For the JSON: every run, and what a page needs of each of its steps."""
    return [
        {
            **asdict(record),
            "steps": [{name: step[name] for name in comparison.SHOWN if name in step} for step in record.steps],
        }
        for record in records
    ]


def _variants(settings: Settings) -> Report:
    found = [read(file) for file in sorted(settings.results.glob("*.json"))]
    kept = [record for record in found if all(getattr(record.run, name) == getattr(settings, name) for name in SCALE)]
    if not kept:
        sizes = ", ".join(f"--{name.replace('_', '-')} {getattr(settings, name)}" for name in SCALE)
        raise ValueError(f"--variants: {settings.results} holds no run with {sizes}")
    check_names("--results, methods", [*CONTROLS, *IMPORTANCES, *(record.run.method for record in kept)])
    check_names("--results, gates", [*GATES, *(record.run.gate for record in kept)])
    return Report(
        "Every training that was finished",
        "learning_variants",
        comparison.variants(kept),
        [*comparison.how_to_read(), EARLIER],
        {"finished": _plain(kept)},
        machine=None,
    )
