"""`oar bench fidelity` as one HTML file: the tables, the plots, and responses shaded by each estimator's weights."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.fidelity.estimators import REFERENCE
from benchmarks.fidelity.measure import Example
from benchmarks.fidelity.report import Grid, Summary, grids, notes, shown_estimators, verdicts
from benchmarks.machine import machine_line
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import bi_level
from oar_plugin.page.tokens import page, shaded

LEAD = (
    "How well each estimator of importance agrees with exact OAR-P, which replaces every token and looks what happens to the "
    "model's answer, and where it is known with the tokens that decide the answer. At the end are responses as each estimator "
    "weights them. Point at a token for its numbers."
)

_STYLE = """<style>
table { border-collapse: collapse; font-size: 13px; background: #fff; margin: 6px 0 14px; }
td, th { border: 1px solid #d9dee3; padding: 2px 8px; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; white-space: nowrap; } img { max-width: 100%; }
.who { font-size: 12px; color: #4a545e; } article .tokens { margin: 0 0 6px; line-height: 1.7; }
</style>"""


def html(summary: Summary, plot: Path | None, command: str) -> str:
    """The page.

    Args:
        summary: of the run.
        plot: a PNG file to inline.
        command: that made it.
    """
    sections = [_STYLE, f"<p><code>{escape(command)}</code><br>{escape(machine_line(summary.result.machine))}</p>"]
    sections.append(_items(verdicts(summary)))
    if plot is not None:
        data = base64.b64encode(plot.read_bytes()).decode()
        sections.append(f'<img alt="overlap against cost, and deletion curves" src="data:image/png;base64,{data}">')
    sections += [_table(grid) for grid in grids(summary)]
    sections += ["<h2>How to read this</h2>", _items(notes(summary)), "<h2>Responses</h2>"]
    names = shown_estimators(summary)
    sections += [_example(example, names) for example in summary.result.examples]
    return page("Fidelity of importance estimators", LEAD, "".join(sections))


def _items(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in grid.head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in grid.cells)
    return f"<h2>{escape(grid.title)}</h2><table><tr>{head}</tr>{body}</table>"


def _example(example: Example, names: list[str]) -> str:
    response = example.response
    begin = response.prompt_length
    tokens = response.texts[begin:]
    segments = response.segments_T[begin:].tolist()
    verdict = {True: "right answer", False: "wrong answer", None: ""}[response.correct]
    prompt = "".join(response.texts[:begin])
    rows = [f'<p class="who">{escape(example.task)} {verdict}: {escape(prompt[-400:])}</p>']
    if response.causal_T is not None:
        causal = response.causal_T[begin:].double()
        rows.append(_line("known to be causal", tokens, 1 + 3 * causal, causal, segments))
    for name in names:
        importance = torch.zeros(len(tokens), dtype=torch.float64)
        importance[response.reasoning_R - begin] = example.scores[name]
        reasoning = response.segments_T[None, begin:] == Segment.REASONING
        # Scores of different estimators have different units: shown on exact OAR-P's scale they pass the gate alike.
        scale = example.scores[REFERENCE].sum() / importance.sum().clamp_min(1e-30)
        weights = bi_level((importance * scale).clamp_min(0.0)[None], reasoning)[0]
        rows.append(_line(name, tokens, weights, importance, segments))
    return f"<article>{''.join(rows)}</article>"


def _line(name: str, tokens: tuple[str, ...], weights: Tensor, importance: Tensor, segments: list[int]) -> str:
    return f'<span class="who">{escape(name)}</span>{shaded(tokens, weights.tolist(), importance.tolist(), segments)}'
