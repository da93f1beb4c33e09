"""A small dump, as `record.py` writes it."""

import json
from dataclasses import replace
from pathlib import Path

from oar_plugin.page.record import Header, Response

CASES = json.loads(Path(__file__).with_name("cases.json").read_text("utf-8"))
CONFIG = {"importance": "fisher", "gate": "two_level", "tau": 0.5, "beta": 2.0, "floor": 0.1}
HEADER = Header({"oar_plugin": "0"}, CONFIG, {"fisher": True})
RESPONSE = Response(
    step=3, group="g", uid="u", source="math", prompt="1+1?", truth="2", token_ids=[5, 6, 7, 8],
    tokens=["so", " 2", " #### ", "2"], segments=[1, 1, 2, 3], importance={"fisher": [0.5, 2.0, 0.0, 0.0]},
    weights=[0.5, 1.5, 1.0, 1.0], log_probs=[-1.0, -0.5, -0.1, -0.1], entropies=[1.0, 0.5, 0.1, 0.1],
    mask=None, advantage=1.0, reward=1.0, status="scored",
)  # fmt: skip


def write_dump(folder, *steps, header=HEADER, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        line = replace(RESPONSE, **{"step": step, "uid": f"u{step}", **changes}).line()
        (folder / f"step_{step:06d}.jsonl").write_text(header.line() + line, encoding="utf-8")
    return folder
