"""The default gate and the paper's on scores with edges: `python -m benchmarks.gate_edges` prints the page."""

import torch
from torch import Tensor

from benchmarks.fidelity.scores import causal_recall
from benchmarks.report import Table
from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import effective_sample_size
from oar_plugin.credit.gate import GATES

DRAWS = 64

TEXT = """\
# The gate at its edges

`python -m benchmarks.gate_edges` prints this page: {draws} responses a case with drawn scores, log-normal, ten times as large
for a tenth of the tokens, which count as causal. The default gate is `{default}`, with tau {tau}; `bi_level`, the paper's, has
tau {paper_tau} unless said; beta 2, floor 0.1.

- One outlier takes the min-max scale of `bi_level` with it. Its own weight stays bounded, but the mean weight of the causal
  tokens falls from {typical[2]} to {outlier[bi_level][2]}: nearly even credit. With `two_level` it is {outlier[two_level][2]}.
- Where most scores are exactly zero, the tau-quantile of `bi_level` is zero and its floor never acts: with 70 % zeros the
  effective sample size (ESS) stays {zeros[0]} of all tokens.
- `bi_level` stretches scores that differ by one part in 10^7 like any others: there is no scale below which a response counts
  as flat. An estimator whose scores are rounding noise gives weights that are rounding noise. `oar/fallback/constant` catches
  exact equality alone.
- With tau 1 `bi_level` puts up to {one[1]} times the mean on one token; with tau 0 its floor never acts.
- Recall hardly differs between gates that keep the order of the scores. Among the equal weights of `two_level` chance decides.

Weights that are finite and positive, keep the mass and keep the order are tested (`tests/credit/test_gate.py`). No gate
was seen to learn better: [studies](../../docs/evidence/studies.md).
"""


def scores(length: int) -> tuple[Tensor, Tensor]:
    """Importance `[DRAWS, length]` and which tokens are causal."""
    generator = torch.Generator().manual_seed(length)
    causal = torch.zeros(DRAWS, length, dtype=torch.bool)
    causal[:, :: max(2, min(10, length))] = True
    return 0.01 * torch.randn(DRAWS, length, generator=generator).exp() * torch.where(causal, 10.0, 1.0), causal


def cases() -> dict[str, tuple[Tensor, Tensor, float | None]]:
    """Importance, causal tokens and tau (None: the gate's own), by name."""
    typical, causal = scores(100)
    outlier = typical.index_fill(1, torch.tensor([5]), 100.0)
    ties = torch.where(typical < typical.quantile(0.7, -1, keepdim=True), 0.0, typical)
    found: dict[str, tuple[Tensor, Tensor, float | None]] = {"typical, 100 tokens": (typical, causal, None)}
    found |= {"one outlier, x 10000": (outlier, causal, None)}
    found |= {"tau 0": (typical, causal, 0.0), "tau 1": (typical, causal, 1.0), "70 % are zero": (ties, causal, None)}
    found |= {"nearly constant": (1.0 + 1e-6 * typical, causal, None), "scores of 1e-8": (typical * 1e-6, causal, None)}
    return found | {f"{length} tokens": (*scores(length), None) for length in (1, 2, 3, 8192)}


def main() -> None:
    gates = {name: (GATES[name].weights, GATES[name].tau) for name in ("two_level", "bi_level")}
    found: dict[str, dict[str, list[str]]] = {}
    for case, (importance, causal, tau) in cases().items():
        keep = torch.ones_like(causal)
        found[case] = {}
        for name, (weights, own_tau) in gates.items():
            weight = weights(importance, keep, own_tau if tau is None else tau, 2.0, 0.1)
            figures = [effective_sample_size(weight, keep).mean(), weight.max(), weight[causal].mean()]
            figures += [weight[~causal].mean(), causal_recall(weight, keep, causal).mean()]
            found[case][name] = [f"{figure:.2f}" for figure in figures]
    facts = {
        "draws": DRAWS,
        "default": OarConfig().gate,
        "tau": GATES["two_level"].tau,
        "paper_tau": GATES["bi_level"].tau,
    }
    facts |= {"typical": found["typical, 100 tokens"]["bi_level"], "outlier": found["one outlier, x 10000"]}
    facts |= {"zeros": found["70 % are zero"]["bi_level"], "one": found["tau 1"]["bi_level"]}
    columns = ("scores", "gate", "ESS ratio", "largest weight", "mean weight, causal", "others", "recall")
    rows = [(case, name, *figures) for case, of_case in found.items() for name, figures in of_case.items()]
    print(TEXT.format(**facts), *Table("Every case", columns, rows).markdown()[:-1], sep="\n")


if __name__ == "__main__":
    main()
