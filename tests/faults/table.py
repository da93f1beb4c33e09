"""The tables of docs/evidence/faults.md, which `python -m docs.figures` writes.

`OAR_FAULTS_SEEN=tests/faults/seen.jsonl python -m pytest tests/faults -m nightly` adds a line for each fault to that file.
The last line of a fault counts.
"""

import json
import re
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES
from tests.faults.long_run import GROWS, Growth

HERE = Path(__file__).parent

HEAD = """| fault | the run | same numbers | metric above 0 | left behind | the log |
|---|---|---|---|---|---|
"""


def seen() -> dict[str, dict[str, Any]]:
    """Fault -> its newest line of `seen.jsonl`, in the order of `CASES`."""
    lines = (json.loads(line) for line in (HERE / "seen.jsonl").read_text(encoding="utf-8").splitlines())
    newest = {line["name"]: line for line in lines}
    return {name: newest[name] for name in CASES if name in newest}


def row(name: str, line: dict[str, Any]) -> str:
    if line["deviations"]:
        raise ValueError(f"{name} was not as expected: {line['deviations']}")
    case = CASES[name]
    left = ["Ray's agents and others"] if case.leaves else line["left"]
    cells = (
        name,
        {"waits for ever": "waits"}.get(line["outcome"], line["outcome"]),
        "no" if not line["same"] else "yes" if case.same is not None else "yes, this time",
        f"`{case.metric}`" if case.metric else "",
        ", ".join([*left, *(f"`{file}`" for file in line["shared_memory"])]),
        f"`{message(line['error'])}`" if line["error"] else "",
    )
    return f"| {' | '.join(cells)} |\n"


def message(line: str) -> str:
    """The error in a line of a log, without its colours, process and file."""
    error = re.search(r"[A-Za-z_.]*Error.*", re.sub(r"\x1b\[[0-9;]*m", "", line))
    assert error is not None
    return error[0].replace("|", "/").replace("`", "'").strip()[:120]


def faults() -> str:
    lines = seen()
    missing = ", ".join(f'"{name}"' for name in CASES if name not in lines)
    table = HEAD + "".join(row(name, line) for name, line in lines.items())
    return table + (f"\nNot tried since they were written: {missing}.\n" if missing else "")


def long_run() -> str:
    report = json.loads((HERE / "long_run.json").read_text(encoding="utf-8"))
    growths = [Growth(**growth) for growth in report["growths"]]
    shown = [one for one in growths if "memory, MB" in one.name or one.name == "seconds a step" or one.grows]
    rows = (f"| {one.name} | {one.mean:.3g} | {one.by:+.2g} | {one.low:+.2g} to {one.high:+.2g} |\n" for one in shown)
    return (
        f"{report['steps']:,} steps, {report['steps with a scored response']:,} of them with a scored response; "
        f"{report['copies']:,.0f} masked copies. The table has memory, seconds, and every number that rises significantly by "
        f"more than {100 * GROWS:.0f} % of its mean.\n\n"
        "| | mean | rises by | 95 % |\n|---|---|---|---|\n" + "".join(rows)
    )
