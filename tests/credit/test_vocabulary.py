"""Coefficients from columns of the logits equal those columns of the coefficients from all logits."""

import threading

import pytest
import torch

from oar_plugin.credit.gradient import fisher_coefficients, fisher_signs, joint_coefficients, kl_coefficients
from oar_plugin.credit.probe import AnswerRows
from oar_plugin.credit.vocabulary import VocabularyShard

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


@pytest.fixture
def rows() -> AnswerRows:
    return AnswerRows(
        torch.arange(3), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.tensor([5, 70, 99]),
        torch.tensor([0.5, 0.5, 1.0]), 2,
    )  # fmt: skip


@pytest.mark.parametrize("probe", ["answer_mean", "answer_joint"])
def test_fisher(logits, rows, probe):
    seeds = torch.tensor([11, 12, 13])
    if probe == "answer_joint":
        seeds = seeds[:2]
    sign = fisher_signs(probe, rows, seeds, SIZE)
    want = fisher_coefficients(logits, sign)

    def compute(columns, shard):
        mine = logits[:, columns]
        return fisher_coefficients(mine, fisher_signs(probe, rows, seeds, mine.shape[1], shard), shard)

    torch.testing.assert_close(in_shards(compute), want)


def test_kl(logits):
    noisy = logits + 1e-3 * torch.randn_like(logits)
    want = kl_coefficients(logits, noisy)
    got = in_shards(lambda columns, shard: kl_coefficients(logits[:, columns], noisy[:, columns], shard))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_joint(logits, rows):
    got = in_shards(lambda columns, shard: joint_coefficients(logits[:, columns], rows, shard))
    torch.testing.assert_close(got, joint_coefficients(logits, rows))


def test_entropy(logits):
    want = torch.distributions.Categorical(logits=logits).entropy()
    got = in_shards(
        lambda columns, shard: shard.entropy(logits[:, columns])[:, None].expand(-1, logits[:, columns].shape[1])
    )
    torch.testing.assert_close(got, want[:, None].expand_as(logits))
