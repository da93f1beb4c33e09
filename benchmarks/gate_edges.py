"""The published gate beside variants of it, on scores with edges: `python benchmarks/gate_edges.py`.

Scores are drawn: log-normal for most tokens, ten times as large for a tenth of them, the causal ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from candidates.learning.gates import bounded, ranked, winsorised
from torch import Tensor

from benchmarks.fidelity.scores import causal_recall
from oar_plugin.credit.diagnostics import effective_sample_size
from oar_plugin.credit.gate import bi_level

DRAWS = 64


GATES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "published": bi_level,
    "ranks": ranked,
    "winsorised": winsorised,
    "bounded": partial(bounded, largest=3.0),
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
