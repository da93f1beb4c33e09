"""Dumps: when they are due, whom they show, and how `oar inspect` finds and reads them. A bad line is skipped alone.

What files hold is in `tests/hosts/test_dump.py`.
"""

import json
import re
from dataclasses import replace

import pytest

from oar_plugin.cli.score import scored
from oar_plugin.config import DumpConfig
from oar_plugin.page import sources
from oar_plugin.page.dumps import Dumps, Sibling, choose
from oar_plugin.page.inspector import inspector_page
from oar_plugin.page.sources import read
from tests.page.dumped import CASES, HEADER, RESPONSE, write_dump


def written(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "value"), CASES["response"].items())
def test_a_line_of_a_dump_with_a_value_of_another_type_is_skipped(name, value, tmp_path):
    good = replace(RESPONSE, advantage=float("nan"), weights=[1, float("inf"), 0.5, 1.0])
    found = read([written(tmp_path / "f.jsonl", HEADER.line(), good.line(), vars(RESPONSE) | {name: value})])
    assert [item.weights for item in found.items] == [good.weights]
    assert f"1 of 2 lines skipped, the first: {tmp_path / 'f.jsonl'}, line 5: " in found.notes[0]


@pytest.mark.parametrize(("name", "change"), CASES["header"].items())
def test_a_header_with_a_value_of_another_type_is_refused(name, change, tmp_path):
    with pytest.raises(ValueError, match=f"line 1: no header: {name}: "):
        read([written(tmp_path / "f.jsonl", vars(HEADER) | change, RESPONSE.line())])


def test_a_dump_made_with_settings_that_left_still_opens(tmp_path):
    config = HEADER.config | {"importance": "decision", "perturbation": {"budget": 0.3}, "context": {"truth": None}}
    header, response = replace(HEADER, config=config), replace(RESPONSE, importance={"decision": RESPONSE.weights})
    loaded = read([written(tmp_path / "step_1.jsonl", header.line(), response.line())])
    assert loaded.items == [response]
    assert "decision" in inspector_page(loaded.items, loaded.header, "run")


def test_a_line_that_is_none_costs_nothing_but_itself(tmp_path):
    good, other = RESPONSE.line(), replace(RESPONSE, uid="v", tokens=["�", "\0", "", "‮"])
    bad = [good[:50], "5", "[]", "{}", "[" * 100_000, '{"\\ud83d": ' * 9_000, good.replace('"so", ', ""), good[:-20]]
    file = written(tmp_path / "step_3.jsonl", HEADER.line(), good, *bad, other.line())
    file.write_bytes(file.read_bytes().replace("�".encode(), b"\xff"))
    found = read([tmp_path])
    assert found.items == [RESPONSE, other]
    assert [note.partition("skipped")[0] for note in found.notes] == ["8 of 10 lines "]
    half = replace(RESPONSE, tokens=["\ud83d", "\0", "\ud83d\ude00", "2"]).line()
    assert read([written(tmp_path / "half", HEADER.line(), half)]).items[0].tokens == ["?", "\0", "😀", "2"]


@pytest.mark.parametrize(("line", "fault"), CASES["line"].items())
def test_it_is_said_which_line_is_no_json_or_lacks_a_key(line, fault, tmp_path):
    dump = written(tmp_path / "dump", vars(HEADER), vars(RESPONSE), line)
    assert re.search(f"skipped, the first: {dump}, line 3: (step: )?{re.escape(fault)}$", *read([dump]).notes)
    with pytest.raises(ValueError, match=f"header, line 1: no header: (versions: )?{re.escape(fault)}; a file of"):
        read([written(tmp_path / "header", line)])
    with pytest.raises(ValueError, match=f"texts, line 2: (prompt: )?{re.escape(fault)}$"):
        next(scored([written(tmp_path / "texts", {"prompt": "1", "response": "2"}, line)], "no model", []))


@pytest.mark.parametrize(
    ("tokens", "steps", "want", "left_out"),
    [(40, None, "1 2 10", ""), (9, None, "2 10", "1"), (1, None, "10", "1, 2"), (1, [1, 10], "1 10", "")],
)
def test_the_newest_steps_are_shown_or_those_that_are_named(tokens, steps, want, left_out, tmp_path, monkeypatch):
    write_dump(tmp_path, 1, 2, 10)  # of four tokens each
    monkeypatch.setattr(sources, "TOKENS", tokens)
    found = read([tmp_path], steps)
    assert [item.uid for item in found.items] == [f"u{step}" for step in want.split()]
    assert found.notes == [f"steps {left_out} not shown: --steps N,... shows them"] * bool(left_out)


@pytest.mark.parametrize(("source", "said"), CASES["source"].items())
def test_a_source_is_recognised_or_it_is_said_what_is_wrong(source, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("run", "projects/project/run"):
        write_dump(tmp_path / run / "dump", 1)
    written(tmp_path / "run/step_last.jsonl", RESPONSE.line())
    for name in "ab":
        write_dump(tmp_path / "two" / name, 1)
    (tmp_path / "empty").mkdir()
    written(tmp_path / "old/step_1.jsonl", RESPONSE.line())
    write_dump(tmp_path / "newer", 1, header=replace(HEADER, oar_dump=99))
    written(tmp_path / "none/step_1.jsonl", HEADER.line(), "{}")
    written(tmp_path / "foreign.jsonl", {"prompt": "1+1?", "response": "2"})
    path = (tmp_path / source).relative_to(tmp_path)
    if isinstance(said, list):
        assert [item.step for item in read([path]).items] == said
    else:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            read([path])
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("change", "steps", "differ"),
    [
        ({"tau": 0.9}, None, True),
        ({"importance": "oar_g"}, None, True),
        ({"dump": 1}, None, False),
        ({"tau": 0.9}, [1], False),
    ],
)
def test_the_newest_header_of_the_steps_shown_counts_with_the_importances_of_all(change, steps, differ, tmp_path):
    other = replace(HEADER, config={**HEADER.config, **change}, arbitrary_scale={"oar_g": False})
    write_dump(tmp_path, 1)
    write_dump(tmp_path, 2, header=other)
    for sources_ in ([tmp_path], sorted(tmp_path.iterdir())):
        found = read(sources_, steps)
        assert found.header == (HEADER if steps else replace(other, arbitrary_scale={"fisher": True, "oar_g": False}))
        assert found.settings_differ == differ == any("settings differ" in note for note in found.notes)


def test_a_step_that_nobody_asked_about_is_made_up_for_at_the_next(tmp_path):
    for steps, due in (
        (range(1, 22), [1, 10, 20]),
        ([1, 5, 9, 13, 17, 21], [1, 13, 21]),  # generations serve four steps: the first one after each tenth
        ([14, 15, 20], [20]),  # after a resume: what stood before is an earlier process's
        ([1, 1, 9, 12, 12, 13], [1, 1, 12, 12]),  # two batches of one step
    ):
        dumps = Dumps(DumpConfig(every=10), tmp_path)
        assert [step for step in steps if dumps.due(step)] == due


def test_a_reward_that_is_not_finite_is_neither_right_nor_wrong():
    rewards = ("absent", 1.0), ("absent", float("nan")), ("both", 1.0), ("both", 0.0)
    assert choose([Sibling(group, group, reward, 0) for group, reward in rewards], 1)[0][0].group == "both"
