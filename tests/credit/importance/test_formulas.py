"""Each importance's own formulas, against closed forms and plain autograd."""

import math

import pytest
import torch

from oar_plugin.credit.importance import Rows
from oar_plugin.credit.importance.fisher import Fisher, fisher_coefficients
from oar_plugin.credit.importance.grail import Grail
from oar_plugin.credit.importance.oar_g import OarG, joint_coefficients, kl_coefficients
from oar_plugin.credit.importance.oar_p import divergence, log_distribution

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
    """Derivatives of the negative log-probability and of the KL, divided by sigma: half precision then holds numbers of the
    size of a gradient, not of the noise."""
    token, clean = torch.tensor([3, 0]), torch.randn(2, 9, dtype=torch.float64)
    noisy = (clean + 0.1 * torch.randn_like(clean)).requires_grad_(True)
    log_p, log_q = clean.log_softmax(-1), noisy.log_softmax(-1)
    (joint,) = torch.autograd.grad(-log_q.gather(-1, token[:, None]).sum(), noisy, retain_graph=True)
    (kl,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), noisy)
    noisy = noisy.detach()
    torch.testing.assert_close(joint_coefficients(noisy, token), joint)
    torch.testing.assert_close(kl_coefficients(clean, noisy), kl)
    half = noisy.bfloat16()
    assert torch.equal(joint_coefficients(half, token), joint_coefficients(half.float(), token))
    pooled = Rows(noisy, None, torch.arange(2), clean_NV=clean, sigma=1e-2)
    torch.testing.assert_close(OarG().coefficients(0, pooled), kl / 1e-2)
    torch.testing.assert_close(OarG().coefficients(0, Rows(noisy, token, torch.arange(2), sigma=1e-2)), joint / 1e-2)


# ---- grail


def test_grail_is_the_norm_of_gradient_times_input_of_the_answers_log_probability():
    """Of two answer tokens, whose logits depend on three embeddings; a sum of the products would cancel."""
    token, weight_TNVH = torch.tensor([3, 0]), torch.randn(3, 2, 6, 5, dtype=torch.float64)
    embedding_TH = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    logits_NV = torch.einsum("tnvh,th->nv", weight_TNVH, embedding_TH.tanh())
    (want_TH,) = torch.autograd.grad(-logits_NV.log_softmax(-1)[[0, 1], token].sum(), embedding_TH, retain_graph=True)
    rows = Rows(logits_NV.detach(), token, torch.arange(2))
    (got_TH,) = torch.autograd.grad((Grail().coefficients(0, rows) * logits_NV).sum(), embedding_TH)
    torch.testing.assert_close(got_TH, want_TH)
    want_T = (want_TH * embedding_TH).square().sum(-1).sqrt().float()
    torch.testing.assert_close(Grail().score(got_TH, embedding_TH), want_T)
    assert Grail().score(torch.tensor([3.0, -4.0]), torch.ones(2)) == 5


# ---- oar_p


def test_divergence_is_the_kl_however_small_and_for_joint_the_drop_with_its_sign():
    """The KL of two distributions that differ by 1e-4 is about 1e-9, less than the float32 rounding of its terms."""
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
