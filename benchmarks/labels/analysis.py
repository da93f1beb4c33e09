"""Agreement between replacements, predictions from n labels, and what rounding leaves of a unit's score."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.fidelity.scores import beyond_position, rank_correlation, top_overlap
from benchmarks.report import Progress
from benchmarks.statistics import Estimate
from oar_plugin.credit.regression import Regression
from oar_plugin.passes.prediction import LEAST, RIDGE

KINDS = ("pad", "separator", "line break", "sampled", "batch")
"""What stands in the masked place."""
AGAIN, ROUNDED = "batch again", "pad, bfloat16"
"""A second draw; and scores as the labels have them. All others are float32."""
POOL = ("pad", "sampled", "batch")
"""What regressions are fitted with: one fixed token, and two that are drawn anew for each label."""
LABELS = (128, 256, 512, 1024, 2048, 4096, 8192)
UNITS, SHOWN = (2, 4, 8, 16, None), 8
"""Labelled units of a response (None: all); and those that are shown in detail."""
DRAWS = 8
"""Of which responses and units are labelled."""
FOLDS = 10
"""Parts of the long texts; each is predicted from the others."""
COMPUTED, POSITION = "fisher", "position"
"""What stands beside exact scores and predictions: an importance without copies, and the later, the more."""


@dataclass(frozen=True)
class Scored:
    """A response of R reasoning tokens, of which those without a label have NaN."""

    scores: dict[str, Tensor]  # float64 [R], by what stands in the masked place; and `COMPUTED`
    features: dict[str, Tensor]  # float32 [R, F], by layer
    right: bool


@dataclass(frozen=True)
class Long:
    """Units of a long text."""

    distances: list[int]  # tokens from a unit's first token to the end of the reasoning
    scores: dict[tuple[str, int], list[float]]  # of the units, by type and span
    features: dict[int, Tensor]  # float32 [N, F], the mean of a unit's tokens, by span


def mean_of_others(scores: dict[str, Tensor], *left_out: str) -> Tensor:
    """The mean of the other kinds' scores, each over its mean in the response; of a kind, first over its draws, `[R]`."""
    scaled = {name: score_R / score_R.mean() for name, score_R in scores.items()}
    scaled["batch"] = (scaled["batch"] + scaled[AGAIN]) / 2
    return torch.stack([scaled[other] for other in KINDS if other not in left_out]).mean(0)


def spread(count: int, units: int | None, rng: random.Random) -> list[int]:
    """One of `count` places from each of `units` parts of about one size; all where there are no more."""
    if units is None or units >= count:
        return list(range(count))
    return [rng.randrange(part * count // units, (part + 1) * count // units) for part in range(units)]


def centred_log(score_R: Tensor) -> Tensor:
    """Scores below a share of the mean count as that share, as in the package."""
    log_R = score_R.clamp_min(LEAST * score_R.mean()).log()
    return log_R - log_R.mean()


def agreements(judged: Sequence[Scored]) -> pd.DataFrame:
    """A row for each way to score, kind that is left out (``: all count) and response: against the mean of the other kinds."""
    rows = list[dict[str, Any]]()
    for response, row in enumerate(judged):
        position_R = torch.arange(len(row.scores["pad"]), dtype=torch.float64)
        for name, score_R in (row.scores | {POSITION: position_R}).items():
            kind = {AGAIN: "batch", ROUNDED: "pad"}.get(name, name)
            of = {"name": name, "response": response, "mean": float(score_R.mean())}
            of[POSITION] = top_overlap(score_R, position_R)
            of |= {f"with {other}": top_overlap(score_R, row.scores[other]) for other in (*KINDS, AGAIN)}
            left_out = [kind] if kind in KINDS else ["", *POOL]
            rows += [of | {"but": but, **against(score_R, row, but)} for but in left_out]
    return pd.DataFrame(rows)


def against(score_R: Tensor, row: Scored, but: str) -> dict[str, float]:
    """Agreement with the mean of all kinds but one."""
    mean_R, plain_R = mean_of_others(row.scores, but), mean_of_others(row.scores, but, "separator")
    found = {"overlap": top_overlap(score_R, mean_R), "beyond": beyond_position(score_R, mean_R)}
    return found | {"no separator": beyond_position(score_R, plain_R), "spearman": rank_correlation(score_R, mean_R)}


def fits(
    pool: Sequence[Scored], layer: str, units: int | None, seed: int
) -> Iterator[tuple[int, int, dict[str, Regression]]]:
    """Labels wanted, labels, and the package's regression of each of `POOL`.

    Features and targets are centred within each response. The last response may bring a few labels more.
    """
    rng, order, labels = random.Random(seed), list(range(len(pool))), 0
    rng.shuffle(order)
    wanted, size = list(LABELS), pool[0].features[layer].shape[1]
    sums = {name: torch.zeros(size, size + 1).double() for name in POOL}
    for row in (pool[index] for index in order):
        known_N = row.scores["pad"].isfinite().nonzero()[:, 0]
        chosen = known_N[spread(len(known_N), units, rng)]
        if len(chosen) < 2 or (units is None and len(known_N) < len(row.scores["pad"])):
            continue
        for name, sums_FG in sums.items():
            sums_FG += sums_of(row.features[layer][chosen], row.scores[name][chosen])
        labels += len(chosen)
        while wanted and labels >= wanted[0]:
            yield wanted.pop(0), labels, {name: regression_of(sums_FG) for name, sums_FG in sums.items()}


def sums_of(feature_NF: Tensor, score_N: Tensor) -> Tensor:
    """What a regression learns of a response's labels, centred."""
    return Regression.sums(feature_NF - feature_NF.mean(0), centred_log(score_N))


def regression_of(sums_FG: Tensor) -> Regression:
    regression = Regression(len(sums_FG), RIDGE)
    regression.end_step(sums_FG, 0, 0)  # how many labels there were says what to forget
    return regression


def predictions(pool: Sequence[Scored], judged: Sequence[Scored], progress: Progress) -> pd.DataFrame:
    """A row for each regression and judged response: against the same replacement, and the mean of the other kinds."""
    rows = list[dict[str, Any]]()
    for draw in range(DRAWS):
        progress("regressions", draw, DRAWS)
        for layer, units in [*(("last", units) for units in UNITS), ("middle", SHOWN)]:
            for wanted, labels, regressions in fits(pool, layer, units, draw):
                key = {"layer": layer, "units": units or 0, "wanted": wanted, "labels": labels, "draw": draw}
                for (response, row), (name, one) in product(enumerate(judged), regressions.items()):
                    log_R, control_R = one.predict(row.features[layer]).double().T
                    rows.append(key | {"target": name, "response": response, **judge(log_R, control_R, row, name)})
    return pd.DataFrame(rows)


def judge(log_R: Tensor, control_R: Tensor, row: Scored, name: str) -> dict[str, float]:
    """Predicted logarithms, and those without hidden states."""
    exact_R, target_R = row.scores[name], centred_log(row.scores[name])
    found = {"overlap": top_overlap(log_R, exact_R), "beyond": beyond_position(log_R, exact_R)}
    found |= {f"others {key}": value for key, value in against(log_R, row, name).items()}
    found["control"] = beyond_position(control_R, mean_of_others(row.scores, name))
    errors = [(target_R - x_R + x_R.mean()).square().sum() for x_R in (log_R, control_R)]
    values = map(float, [*errors, target_R @ target_R])
    return found | dict(zip(("error", "control error", "variance"), values, strict=True))


def rounded(texts: Iterable[Long]) -> pd.DataFrame:
    """A row for each unit: its scores in both types, and the error of whole copies. Drowned: off by more than half."""
    rows = []
    for text, found in enumerate(texts):
        for (kind, span), score in found.scores.items():
            if kind == "float32":
                narrow, whole = (found.scores[name, span] for name in ("bfloat16", "bfloat16, whole"))
                rows += [
                    {"text": text, "span": span, "distance": d, "score": max(a, 0.0), "narrow": max(b, 0.0), "whole": c}
                    for d, a, b, c in zip(found.distances, score, narrow, whole, strict=True)
                ]
    frame = pd.DataFrame(rows)
    frame["whole"] = (frame["whole"].clip(lower=0.0) - frame["score"]).abs()
    off = (frame["narrow"] - frame["score"]).abs()
    return frame.assign(error=off, drowned=off > frame["score"] / 2)


def long_predictions(long: Sequence[Long]) -> pd.DataFrame:
    """A row for each type and length of labelled units, draw and text (predicted from other folds); and for position."""
    spans, rows = sorted(long[0].features), list[dict[str, Any]]()

    def add(kind: str, span: int, text: int, log_N: Tensor, control_N: Tensor) -> None:
        single_N, longest_N = (torch.tensor(long[text].scores["float32", of]) for of in (spans[0], spans[-1]))
        found = {"single": rank_correlation(log_N, single_N), "longest": rank_correlation(log_N, longest_N)}
        found |= {"beyond": beyond_position(log_N, single_N), "control": beyond_position(control_N, single_N)}
        rows.append({"kind": kind, "span": span, "response": text} | found)

    for kind, span in long[0].scores:
        labels = [(text.features[span], torch.tensor(text.scores[kind, span]).double()) for text in long]
        sums_XFG = torch.stack([sums_of(*of_text) for of_text in labels])
        for draw in range(DRAWS):
            fold_X = torch.randperm(len(long), generator=torch.Generator().manual_seed(draw)) % FOLDS
            for fold in fold_X.unique():
                regression = regression_of(sums_XFG[fold_X != fold].sum(0))
                for text in (fold_X == fold).nonzero()[:, 0].tolist():
                    add(kind, span, text, *regression.predict(long[text].features[spans[0]]).T)
    for text, one in enumerate(long):
        add(POSITION, 0, text, *torch.arange(len(one.distances)).float().expand(2, -1))
    return pd.DataFrame(rows)


def of_responses(rows: pd.DataFrame, value: str, of: str | None = None) -> Estimate:
    """Mean over responses of a column, or with `of` one less the share of it; its interval is a percentile bootstrap."""
    by = rows.groupby("response")[[value, *([of] if of else [])]].mean().dropna().to_numpy()
    if not len(by):
        return Estimate(np.nan)
    drawn = by[np.random.default_rng(0).integers(len(by), size=(2000, len(by)))].mean(1)
    mean, drawn = (1 - x[..., 0] / x[..., 1] if of else x[..., 0] for x in (by.mean(0), drawn))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(float(mean), float(low), float(high), len(by))
