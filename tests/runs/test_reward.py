"""verl's reward function: paid is an answer that equals the ground truth, and nothing stalls training."""

import json
import logging
import math
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from oar_plugin.output import INSTALL
from oar_plugin.runs import reward
from oar_plugin.runs.math.answer import final_answer
from oar_plugin.runs.reward import compute_score, own_turns

DATA = Path(os.environ.get("OAR_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
MATH_RESPONSES = DATA / "math_responses.jsonl"
TURNS = json.loads(Path(__file__).with_name("rows.json").read_text("utf-8"))["turns"]
# Ground truths that the file's grader did not recognise in another notation (10000).
GRADER_IS_WRONG = {"10{,}000"}
KEYS = {"score", "acc", "no_truth", "no_answer", "unparsed", "failed"}


@pytest.fixture(scope="module", autouse=True)
def one_pool():
    compute_score("test", r"\boxed{2 + 2}", "4", timeout_s=5.0, processes=1)
    yield
    reward._pool.close()
    reward._pool = None


@pytest.mark.parametrize(
    ("response", "truth", "flags"),
    [
        (r"\boxed{72}", "72", {"score", "acc"}),
        (r"\boxed{7 2}", 72, {"score", "acc"}),
        (r"\boxed{\frac{144}{2}}", "72", {"score", "acc"}),
        ("#### 72", "72", {"score", "acc"}),
        (r"\boxed{71}", "72", set()),
        (r"\boxed{72} or rather \boxed{71}", "72", set()),
        (r"x = \boxed{8} or \boxed{9}", "8, 9", {"score", "acc"}),
        (r"\boxed{72} and \boxed{9}", "72", set()),
        (r"\boxed{72.5} or \boxed{\frac{145}{2}}", "72.5", {"score", "acc"}),
        ("It is 72", "72", {"no_answer"}),
        (r"\boxed{72", "72", {"no_answer"}),
        ("", "72", {"no_answer"}),
        (r"\boxed{" + "1+" * 400 + "1}", "401", {"unparsed"}),
    ],
)
def test_each_row_has_every_key_and_says_why_it_got_nothing(response, truth, flags):
    row = compute_score("test", response, truth)
    assert row.pop("extracted_answer") == (final_answer(response, [str(truth)]) or "")
    assert row == {key: float(key in flags) for key in KEYS}


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        *(("5", several, True) for several in (["4", "5"], ("5",), np.array(["4", "5"]), [None, "5"], [["4"], [5]])),
        *(("5", number, True) for number in (5, 5.0, np.int64(5), np.float32(5), Decimal("5.00"), np.array(5))),
        *(("7000", number, True) for number in (7e3, Decimal("7E+3"), np.float64(7e3))),
        ("6", ["4", "5"], False),
        ("None", "None", True),  # a text that a data set has
        ("True", np.bool_(True), True),
    ],
)
def test_a_ground_truth_of_any_type_means_its_text_and_of_several_any_is_right(answer, truth, right):
    row = compute_score("test", rf"\boxed{{{answer}}}", truth)
    assert (row["score"], row["no_truth"]) == (float(right), 0.0)


@pytest.mark.parametrize(
    "truth", [None, float("nan"), np.float64("nan"), Decimal("nan"), "", " ", [], [None], {}, math.inf]
)
def test_a_row_without_a_ground_truth_pays_nothing_and_is_named(truth, caplog, monkeypatch):
    for answer in ("None", "nan", "inf", "[]", "{}"):
        row = compute_score("set", rf"\boxed{{{answer}}}", truth, extra_info={"index": 17})
        assert (row["score"], row["no_truth"]) == (0.0, 1.0)
    assert "row 17 of set" in caplog.text


def test_an_answer_that_takes_for_ever_pays_nothing_and_is_flagged(caplog):
    """It comes to an end, and the next one is graded."""
    caplog.set_level(logging.WARNING, logger="oar_plugin")
    row = compute_score("test", r"\boxed{9^{9^{9^{9}}}}", "7")
    assert (row["score"], row["failed"]) == (0.0, 1.0)
    assert "the reward is 0" in caplog.text
    assert compute_score("test", r"\boxed{14/2}", "7")["score"] == 1.0


@pytest.mark.parametrize("version", ["4.7.2", "4.13.2"])  # unknown to math-verify's parser, and not the installed one
def test_a_grader_that_cannot_parse_is_refused_when_it_is_loaded(version, tmp_path):
    info = tmp_path / f"antlr4_python3_runtime-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: antlr4-python3-runtime\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", "import oar_plugin.runs.reward"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("ImportError: no answer can be compared here: ")
    assert INSTALL in refused.stderr


@pytest.mark.parametrize(("transcript", "info", "own"), TURNS)
def test_only_the_models_own_turns_are_read(transcript, info, own):
    assert [turn.strip() for turn in own_turns(transcript, info)] == own
    assert compute_score("test", transcript, "8", info)["score"] == 0.0, "a tool's answer is not paid"


def test_where_turns_cannot_be_told_the_log_says_so_once(caplog):
    for number in (6, 8):
        assert own_turns("a 8 b", {"num_turns": np.int64(number)}) == ["a 8 b"]
    assert [one.getMessage()[:29] for one in caplog.records] == ["the reward cannot distinguish"]


@pytest.mark.skipif(not MATH_RESPONSES.is_file(), reason="no responses of a real model here")
def test_on_real_responses_it_agrees_with_their_grader():
    for row in map(json.loads, MATH_RESPONSES.read_text(encoding="utf-8").splitlines()):
        paid = compute_score("test", row["response"], row["ground_truth"])["score"] == 1.0
        assert paid is row["correct"] or row["ground_truth"] in GRADER_IS_WRONG
