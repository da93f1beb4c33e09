"""The marks study by continuation: values where it is known what they are, correlations by hand, its page, and vLLM."""

import json
import random

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.learning.tasks import TASKS, wrong_results
from benchmarks.learning.training import roll_out
from benchmarks.learning.warm_start import HEADS
from benchmarks.marks import continuation, study
from benchmarks.tiny.data import write_problems
from benchmarks.tiny.model import build_model
from benchmarks.tiny.tasks import Problem
from benchmarks.tiny.words import PAD, make_tokenizer
from oar_plugin.credit.importance import IMPORTANCES
from tests.benchmarks.test_marks import TASK, written

PAGE = "continuation_cpu"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr("benchmarks.learning.training.sample", written)
    model = build_model(0, heads=HEADS)
    monkeypatch.setattr(study, "PROMPTS", 4)
    monkeypatch.setattr(study, "warm_model", lambda task, number, progress: model)
    return model


def finished(rollout):
    """In place of sampling: the rest of a demonstration that goes on from the prefix. In a wrong response an end is right
    as long as the prefix holds no wrong result; every fourth end of any other prefix is wrong."""
    start = rollout.prompt_length
    rows = rollout.token_BL.tolist()

    def sample(model, prefix_BL, copies, longest, noise):
        ends = []
        for prefix in prefix_BL.tolist():
            row = next(row for row, ids in enumerate(rows) if ids[: len(prefix)] == prefix)
            gold, own = rollout.gold_Bm[row].tolist(), rows[row][len(prefix) : int(rollout.length_B[row])]
            broken = bool(rollout.wrong_BL[row, start : len(prefix)].any())
            right = [*own[:-1 - len(gold)], *gold, own[-1]]
            wrong = [*own[:-1 - len(gold)], *[(gold[0] + 1) % 10] * len(gold), own[-1]]
            ends += [torch.tensor(wrong if broken or copy % 4 == 3 else right) for copy in range(copies)]
        assert max(map(len, ends)) <= longest
        return torch.nn.utils.rnn.pad_sequence(ends, True, PAD)

    return sample


def test_the_value_falls_at_the_first_wrong_result(model, monkeypatch):
    rollout = roll_out(model, TASK, random.Random(0), torch.Generator().manual_seed(0), 4, 4)
    monkeypatch.setattr(continuation, "sample", finished(rollout))
    for spans, k in ((64, 1), (10, None)):
        found = list(continuation.continued(model, TASK, rollout, spans, seed=0))
        assert len(found) == len(rollout.token_BL)
        for row, response in enumerate(found):
            assert response.right == bool(rollout.advantage_B[row] > 0)
            assert response.prompt + response.ids == rollout.token_BL[row, : int(rollout.length_B[row])].tolist()
            fell = np.flatnonzero(response.advantage_S())
            wrong = np.flatnonzero(rollout.wrong_BL[row, rollout.prompt_length :].numpy())
            assert len(response.places) - 1 <= spans
            assert k is None or response.places == [*range(int(rollout.reasoning_BL[row].sum()) + 1)]
            if not len(wrong):
                assert not len(fell)
                assert response.right_PN.mean() == 0.75
                continue
            assert response.places[fell[0]] <= wrong[0] < response.places[fell[0] + 1], "the span with the wrong result"
            assert response.advantage_S()[fell].tolist() == [-0.75]


def response(right, values, **given):
    """16 continuations: of each half as many are right as `values` say."""
    right_PN = np.array([[n < 8 * value for n in range(8)] * 2 for value in values])
    return continuation.Continued([0], [0] * 9, right, given.get("places", [*range(len(values))]), right_PN)


def test_correlations_by_hand():
    score, weight = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([0.5, 0.5, 2.0])
    values = [0.5, 0.625, 0.125, 0.5]  # advantages 0.125, -0.5, 0.375: drops rank 1, 3, 2
    good = continuation.agreement("x", response(True, values), score, weight)
    bad = continuation.agreement("x", response(False, values), score, weight)
    assert good["drop, right"] == bad["drop, wrong"] == pytest.approx(1)
    assert good["advantage, right"] == pytest.approx(np.sqrt(0.75) / 3 * 0 + np.corrcoef([1.5, 1.5, 3], [2, 1, 3])[0, 1])
    assert bad["advantage, wrong"] == pytest.approx(np.corrcoef([1.5, 1.5, 3], [2, 3, 1])[0, 1])
    assert "drop, wrong" not in good
    # Spans of two tokens and one: means 2.5 and 2, drops 0.125 and 0.5.
    two = continuation.agreement("x", response(True, values[:3], places=[0, 2, 3]), score, weight)
    assert two["drop, right"] == pytest.approx(-1)
    assert two["k"] == 2
    still = continuation.agreement("x", response(True, [0.5] * 4), score, weight)
    assert np.isnan(still["drop, right"])
