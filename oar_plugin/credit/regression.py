"""Numbers per token that are predicted from hidden states, by a ridge regression that is fitted anew in each step.

A regression keeps the sums `X^T X` and `X^T y` of the tokens that it has seen. Those of earlier steps count less and less, so
that it follows a policy that changes. Sums over ranks are the sums of one process, up to rounding.

Shape suffixes: N tokens, H hidden size, P columns of a projected hidden state, F features.
"""

import functools

import torch
from torch import Tensor

from oar_plugin.credit.noise import signs

COLUMNS = 256  # of a projected hidden state
DECAY = 0.95  # the sums of earlier steps count this much in each step
FEATURES = 2 * COLUMNS + 4  # columns of `token_features`


def projected(hidden_NH: Tensor) -> Tensor:
    """Hidden states, scaled to one length, times a fixed matrix of random signs, float32 `[N, P]`, about 1 in size."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        scaled_NH = torch.nn.functional.normalize(hidden_NH.float(), dim=-1)
        return scaled_NH @ _projection(hidden_NH.shape[-1], hidden_NH.device)


@functools.cache
def _projection(size: int, device: torch.device) -> Tensor:
    """Signs, float32 `[H, P]`: hashes, so the same on every rank."""
    return signs(torch.arange(size), 0, COLUMNS).to(device)


def token_features(own_NP: Tensor, before_NP: Tensor, doubt_N: Tensor, position_N: Tensor) -> Tensor:
    """Features `[N, F]` of tokens: hidden states of the token and of the one before it, doubt (1 - probability), and position.

    `position_N` is -1 at the first reasoning token and 1 at the last one.
    """
    one_N = torch.ones_like(doubt_N)
    return torch.cat([own_NP, before_NP, torch.stack([doubt_N, position_N, position_N.square(), one_N], -1)], -1)


def _wide(device: torch.device) -> torch.dtype:
    """The type that sums are made in: float64 where a device has it."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


class Regression:
    """Ridge regression on F features. `tokens`: the number of tokens in its sums, where earlier ones count less.

    `add` collects the sums of this rank and step. `end_step` ends the step: it takes the sums over all ranks, and fits.
    """

    def __init__(self, features: int, ridge: float) -> None:
        self.ridge, self.tokens = ridge, 0.0
        # X^T X beside X^T y
        self._sums, self._step = torch.zeros(features, features + 1, dtype=torch.float64), torch.zeros(())
        self._coefficient_F = torch.zeros(features)

    def predict(self, feature_NF: Tensor) -> Tensor:
        """float32 `[N]`, as the last `end_step` left it; 0 before the first."""
        with torch.autocast(feature_NF.device.type, enabled=False):
            return feature_NF @ self._coefficient_F.to(feature_NF)

    def add(self, feature_NF: Tensor, target_N: Tensor) -> None:
        """Tokens of this step. Those with a number that is not finite are left out."""
        wide = torch.cat([feature_NF, target_N[:, None].to(feature_NF)], -1).to(_wide(feature_NF.device))
        wide = wide.where(wide.isfinite().all(-1, keepdim=True), 0.0)
        sums = wide[:, :-1].T @ wide
        self._step = self._step.to(sums) + sums

    def step_sums(self, device: torch.device) -> Tensor:
        """The sums of this rank and step, to be summed over ranks."""
        return self._step.to(device, _wide(device)).expand(self._sums.shape).contiguous()

    def end_step(self, sums: Tensor) -> None:
        """Ends a step with `step_sums`, summed over all ranks that share no rows. Without tokens nothing changes."""
        self._step, sums = torch.zeros(()), sums.cpu().double()
        count = sums[-1, -2].item()  # the last feature is 1
        if not count:
            return
        self._sums, self.tokens = DECAY * self._sums + sums, DECAY * self.tokens + count
        gram_FF, moment_F = self._sums[:, :-1], self._sums[:, -1]
        eye_FF = torch.eye(len(gram_FF), dtype=torch.float64)
        self._coefficient_F = torch.linalg.solve(gram_FF + self.ridge * eye_FF, moment_F).float()
