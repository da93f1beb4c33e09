"""What a credit marks, and how it agrees with people's marks, by hand."""

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks.marks import people
from benchmarks.marks.study import first_hit, judged
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import make_tokenizer
from tests.benchmarks.test_learning import model, rollout  # noqa: F401


def test_a_credit_that_knows_the_wrong_results_ranks_them_first_and_its_negative_last(rollout):  # noqa: F811
    best, worst = ([*judged(sign * rollout.wrong_BL.float(), rollout)] for sign in (1, -1))
    asked = [row for row in best if "wrong AUC" in row]
    assert 0 < len(asked) < len(best)
    for row in asked:
        assert row["wrong AUC"] == 1
        assert row["wrong results, wrong answer, weight"] > row["filler, weight"] == pytest.approx(row["form, weight"])
    assert {row["wrong AUC"] for row in worst if "wrong AUC" in row} == {0.0}
    assert all(row["results AUC"] == 1 for row in judged(rollout.causal_BL.float(), rollout))


def test_the_first_wrong_step_is_hit_where_the_highest_token_stands_in_it():
    """Steps are `x r ;`: of three the second and the third are wrong."""
    result_R, wrong_R = np.array([0, 1, 0, 0, 1, 0, 0, 1, 0], bool), np.array([0, 0, 0, 0, 1, 0, 0, 1, 0], bool)
    hits = [first_hit(np.eye(9)[place], result_R, wrong_R) for place in range(9)]
    assert hits == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert first_hit(np.zeros(9), result_R, wrong_R) == pytest.approx(3 / 9), "all equal: chance"


def marked(text, step=None):
    """A problem of CHAMP, with one solution and its first wrong step."""
    start = text.find(step) if step else None
    mark = SimpleNamespace(text=text, start_idx=start, end_idx=start + len(step) if step else None)
    asked = SimpleNamespace(messages=[None, SimpleNamespace(text="How many?")])
    key = "GPT-4|No C w/o H"
    return SimpleNamespace(identifier=text[:3], fws_annotations={key: mark}, conversations={key: asked})


STEP, LAST = "Two and two is five.", "So there are 5."


def test_marks_of_people_are_read_in_tokens_and_judged(monkeypatch, tmp_path):
    texts = (
        f"One and one is two. {STEP}\nThus\n{LAST}\n",
        f"One. {STEP} The answer is 5. Done.",
        f"{STEP} #### 5\nOr {LAST}",
    )
    problems = [*(marked(text, STEP) for text in texts), marked(f"One. {STEP}", STEP), marked("All is right.")]
    dataset = SimpleNamespace(problems=dict(enumerate(problems)))
    monkeypatch.setitem(sys.modules, "champ_dataset", SimpleNamespace(load=lambda version: dataset))
    tokenizer = make_tokenizer(by_bytes=True)
    read, without = people.solutions(tokenizer, 512, None, 0)
    assert without == 1, "nothing is said behind the step"
    assert people.solutions(tokenizer, 60, None, 0)[1] == 2
    for one, answer in zip(read, (LAST, "5", "5"), strict=True):
        segments_L = one.segments_L[len(one.prompt) :]
        assert tokenizer.decode(np.array(one.ids)[segments_L == 1][one.step_R]) == STEP
        assert tokenizer.decode(np.array(one.ids)[segments_L == 3]) == answer
    assert [one.announced for one in read] == [False, True, True]

    tiny, credits = build_model(0, vocab=len(tokenizer)), ("fisher", "oar_p", "random")
    found = pd.DataFrame(people.judged(tiny, tokenizer, read, credits, 8, None, 0, tmp_path))
    assert len(found) == 3 * 8
    with pytest.raises(ValueError, match=r"fisher\.pickle was made with another value of seed"):
        [*people.judged(tiny, tokenizer, read, credits, 8, None, 1, tmp_path)]
    means = found.groupby("credit", sort=False).mean(numeric_only=True)
    assert [*means.index][:4] == ["surprisal", "fisher", "fisher x (1 - p)", "oar_p, at most 8 copies"]
    assert means.loc["chance", "AUC"] == 0.5
    assert means.loc["control: later is higher", [people.METRICS[at] for at in (0, 4, 3)]].tolist() == [1, 1, 0]
    assert "3 solutions of 2 problems" in people.notes(read, without, 8)[0]


def test_a_solution_is_judged_by_hand():
    """The step is the last two of five tokens, one more follows."""
    score_R, step_R = np.array([1.0, 2, 0, 3, 1, 9]), np.array([0, 0, 0, 1, 1, 0], bool)
    found = people.judgement(score_R, step_R)
    own, before = (3 + 1.5) / 6, (1 + 0) / 2  # the stretch before are the second and the third
    assert [*found.values()] == pytest.approx([own, before, own - before, 0, 1])
