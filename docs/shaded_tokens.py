"""`python -m docs.shaded_tokens` draws shaded_tokens.svg: a response of benchmarks/results/fidelity_cpu.html and its credit."""

import re
from html import escape, unescape
from pathlib import Path

import torch

from benchmarks.fidelity.pictures import shade
from oar_plugin.credit.gate import two_level

HERE = Path(__file__).parent
TOKEN = re.compile(r'data-tip="\s*(.*?)\n(.*?)\nweight (.*?)\n(?:importance )?(.*?)"')


def picture() -> str:
    """Return the page's second response twice, as SVG. Tokens that are known to decide its answer are underlined."""
    article = (HERE.parent / "benchmarks" / "results" / "fidelity_cpu.html").read_text().split("<article>")[2]
    shown = dict(block.split("</span>", 1) for block in article.split('<span class="who">')[1:])
    words, kinds, known, _ = zip(*TOKEN.findall(shown["known to be causal"]), strict=True)
    scores = [float(score) if kind == "reasoning" else 0.0 for _, kind, _, score in TOKEN.findall(shown["fisher 1"])]
    weights = two_level(torch.tensor([scores]), torch.tensor([[kind == "reasoning" for kind in kinds]]))[0].tolist()
    drawn, y = ['<rect width="830" height="190" fill="white"/>'], 0
    for title, row in (("GRPO: the same for every token", [1.0] * len(words)), ("OAR: what moved the answer", weights)):
        drawn.append(f'<text x="12" y="{y + 24}" font-weight="bold">{title}</text>')
        x, y = 12, y + 34
        for word, mark, weight in zip(map(unescape, words), known, row, strict=True):
            x, y = (12, y + 27) if x > 780 else (x, y)
            line = ' text-decoration="underline"' if float(mark) > 1 else ""
            box = f'width="{9 * len(word) + 6}" height="22" fill="{shade(weight)}" stroke="#ddd"'
            drawn.append(f'<rect x="{x}" y="{y}" {box}/>')
            drawn.append(f'<text x="{x + 3}" y="{y + 16}" textLength="{9 * len(word)}"{line}>{escape(word)}</text>')
            x += 9 * len(word) + 9
        y += 27
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="830" height="190" font-family="monospace" font-size="15">'
    return "\n".join([head, *drawn, "</svg>\n"])


if __name__ == "__main__":
    (HERE / "shaded_tokens.svg").write_text(picture())
