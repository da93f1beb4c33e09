"""A page that shows responses with every token shaded by its OAR weight.

One self-contained HTML file: no script from elsewhere, no font, no request. Orange is above 1, blue below: told apart
with every common form of colour-blindness, and the weight itself is in the tooltip. A token's border tells its segment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

SEGMENTS = ("outside", "reasoning", "conclude", "answer", "after")
REASONING, CONCLUDE, ANSWER, AFTER = 1, 2, 3, 4

ABOVE, BELOW = (224, 122, 31), (96, 158, 230)
"""Colours of the largest and the smallest weight; weight 1 is white."""

STATUS_TEXT = {
    "scored": "weights applied",
    "not_needed": "advantage 0: no weight would change anything",
    "no_answer": "no answer found: plain GRPO",
    "truncated": "cut off at the length limit: plain GRPO",
    "no_reasoning": "nothing before the answer: plain GRPO",
    "non_finite": "importance not finite: plain GRPO",
    "constant": "all importances equal: plain GRPO",
    "not_scored": "not scored: plain GRPO",
}


@dataclass(frozen=True)
class TokenRow:
    """One response. ``tokens``, ``weights``, ``importance`` and ``segments`` are equally long.

    Attributes:
        prompt: the text before the response.
        tokens: the text of each token.
        weights: what each token's advantage was multiplied by.
        importance: how much each token moved the answer's distribution; 0 where not scored.
        segments: 0 outside, 1 reasoning, 2 conclude, 3 answer, 4 after.
        advantage: of the whole response, before reshaping.
        reward: of the whole response.
        status: what became of it, a key of ``STATUS_TEXT``.
        step: training step.
        uid: which response; shown as it is.
    """

    prompt: str
    tokens: Sequence[str]
    weights: Sequence[float]
    importance: Sequence[float]
    segments: Sequence[int]
    advantage: float
    reward: float
    status: str
    step: int = 0
    uid: str = ""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.weights), len(self.importance), len(self.segments)}
        if len(lengths) != 1:
            raise ValueError(f"response {self.uid!r}: tokens, weights, importance and segments differ in length")


def token_row(record: Mapping[str, Any]) -> TokenRow:
    """One line of what ``algorithm.oar.dump_dir`` holds. Its ``advantage`` may be one number, or one a token."""
    advantage = record["advantage"]
    if isinstance(advantage, Sequence):
        advantage = advantage[0] if len(advantage) else 0.0
    return TokenRow(
        prompt=record["prompt"],
        tokens=record["tokens"],
        weights=record["weights"],
        importance=record["importance"],
        segments=record["segments"],
        advantage=float(advantage),
        reward=float(record["reward"]),
        status=str(record["status"]).lower(),
        step=int(record["step"]),
        uid=str(record["uid"]),
    )


def shade(weight: float) -> str:
    """CSS colour of a weight: blue below 1, white at 1, orange above; on a log scale, full at 0.25 and at 4."""
    if not math.isfinite(weight):
        return "#ddd"
    amount = max(-1.0, min(1.0, math.log(max(weight, 1e-6)) / math.log(4.0)))
    target = ABOVE if amount > 0 else BELOW
    r, g, b = (round(255 + (channel - 255) * abs(amount) * 0.85) for channel in target)
    return f"#{r:02x}{g:02x}{b:02x}"


def tokens_page(rows: Sequence[TokenRow], title: str) -> str:
    """The page as one string. Rows appear by training step, in the order given within a step."""
    by_step: dict[int, list[TokenRow]] = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    sections = "".join(
        f"<section><h2>Step {step}</h2>{''.join(map(_card, by_step[step]))}</section>" for step in sorted(by_step)
    )
    lead = (
        f"{len(rows)} responses. OAR multiplies the advantage of a response, token by token, by a weight: large where the "
        "token moves the model's own final answer, small where it does not. The weights of a response average 1: nothing "
        "is added, only moved. Point at a token for its numbers."
    )
    return page(title, lead, sections or "<p>Nothing to show.</p>")


def page(title: str, lead: str, sections: str) -> str:
    """A whole page.

    Args:
        title: plain text.
        lead: plain text below it.
        sections: HTML.
    """
    return PAGE.format(title=escape(title), lead=escape(lead, quote=False), legend=_legend(), sections=sections)


def shaded(
    tokens: Sequence[str], weights: Sequence[float], importance: Sequence[float], segments: Sequence[int]
) -> str:
    """HTML of the tokens of a response, each shaded by its weight; the arguments are those of `TokenRow`."""
    parts = zip(tokens, weights, importance, segments, strict=True)
    return f'<p class="tokens">{"".join(_token(*part) for part in parts)}</p>'


def _card(row: TokenRow) -> str:
    sign = "up" if row.advantage > 0 else "down" if row.advantage < 0 else "flat"
    scored = [weight for weight, segment in zip(row.weights, row.segments, strict=True) if segment == REASONING]
    spread = f"weights {min(scored):.2f} to {max(scored):.2f}" if scored else "no reasoning tokens"
    return (
        f'<article><header><span class="chip {sign}">{ARROWS[sign]} advantage {row.advantage:+.2f}</span>'
        f'<span class="chip">reward {row.reward:g}</span><span class="chip">{spread}</span>'
        f'<span class="chip">{escape(STATUS_TEXT.get(row.status, row.status))}</span>'
        f'<span class="uid">{escape(row.uid)}</span></header>'
        f'<details class="prompt"><summary>{escape(_one_line(row.prompt))}</summary><pre>{escape(row.prompt)}</pre></details>'
        f"{shaded(row.tokens, row.weights, row.importance, row.segments)}</article>"
    )


ARROWS = {"up": "▲", "down": "▼", "flat": "●"}


def _token(text: str, weight: float, importance: float, segment: int) -> str:
    name = SEGMENTS[segment] if 0 <= segment < len(SEGMENTS) else str(segment)
    tip = f"{_visible(text)}\n{name}\nweight {weight:.3f}\n" + (
        f"importance {importance:.3g}" if segment == REASONING else "not scored: weight stays 1"
    )
    gap = " " if text.startswith(" ") and text.strip() else ""  # unshaded: lines then break between the boxes
    shown = escape(text[len(gap) :] if text.strip() else _visible(text))
    newline = "<br>" if "\n" in text else ""
    return (
        f'{gap}<span class="t s{segment}" style="background:{shade(weight)}" data-tip="{escape(tip)}">{shown}</span>'
        f"{newline}"
    )


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥") if text.strip() else text.replace("\n", "⏎").replace(" ", "␣")


def _one_line(text: str, limit: int = 140) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _legend() -> str:
    swatches: Iterable[float] = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
    scale = "".join(f'<span class="sw" style="background:{shade(weight)}">{weight:g}</span>' for weight in swatches)
    return (
        f'<div class="legend"><span>weight</span><span class="scale">{scale}</span>'
        '<span class="t s1" style="background:#fff">reasoning</span>'
        '<span class="t s2" style="background:#fff">conclude</span>'
        '<span class="t s3" style="background:#fff">answer</span>'
        '<span class="t s4" style="background:#fff">after</span></div>'
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; }}
body {{ margin: 0 auto; padding: 28px 24px 80px; max-width: 1040px; background: #f6f7f9; color: #1c2126;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 24px; margin: 0 0 6px; }}
h2 {{ font-size: 15px; margin: 30px 0 10px; color: #4a545e; text-transform: uppercase; letter-spacing: .06em; }}
.lead {{ margin: 0; max-width: 76ch; color: #37414a; }}
.legend {{ position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: 12px; align-items: center;
  margin: 18px -24px 0; padding: 10px 24px; background: #f6f7f9f2; border-bottom: 1px solid #d9dee3; font-size: 13px; }}
.scale {{ display: inline-flex; border: 1px solid #b9c1c9; border-radius: 4px; overflow: hidden; }}
.sw {{ padding: 2px 9px; font-variant-numeric: tabular-nums; }}
article {{ background: #fff; border: 1px solid #d9dee3; border-radius: 10px; padding: 12px 16px 10px; margin: 0 0 12px; }}
header {{ display: flex; flex-wrap: wrap; gap: 8px; align-items: center; font-size: 13px; }}
.chip {{ padding: 1px 9px; border: 1px solid #cdd4da; border-radius: 99px; white-space: nowrap; }}
.chip.up, .chip.down {{ font-weight: 600; border-color: #1c2126; }}
.uid {{ margin-left: auto; color: #6b7580; font-size: 11px; overflow: hidden;
  text-overflow: ellipsis; max-width: 220px; white-space: nowrap; }}
.prompt {{ margin: 8px 0 0; color: #55606a; font-size: 13px; }}
.prompt summary {{ cursor: pointer; font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
pre {{ white-space: pre-wrap; margin: 6px 0 0 14px; }}
.tokens {{ margin: 8px 0 2px; font: 15px/2.1 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }}
.t {{ white-space: pre-wrap; padding: 3px 1px; border-radius: 3px; border-bottom: 2px solid transparent;
  position: relative; cursor: default; }}
.legend .t {{ padding: 1px 4px; }}
.s2 {{ border-bottom: 2px dotted #1c2126; }}
.s3 {{ border-bottom: 3px double #1c2126; font-weight: 700; }}
.s4, .s0 {{ color: #75808a; }}
.t[data-tip]:hover {{ outline: 2px solid #1c2126; }}
#tip {{ position: fixed; display: none; z-index: 9; pointer-events: none; background: #1c2126; color: #fff; padding: 7px 10px;
  border-radius: 6px; font: 12px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }}
</style></head><body>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{legend}
{sections}
<div id="tip" role="tooltip"></div>
<script>
const tip = document.getElementById("tip");
document.addEventListener("mousemove", event => {{
  const token = event.target.closest("[data-tip]");
  tip.style.display = token ? "block" : "none";
  if (!token) return;
  tip.textContent = token.dataset.tip;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8) + "px";
}});
</script>
</body></html>
"""
