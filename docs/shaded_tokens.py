"""`python -m docs.shaded_tokens` draws shaded_tokens.svg: responses of SmolLM2-135M and their credit, with OAR's defaults.

Question and responses are those of responses.jsonl; `docs.screenshots.picked` has the rule by which two are chosen.
"""

import json
from html import escape
from pathlib import Path

from benchmarks.fidelity.pictures import shade
from benchmarks.language import smollm2
from docs.screenshots import HERE, RESPONSES, picked
from oar_plugin.cli.score import configs_of, scored
from oar_plugin.credit.answer import Segment
from oar_plugin.page.record import Response

WIDTH, LETTER, LINE = 830, 9, 27


def picture(folder: Path) -> str:
    """Return an SVG: the right response with equal credit and with OAR's, then the wrong one. `folder` has the model."""
    right, wrong = picked(list(scored([RESPONSES], str(folder), configs_of(None, []))))
    asked = json.loads(RESPONSES.read_text(encoding="utf-8").splitlines()[0])["prompt"][-1]["content"]
    drawn, y = [f'<text x="12" y="24" fill="#555">{escape(asked)}</text>'], 34
    for title, row, weights in (
        ("GRPO: the same for every token", right, [1.0] * len(right.tokens)),
        ("OAR: what moved the answer", right, right.weights or []),
        ("OAR: what moved the answer of a wrong response", wrong, wrong.weights or []),
    ):
        drawn.append(f'<text x="12" y="{y + 20}" font-weight="bold">{title}</text>')
        lines, y = tokens(row, weights, y + 30)
        drawn += lines
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 6}" font-family="monospace" font-size="15">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 6}" fill="white"/>', *drawn, "</svg>\n"])


def tokens(row: Response, weights: list[float], y: int) -> tuple[list[str], int]:
    """The response's tokens as boxes from `y` on, the answer underlined, and where they end. A space parts words."""
    x, drawn = 12, []
    for token, weight, segment in zip(row.tokens, weights, row.segments, strict=True):
        word = "⏎" if "\n" in token else token.strip()
        width = LETTER * len(word) or LETTER // 2
        x += LETTER // 2 * token.startswith(" ")
        x, y = (12, y + LINE) if x + width > WIDTH - 12 else (x, y)
        line = ' text-decoration="underline"' if segment == Segment.ANSWER else ""
        drawn.append(f'<rect x="{x}" y="{y}" width="{width + 4}" height="22" fill="{shade(weight)}" stroke="#ddd"/>')
        drawn.append(f'<text x="{x + 2}" y="{y + 16}" textLength="{width}"{line}>{escape(word)}</text>')
        x, y = (12, y + LINE) if "\n" in token else (x + width + 5, y)
    return drawn, y + LINE


if __name__ == "__main__":
    (HERE / "shaded_tokens.svg").write_text(picture(smollm2.folder()), encoding="utf-8")
