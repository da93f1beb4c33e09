"""Measures of a batch's weights: the metrics to watch in a run (arXiv 2601.07408, diagnostics)."""

import enum

import torch
from torch import Tensor

from oar_plugin.credit.gate import TINY, row_sums, sorted_rows


class Status(enum.IntEnum):
    """The outcome of one response. Every status except `SCORED` and `NOT_NEEDED` is a counted fallback to GRPO."""

    SCORED = 0
    NOT_NEEDED = 1  # its advantage is zero, or what rounding leaves of zero: no weight would change anything
    NO_ANSWER = 2
    TRUNCATED = 3
    NO_REASONING = 4  # the answer opens the response
    NON_FINITE = 5
    CONSTANT = 6  # all importances are equal, perhaps zero
    NOT_SCORED = 7  # no scores arrived
    # 8 to 11: its copies on a rollout engine (`perturbation.backend=rollout`) have no scores.
    TIMED_OUT = 8
    TOO_LONG = 9  # the engine has no room for the copies
    ABORTED = 10  # the engine dropped the copies, or its weights changed meanwhile
    ENGINE_FAILED = 11
    ANSWER_TOO_LONG = 12  # more tokens than `max_answer_tokens`
    OUT_OF_MEMORY = 13  # in the actor's pass over its micro-batches
    SEARCH_FAILED = 14  # a pattern of the user's own took too long or raised, or the tokenizer raised
    BAD_REWARD = 15  # it has no reward, or its advantage is NaN or infinite, because its reward or a sibling's is
    LEARNING = 16  # it was to be predicted, and too few labels have been seen so far


MEASURE_NAMES = "ess_ratio", "top10_mass", "weight_max", "reasoning_tokens"  # the columns of `measured`
# Further columns of predicted importance: 1 if it was predicted; and of the step, `Predictor.explained` and `learning`.
PREDICTION_NAMES = tuple(f"amortize/{n}" for n in ("predicted", "explained", "explained_by_position", "learning_steps"))
FALLBACKS: tuple[Status, ...] = tuple(s for s in Status if s not in (Status.SCORED, Status.NOT_NEEDED))


def effective_sample_size(weight_BL: Tensor, keep_BL: Tensor) -> Tensor:
    """`(sum w)^2 / (n sum w^2)` over the `n` kept tokens of each response, `[B]`: 1 if weights are equal, 1/n for one token."""
    weight_BL = weight_BL.double().masked_fill(~keep_BL, 0.0)
    count_B1 = keep_BL.sum(-1, keepdim=True).clamp_min(1)
    share_B1 = row_sums(weight_BL).square() / (count_B1 * row_sums(weight_BL.square())).clamp_min(TINY)
    return share_B1[:, 0].float()


def top_share(weight_BL: Tensor, keep_BL: Tensor, share: float = 0.1) -> Tensor:
    """Part of the absolute weight on the largest `share` of the kept tokens (at least one), `[B]`; `share` if all are equal."""
    mass_BL = weight_BL.abs().masked_fill(~keep_BL, 0.0)
    ranked_BL = sorted_rows(mass_BL.clone()).flip(-1)
    take_B1 = (keep_BL.sum(-1, keepdim=True) * share).round().long().clamp_min(1)
    position_L = torch.arange(weight_BL.shape[-1], device=weight_BL.device)
    top_B1 = row_sums(ranked_BL.masked_fill(position_L >= take_B1, 0.0).double())
    return (top_B1 / row_sums(mass_BL.double()).clamp_min(TINY))[:, 0].float()


def measured(weight_BL: Tensor, keep_BL: Tensor) -> Tensor:
    """The measures of each response's kept tokens, float32 `[B, 4]`. Padding on the right does not change them."""
    shares = effective_sample_size(weight_BL, keep_BL), top_share(weight_BL, keep_BL)
    return torch.stack([*shares, weight_BL.masked_fill(~keep_BL, 0.0).amax(-1), keep_BL.sum(-1).float()], -1)


def summarize(measure_BM: Tensor, status_B: Tensor) -> dict[str, float]:
    """Returns metrics of one batch by name, without prefix, from the measures (`measured`) and statuses of its responses.

    Columns behind those of `measured` are `PREDICTION_NAMES`.

    * `scored`: share of the batch. `answer_found`: share of the responses that needed credit; absent if none did.
    * `fallback/any`, `fallback/<reason>`: shares of the responses that needed credit; 0 if none did.
    * `ess_ratio`, `top10_mass`, `reasoning_tokens`: means over scored responses. `weight_max`. Absent if none was scored.
    * `PREDICTION_NAMES`: means over the responses that have them. Absent if none has.
    """
    scored_B = status_B == Status.SCORED
    needed = int((status_B != Status.NOT_NEEDED).sum())
    missing = sum(int((status_B == s).sum()) for s in (Status.NO_ANSWER, Status.TRUNCATED, Status.SEARCH_FAILED))
    metrics = {"scored": scored_B.float().mean().item()}
    if needed:
        metrics["answer_found"] = 1 - missing / needed
    for reason in FALLBACKS:
        metrics[f"fallback/{reason.name.lower()}"] = int((status_B == reason).sum()) / max(1, needed)
    metrics["fallback/any"] = sum(metrics[f"fallback/{r.name.lower()}"] for r in FALLBACKS)
    if scored_B.any():
        columns = dict(zip(MEASURE_NAMES, measure_BM[scored_B].unbind(-1), strict=False))
        metrics |= {name: (c.max() if name == "weight_max" else c.mean()).item() for name, c in columns.items()}
    predictions = zip(PREDICTION_NAMES, measure_BM[:, len(MEASURE_NAMES) :].unbind(-1), strict=False)
    return metrics | {name: mean for name, c in predictions if (mean := c.nanmean().item()) == mean}
