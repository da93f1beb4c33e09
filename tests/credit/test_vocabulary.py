"""Results from shards of the columns equal the same columns of the result from all logits."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oar_plugin.credit.importance import Rows
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.credit.importance.oar_g import OarG
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

STARTS, WIDTH, SIZE = [0, 64, 128], 64, 100  # the last shard is padding alone
TOKENS = torch.tensor([63, 64, 99])  # at both ends of shards


def in_shards(compute):
    """`compute(columns, shard)` of every vocabulary-parallel rank; each rank is a thread."""
    barrier, given = threading.Barrier(len(STARTS), timeout=60), {}

    def over_ranks(start, tensor, reduce):
        given[start] = tensor
        barrier.wait()
        result = reduce(torch.stack([given[other] for other in STARTS]), 0)
        barrier.wait()
        return tensor.copy_(result)  # in place, as torch.distributed's are

    def work(start):
        total, largest = (lambda x, op=op: over_ranks(start, x, op) for op in (torch.sum, torch.amax))
        return compute(slice(start, min(start + WIDTH, SIZE)), VocabularyShard(start, total, largest))

    with ThreadPoolExecutor(len(STARTS)) as ranks:
        return list(ranks.map(work, STARTS))


@pytest.fixture
def logits():
    """In float32 the exponential of 100 is infinite."""
    spread = 4 * torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
    return spread + torch.tensor([[0.0], [100.0], [-100.0]])


def of_importance(kind, token_N=None):
    """Coefficients with signs: `fisher` draws one per column, and each rank draws those of its columns."""

    def coefficients(logits, noisy, shard):
        entropy_N = torch.tensor([0.5, 1.0, 0.0])
        rows = Rows(logits, token_N, torch.tensor([11, 12, 13]), entropy_N, noisy, vocabulary=shard)
        return kind().coefficients(0, rows)

    return coefficients


def softmax_less_the_token(logits, noisy, shard):
    return shard.subtract_one_at(shard.softmax(logits), TOKENS)


@pytest.mark.parametrize(
    ("coefficients", "limits"),
    [
        (of_importance(Fisher), {}),
        (of_importance(OarG), {"rtol": 1e-9, "atol": 1e-9}),
        (of_importance(OarG, TOKENS), {"rtol": 1e-4, "atol": 1e-3}),
        (softmax_less_the_token, {}),
    ],
)
def test_coefficients(logits, coefficients, limits):
    noisy = logits + 1e-3 * torch.randn_like(logits)
    want = coefficients(logits, noisy, WHOLE_VOCABULARY)
    got = in_shards(lambda columns, shard: coefficients(logits[:, columns], noisy[:, columns], shard))
    torch.testing.assert_close(torch.cat(got, 1), want, **limits)


@pytest.mark.parametrize(
    "banned",
    [[], [1, 2, 98], list(range(64)), [column for column in range(SIZE) if column != 70]],
    ids=["none", "some", "a whole shard", "all but one"],
)
def test_where_logits_are_minus_infinity(logits, banned):
    """Banned tokens add nothing to an entropy, and their log-probability is -inf."""
    logits[:, banned] = -math.inf
    allowed = [column for column in range(SIZE) if column not in banned]
    entropy_N = torch.distributions.Categorical(logits=logits[:, allowed]).entropy()
    want = torch.stack([entropy_N, logits.log_softmax(-1)[torch.arange(3), TOKENS]])

    def compute(columns, shard):
        return torch.stack([shard.entropy(logits[:, columns]), shard.log_prob(logits[:, columns], TOKENS)])

    for got in (compute(slice(None), WHOLE_VOCABULARY), *in_shards(compute)):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    less = logits.softmax(-1) - torch.nn.functional.one_hot(TOKENS, SIZE)
    torch.testing.assert_close(softmax_less_the_token(logits, None, WHOLE_VOCABULARY), less)
