"""docs/faults.md from what was seen: python -m tests.faults.table

`seen.jsonl` has a line for each fault, added by `OAR_FAULTS_SEEN=tests/faults/seen.jsonl python -m pytest tests/faults -m
nightly`; of several lines for one fault the last counts.
"""

import json
import re
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES
from tests.faults.long_run import GROWS, Growth

HERE = Path(__file__).parent
SEEN = HERE / "seen.jsonl"
PAGE = HERE.parents[1] / "docs" / "faults.md"

HEAD = """# What a fault does to a run

Real verl 0.9.1, Ray and vLLM on a CPU: [a recipe](../recipes/qwen2_5_7b_math) with a tiny model, FSDP2 with one actor, a
checkpoint in each step. What was expected of each fault was written down before it was tried, and where something else came
that is the host's own, the table has what came ([tests/faults/cases.py](../tests/faults/cases.py)).
`python -m pytest tests/faults -m nightly` does all of it again.

* **ends**: without help, within minutes. Started again by the same command once the cause was gone (another reward or
  importance, room on the disk; where half of the newest checkpoint is there, the one before named), the run went on with the
  step behind its last checkpoint. A fault that comes with the first step leaves no numbers but those behind the new start;
  verl's log may lack the metrics of the last steps before an end.
* **goes on**: two more steps were seen. Nothing has to be done.
* **waits**: no step and no end for four minutes; the host has no limit of time there. Ended by hand and started again, the run
  went on with the step behind its last checkpoint.
* **same numbers**: reward, gradient norm, loss, entropy and OAR's metrics of all steps that were seen, those behind a new
  start included, are bit for bit those of a run that nothing happened to; "this time" where it is a matter of the moment.
* **left**: processes that were there twenty seconds or a minute after the driver had ended (Ray's two agents, where a driver
  that had begun a cluster was killed, and more of the run's where libfaketime had stepped its clock: end them by hand), and
  files in shared memory (verl's buffer for weights). Python's
  semaphores, 32 bytes each, are not counted: they stay behind a run that nothing happens to as well, because Ray ends a
  worker's children with it, and with them the process that would remove them.

| fault | the run | same numbers | metric above 0 | left | the log |
|---|---|---|---|---|---|
"""

FOOT = """
## Between nodes

What [tests/hosts/test_lost_node.py](../tests/hosts/test_lost_node.py) holds: two nodes of Ray on one machine, an actor on each;
for a cut the second one has a network namespace of its own, which takes root.

| fault | the run |
|---|---|
| a node is lost in the update | ends; goes on from its checkpoint when a node is added |
| the network between them is cut for 5 s in the update | goes on |
| the network between them is cut for a minute in the update | ends; goes on from its checkpoint when a node is added |
"""


def seen() -> dict[str, dict[str, Any]]:
    """By the fault's name, in the order of `CASES`."""
    lines = [json.loads(line) for line in SEEN.read_text(encoding="utf-8").splitlines()]
    found = {line["name"]: line for line in lines}
    return {name: found[name] for name in CASES if name in found}


def row(name: str, found: dict[str, Any]) -> str:
    if found["deviations"]:
        raise ValueError(f"{name} was not as expected: {found['deviations']}")
    case, left = CASES[name], found["left"]
    if case.leaves:
        left = ["Ray's agents and others"]
    return " | ".join(
        (
            name,
            {"waits for ever": "waits"}.get(found["outcome"], found["outcome"]),
            "no" if not found["same"] else "yes" if case.same is not None else "yes, this time",
            f"`{case.metric}`" if case.metric else "",
            ", ".join([*left, *(f"`{name}`" for name in found["shared_memory"])]),
            f"`{message(found['error'])}`" if found["error"] else "",
        )
    )


def message(line: str) -> str:
    """Of a line of a log, what it says: no colours, process or place."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    found = re.search(r"[A-Za-z_.]*Error.*", line)
    assert found is not None
    return found[0].replace("|", "/").replace("`", "'").strip()[:120]


LONG = """
## A long run

{steps:,} steps with OAR-P on the rollout engines and dumps every tenth step, {scored:,} of them with a scored response,
{copies:,.0f} masked copies, on a machine that did other work. What a straight line through each number rises in the second
half of them, with its 95 % interval. In the first half caches fill: Ray's GCS, which keeps the last 100,000 tasks, grew from
40 to 410 MB. This table has the memory, seconds, and whatever rises for sure by over {grows:.0f} % of its mean; [all that was
sampled](../tests/faults/long_run.json) are open files and threads of each process, hooks, modules, tensors, Python's objects,
references to Ray's objects, shared memory, processes and seconds of CPU. `python -m tests.faults.long_run` does it again.

| | mean | rises by | 95 % |
|---|---|---|---|
"""


def long_run() -> str:
    report = json.loads((HERE / "long_run.json").read_text(encoding="utf-8"))
    found = [Growth(**one) for one in report["growths"]]
    shown = [one for one in found if "memory, MB" in one.name or one.name == "seconds a step" or one.grows]
    return LONG.format(
        steps=report["steps"],
        scored=report["steps with a scored response"],
        copies=report["copies"],
        grows=100 * GROWS,
    ) + "".join(
        f"| {one.name} | {one.mean:.3g} | {one.by:+.2g} | {one.low:+.2g} to {one.high:+.2g} |\n" for one in shown
    )


def page() -> str:
    found = seen()
    rows = "".join(f"| {row(*pair)} |\n" for pair in found.items())
    missing = [f'"{name}"' for name in CASES if name not in found]
    return (
        HEAD
        + rows
        + (f"\nNot seen since they were written: {', '.join(missing)}.\n" if missing else "")
        + FOOT
        + long_run()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(seen())} of {len(CASES)} faults")
