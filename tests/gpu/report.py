"""The results of the suite, as one page and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.here import STACK

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
    versions = {name: machine["versions"][name] for name in STACK if name in machine["versions"]}
    cards = [f"{gpu['name']}, {gpu['gb']} GB, capability {gpu['capability']}" for gpu in machine["gpus"]]
    lines = ["# GPU suite", "", *([REHEARSED, ""] if machine["rehearsal"] else []), f"{count(results)}.", ""]
    lines += [f"* GPU {place}: {card}" for place, card in enumerate(cards)]
    lines += [f"* {name}: {machine[name]}" for name in ("driver", "cuda", "nccl", "python", "system") if machine[name]]
    lines += [f"* {name} {version}" for name, version in versions.items()]
    lines += ["", "All versions: report.json. Output of each check: logs/. Pages of the benchmarks: benchmarks/.", ""]
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
