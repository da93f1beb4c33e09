"""Numbers per token that are predicted from hidden states, by a ridge regression that is fitted anew in each step.

A regression keeps the sums `X^T X` and `X^T y` of the labels that it has seen. Earlier ones count less and less, so that it
follows a policy that changes. Sums over ranks are the sums of one process, up to rounding.

Shape suffixes: N tokens, U labels, H hidden size, P columns of a projected hidden state, F features.
"""

import functools
import math

import torch
from torch import Tensor

from oar_plugin.credit.noise import signs

COLUMNS = 256  # of a projected hidden state
SURFACE = 4  # the last columns of `token_features`, without hidden states
FEATURES = 2 * COLUMNS + SURFACE  # columns of `token_features`
REMEMBERED = 2560, 128  # newer labels or newer responses, whichever takes longer, after which a label counts 1/e


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


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type that sums are made in: float64 where a device has it."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


class Regression:
    """Ridge regression on F features, and to compare one on the last `SURFACE` of them, which need hardly any ridge.

    `labels` and `responses` are the numbers of those in its sums, where earlier ones count less.
    """

    def __init__(self, features: int, ridge: float) -> None:
        self.ridge, self.labels, self.responses = ridge, 0.0, 0.0
        self._sums = torch.zeros(features, features + 1, dtype=torch.float64)  # X^T X beside X^T y
        self._coefficient_F2 = torch.zeros(features, 2)

    def predict(self, feature_NF: Tensor) -> Tensor:
        """float32 `[N, 2]`, of both regressions, as the last `end_step` left them; 0 before the first."""
        with torch.autocast(feature_NF.device.type, enabled=False):
            return feature_NF @ self._coefficient_F2.to(feature_NF)

    @staticmethod
    def sums(feature_UF: Tensor, target_U: Tensor) -> Tensor:
        """The sums of some labels, `[F, F + 1]`."""
        wide_UF = feature_UF.to(sum_dtype(feature_UF.device))
        with torch.autocast(wide_UF.device.type, enabled=False):
            return wide_UF.T @ torch.cat([wide_UF, target_U[:, None].to(wide_UF)], -1)

    def end_step(self, sums: Tensor, labels: float, responses: float) -> float:
        """Ends a step with the `sums` of its labels on all ranks, and fits. Returns how much earlier labels still count."""
        kept = math.exp(-min(labels / REMEMBERED[0], responses / REMEMBERED[1]))
        self._sums = kept * self._sums + sums.cpu().double()
        self.labels, self.responses = kept * self.labels + labels, kept * self.responses + responses
        for column, (used, ridge) in enumerate(((slice(None), self.ridge), (slice(-SURFACE, None), 1.0))):
            gram_ff, moment_f = self._sums[used, :-1][:, used], self._sums[used, -1]
            ridge_ff = ridge * torch.eye(len(gram_ff), dtype=torch.float64)
            self._coefficient_F2[used, column] = torch.linalg.solve(gram_ff + ridge_ff, moment_f).float()
        return kept
