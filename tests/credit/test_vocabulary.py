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


class Group:
    """All-reduce among threads, each of which plays a vocabulary-parallel rank."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: dict[int, torch.Tensor] = {}

    def reduce(self, rank: int, tensor: torch.Tensor, op) -> torch.Tensor:
        self.given[rank] = tensor
        self.barrier.wait()
        result = op(torch.stack([self.given[r] for r in sorted(self.given)]))
        self.barrier.wait()
        return result


def in_shards(compute) -> torch.Tensor:
    """`compute(columns, shard)` on every rank, joined."""
    group, results = Group(len(STARTS)), {}

    def work(rank: int) -> None:
        start = STARTS[rank]
        shard = VocabularyShard(
            start,
            total=lambda x: group.reduce(rank, x, lambda all_: all_.sum(0)),
            largest=lambda x: group.reduce(rank, x, lambda all_: all_.amax(0)),
        )
        results[rank] = compute(slice(start, max(start, min(start + WIDTH, SIZE))), shard)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(STARTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([results[rank] for rank in range(len(STARTS))], 1)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)) * 4


TOKENS = torch.tensor([5, 70, 99])


def a_row_each(value_N, logits_NV):
    """A number a row, as columns: what `in_shards` joins."""
    return value_N[:, None].expand(-1, logits_NV.shape[1])


def test_fisher(logits):
    """Signs as well: each rank draws those of its own columns."""

    def compute(columns, shard):
        rows = Rows(logits[:, columns], None, torch.tensor([11, 12, 13]), vocabulary=shard)
        return fisher_coefficients(rows.logits_NV, rows.signs(), shard)

    torch.testing.assert_close(in_shards(compute), compute(slice(None), WHOLE_VOCABULARY))


def test_kl(logits):
    noisy = logits + 1e-3 * torch.randn_like(logits)
    want = kl_coefficients(logits, noisy)
    got = in_shards(lambda columns, shard: kl_coefficients(logits[:, columns], noisy[:, columns], shard))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_joint(logits):
    got = in_shards(lambda columns, shard: joint_coefficients(logits[:, columns], TOKENS, shard))
    torch.testing.assert_close(got, joint_coefficients(logits, TOKENS))


BANNED = {
    "none": [],
    "some": [1, 2, 98],
    "a whole shard": list(range(64)),
    "all but one": [c for c in range(100) if c != 70],
}


@pytest.mark.parametrize("banned", BANNED.values(), ids=BANNED)
@pytest.mark.parametrize(
    "cut", [lambda compute: compute(slice(None), WHOLE_VOCABULARY), in_shards], ids=["whole", "cut"]
)
def test_entropy_and_log_prob_where_logits_are_minus_infinity(logits, banned, cut):
    """Banned tokens have no mass: they add nothing to an entropy, and their own log-probability is -inf."""
    logits[:, banned] = -math.inf
    log_p = logits.log_softmax(-1)
    allowed = torch.tensor([c for c in range(SIZE) if c not in banned])
    want = torch.distributions.Categorical(logits=logits[:, allowed]).entropy()
    got = cut(lambda columns, shard: a_row_each(shard.entropy(logits[:, columns]), logits[:, columns]))
    torch.testing.assert_close(got, a_row_each(want, logits), atol=1e-6, rtol=1e-5)
    got = cut(lambda columns, shard: a_row_each(shard.log_prob(logits[:, columns], TOKENS), logits[:, columns]))
    torch.testing.assert_close(got, a_row_each(log_p[torch.arange(3), TOKENS], logits), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "cut", [lambda compute: compute(slice(None), WHOLE_VOCABULARY), in_shards], ids=["whole", "cut"]
)
def test_softmax_less_the_token(logits, cut):
    logits[:, 3] = -math.inf
    got = cut(lambda columns, shard: shard.subtract_one_at(shard.softmax(logits[:, columns]), TOKENS))
    torch.testing.assert_close(got, logits.softmax(-1) - torch.nn.functional.one_hot(TOKENS, SIZE))
