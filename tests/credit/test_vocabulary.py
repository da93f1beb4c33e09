"""Coefficients from columns of the logits equal those columns of the coefficients from all logits."""

import math
import threading

import pytest
import torch

from oar_plugin.credit.importance import Rows
from oar_plugin.credit.importance.fisher import fisher_coefficients
from oar_plugin.credit.importance.oar_g import joint_coefficients, kl_coefficients
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

STARTS, WIDTH, SIZE = [0, 64, 128], 64, 100  # the last shard is padding alone
TOKENS = torch.tensor([5, 70, 99])


def whole(compute) -> torch.Tensor:
    return compute(slice(None), WHOLE_VOCABULARY)


def in_shards(compute) -> torch.Tensor:
    """`compute(columns, shard)` on every rank, joined; threads play the vocabulary-parallel ranks."""
    barrier, given, results = threading.Barrier(len(STARTS)), {}, {}

    def reduce(rank: int, tensor: torch.Tensor, op) -> torch.Tensor:
        given[rank] = tensor
        barrier.wait()
        result = op(torch.stack([given[r] for r in sorted(given)]))
        barrier.wait()
        return result

    def work(rank: int, start: int) -> None:
        shard = VocabularyShard(
            start,
            total=lambda x: reduce(rank, x, lambda all_: all_.sum(0)),
            largest=lambda x: reduce(rank, x, lambda all_: all_.amax(0)),
        )
        results[rank] = compute(slice(start, max(start, min(start + WIDTH, SIZE))), shard)

    threads = [threading.Thread(target=work, args=one) for one in enumerate(STARTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([results[rank] for rank in range(len(STARTS))], 1)


either_cut = pytest.mark.parametrize("cut", [whole, in_shards])


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)) * 4


def test_fisher(logits):
    """Signs as well: each rank draws those of its own columns."""

    def compute(columns, shard):
        rows = Rows(logits[:, columns], None, torch.tensor([11, 12, 13]), vocabulary=shard)
        return fisher_coefficients(rows.logits_NV, rows.signs(), shard)

    torch.testing.assert_close(in_shards(compute), whole(compute))


def test_kl(logits):
    noisy = logits + 1e-3 * torch.randn_like(logits)
    want = kl_coefficients(logits, noisy)
    got = in_shards(lambda columns, shard: kl_coefficients(logits[:, columns], noisy[:, columns], shard))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_joint(logits):
    got = in_shards(lambda columns, shard: joint_coefficients(logits[:, columns], TOKENS, shard))
    torch.testing.assert_close(got, joint_coefficients(logits, TOKENS))


@pytest.mark.parametrize(
    "banned",
    [[], [1, 2, 98], list(range(64)), [column for column in range(SIZE) if column != 70]],
    ids=["none", "some", "a whole shard", "all but one"],
)
@either_cut
def test_entropy_and_log_prob_where_logits_are_minus_infinity(logits, banned, cut):
    """Banned tokens have no mass: they add nothing to an entropy, and their own log-probability is -inf."""
    logits[:, banned] = -math.inf
    allowed = [column for column in range(SIZE) if column not in banned]
    entropy_N = torch.distributions.Categorical(logits=logits[:, allowed]).entropy()
    log_prob_N = logits.log_softmax(-1)[torch.arange(3), TOKENS]

    def compute(columns, shard):
        here_NV = logits[:, columns]  # a number a row, as columns: what `in_shards` joins
        values_2N = torch.stack([shard.entropy(here_NV), shard.log_prob(here_NV, TOKENS)])
        return values_2N.flatten()[:, None].expand(-1, here_NV.shape[1])

    want = torch.cat([entropy_N, log_prob_N])[:, None].expand(-1, SIZE)
    torch.testing.assert_close(cut(compute), want, atol=1e-6, rtol=1e-5)


@either_cut
def test_softmax_less_the_token(logits, cut):
    logits[:, 3] = -math.inf
    got = cut(lambda columns, shard: shard.subtract_one_at(shard.softmax(logits[:, columns]), TOKENS))
    torch.testing.assert_close(got, logits.softmax(-1) - torch.nn.functional.one_hot(TOKENS, SIZE))
