"""Rows of the probe in packed batches, pooling, and sums over ranks."""

import torch

from oar_plugin.credit.probe import answer_rows, pool

#            response 0: 3 tokens prompt+reasoning, 2 answer; response 1: opens with its answer; response 2: none
ANSWER = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
RESPONSE = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
TOKENS = torch.arange(10) * 10


def rows(probe):
    return answer_rows(ANSWER, RESPONSE, TOKENS, 3, probe)


def test_rows_stand_one_before_the_answer_and_never_in_another_response():
    found = rows("answer_mean")
    assert found.position_N.tolist() == [2, 3, 6]  # the answer token at 5 opens its sequence: nothing predicts it
    assert found.response_N.tolist() == [0, 0, 1]
    assert found.ordinal_N.tolist() == [0, 1, 0]
    assert found.token_N.tolist() == [30, 40, 70]
    assert found.share_N.tolist() == [0.5, 0.5, 1.0]


def test_last_keeps_the_first_row():
    assert rows("last").position_N.tolist() == [2, 6]
    assert rows("last").share_N.tolist() == [1.0, 1.0]


def test_no_answers_give_no_rows():
    empty = answer_rows(torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long), torch.arange(4), 1, "last")
    assert len(empty) == 0
    assert torch.equal(pool(torch.zeros(0, 5), empty), torch.zeros(1, 5))


def test_pooling_is_the_mean_per_response_and_adds_up_over_shards():
    found = rows("answer_mean")
    logits = torch.randn(3, 7)
    whole = pool(logits, found)
    torch.testing.assert_close(whole[0], logits[:2].mean(0))
    torch.testing.assert_close(whole[1], logits[2])
    assert not whole[2].any()
    keep = torch.tensor([True, False, True])
    parts = pool(logits[keep], found.select(keep)) + pool(logits[~keep], found.select(~keep))
    torch.testing.assert_close(parts, whole)
