"""The study's plot, and responses shaded by what each estimator says, as one HTML file."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import torch
from markupsafe import Markup
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.fidelity.estimators import REFERENCE
from benchmarks.fidelity.responses import Response
from benchmarks.fidelity.tables import Findings
from benchmarks.report import COLOURS, subplots
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import bi_level

LEAD = (
    "Responses as each estimator of importance weights them. Exact OAR-P replaces every token and measures how the "
    "model's answer changes; the scores of all are put on its scale and go through the paper's gate (bi_level). Point at a "
    "token for its numbers."
)


def shade(weight: float) -> str:
    """CSS colour of a weight: blue below 1, white at 1, orange above; on a log scale, full at 0.25 and at 4."""
    amount = max(-1.0, min(1.0, math.log(max(weight, 1e-6), 4)))
    # Told apart with every common form of colour-blindness.
    target = (224, 122, 31) if amount > 0 else (96, 158, 230)
    r, g, b = (round(255 + (channel - 255) * abs(amount) * 0.85) for channel in target)
    return f"#{r:02x}{g:02x}{b:02x}"


def draw(findings: Findings) -> Figure:
    """Overlap beside cost, a row an estimator, the best above. Those that were added have another colour."""
    rows = findings.summary.drop(index=REFERENCE)[::-1]
    figure, (overlap, cost) = subplots(1, 2, figsize=(8, 0.6 + 0.24 * len(rows)), sharey=True)
    for place, (name, row) in enumerate(rows.iterrows()):
        colour, mean = COLOURS[name in findings.added], row.overlap
        overlap.errorbar(
            mean.value, place, None, [[mean.value - mean.low], [mean.high - mean.value]], "o", color=colour
        )
        cost.bar_label(cost.barh(place, row.passes, color=colour), fmt="%.1f", padding=3, fontsize=8)
    overlap.set(yticks=range(len(rows)), yticklabels=rows.index, xlabel="overlap with exact OAR-P, top 20 %")
    cost.set(xlabel=f"passes (exact OAR-P: {findings.summary.passes[REFERENCE]:.1f})")
    return figure


def page_of(findings: Findings) -> str:
    """The HTML file."""
    rows = findings.examples()
    articles = [_article(row["task"], row["response"], row["scores"], findings.shown()) for row in rows]
    return str(_HTML.page("Fidelity of importance estimators", LEAD, Markup("".join(articles))))  # noqa: S704  made by the templates


def _article(task: str, response: Response, scores: Mapping[str, Tensor], names: Sequence[str]) -> str:
    own_T = response.segments_T != Segment.OUTSIDE
    segments_L = response.segments_T[own_T]
    reasoning_L = segments_L == Segment.REASONING

    def line(name: str, weight_L: Tensor, importance_L: Tensor) -> str:
        tokens = _HTML.shaded(
            zip(response.words, weight_L.tolist(), importance_L.tolist(), segments_L.tolist(), strict=True)
        )
        return f'<span class="who">{escape(name)}</span>{tokens}'

    causal_L = response.causal_T[own_T].double()
    lines = [line("known to be causal", 1 + 3 * causal_L, causal_L)] if causal_L.any() else []
    for name in names:
        importance_L = torch.zeros(len(segments_L), dtype=torch.float64).masked_scatter(reasoning_L, scores[name])
        on_scale_L = (importance_L * scores[REFERENCE].sum() / scores[name].sum().clamp_min(1e-30)).clamp_min(0.0)
        lines.append(line(name, bi_level(on_scale_L[None], reasoning_L[None])[0], importance_L))
    chip = f"{escape(task)}, {'right' if response.right else 'wrong'} answer"
    asked = f"<pre>{escape(response.question)}</pre>"
    return f'<article><header><span class="chip">{chip}</span></header>{asked}{"".join(lines)}</article>'


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
