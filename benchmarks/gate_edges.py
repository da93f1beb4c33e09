"""The published gate beside variants of it, on scores with edges: `python benchmarks/gate_edges.py`.

Scores are drawn: log-normal for most tokens, ten times as large for a tenth of them, the causal ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from oar_plugin.credit.diagnostics import causal_recall, effective_sample_size
from oar_plugin.credit.gate import bounded, gate

DRAWS = 64


def ranked(importance_BL: Tensor, keep_BL: Tensor, tau: float) -> Tensor:
    """The gate on ranks: `s` is the share of tokens below, equal scores share theirs."""
    sorted_BL = importance_BL.sort(-1).values
    below, level = (torch.searchsorted(sorted_BL, importance_BL, right=right) for right in (False, True))
    share_BL = (below + level - 1).double() / 2 / importance_BL.shape[1]
    return gate(share_BL.expm1(), keep_BL, tau)  # the gate takes the logarithm


def winsorised(importance_BL: Tensor, keep_BL: Tensor, tau: float) -> Tensor:
    """The gate on scores cut at their 95 % quantile."""
    return gate(importance_BL.minimum(importance_BL.quantile(0.95, -1, keepdim=True)), keep_BL, tau)


def at_most_3(importance_BL: Tensor, keep_BL: Tensor, tau: float) -> Tensor:
    """The gate, no weight above 3: what is cut off is given to the others in proportion."""
    return bounded(gate(importance_BL, keep_BL, tau), keep_BL, 3.0)


GATES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "published": gate,
    "ranks": ranked,
    "winsorised": winsorised,
    "bounded": at_most_3,
}


def scores(length: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Importance `[DRAWS, length]` and which tokens are causal."""
    generator = torch.Generator().manual_seed(length)
    causal = torch.zeros(DRAWS, length, dtype=torch.bool)
    causal[:, :: max(2, min(10, length))] = True
    noise = torch.randn(DRAWS, length, generator=generator).exp()
    return scale * noise * torch.where(causal, 10.0, 1.0), causal


def cases() -> dict[str, tuple[Tensor, Tensor, float]]:
    """Importance, causal tokens and tau, by name."""
    typical, causal = scores(100, 0.01)
    outlier = typical.clone()
    outlier[:, 5] = 100.0
    ties = torch.where(typical < typical.quantile(0.7, -1, keepdim=True), 0.0, typical)
    flat = 1.0 + 1e-6 * typical
    small = typical * 1e-6
    found = {"typical, 100 tokens": (typical, causal, 0.4), "one outlier, x 10000": (outlier, causal, 0.4)}
    found |= {"tau 0": (typical, causal, 0.0), "tau 1": (typical, causal, 1.0), "70 % are zero": (ties, causal, 0.4)}
    found |= {"nearly constant": (flat, causal, 0.4), "scores of 1e-8": (small, causal, 0.4)}
    found |= {f"{length} tokens": (*scores(length, 0.01), 0.4) for length in (1, 2, 3, 8192)}
    return found


def main() -> None:
    """Print the tables."""
    print("| scores | gate | ESS ratio | largest weight | mean weight, causal | others | recall |")
    print("|---|---|---|---|---|---|---|")
    for case, (importance, causal, tau) in cases().items():
        keep = torch.ones_like(causal)
        for name, function in GATES.items():
            weight = function(importance, keep, tau)
            recalled = [float(x) for x in causal_recall(weight, keep, causal)]
            others = weight[~causal].mean() if (~causal).any() else torch.tensor(torch.nan)
            print(
                f"| {case} | {name} | {effective_sample_size(weight, keep).mean():.2f} | {weight.max():.2f} "
                f"| {weight[causal].mean():.2f} | {others:.2f} | {statistics.fmean(recalled):.2f} |"
            )


if __name__ == "__main__":
    main()
