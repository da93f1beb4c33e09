"""Rows of the probe in packed batches, pooling, and sums over ranks."""

import pytest
import torch

from oar_plugin.credit.probe import answer_rows, pool

#            response 0: 3 tokens prompt+reasoning, 2 answer; response 1: opens with its answer; response 2: none
ANSWER = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
RESPONSE = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
TOKENS = torch.arange(10) * 10


@pytest.mark.parametrize(
    ("answer", "response", "probe", "positions", "ordinals"),
    [
        # The answer token at 5 opens its sequence: nothing predicts it.
        (ANSWER, RESPONSE, "answer_mean", [2, 3, 6], [0, 1, 0]),
        (ANSWER, RESPONSE, "last", [2, 6], [0, 0]),
        # The first token of the batch has none; answers of three tokens and one; the second tokens of their sequences.
        ([1, 1, 1], [0, 0, 0], "answer_mean", [0, 1], [0, 1]),
        ([0, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], "answer_mean", [0, 3, 4, 5], [0, 0, 1, 2]),
        ([0, 1, 0, 1], [0, 0, 1, 1], "answer_mean", [0, 2], [0, 0]),
    ],
)
def test_rows_stand_one_before_the_answer_and_never_in_another_response(answer, response, probe, positions, ordinals):
    response_T = torch.as_tensor(response)
    rows = answer_rows(torch.as_tensor(answer).bool(), response_T, TOKENS[: len(response)], 3, probe)
    assert rows.position_N.tolist() == positions
    assert rows.ordinal_N.tolist() == ordinals
    assert torch.equal(rows.response_N, response_T[positions])
    assert rows.token_N.tolist() == [10 * (position + 1) for position in positions]
    count_B = torch.bincount(response_T[positions], minlength=3)
    assert torch.equal(rows.share_N, 1 / count_B[rows.response_N])


def test_pooling_is_the_mean_per_response_and_adds_up_over_shards():
    rows, logits = answer_rows(ANSWER, RESPONSE, TOKENS, 3, "answer_mean"), torch.randn(3, 7)
    whole = pool(logits, rows)
    torch.testing.assert_close(whole, torch.stack([logits[:2].mean(0), logits[2], torch.zeros(7)]))
    half = logits.bfloat16()
    assert torch.equal(pool(half, rows), pool(half.float(), rows)), "never in half precision"
    keep = torch.tensor([True, False, True])
    torch.testing.assert_close(pool(logits[keep], rows.select(keep)) + pool(logits[~keep], rows.select(~keep)), whole)
    none = answer_rows(torch.zeros_like(ANSWER), RESPONSE, TOKENS, 3, "last")
    assert len(none) == 0
    assert torch.equal(pool(torch.zeros(0, 5), none), torch.zeros(3, 5))


def test_a_response_that_is_not_finite_is_alone_with_it():
    rows, logits = answer_rows(ANSWER, RESPONSE, TOKENS, 3, "answer_mean"), torch.randn(3, 7)
    logits[0, 2] = torch.inf
    pooled = pool(logits, rows)
    assert pooled[0].isnan().all()
    assert torch.equal(pooled[1], logits[2])
