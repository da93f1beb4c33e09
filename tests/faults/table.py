"""docs/faults.md from what was seen: python -m tests.faults.table

`seen.jsonl` has a line for each fault, added by `OAR_FAULTS_SEEN=tests/faults/seen.jsonl python -m pytest tests/faults -m
nightly`; of several lines for one fault the last counts.
"""

import json
import re
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES

HERE = Path(__file__).parent
SEEN = HERE / "seen.jsonl"
PAGE = HERE.parents[1] / "docs" / "faults.md"

HEAD = """# What a fault does to a run

Real verl 0.9.1, Ray and vLLM on a CPU: [a recipe](../recipes/qwen2_5_7b_math) with a tiny model, FSDP2 with one actor, a
checkpoint in each step. What was expected of each fault was written down before it was tried
([tests/faults/cases.py](../tests/faults/cases.py)). `python -m pytest tests/faults -m nightly` does all of it again.

* **ends**: with an error, within minutes. Started again by the same command, the run went on with the step behind its last
  checkpoint.
* **goes on**: two more steps were seen. Nothing has to be done.
* **waits**: no step and no end for four minutes; the host has no limit of time there. Ended by hand and started again, the run
  went on with the step behind its last checkpoint.
* **same numbers**: reward, gradient norm, loss, entropy and OAR's metrics of all steps that were seen, those behind a new
  start included, are bit for bit those of a run that nothing happened to.
* **left**: processes that were there 20 s after the driver had ended, and files in shared memory. Python's semaphores, 32
  bytes each, are not counted: they stay behind a run that nothing happens to as well, because Ray ends a worker's children
  with it, and with them the process that would remove them.

| fault | the run | same numbers | metric above 0 | left | the log |
|---|---|---|---|---|---|
"""

FOOT = """
"half of the newest checkpoint": a run that is started then ends while it loads, before its first step: write the step before
into `latest_checkpointed_iteration.txt`.

## Between nodes

What [tests/hosts/test_lost_node.py](../tests/hosts/test_lost_node.py) holds: two nodes of Ray on one machine, an actor on each;
for the network the second one is in a network namespace.

| fault | the run |
|---|---|
| a node is lost in the update | ends; goes on from its checkpoint when a node is added |
| nothing gets through between the nodes for 5 s, in the update | goes on |
| nothing gets through between the nodes for 60 s, in the update | ends; goes on from its checkpoint when a node is added |
"""


def seen() -> dict[str, dict[str, Any]]:
    """By the fault's name, in the order of `CASES`."""
    lines = [json.loads(line) for line in SEEN.read_text(encoding="utf-8").splitlines()]
    found = {line["name"]: line for line in lines}
    return {name: found[name] for name in CASES if name in found}


def row(name: str, found: dict[str, Any]) -> str:
    if found["deviations"]:
        raise ValueError(f"{name} was not as expected: {found['deviations']}")
    case = CASES[name]
    return " | ".join(
        (
            name,
            {"waits for ever": "waits"}.get(found["outcome"], found["outcome"]),
            "yes" if found["same"] else "no",
            f"`{case.metric}`" if case.metric else "",
            ", ".join(found["left"] + found["shared_memory"]),
            f"`{message(found['error'])}`" if found["error"] else "",
        )
    )


def message(line: str) -> str:
    """Of a line of a log, what it says: no colours, process or place."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"^.*?(?=[A-Za-z_.]*Error)", "", line)
    return line.replace("|", "/").replace("`", "'").strip()[:120]


def page() -> str:
    return HEAD + "".join(f"| {row(*pair)} |\n" for pair in seen().items()) + FOOT


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(seen())} of {len(CASES)} faults")
