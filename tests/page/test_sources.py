"""The sources of `oar inspect`: each kind is recognised by its content, and a bad line is skipped alone."""

import hashlib
import json
from dataclasses import replace

import pytest

from oar_plugin.page import sources
from oar_plugin.page.sources import SourceError, advantages, read, unscored
from tests.page.dumped import HEADER, RESPONSE, write_dump

ASKED = {"prompt": "1+1?", "response": "so 2 #### 2"}
CHAT = [{"role": "user", "content": "1?"}]
VERL = {"input": "1+1?", "output": "#### 2", "gts": "2", "score": 1.0, "step": 7, "uid": "a_3_0"}


def read_group(prompt):
    """The group of a line without one."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def written(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "want"),
    [
        (ASKED, {"prompt": "1+1?", "response": "so 2 #### 2", "step": 0, "uid": "f:1", "truth": None, "reward": None}),
        (
            ASKED | {"truth": 2, "reward": True, "source": "m", "group": 4, "step": "9"},
            {"truth": "2", "reward": 1.0, "source": "m", "group": "4", "step": 9},
        ),
        (ASKED | {"reward": float("nan")}, {"reward": None}),
        (ASKED | {"prompt": CHAT}, {"prompt": "user: 1?", "chat": CHAT}),
        (VERL, {"prompt": "1+1?", "response": "#### 2", "truth": "2", "reward": 1.0, "step": 7, "group": "a"}),
        (ASKED | {"uid": "math_1_0"}, {"uid": "f:1", "group": read_group("1+1?")}),
        (VERL | {"uid": None, "gts": None, "data_source": "d"}, {"uid": "f:1", "truth": None, "source": "d"}),
        # verl does not escape characters that end a line for Python. Halves of characters, and NUL.
        (json.dumps(VERL | {"output": "a\u2028b\x85c"}, ensure_ascii=False), {"response": "a\u2028b\x85c"}),
        ("\ufeff" + json.dumps(ASKED), {"prompt": "1+1?"}),
        ('{"prompt": "\\uD83D", "response": "2"}', {"prompt": "?"}),
        ('{"prompt": "1", "response": "\\u0000\\ud83d\\ude00 \\udc00"}', {"response": "\0😀 ?"}),
    ],
)
def test_a_line_says_what_it_is_by_its_keys(line, want, tmp_path):
    found = read([written(tmp_path / "f.jsonl", line)])
    assert (found.skipped, {name: getattr(found.items[0], name) for name in want}) == (0, want)


def test_responses_to_one_prompt_are_siblings(tmp_path):
    rows = [ASKED | {"uid": "u"}, ASKED | {"prompt": "2"}, ASKED | {"uid": "u"}]
    groups = [item.group for item in read([written(tmp_path / "f", *rows)]).items]
    assert groups[0] == groups[1] != groups[2]


@pytest.mark.parametrize(
    "change",
    [
        {"step": "3"},
        {"group": ["g"]},
        {"uid": None},
        {"token_ids": None},
        {"tokens": ["so", " 2", None, "2"]},
        {"importance": {"fisher": ["0.5", 2.0, 0.0, 0.0]}},
        {"weights": "four"},
        {"advantage": "1"},
        {"reward": [1.0]},
    ],
)
def test_a_line_of_a_dump_with_a_value_of_another_type_is_skipped(change, tmp_path):
    good, bad = replace(RESPONSE, advantage=float("nan"), weights=[1, float("inf"), 0.5, 1.0]), vars(RESPONSE) | change
    found = read([written(tmp_path / "f.jsonl", HEADER.line(), good.line(), bad | {"uid": "v"} | change)])
    assert ([item.weights for item in found.items], found.skipped) == ([good.weights], 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": None}, "versions: "),
        ({"config": None}, "config: "),
        ({"arbitrary_scale": None}, "arbitrary_scale: "),
        ({"config": {**HEADER.config, "gate": []}}, "gate: "),
        ({"config": {"gate": "two_level"}}, "importance: "),
        ({"config": {**HEADER.config, "tau": float("nan")}}, "tau: "),
    ],
)
def test_a_header_with_a_value_of_another_type_is_refused(change, said, tmp_path):
    with pytest.raises(SourceError, match=f"no header that this version of oar_plugin reads: {said}"):
        read([written(tmp_path / "f.jsonl", vars(HEADER) | change, RESPONSE.line())])


def test_a_line_that_is_none_costs_nothing_but_itself(tmp_path):
    good, other = replace(RESPONSE, status="no_answer").line(), replace(RESPONSE, uid="v", tokens=["�", "\0", "", "‮"])
    bad = [good[:50], "5", "[]", "{}", "[" * 100_000, json.dumps(ASKED), good.replace('"so", ', "")]
    file = written(tmp_path / "step_3.jsonl", HEADER.line(), RESPONSE.line(), *bad, good, other.line(), good[:-20])
    file.write_bytes(file.read_bytes().replace("�".encode(), b"\xff"))
    found = read([tmp_path])
    assert [item.uid for item in found.items] == ["u", "v"]
    assert found.items[0].status == "no_answer", "of two lines with one uid the last counts"
    assert found.items[1] == other
    assert (found.lines, found.skipped, len(found.notes())) == (11, 8, 1)


@pytest.mark.parametrize(
    ("tokens", "steps", "want", "left_out", "cut"),
    [  # a response has 5
        (40, None, "a2 c2 b2 d2 a3 c3 b3 d3", [1], 0),
        (30, None, "a2 c2 a3 c3 b3 d3", [1], 2),
        (1, None, "a3 c3", [1, 2], 2),
        (1, [1, 3], "a1 c1 b1 d1 a3 c3 b3 d3", [], 0),
    ],
)
def test_the_newest_steps_are_shown_or_those_that_are_named_and_no_group_is_parted(
    tokens, steps, want, left_out, cut, tmp_path, monkeypatch
):
    for step in (1, 2, 3):
        pairs = zip("abcd", "xyxy", strict=True)
        lines = [replace(RESPONSE, step=step, group=group, uid=f"{uid}{step}").line() for uid, group in pairs]
        written(tmp_path / f"step_{step}.jsonl", HEADER.line(), *lines)
    monkeypatch.setattr(sources, "TOKENS", tokens)
    found = read([tmp_path], steps)
    assert ([item.uid for item in found.items], found.left_out, found.cut) == (want.split(), left_out, cut)
    assert len(found.notes()) == bool(left_out) + bool(cut)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("projects", [1]),
        ("projects/project/run", [1]),
        ("run", [1]),
        ("run/dump", [1]),
        ("run/dump/step_000001.jsonl", [1]),
        ("rollouts", [7]),
        ("two", "two: name one of its dumps: two/a, two/b"),
        ("empty", "algorithm.oar.dump.dir"),
        ("nowhere", "nowhere: no such file or folder"),
        ("old", "step_1.jsonl: its first line is no header that this version of oar_plugin reads: versions: "),
        ("newer", "a dump of format 99; this version reads 1"),
        ("foreign", "foreign: nothing to show: 2 of 2 lines skipped"),
    ],
)
def test_a_source_is_recognised_or_it_is_said_what_is_wrong(source, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("run", "projects/project/run"):
        write_dump(tmp_path / run / "dump", 1)
    written(tmp_path / "run/metrics/start.jsonl", {"step": 1, "data": {}})
    written(tmp_path / "run/step_last.jsonl", RESPONSE.line())
    written(tmp_path / "rollouts/7.jsonl", VERL)
    for name in "ab":
        write_dump(tmp_path / "two" / name, 1)
    (tmp_path / "empty").mkdir()
    written(tmp_path / "old/step_1.jsonl", RESPONSE.line())
    write_dump(tmp_path / "newer", 1, header=replace(HEADER, oar_dump=99))
    written(tmp_path / "foreign/1.jsonl", {"a": 1}, {"prompt": "", "response": ""})
    path = (tmp_path / source).relative_to(tmp_path)
    if isinstance(said, list):
        assert [item.step for item in read([path]).items] == said
    else:
        with pytest.raises(SourceError) as error:
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
        assert found.settings_differ == differ == any("settings differ" in note for note in found.notes())


def test_without_a_model_words_are_the_tokens_and_advantages_are_grpos(tmp_path):
    rows = [ASKED | {"reward": reward} for reward in (1, 0, 0)]
    others = [ASKED | {"prompt": "2", "reward": 1}, *(VERL | {"uid": f"a_{n}_0", "score": n or None} for n in (0, 1))]
    texts = read([written(tmp_path / "f", *rows, *others)]).items
    # (r - mean) / (std + 1e-6) with mean 1/3 and std sqrt(1/3)
    assert advantages(texts)[:3] == pytest.approx([1.154698, -0.577349, -0.577349], abs=1e-6)
    assert advantages(texts)[3:] == [None] * 3
    first = unscored(texts)[0]
    assert (first.tokens, first.segments, first.status) == (["so", " 2", " ####", " 2"], [1, 1, 2, 3], "not_scored")
    assert first.token_ids[1] == first.token_ids[3] != first.token_ids[0] < 0
    assert (first.importance, first.weights, first.log_probs) == ({}, None, None)
