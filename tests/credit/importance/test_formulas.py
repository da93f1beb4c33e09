"""Each importance's own formulas, against closed forms and plain autograd."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oar_plugin.credit.importance import Fisher, OarG, Onward, Parts, Rows
from oar_plugin.credit.importance.fisher import fisher_coefficients
from oar_plugin.credit.importance.oar_g import joint_coefficients, kl_coefficients
from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.importance.onward import NOISE, SURE, TEMPERATURE, row_weights

# ---- fisher


def test_fisher_coefficients_are_a_root_of_the_fisher_matrix_and_the_expected_score_is_a_trace():
    """Over the signs: E[c c^T] = F = diag(p) - p p^T, and E[score] = tr(W^T F W) for the logits W e of an embedding e."""
    logits, weight_VH = torch.randn(1, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    p_V = logits.softmax(-1)[0]
    fisher_VV = torch.diag(p_V) - p_V[:, None] * p_V
    every_sign = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 6)
    c_NV = torch.cat([fisher_coefficients(logits, sign_V[None]) for sign_V in every_sign])
    torch.testing.assert_close(c_NV.T @ c_NV / 64, fisher_VV)
    score_N = Fisher().score(c_NV @ weight_VH, torch.zeros(64, 5)).double()
    torch.testing.assert_close(score_N.mean(), (weight_VH.T @ fisher_VV @ weight_VH).trace(), rtol=1e-4, atol=0)


# ---- oar_g


def test_oar_g_coefficients_are_derivatives():
    """Of the negative log-probability and of the KL. Sigma is divided by here and multiplied back by the score: what travels
    through half precision is of the size of a gradient, not of the noise."""
    token, clean = torch.tensor([3, 0]), torch.randn(2, 9, dtype=torch.float64)
    noisy = (clean + 0.1 * torch.randn_like(clean)).requires_grad_(True)
    log_p, log_q = clean.log_softmax(-1), noisy.log_softmax(-1)
    (joint,) = torch.autograd.grad(-log_q.gather(-1, token[:, None]).sum(), noisy, retain_graph=True)
    (kl,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), noisy)
    noisy = noisy.detach()
    torch.testing.assert_close(joint_coefficients(noisy, token), joint)
    torch.testing.assert_close(kl_coefficients(clean, noisy), kl)
    pooled = Rows(noisy, None, torch.arange(2), clean_NV=clean, sigma=1e-2)
    torch.testing.assert_close(OarG().coefficients(0, pooled), kl / 1e-2)
    torch.testing.assert_close(OarG().coefficients(0, Rows(noisy, token, torch.arange(2), sigma=1e-2)), joint / 1e-2)


# ---- oar_p


def test_divergence_is_the_kl_however_small_and_for_joint_the_drop_with_its_sign():
    """KL of two distributions that differ by 1e-4 is 1e-9 or so: below float32's rounding of the terms."""
    torch.manual_seed(0)
    logits, noise = torch.randn(2, 5000, dtype=torch.float64)
    outcomes = logits + torch.tensor([[1.0], [1e-4], [0.0]]) * noise
    p, q = logits.softmax(-1), outcomes.softmax(-1)
    got = divergence(log_distribution(logits), log_distribution(outcomes), "answer_mean")
    assert got.tolist() == pytest.approx((p * (p / q).log()).sum(-1).tolist(), rel=1e-6, abs=0)
    assert got[2] == 0
    assert divergence(torch.tensor(-1.0), torch.tensor([-3.0, -0.5]), "answer_joint").tolist() == [2.0, -0.5]


def test_banned_tokens_count_nothing():
    reference, outcome = torch.tensor([1.0, 0.0, -math.inf]), torch.tensor([[0.0, 0.0, -math.inf]])
    got = divergence(log_distribution(reference), log_distribution(outcome), "answer_mean")
    want = divergence(log_distribution(reference[:2]), log_distribution(outcome[:, :2]), "answer_mean")
    torch.testing.assert_close(got, want)


# ---- onward

KEEP = torch.tensor([[False, True, True, True, False]])
NOTHING, ONES = torch.zeros(1, 5), torch.ones(1, 5)
values = st.lists(st.floats(0, 1e6, width=32), min_size=5, max_size=5).map(lambda v: torch.tensor([v]))


def onward(answer_BL, reasoning_BL, entropy_BL, keep_BL=KEEP):
    parts = Parts(torch.stack([answer_BL, reasoning_BL]), keep_BL, entropy_BL, NOTHING, NOTHING.long())
    return Onward().combine(parts)


@given(values, values, values, st.sampled_from([2.0**-8, 4.0, 2.0**10]))
def test_range_and_places_and_that_the_scale_of_either_part_means_nothing(answer_BL, reasoning_BL, entropy_BL, factor):
    got = onward(answer_BL, reasoning_BL, entropy_BL)
    assert ((got >= 0) & (got <= 1)).all()
    assert (got[~KEEP] == 0).all()
    answer_BL, reasoning_BL = answer_BL + 1e-3, reasoning_BL + 1e-3
    got = onward(answer_BL, reasoning_BL, entropy_BL)
    torch.testing.assert_close(onward(answer_BL * factor, reasoning_BL, entropy_BL), got)
    torch.testing.assert_close(onward(answer_BL, reasoning_BL * factor, entropy_BL), got)


def test_onward_by_hand():
    """An early result that only what follows reads, filler with an eighth of its influence, and the last result."""
    answer_BL, reasoning_BL = torch.tensor([[9.0, 0.0, 0.0, 2.0, 9.0]]), torch.tensor([[9.0, 4.0, 0.5, 0.0, 9.0]])
    decision = (1 - math.exp(-1 / SURE)) * math.exp(-1 / NOISE)  # at an entropy of 1
    want = decision * torch.tensor([[0.0, 1.0, 0.5, 1.0, 0.0]])
    torch.testing.assert_close(onward(answer_BL, reasoning_BL, ONES), want)
    # Neither a copy nor noise was a decision.
    got = onward(ONES, ONES, torch.tensor([[0.0, 0.0, 0.6, 12.0, 0.0]]))[0]
    assert got[1] == 0
    assert got[3] < 0.01 < 0.5 < got[2]
    # Without reasoning or influence.
    assert (onward(NOTHING, NOTHING, ONES) == 0).all()
    assert (onward(ONES, ONES, ONES, KEEP & False) == 0).all()


def test_rows_of_filler_hardly_count_and_flattening_gives_a_sure_prediction_a_voice():
    """The Fisher information of a near-certain row is near zero; flattened it is not."""
    weights = row_weights(torch.tensor([0.0, 3.0, 0.5, -math.log(9.0) / 2]))
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(-6), math.exp(-1), 9.0]))
    logits_NV, entropy_N = torch.tensor([[12.0, 0.0, 0.0, 0.0]]), torch.tensor([-math.log(9.0) / 2])
    rows = Rows(logits_NV, torch.zeros(1).long(), torch.arange(1), entropy_N)
    flat = Onward().coefficients(0, rows)
    assert torch.equal(flat, fisher_coefficients(logits_NV / TEMPERATURE, rows.signs()))
    assert flat.norm() > 10 * fisher_coefficients(logits_NV, rows.signs()).norm()
    assert flat.sum().item() == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(Onward().coefficients(1, rows), 3 * flat)
