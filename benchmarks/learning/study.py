"""Which trainings a plan wants, what of them is on disk, and the report."""

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from benchmarks.learning import comparison, training
from benchmarks.learning.cost import flops_of, tokens_of
from benchmarks.learning.plan import PLANS, Plan, read_plan
from benchmarks.learning.training import Credit, Record, Run
from benchmarks.learning.warm_start import StuckError, warm_model
from benchmarks.report import Progress, Report
from oar_plugin.output import write_whole

FORMAT = 8
"""Raised when training changes, so that runs of an older version are not taken for new ones."""
_SHIPPED = ", ".join(sorted(file.stem for file in PLANS.glob("*.yaml")))


@dataclass(frozen=True, kw_only=True)
class Settings:
    plan: Annotated[str, tyro.conf.arg(help=f"A YAML file, or one of those that are kept here: {_SHIPPED}.")] = "judged"
    results: Path = Path("learning_runs")
    """Folder of the finished trainings, a file each."""
    workers: int = 1
    """Trainings at a time, each on one thread."""
    finished: bool = False
    """Train nothing: report on what is finished."""
    out: Path | None = None
    """Folder to write the report to: Markdown, JSON and a picture."""

    def check(self) -> None:
        """Raises: ValueError for what cannot work."""
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers}: must be at least 1")
        self.read()

    def read(self) -> Plan:
        shipped = PLANS / f"{self.plan}.yaml"
        file = shipped if shipped.exists() else Path(self.plan)
        if not file.is_file():
            raise ValueError(f"--plan {self.plan}: there is no such file; or one of {_SHIPPED}")
        return read_plan(file)


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises ValueError where nothing is finished and nothing may be trained, RuntimeError where a training failed."""
    plan = settings.read()
    chosen_from = records(settings, plan.grid() if len(plan.rates) > 1 else [], progress)
    rates = comparison.chosen_rates(plan, chosen_from)
    wanted = plan.runs(plan.judge, {key: [rate] for key, rate in rates.items()})
    judged = records(settings, wanted, progress)
    if not judged and not chosen_from:
        raise ValueError(f"{settings.results} holds no training of this plan; leave --finished out to make them")
    return Report(
        plan.title,
        f"learning_{plan.name}",
        comparison.tables(plan, chosen_from, judged),
        comparison.notes(plan, chosen_from, judged),
        {
            "chosen_on": _columns(_named(*one) for one in chosen_from),
            "judged_on": _columns(_plain(*one) for one in judged),
        },
        figure=lambda: comparison.draw(plan, rates, judged or chosen_from),
    )


def records(settings: Settings, runs: Iterable[tuple[str, Run]], progress: Progress) -> list[tuple[str, Record]]:
    """Those on disk, and the others trained now; with `finished` only those on disk."""
    settings.results.mkdir(parents=True, exist_ok=True)
    wanted = [(name, run, run_file(run, settings.results)) for name, run in runs]
    missing = {file: run for _, run, file in wanted if not file.exists() and not settings.finished}
    if missing:
        spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with ProcessPoolExecutor(settings.workers, spawn, _begin) as pool:
            starts = sorted({(run.warm, run.task) for run in missing.values()})
            _all(pool, [pool.submit(_taught, task, warm) for warm, task in starts], "warm models", progress)
            _all(pool, [pool.submit(_train, run, file) for file, run in missing.items()], "trainings", progress)
    return [(name, read(file)) for name, _, file in wanted if file.exists()]


def _begin() -> None:
    """A worker has one thread, and ends with the study, however that ends: it would wait for work for ever."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _all(pool: ProcessPoolExecutor, futures: Sequence[Any], what: str, progress: Progress) -> None:
    progress(what, 0, len(futures))
    try:
        for number, future in enumerate(as_completed(futures), 1):
            future.result()
            progress(what, number, len(futures))
    except StuckError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise error.with_traceback(None) from None  # it says all that there is to say
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _taught(task: str, warm: int) -> None:
    warm_model(task, warm)


def _train(run: Run, file: Path) -> None:
    _keep(file, training.train(run, warm_model(run.task, run.warm)))


def _keep(file: Path, record: Record) -> None:
    write_whole(file, json.dumps(asdict(record)))


def run_file(run: Run, folder: Path) -> Path:
    """Where a training's record is kept: found by all that its outcome depends on."""
    text = json.dumps({**asdict(run), "format": FORMAT}, sort_keys=True)
    return folder / f"{run.task}-w{run.warm}-s{run.seed}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def read(file: Path) -> Record:
    values = json.loads(file.read_text(encoding="utf-8"))
    run = values["run"]
    values["run"] = Run(**run | {"credit": Credit(**run["credit"])})
    return Record(**values)


def _columns(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The names of the columns, and a list for each row: thousands of rows have the same names."""
    found = list(rows)
    names = list(dict.fromkeys(name for row in found for name in row))
    return {"columns": names, "data": [[row.get(name) for name in names] for row in found]}


def _named(name: str, record: Record) -> dict[str, Any]:
    """For the JSON: what a training was, and its mean reward."""
    told = {key: getattr(record.run, key) for key in ("lr", "warm", "seed")}
    return {"method": name, "task": record.run.task, **told, "reward": round(comparison.means(record)["reward"], 4)}


def _plain(name: str, record: Record) -> dict[str, Any]:
    """The same with its reward at each step, what it spent, and means of the rest but seconds."""
    means = {key: of for key, of in comparison.means(record).items() if key not in comparison.SECONDS}
    return {
        **_named(name, record),
        "start": record.start,
        "held_out": round(record.held_out, 4),
        **{key: round(value, 4) for key, value in means.items()},
        "rewards": [round(step["reward"], 3) for step in record.steps],
        "tokens": float(tokens_of(record.steps).sum()),
        "flops": float(f"{flops_of(record.steps).sum():.4g}"),
    }
