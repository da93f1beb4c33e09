"""How importances agree with people, who marked the first wrong step of solutions of competition problems (CHAMP).

The package champ-dataset (MIT; arXiv 2401.06961) has solutions by four large models. The model under test reads problem and
solution; it writes nothing. The answer of a solution is what the package's finder reads behind the marked step, or else the
last sentence. The record's answer is not used: it is the right one, which a wrong solution does not lead to.
"""

import importlib.util
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import oar_plugin
from benchmarks.fidelity.scores import auc, mean_over_groups
from benchmarks.fidelity.tables import plus_minus
from benchmarks.report import Progress, Table, silent
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.credit.importance import importance_of
from oar_plugin.passes.plain import log_probs
from oar_plugin.passes.tokens import TokenBytes

INSTALL = "pip install champ-dataset==1.0.0"
SENTENCE = re.compile(r"[^\n]*?\w[^\n]*?(?:[.?!](?=\s)|\n|\Z)")
METRICS = {
    "AUC": "AUC",
    "before": "AUC of as many tokens before it",
    "gain": "AUC less that",
    "hit": "largest of all",
    "hit so far": "largest up to its end",
}
CONTROLS = ("chance", "control: later tokens higher", "control: earlier tokens higher")


@dataclass(frozen=True)
class Solution:
    """A solution with a wrong step, in tokens of the model under test."""

    problem: str
    writer: str
    prompt: list[int]
    ids: list[int]
    segments_L: Tensor  # int8, of prompt and solution
    step_R: np.ndarray  # bool, which reasoning tokens are the marked step
    announced: bool  # whether the finder reads its answer


def missing() -> str | None:
    """What to install, where the marks cannot be had."""
    return None if importlib.util.find_spec("champ_dataset") else f"the marks of people: {INSTALL}"


def solutions(tokenizer: Any, longest: int, count: int | None, seed: int) -> tuple[list[Solution], Counter[str]]:
    """All, or `count` drawn ones; and why how many of them are left out. `longest`: tokens of problem and solution."""
    import champ_dataset

    problems = champ_dataset.load("v0").problems.values()
    marked = [(problem, *item) for problem in problems for item in problem.fws_annotations.items() if item[1].end_idx]
    drawn = marked if count is None else random.Random(seed).sample(marked, min(count, len(marked)))
    found, without, pieces = list[Solution](), Counter[str](), TokenBytes(tokenizer).pieces
    finder = make_finder(OarConfig().answer_patterns)
    for problem, key, mark in drawn:
        asked = problem.conversations[key].messages[1].text  # the first one is the system's
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": asked}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        else:
            prompt = tokenizer(f"{asked}\n\n")["input_ids"]
        ids = tokenizer(mark.text, add_special_tokens=False)["input_ids"]
        read = finder(mark.text)
        announced = read is not None and read.marker_start >= mark.end_idx
        answer = read if announced else [*SENTENCE.finditer(mark.text)][-1].span()
        segments_L, marked_L = (
            segment_tokens(pieces(ids), partial(_shifted, span, len(mark.text)))
            for span in (answer, (mark.start_idx, mark.end_idx))
        )
        step_R = marked_L[segments_L == Segment.REASONING] == Segment.ANSWER
        if len(prompt) + len(ids) > longest:
            without["too long for the model"] += 1
        elif step_R.sum() < (marked_L == Segment.ANSWER).sum():
            without["nothing said behind the step"] += 1
        else:
            whole_L = torch.cat([torch.zeros(len(prompt), dtype=torch.int8), torch.from_numpy(segments_L)])
            writer = key.partition("|")[0]
            found.append(Solution(problem.identifier, writer, prompt, ids, whole_L, step_R, announced))
    return found, without


def _shifted(span: Sequence[int], length: int, text: str) -> list[int]:
    """Some tokenizers begin a text with a space, and so all of it is further on."""
    return [place + len(text) - length for place in span]


def judged(
    model: Any,
    tokenizer: Any,
    read: Sequence[Solution],
    importances: Sequence[str],
    spans: int,
    max_tokens: int | None,
    seed: int,
    progress: Progress = silent,
) -> Iterator[dict[str, Any]]:
    """A row for each credit and solution: `METRICS`, NaN where one cannot be had."""
    pairs = [(torch.tensor(one.prompt), torch.tensor(one.ids)) for one in read]
    log_prob = log_probs(model, pairs, 1.0, max_tokens or 1024)
    surprisal = [-of_L[_reasoning(one)[len(one.prompt) :]].numpy() for of_L, one in zip(log_prob, read, strict=True)]
    yield from _rows("surprisal", read, surprisal)
    for done, name in enumerate(importances):
        progress(f"{name} of {len(read)} solutions", done, len(importances))
        importance, scores = importance_of(name), dict[int, np.ndarray]()
        # A copy for each token would be hundreds of forwards a solution.
        every = importance.copies is not None and importance.copies.budget <= 1
        span_of = [math.ceil(len(one.step_R) / spans) if every else 1 for one in read]
        for span in sorted({*span_of}):
            rows = [row for row, of_row in enumerate(span_of) if of_row == span]
            credit = oar_plugin.importance(
                model,
                tokenizer=tokenizer,
                prompts=[read[row].prompt for row in rows],
                responses=[read[row].ids for row in rows],
                segments=pad_sequence([read[row].segments_L for row in rows], True),
                importance=name,
                perturbation={"span": span},
                max_tokens=max_tokens,
                seed=seed,
            )
            for row, score_L in zip(rows, credit.importance, strict=True):
                scores[row] = score_L[: len(read[row].segments_L)][_reasoning(read[row])].numpy()
        ordered = [scores[row] for row in range(len(read))]
        yield from _rows(f"{name}, at most {spans} copies" if every else name, read, ordered)
        if importance.backwards:
            doubted = [score_R * -np.expm1(-of_R) for score_R, of_R in zip(ordered, surprisal, strict=True)]
            yield from _rows(f"{name} x (1 - p)", read, doubted)
    for name, slope in zip(CONTROLS, (0, 1, -1), strict=True):
        yield from _rows(name, read, [slope * np.arange(len(one.step_R)) for one in read])


def _reasoning(one: Solution) -> Tensor:
    return one.segments_L == Segment.REASONING


def _rows(credit: str, read: Sequence[Solution], scores: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
    for one, score_R in zip(read, scores, strict=True):
        yield {"credit": credit, "problem": one.problem, "writer": one.writer, **judgement(score_R, one.step_R)}


def judgement(score_R: np.ndarray, step_R: np.ndarray) -> dict[str, float]:
    """`METRICS` of a solution."""
    first, length = int(step_R.argmax()), int(step_R.sum())
    far_R, last_R = score_R[: first + length], step_R[: first + length]
    # Where scores rise or fall along a solution, they do so before the step as well.
    before_R = np.arange(first) >= first - length
    found = {"AUC": auc(far_R, last_R), "before": auc(far_R[:first], before_R)}
    # Among equals, the share of them that is in the step.
    hits = {"hit": step_R[score_R == score_R.max()].mean(), "hit so far": last_R[far_R == far_R.max()].mean()}
    return found | {"gain": found["AUC"] - found["before"]} | hits


def tables(found: pd.DataFrame) -> list[Table]:
    """All metrics, and the AUC of each writer's solutions. A problem counts once, however many solutions it has."""
    credits, writers = list(found.groupby("credit", sort=False)), sorted({*found["writer"]})

    def shown(rows: pd.DataFrame, metric: str) -> str:
        return plus_minus(mean_over_groups([[*rows.groupby("problem")[metric].mean()]]))

    everything = [[name, *(shown(rows, metric) for metric in METRICS)] for name, rows in credits]
    apart = [[name, *(shown(rows[rows["writer"] == one], "AUC") for one in writers)] for name, rows in credits]
    return [
        Table("The first wrong step against what is before it", ("credit", *METRICS.values()), everything),
        Table("AUC, by the model that wrote the solution", ("credit", *writers), apart),
    ]


def notes(read: Sequence[Solution], without: Counter[str], spans: int) -> list[str]:
    """What one has to know to read the figures."""
    lost = "".join(f"; {count} more are left out: {reason}" for reason, count in without.items())
    tokens, step, before = np.mean([(len(one.step_R), one.step_R.sum(), one.step_R.argmax()) for one in read], 0)
    announced = sum(one.announced for one in read)
    return [
        f"{len(read)} solutions of {len({one.problem for one in read})} problems, with the first wrong step as people marked "
        f"it (package champ-dataset, MIT; arXiv 2401.06961){lost}. On average {tokens:.0f} reasoning tokens, {step:.0f} of "
        f"them in that step and {before:.0f} before it. The model under test reads them behind the problem, as its own answer "
        "to a user; other models wrote them.",
        f"The answer: in {announced} solutions what the package's finder reads behind the step, in the others the last "
        "sentence, which may be a mere remark. In training, such responses get no token credit.",
        "AUC: how often a token of the step is above a token before it, equal ones a half. What is behind the step is left "
        "out, and so are solutions that begin with it. Scores that rise or fall along a solution have an AUC and know nothing: "
        "the second column has the AUC of as many tokens right before the step against all before these, the third the "
        "difference, in solutions that have both.",
        "Largest: how often the largest score of all reasoning, or of that up to the end of the step, is in the step. Chance: "
        "the step's share of these tokens.",
        "Means of problems' means; ±: half the width of a 95 % percentile bootstrap over problems. It says nothing about "
        "other models.",
        f"p: the probability of a token for the model under test; surprisal: -log p. At most {spans} copies: `oar_p` replaces "
        "spans of equal length, single tokens where there are few, `hybrid` 30 % of these spans.",
    ]
