"""docs/faults.md from what was seen: python -m tests.faults.table

`seen.jsonl` has a line for each fault, added by `OAR_FAULTS_SEEN=tests/faults/seen.jsonl python -m pytest tests/faults -m
nightly`; of several lines for one fault the last counts.
"""

import json
import re
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES, LONG_S, STOPPED_S

HERE = Path(__file__).parent
SEEN = HERE / "seen.jsonl"
PAGE = HERE.parents[1] / "docs" / "faults.md"

HEAD = """# What a fault does to a run

Each was done to a run of its own: [a recipe](../recipes/qwen2_5_7b_math) with real verl 0.9.1, Ray and vLLM on a CPU, a tiny
model, FSDP2 with one actor, four steps and a checkpoint in each. What was expected was written down before it was tried
([tests/faults/cases.py](../tests/faults/cases.py)); `python -m pytest tests/faults -m nightly` does all of it again. One
machine stands in for many: [a lost node and a cut network](#between-nodes) are runs on two nodes with network namespaces.

* **ends**: with an error, and within minutes. Started again by the same command, it went on from its last checkpoint to its
  last step.
* **goes on**: to its last step. Nothing has to be done.
* **waits**: four minutes without a step or an end, and the host has no limit of time there. Ended by hand and started
  again, it went on from its last checkpoint.
* **same numbers**: rewards, gradient norms, losses, entropies and OAR's own metrics of all four steps, those after a new
  start included, are those of a run that nothing happened to, bit for bit.

No process of a run outlived its driver by more than 20 s but where the table says so, and nothing stayed in shared memory but
Python's semaphores, 32 bytes each. Those stay behind a run that nothing happens to as well: Ray ends a worker's children with
it, and with them the process that would remove them.

| fault | the run | same numbers | metric above 0 | left behind | the log |
|---|---|---|---|---|---|
"""

FOOT = """
## Between nodes

`tests/hosts/test_lost_node.py`: two nodes, an actor on each.

| fault | the run |
|---|---|
| a node is lost in the update | ends; goes on from its checkpoint when a node is added |
| the network between nodes is cut for 5 s in the update | goes on |
| the network between nodes is cut for 60 s in the update | ends; goes on from its checkpoint when the node is started again |
"""


def seen() -> dict[str, dict[str, Any]]:
    """By the fault's name, in the order of `CASES`."""
    lines = [json.loads(line) for line in SEEN.read_text(encoding="utf-8").splitlines()]
    found = {line["name"]: line for line in lines}
    return {name: found[name] for name in CASES if name in found}


def row(name: str, found: dict[str, Any]) -> str:
    above = ", ".join(f"`{metric}`" for metric, value in sorted(found["metrics"].items()) if value > 0)
    above = "" if found["same"] else above
    return " | ".join(
        (
            name,
            {"waits for ever": "waits"}.get(found["outcome"], found["outcome"]),
            "yes" if found["same"] else "no",
            above,
            ", ".join(found["left"]),
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
    print(f"{PAGE}: {len(seen())} of {len(CASES)} faults, stopped for {STOPPED_S:.0f} and {LONG_S:.0f} s")
