"""Responses of any model with marks on their text, of people or of a checker: tokens that decide, and tokens that are wrong.

The docstring of this package shows the format of a file. A token is marked where it shares a character with a span, and counts
where it is reasoning.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fidelity.responses import Response
from benchmarks.fidelity.scores import auc, causal_recall, mean_over_groups
from benchmarks.fidelity.tables import plus_minus
from benchmarks.report import Table
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes

MARKS = ("causal", "wrong")


@dataclass(frozen=True)
class MarkedResponse(Response):
    wrong_T: Tensor  # bool, tokens that are wrong; nothing is marked where the file does not say


@dataclass(frozen=True)
class Marked:
    responses: list[MarkedResponse]
    unusable: int  # responses without an answer or without reasoning, which are not among them


def read_marked(file: Path, tokenizer: Any) -> Marked:
    """Raises: ValueError with file and line for what is no marked response, or where none can be used."""
    finder, token_bytes = make_finder(OarConfig().answer_patterns), TokenBytes(tokenizer)
    found, unusable = [], 0
    try:
        # Not splitlines: it cuts at characters that JSON leaves as they are.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--marked {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
            pieces, right = token_bytes.pieces(ids), bool(row["right"])
            if b"".join(pieces).decode(errors="replace") != row["response"]:
                raise ValueError("its tokens do not give the response's text back: spans have no place in them")
            marked = [_tokens(row["response"], row.get(name, []), pieces) for name in MARKS]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--marked {file}, line {number}: {type(error).__name__}: {error}") from error
        segments = segment_tokens(pieces, finder)
        if segments is None or Segment.REASONING not in segments:
            unusable += 1
            continue
        segments_T = torch.tensor([int(Segment.OUTSIDE)] * len(prompt) + segments.tolist())
        causal_T, wrong_T = (torch.tensor([False] * len(prompt) + tokens) for tokens in marked)
        found.append(MarkedResponse(torch.tensor([*prompt, *ids]), segments_T, causal_T, right, wrong_T))
    if not found:
        raise ValueError(f"--marked {file}: no response has reasoning and an answer")
    return Marked(found, unusable)


def _tokens(text: str, spans: Sequence[Sequence[int]], pieces: Sequence[bytes]) -> list[bool]:
    """Of each token whether it shares a character with one of the spans."""
    bounds = []
    for begin, end in spans:
        if not 0 <= begin < end <= len(text):
            raise ValueError(f"span [{begin}, {end}] is not inside of the response's {len(text)} characters")
        bounds.append([len(text[:at].encode()) for at in (begin, end)])
    found, here = [], 0
    for piece in pieces:
        found.append(any(begin < here + len(piece) and here < end for begin, end in bounds))
        here += len(piece)
    return found


def marked_figures(found: Marked, scores: Mapping[str, Sequence[Tensor]]) -> dict[str, dict[str, list[float]]]:
    """By estimator and figure, one a response, NaN where nothing of the kind is marked; `scores` are `[R]` a response."""
    return {name: _figures(found.responses, of_responses) for name, of_responses in scores.items()}


def _figures(responses: Sequence[MarkedResponse], scores: Sequence[Tensor]) -> dict[str, list[float]]:
    recall, causal, wrong = [], [], []
    for response, score_R in zip(responses, scores, strict=True):
        causal_R, wrong_R = (marks_T[response.reasoning_R] for marks_T in (response.causal_T, response.wrong_T))
        everywhere_1R = torch.ones(1, len(score_R), dtype=torch.bool)
        recall.append(float(causal_recall(score_R[None], everywhere_1R, causal_R[None])))
        causal.append(auc(score_R.numpy(), causal_R.numpy()))
        wrong.append(auc(score_R.numpy(), wrong_R.numpy()))
    return {"causal recall": recall, "causal AUC": causal, "wrong AUC": wrong}


def marked_table(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Of `marked_figures`, a row an estimator."""
    columns = list(next(iter(figures.values())))
    rows = [[name, *(plus_minus(mean_over_groups([of[column]])) for column in columns)] for name, of in figures.items()]
    return Table("Marked tokens and their ranks among the reasoning", ("estimator", *columns), rows)


def marked_notes(found: Marked, model: str, probe: str) -> list[str]:
    """What one has to know to read the figures."""
    rows = found.responses
    causal, wrong = (
        sum(bool(getattr(row, f"{name}_T")[row.reasoning_R].any()) for row in rows) for name in ("causal", "wrong")
    )
    return [
        f"{len(rows)} responses of {model}, {sum(row.right for row in rows)} of them right; probe {probe}; "
        f"{found.unusable} more without an answer or without reasoning were left out.",
        f"{causal} have reasoning tokens that are marked as causal, {wrong} some that are marked as wrong: means are over "
        "these; ±: half the width of a 95 % percentile bootstrap over them. Nothing is known of other models and data.",
        "Causal recall: share of the causal tokens among as many top scores. AUC: how often a marked token is above another "
        "one of its response's reasoning, equal scores a half; 0.5 is chance.",
    ]
