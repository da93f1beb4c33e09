"""How importances agree with people, who marked the first wrong step of solutions of competition problems (CHAMP).

The package champ-dataset (MIT; arXiv 2401.06961) has solutions by four large models; the model under test reads them. The
answer of a solution is what the package's finder reads behind the marked step, or else the last sentence. The record's answer
is not used: it is the right one, which a wrong solution does not lead to.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import oar_plugin
from benchmarks.cache import cached
from benchmarks.fidelity.scores import auc, mean_over_groups
from benchmarks.fidelity.tables import plus_minus
from benchmarks.language.log_probs import log_probs
from benchmarks.report import Table
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.credit.importance import importance_of
from oar_plugin.passes.tokens import TokenBytes

SENTENCE = re.compile(r"(?=\S)[^\n]*?\w[^\n]*?(?:[.?!](?=\s)|\n|\Z)")
METRICS = ("AUC", "AUC before the step", "difference", "top token in step", "top token in step, without later tokens")


@dataclass(frozen=True)
class Solution:
    problem: str
    writer: str
    announced: bool  # whether the finder reads its answer
    prompt: list[int]
    ids: list[int]
    segments_L: Tensor  # int8, of prompt and solution
    step_R: np.ndarray  # bool, which reasoning tokens are the marked step


def solutions(tokenizer: Any, longest: int, count: int | None, seed: int) -> tuple[list[Solution], int]:
    """Those with a wrong step (of `count` drawn ones) that fit into `longest` tokens; and how many cannot be scored."""
    import champ_dataset

    problems = champ_dataset.load("v0").problems.values()
    marked = [(problem, *item) for problem in problems for item in problem.fws_annotations.items() if item[1].end_idx]
    drawn = marked if count is None else random.Random(seed).sample(marked, min(count, len(marked)))
    found, pieces, finder = list[Solution](), TokenBytes(tokenizer).pieces, make_finder(OarConfig().answer_patterns)
    for problem, key, mark in drawn:
        text, step = mark.text, (mark.start_idx, mark.end_idx)
        chat = [{"role": "user", "content": problem.conversations[key].messages[1].text}]  # the first is the system's
        if tokenizer.chat_template:
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        else:
            prompt = tokenizer(f"{chat[0]['content']}\n\n")["input_ids"]
        ids, read = tokenizer(text, add_special_tokens=False)["input_ids"], finder(text)
        announced = read is not None and read.marker_start >= step[1]
        answer: Any = read if announced else [*SENTENCE.finditer(text)][-1].span()
        segments_L, marked_L = (_segments(pieces(ids), at) for at in (answer, step))
        if len(prompt) + len(ids) <= longest and answer[0] >= step[1]:
            whole_L = torch.cat([torch.zeros(len(prompt), dtype=torch.int8), torch.from_numpy(segments_L)])
            step_R, writer = marked_L[segments_L == Segment.REASONING] == Segment.ANSWER, key.partition("|")[0]
            found.append(Solution(problem.identifier, writer, announced, prompt, ids, whole_L, step_R))
    return found, len(drawn) - len(found)


def _segments(pieces: Sequence[bytes], answer: Any) -> np.ndarray:
    found = segment_tokens(pieces, lambda _: answer)
    assert found is not None
    return found


def judged(
    model: Any,
    tokenizer: Any,
    read: Sequence[Solution],
    importances: Sequence[str],
    spans: int,
    max_tokens: int | None,
    seed: int,
    folder: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each credit and solution: `METRICS`. The scores of an importance are saved in `folder`."""
    key = {
        "model": model.name_or_path,
        "device": model.device.type,
        "max_tokens": max_tokens,
        "solutions": [(one.problem, one.writer) for one in read],
    }
    keeps = [one.segments_L == Segment.REASONING for one in read]
    pairs = [(torch.tensor(one.prompt), torch.tensor(one.ids)) for one in read]
    log_prob = cached(folder, "log_probs", key, partial(log_probs, model, pairs, 1.0, max_tokens or 1024))
    surprisal = [-of_L[keep_L[-len(of_L) :]].numpy() for of_L, keep_L in zip(log_prob, keeps, strict=True)]
    scores = {"surprisal": surprisal}
    for name in importances:
        importance = importance_of(name)
        # A copy for each token would be hundreds of forwards a solution.
        copies = importance.copies
        title = f"{name}, at most {spans} copies" if copies else name
        compute = partial(_scores, model, tokenizer, read, name, spans if copies else None, max_tokens, seed)
        asked = key | {"importance": name, "spans": spans, "seed": seed}
        scores[title] = of_name = cached(folder, name.rpartition(":")[2], asked, compute)
        if importance.backwards:
            doubts = (-np.expm1(-of_R) for of_R in surprisal)
            scores[f"{name} x (1 - p)"] = [of_R * doubt_R for of_R, doubt_R in zip(of_name, doubts, strict=True)]
    for name, slope in {"chance": 0, "control: later is higher": 1, "control: earlier is higher": -1}.items():
        scores[name] = [slope * np.arange(len(one.step_R)) for one in read]
    for name, of_all in scores.items():
        for one, of_R in zip(read, of_all, strict=True):
            yield {"credit": name, "problem": one.problem, "writer": one.writer, **judgement(of_R, one.step_R)}


def _scores(
    model: Any,
    tokenizer: Any,
    read: Sequence[Solution],
    name: str,
    spans: int | None,
    max_tokens: int | None,
    seed: int,
) -> list[np.ndarray]:
    """Of an importance, `[R]` a solution; where `spans` is given, each solution is cut into so many at most."""
    found = [np.zeros(0)] * len(read)
    span_of = [math.ceil(len(one.step_R) / spans) if spans else 1 for one in read]
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
            keep_L = read[row].segments_L == Segment.REASONING
            found[row] = score_L[: len(keep_L)][keep_L].numpy()
    return found


def judgement(score_R: np.ndarray, step_R: np.ndarray) -> dict[str, float]:
    """`METRICS` of a solution, NaN where there are no tokens for one."""
    first, length = int(step_R.argmax()), int(step_R.sum())
    far_R, last_R = score_R[: first + length], step_R[: first + length]
    # Scores that rise or fall along a solution do so before the step as well.
    own, before = auc(far_R, last_R), auc(score_R[:first], np.arange(first) >= first - length)
    hits = (float(in_step[of == of.max()].mean()) for of, in_step in ((score_R, step_R), (far_R, last_R)))
    return dict(zip(METRICS, (own, before, own - before, *hits), strict=True))


def table(found: pd.DataFrame) -> Table:
    """Means over problems, whatever number of solutions they have."""
    problems = found.groupby(["credit", "problem"], sort=False)[[*METRICS]].mean()
    rows = [
        [str(name), *(plus_minus(mean_over_groups([[*rows[metric]]])) for metric in METRICS)]
        for name, rows in problems.groupby("credit", sort=False)
    ]
    return Table("The first wrong step", ("credit", *METRICS), rows)


def notes(read: Sequence[Solution], without: int, spans: int) -> list[str]:
    """What one has to know to read the figures."""
    sizes = [[float(n) for n in (len(one.step_R), one.step_R.sum(), one.step_R.argmax())] for one in read]
    tokens, step, before = np.mean(sizes, 0)
    announced, opening = (sum(of) for of in zip(*((one.announced, int(one.step_R[0])) for one in read), strict=True))
    return [
        f"{len(read)} solutions of {len({one.problem for one in read})} problems with the first wrong step as people marked "
        f"it (package champ-dataset, MIT; arXiv 2401.06961), on average {tokens:.0f} reasoning tokens, {step:.0f} in that step "
        f"and {before:.0f} before it. Left out: {without} too long for the model or without a sentence behind the step. The "
        "model under test reads them as its own response to the problem; other models wrote them.",
        f"The answer: in {announced} solutions what the package's finder reads behind the step, in the others the last "
        "sentence, sometimes a mere remark. In training, responses without a found answer get no token credit.",
        "AUC: how often a token of the step is above a token before it, equal ones a half; what is behind it is left out, and "
        f"so are {opening} solutions that begin with it. Before the step: as many tokens right before it against all before "
        "these, which shows what scores that rise or fall along a solution have without knowing anything. Difference: in "
        "solutions with both.",
        "Top token in step: how often the largest score of all reasoning, or of that up to the step's end, is in the step; "
        "among equals, the share that is. Chance: the step's share of tokens.",
        "Means of problems' means; ±: half the width of a 95 % percentile bootstrap over problems. Other models may differ.",
        f"p: probability of a token for the model under test; surprisal: -log p. At most {spans} copies: `oar_p` replaces "
        "spans of equal length.",
    ]
