import torch

from oar_plugin.credit.importance import OarG, Rows
from oar_plugin.credit.importance.oar_g import joint_coefficients, kl_coefficients


def test_joint_coefficients_are_the_derivative_of_the_negative_log_probability():
    token = torch.tensor([3, 0, 6])
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    (-logits.log_softmax(-1).gather(-1, token[:, None]).sum()).backward()
    torch.testing.assert_close(joint_coefficients(logits.detach(), token), logits.grad)


def test_kl_coefficients_are_the_derivative_of_the_kl():
    clean = torch.randn(2, 9, dtype=torch.float64)
    noisy = (clean + 0.1 * torch.randn_like(clean)).requires_grad_(True)
    p = clean.log_softmax(-1)
    (p.exp() * (p - noisy.log_softmax(-1))).sum().backward()
    torch.testing.assert_close(kl_coefficients(clean, noisy.detach()), noisy.grad)


def test_sigma_is_divided_by_and_multiplied_back():
    """What travels through half precision is of the size of a gradient, not of the noise."""
    clean, noisy, token = torch.randn(2, 9), torch.randn(2, 9), torch.tensor([1, 2])
    pooled = Rows(noisy, None, torch.arange(2), clean_NV=clean, sigma=1e-2)
    torch.testing.assert_close(OarG().coefficients(0, pooled), kl_coefficients(clean, noisy) / 1e-2)
    single = Rows(noisy, token, torch.arange(2), sigma=1e-2)
    torch.testing.assert_close(OarG().coefficients(0, single), joint_coefficients(noisy, token) / 1e-2)
