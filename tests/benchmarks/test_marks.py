"""What a credit marks, by hand; and values of places that are known beforehand."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.learning.tasks import TASKS
from benchmarks.learning.training import roll_out
from benchmarks.marks import continuation
from benchmarks.marks.study import first_hit, judged
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import EOS, MARK, PAD, encode

TASK = TASKS["parallel"]


def written(model, prompt_BP, copies, longest, generator):
    """Demonstrations in place of samples; in every second one half of the steps are wrong."""
    rng, rows = random.Random(int(generator.initial_seed())), []
    for prompt in prompt_BP.tolist():
        facts = tuple((prompt[at + 1], "+-"[prompt[at + 2] - encode("+")[0]], prompt[at + 3]) for at in range(0, 20, 5))
        problem = replace(TASK.problem(random.Random(0)), content=facts)
        rows += [torch.tensor(TASK.demonstration(problem, rng, 0.5 * (copy % 2))) for copy in range(copies)]
    return torch.nn.utils.rnn.pad_sequence(rows, True, PAD)


@pytest.fixture(scope="module")
def model():
    return build_model(0, heads=2)


@pytest.fixture(scope="module")
def rollout(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.learning.training.sample", written)
        return roll_out(model, TASK, random.Random(0), torch.Generator().manual_seed(0), 4, 4)


def test_a_credit_that_knows_the_wrong_results_ranks_them_first_and_its_negative_last(rollout):
    best, worst = ([*judged(sign * rollout.wrong_BL.float(), rollout)] for sign in (1, -1))
    asked = [row for row in best if "wrong AUC" in row]
    assert 0 < len(asked) < len(best) == len(rollout.token_BL)
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


def test_the_value_falls_at_the_first_wrong_result(rollout, monkeypatch):
    """Continuations give the right answer in three of four cases, unless a wrong result stands before them."""
    rows, start = rollout.token_BL.tolist(), rollout.prompt_length

    def sample(model, prefix_BL, copies, longest, noise):
        of = [next(row for row, ids in enumerate(rows) if ids[: len(p)] == p) for p in prefix_BL.tolist()]
        gold = [[MARK, *rollout.gold_Bm[row].tolist(), EOS] for row in of]
        lost = rollout.wrong_BL[of, : prefix_BL.shape[1]].any(-1).tolist()
        ends = [
            [MARK, EOS] if out or n % 4 == 3 else end
            for out, end in zip(lost, gold, strict=True)
            for n in range(copies)
        ]
        return torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, ends)], True, PAD)

    monkeypatch.setattr(continuation, "sample", sample)
    fine, coarse = ([*continuation.continued(None, TASK, rollout, spans, seed=0)] for spans in (64, 10))
    for row, (one, other) in enumerate(zip(fine, coarse, strict=True)):
        assert one.prompt + one.ids == rows[row][: int(rollout.length_B[row])]
        assert one.right == bool(rollout.advantage_B[row] > 0)
        wrong = rollout.wrong_BL[row, start:].nonzero()[:1, 0].tolist()  # the first, if there is one
        assert one.places == [*range(int(rollout.reasoning_BL[row].sum()) + 1)]
        assert one.advantage_S().nonzero()[0].tolist() == wrong
        assert one.advantage_S()[wrong].tolist() == [-0.75] * len(wrong)
        assert len(other.places) <= 11
        for span, at in zip(other.advantage_S().nonzero()[0], wrong, strict=True):
            assert other.places[span] <= at < other.places[span + 1]


def test_correlations_by_hand():
    """Values 0.5, 0.625, 0.125, 0.5: advantages 0.125, -0.5, 0.375, drops of rank 1, 3, 2."""
    right_PN = np.array([[n < 16 * value for n in range(16)] for value in (0.5, 0.625, 0.125, 0.5)])
    good = continuation.Continued([0], [0] * 5, True, [0, 1, 2, 3], right_PN)
    scores = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([0.5, 0.5, 2.0])
    found = continuation.agreement("x", good, *scores) | continuation.agreement(
        "x", replace(good, right=False), *scores
    )
    assert found["drop, right"] == found["drop, wrong"] == pytest.approx(1)
    assert found["advantage, right"] == pytest.approx(np.corrcoef([1.5, 1.5, 3], [2, 1, 3])[0, 1])
    assert found["advantage, wrong"] == pytest.approx(np.corrcoef([1.5, 1.5, 3], [2, 3, 1])[0, 1])
    spans = replace(good, places=[0, 2, 3], right_PN=right_PN[:3])  # mean scores 2.5 and 2, drops 0.125 and 0.5
    assert continuation.agreement("x", spans, *scores)["drop, right"] == pytest.approx(-1)
    assert np.isnan(continuation.agreement("x", replace(good, right_PN=right_PN[[0] * 4]), *scores)["drop, right"])
