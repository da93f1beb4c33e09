"""The pytest plugin of the suite, loaded by tests/gpu.sh: it skips checks that cannot run here and writes the report."""

import json
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import here
from tests.processes import run

OUT = Path(os.environ.get("OAR_GPU_REPORT", "gpu_report")).resolve()
REHEARSED = "**A rehearsal on a CPU: it shows that the checks run, and nothing about GPUs.**"


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # passed, failed, skipped
    seconds: float
    why: str = ""  # it was skipped, or how it failed
    figures: dict[str, Any] = field(default_factory=dict)


def count(results: list[Result]) -> str:
    number = {outcome: sum(one.outcome == outcome for one in results) for outcome in ("passed", "failed", "skipped")}
    return ", ".join(f"{many} {outcome}" for outcome, many in number.items())


def page(machine: dict[str, Any], results: list[Result]) -> str:
    versions = {name: machine["versions"][name] for name in here.STACK if name in machine["versions"]}
    cards = [f"{gpu['name']}, {gpu['gb']} GB, capability {gpu['capability']}" for gpu in machine["gpus"]]
    lines = ["# GPU suite", "", *([REHEARSED, ""] if machine["rehearsal"] else []), f"{count(results)}.", ""]
    lines += [f"* GPU {place}: {card}" for place, card in enumerate(cards)]
    lines += [f"* {name}: {machine[name]}" for name in ("driver", "cuda", "nccl", "python", "system") if machine[name]]
    lines += [f"* {name} {version}" for name, version in versions.items()]
    lines += ["", "All versions: report.json. Output of each check: logs/.", ""]
    lines += ["| check | result | seconds | figures, or why not |", "|---|---|---|---|"]
    for one in results:
        said = one.why if one.outcome == "skipped" else ", ".join(f"{k}: {v}" for k, v in one.figures.items())
        lines.append(f"| {one.name} | {one.outcome} | {one.seconds} | {said.replace('|', '/')} |")
    for one in results:
        if one.outcome == "failed":
            lines += ["", f"## {one.name}", "", "```", one.why, "```"]
    return "\n".join([*lines, ""])


def write(folder: Path, machine: dict[str, Any], results: list[Result]) -> None:
    """`report.md` and `report.json` in this folder."""
    (folder / "report.md").write_text(page(machine, results), encoding="utf-8")
    content = {"machine": machine, "results": [asdict(one) for one in results]}
    (folder / "report.json").write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


results: list[Result] = []


def pytest_configure(config):
    config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not needed here: processes have limits")


def pytest_runtest_setup(item):
    (needs,) = item.iter_markers("needs")
    if reason := here.missing(*needs.args, **needs.kwargs):
        pytest.skip(reason)


def pytest_runtest_logreport(report):
    if report.when != "call" and report.passed:
        return
    why = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else report.longreprtext
    name = report.nodeid.rpartition("/")[2].replace(".py::", ": ")
    results.append(Result(name, report.outcome, round(report.duration, 1), why, dict(report.user_properties)))
    write(OUT, here.describe(), results)  # after each check: the report survives whatever ends this process


@pytest.fixture
def figures(record_property):
    """Called with a name and a value: for the report."""
    return record_property


@pytest.fixture
def log(request):
    """The file for the output of a check's processes."""
    return OUT / "logs" / (re.sub(r"\W+", "_", request.node.name).strip("_") + ".log")


@pytest.fixture
def suite(log):
    """A function that runs tests of the ordinary suite; it returns how many there were and how many were skipped."""

    def of(arguments, limit_s, **variables):
        counts = log.with_suffix(".xml")
        options = ["-p", "no:cacheprovider", "-p", "no:timeout", f"--junitxml={counts}"]
        run(["-m", "pytest", *options, *arguments], log, limit_s, **variables)
        (counted,) = ET.parse(counts).getroot().iter("testsuite")
        return {name: int(counted.attrib[name]) for name in ("tests", "skipped")}

    return of
