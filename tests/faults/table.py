"""The table of docs/evidence/faults.md, which `python -m docs.figures` writes.

`OAR_FAULTS_SEEN=tests/faults/seen.jsonl python -m pytest tests/faults -m nightly` adds a line for each fault to that file.
The last line of a fault counts.
"""

import json
import re
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES

SEEN = Path(__file__).with_name("seen.jsonl")


def row(name: str, line: dict[str, Any]) -> str:
    metric, error = CASES[name].metric, line["error"]
    cells = (
        name,
        line["outcome"],
        "yes" if line["same"] else "no",
        f"`{metric}`" if metric else "",
        f"`{message(error)}`" if error else "",
    )
    return f"| {' | '.join(cells)} |\n"


def message(line: str) -> str:
    """The error in a line of a log, without its colours, process and file."""
    error = re.search(r"[A-Za-z_.]*Error.*", re.sub(r"\x1b\[[0-9;]*m", "", line))
    assert error is not None
    return error[0].replace("|", "/").replace("`", "'").strip()[:120]


def faults() -> str:
    newest = {line["name"]: line for line in map(json.loads, SEEN.read_text(encoding="utf-8").splitlines())}
    head = "| fault | the run | same numbers | metric above 0 | the log |\n|---|---|---|---|---|\n"
    return head + "".join(row(name, newest[name]) for name in CASES)
