"""The study's plot, and responses shaded by what each estimator says, as one HTML file."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from markupsafe import Markup
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.fidelity.estimators import REFERENCE
from benchmarks.fidelity.responses import Response
from benchmarks.fidelity.scores import DELETED
from benchmarks.fidelity.tables import GOALS, Findings
from benchmarks.report import COLOURS, subplots
from benchmarks.tiny.words import EVERY, text
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import bi_level

LEAD = (
    "Responses as each estimator of importance weights them. Exact OAR-P replaces every token and looks what happens to the "
    "model's answer; the scores of all are put on its scale and go through the paper's gate (bi_level). Point at a token for "
    "its numbers."
)


def shade(weight: float) -> str:
    """CSS colour of a weight: blue below 1, white at 1, orange above; on a log scale, full at 0.25 and at 4."""
    amount = max(-1.0, min(1.0, math.log(max(weight, 1e-6), 4)))
    # Told apart with every common form of colour-blindness.
    target = (224, 122, 31) if amount > 0 else (96, 158, 230)
    r, g, b = (round(255 + (channel - 255) * abs(amount) * 0.85) for channel in target)
    return f"#{r:02x}{g:02x}{b:02x}"


def draw(findings: Findings) -> Figure:
    """Overlap against cost, and deletion curves."""
    figure, (cost, curve) = subplots(1, 2, figsize=(12, 5))
    for overlap, passes, _ in GOALS:
        cost.plot([0.5, passes, passes], [overlap, overlap, 1.02], color=COLOURS[-1], ls="--", lw=1)
    added, best = findings.added, findings.shown(added=6)
    for name, row in findings.summary[findings.summary["passes"] > 0].drop(index=REFERENCE).iterrows():
        mean = row.overlap
        error = [[mean.value - mean.low], [mean.high - mean.value]]
        cost.errorbar(row.passes, mean.value, error, fmt="o", color=COLOURS[int(name in added)])
        if name not in added or name in best:
            cost.annotate(name, (row.passes, mean.value), xytext=(4, 3), textcoords="offset points", fontsize=7)
    cost.set(xscale="log", xlabel="passes, forward and backward", ylabel="overlap of the top 20 % with exact OAR-P")
    cost.set_title("dashed: goals; orange: given with --also, the best named", fontsize=9)
    drawn = findings.main[findings.main["curve"].notna()]
    names = findings.shown() if len(drawn) else []
    for name in names:
        models = drawn[drawn["estimator"] == name].groupby(["task", "model"])["curve"]
        points = np.mean([np.mean(list(curves), 0) for _, curves in models], 0)
        curve.plot([100 * share for share in DELETED], points, "o-", label=name, markersize=3)
    if names:
        curve.legend(frameon=False, fontsize=8)
    xlabel = "% of the reasoning tokens replaced, largest scores first"
    curve.set(xlabel=xlabel, ylabel="answer's probability, untouched = 1")
    return figure


def page_of(findings: Findings) -> str:
    """The HTML file, which docs/shaded_tokens.py reads."""
    articles = [_article(*example, findings.shown()) for example in findings.examples]
    return str(_HTML.page("Fidelity of importance estimators", LEAD, Markup("".join(articles))))  # noqa: S704  made by the templates


def _article(task: str, response: Response, scores: Mapping[str, Tensor], names: Sequence[str]) -> str:
    own_T = response.segments_T != Segment.OUTSIDE
    segments_L, token_L = response.segments_T[own_T], response.token_T[own_T]
    reasoning_L = segments_L == Segment.REASONING
    words = [EVERY[token] for token in token_L]

    def line(name: str, weight_L: Tensor, importance_L: Tensor) -> str:
        tokens = _HTML.shaded(zip(words, weight_L.tolist(), importance_L.tolist(), segments_L.tolist(), strict=True))
        return f'<span class="who">{escape(name)}</span>{tokens}'

    causal_L = response.causal_T[own_T].double()
    lines = [line("known to be causal", 1 + 3 * causal_L, causal_L)]
    for name in names:
        importance_L = torch.zeros(len(token_L), dtype=torch.float64).masked_scatter(reasoning_L, scores[name])
        on_scale_L = (importance_L * scores[REFERENCE].sum() / scores[name].sum().clamp_min(1e-30)).clamp_min(0.0)
        lines.append(line(name, bi_level(on_scale_L[None], reasoning_L[None])[0], importance_L))
    chip = f"{escape(task)}, {'right' if response.right else 'wrong'} answer"
    prompt = escape(text(response.token_T[~own_T].tolist()))
    return f'<article><header><span class="chip">{chip}</span></header><pre>{prompt}</pre>{"".join(lines)}</article>'


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_NAMES = {segment.value: segment.name.lower() for segment in Segment}
_ENVIRONMENT.globals |= {"Segment": Segment, "NAMES": _NAMES, "shade": shade}
_HTML: Any = _ENVIRONMENT.get_template("pictures.html.j2").module
