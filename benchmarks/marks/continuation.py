"""How importances agree with the value behind each token: the share of right answers among further ends that the policy writes.

A response is cut into spans, of one reasoning token or of k where it is long; V_t is the value behind span t:

    advantage_t = V_t - V_{t-1}        drop_t = |advantage_t|

An importance should rank spans as drops do; weights should be large where the advantage has the response's own sign. As a
method this is VinePPO (arXiv 2410.01679); here it only measures. Shape suffixes: S spans, P = S + 1 places, N continuations.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

import oar_plugin
from benchmarks.fidelity.scores import rank_correlation
from benchmarks.learning.training import Rollout
from benchmarks.tiny.model import sample
from benchmarks.tiny.tasks import Problem, Task
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import two_level

CONTINUATIONS, HALF = 16, 8
CEILING = f"ceiling: {HALF} continuations against the other {HALF}"
OPEN = "control: how open the outcome is"
TITLES = {
    f"{metric}, {kind}": f"{title}, in {kind} responses"
    for metric, title in {
        "drop": "Importance against drops of value",
        "advantage": "Weights against advantages",
    }.items()
    for kind in ("right", "wrong")
}


@dataclass(frozen=True)
class Continued:
    """A response of a group with right and wrong answers, and how its continuations ended."""

    prompt: list[int]  # token ids
    ids: list[int]  # of the response
    right: bool
    places: list[int]  # number of reasoning tokens before each place: 0, k, 2 k, ..., all
    right_PN: np.ndarray  # bool
    known: dict[str, Tensor] = field(default_factory=dict)  # scores of the reasoning that only a task knows

    def advantage_S(self, some: slice = slice(None)) -> np.ndarray:
        """Of all continuations or of some."""
        return np.diff(self.right_PN[:, some].mean(1))


def places_of(reasoning: int, spans: int) -> list[int]:
    """The start, every k-th token and the end; k is the smallest that makes at most `spans` spans."""
    return [*range(0, reasoning, math.ceil(reasoning / spans)), reasoning]


def continued(model: PreTrainedModel, task: Task, rollout: Rollout, spans: int, seed: int) -> Iterator[Continued]:
    """The responses of a rollout that can be scored. All that are continued at one place are one batch."""
    start, counts = rollout.prompt_length, rollout.reasoning_BL.sum(-1).tolist()
    places = {row: places_of(count, spans) for row, count in enumerate(counts) if count}
    right: dict[int, list[bool]] = {row: [] for row in places}
    noise = torch.Generator().manual_seed(seed)
    for place in sorted({place for of_row in places.values() for place in of_row}):
        rows = [row for row, of_row in places.items() if place in of_row]
        prefix_bL = rollout.token_BL[rows, : start + place]
        ends = sample(model, prefix_bL, CONTINUATIONS, task.max_response_length - place, noise)
        written = torch.cat((prefix_bL[:, start:].repeat_interleave(CONTINUATIONS, 0), ends), 1).tolist()
        for row, ids in zip(np.repeat(rows, CONTINUATIONS).tolist(), written, strict=True):
            problem = Problem((), tuple(rollout.gold_Bm[row].tolist()), None)
            right[row].append(task.read(problem, ids).right)
    oracles = {"results": rollout.causal_BL, "blame": rollout.causal_BL & ~rollout.right_in_wrong_BL}
    for row, of_row in places.items():
        ids = rollout.token_BL[row, : int(rollout.length_B[row])].tolist()
        known = {f"oracle: {name}": of_BL[row, start:][: counts[row]].double() for name, of_BL in oracles.items()}
        right_PN, is_right = np.reshape(right[row], (len(of_row), -1)), bool(rollout.advantage_B[row] > 0)
        yield Continued(ids[:start], ids[start:], is_right, of_row, right_PN, known)


def judged(
    model: Any, tokenizer: Any, responses: Sequence[Continued], importances: Iterable[str], seed: int
) -> Iterator[dict[str, Any]]:
    """A row for each credit and response: correlations by the keys of `TITLES`, NaN where the value never changes."""
    given: dict[str, Any] = {"prompts": [r.prompt for r in responses], "responses": [r.ids for r in responses]}
    for name in importances if responses else ():
        credit = oar_plugin.importance(model, tokenizer=tokenizer, importance=name, seed=seed, **given)
        for row, response in enumerate(responses):
            keep_L = credit.segments[row] == Segment.REASONING
            yield agreement(name, response, credit.importance[row, keep_L], credit.weights[row, keep_L])
    for response in responses:
        for name, score_R in response.known.items():
            weight_1R = two_level(score_R[None], torch.ones(1, len(score_R), dtype=torch.bool))
            yield agreement(name, response, score_R, weight_1R[0])
        one_S, other_S = response.advantage_S(slice(HALF)), response.advantage_S(slice(HALF, None))
        yield correlations(CEILING, response, drop=(abs(one_S), abs(other_S)), advantage=(one_S, other_S))
        # Where the outcome is open, estimates scatter more, and so drops of both halves are larger, whatever the token.
        value_P = response.right_PN[:, :HALF].mean(1)
        open_S = np.convolve(value_P * (1 - value_P), [1, 1], "valid")
        yield correlations(OPEN, response, drop=(open_S, abs(other_S)))


def agreement(credit: str, response: Continued, *scores: Tensor) -> dict[str, Any]:
    """Of importance and weights of the reasoning tokens, each averaged over a span."""
    starts, lengths = response.places[:-1], np.diff(response.places)
    score_S, weight_S = (np.add.reduceat(score_R.numpy(), starts) / lengths for score_R in scores)
    own_S = response.advantage_S() * (1 if response.right else -1)
    return correlations(credit, response, drop=(score_S, abs(own_S)), advantage=(weight_S, own_S))


def correlations(credit: str, response: Continued, **pairs: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """Spearman's, within the response."""
    kind = "right" if response.right else "wrong"
    found = {f"{name}, {kind}": rank_correlation(*map(torch.from_numpy, pair)) for name, pair in pairs.items()}
    return {"credit": credit, "right": response.right, "k": response.places[1], **found}


def notes(found: pd.DataFrame) -> list[str]:
    """What one has to know to read the figures."""
    some = found[found["credit"] == CEILING]
    counts = some.groupby("task", sort=False)["right"].agg(["sum", "size"])
    said = "; ".join(f"{task}: {right} right, {size - right} wrong" for task, right, size in counts.itertuples())
    return [
        f"{len(some)} responses of groups with right and wrong ones ({said}). Value: share of right answers among "
        f"{CONTINUATIONS} continuations at temperature 1. Spans of at most {some['k'].max()} reasoning tokens; scores are "
        f"averaged. In {some[[*TITLES]].isna().all(axis=1).sum()} responses the value never changes; they are left out.",
        "Spearman's correlation within a response; means over responses, of the models' means; ±: half the width of a 95 % "
        "percentile bootstrap over each model's responses, which says nothing about other models. Drops: sizes of the changes "
        "of value. Advantages: the changes, times -1 in wrong responses. Scores that are all equal count as 0.",
        "Importances by `oar_plugin.importance`, weights by its default gate. Oracles, where there are some, know which tokens "
        "are results; `blame` marks only the wrong ones of wrong responses.",
        f"Chance: a value is up to {CONTINUATIONS**-0.5 / 2:.3f} off (standard deviation). With c in the row of the ceiling a "
        "perfect score would reach about sqrt(2 c / (1 + c)), by Spearman and Brown's formula. Values scatter more where the "
        f"outcome is open; `{OPEN}` says what this alone gives: V (1 - V) of one half against drops of the other.",
    ]
