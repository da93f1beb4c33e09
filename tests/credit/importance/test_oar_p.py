import math

import pytest
import torch

from oar_plugin.credit.importance.oar_p import divergence, log_distribution


def test_divergence_is_the_kl_of_the_outcomes():
    reference, outcome = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.0, 0.5], [2.0, 0.0, -1.0]])
    p, q = reference.double().softmax(-1), outcome.double().softmax(-1)
    want = (p * (p / q).log()).sum(-1)
    got = divergence(log_distribution(reference)[0], log_distribution(outcome), "answer_mean")
    torch.testing.assert_close(got, want)
    assert got[1] == 0


def test_small_divergences_survive():
    """KL of two distributions that differ by 1e-4 is 1e-9 or so: below float32's rounding of the terms."""
    torch.manual_seed(0)
    logits = torch.randn(5000, dtype=torch.float64)
    moved = logits + 1e-4 * torch.randn(5000, dtype=torch.float64)
    p, q = logits.softmax(-1), moved.softmax(-1)
    want = (p * (p / q).log()).sum()
    got = divergence(log_distribution(logits), log_distribution(moved[None]), "last")[0]
    assert got == pytest.approx(want.item(), rel=1e-6)


def test_banned_tokens_count_nothing():
    reference, outcome = torch.tensor([1.0, 0.0, -math.inf]), torch.tensor([[0.0, 0.0, -math.inf]])
    got = divergence(log_distribution(reference), log_distribution(outcome), "answer_mean")
    want = divergence(log_distribution(reference[:2]), log_distribution(outcome[:, :2]), "answer_mean")
    torch.testing.assert_close(got, want)


def test_joint_is_the_drop_of_the_scalar_with_its_sign():
    assert divergence(torch.tensor(-1.0), torch.tensor([-3.0, -0.5]), "answer_joint").tolist() == [2.0, -0.5]
