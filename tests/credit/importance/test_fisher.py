import torch

from oar_plugin.credit.importance import Fisher, Rows
from oar_plugin.credit.importance.fisher import fisher_coefficients


def test_coefficients_are_a_root_of_the_fisher_matrix():
    """E[c c^T] over the signs is diag(p) - p p^T."""
    logits = torch.randn(1, 6, dtype=torch.float64)
    p = logits.softmax(-1)[0]
    patterns = torch.tensor([[1.0 if (i >> b) & 1 else -1.0 for b in range(6)] for i in range(64)], dtype=torch.float64)
    c = torch.cat([fisher_coefficients(logits, u[None]) for u in patterns])
    torch.testing.assert_close(c.T @ c / 64, torch.diag(p) - p[:, None] * p[None])


def test_the_expected_score_is_the_trace_of_the_inputs_fisher_information():
    """Over many signs: tr(W^T F W) for logits W e, of an embedding e."""
    torch.manual_seed(0)
    weight_VH, embedding_H = torch.randn(7, 5), torch.randn(5)
    p_V = (weight_VH @ embedding_H).softmax(-1)
    want = (weight_VH.T @ (torch.diag(p_V) - p_V[:, None] * p_V) @ weight_VH).trace()
    rows = Rows((weight_VH @ embedding_H).expand(20_000, 7), None, torch.arange(20_000))
    gradient_NH = Fisher().coefficients(0, rows) @ weight_VH
    torch.testing.assert_close(
        Fisher().score(gradient_NH, embedding_H.expand(20_000, 5)).mean(), want, rtol=0.03, atol=0
    )
