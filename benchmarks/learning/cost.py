"""What a training spends, in sampled tokens and in FLOPs, and what it gains over another one for the same."""

from collections.abc import Mapping, Sequence

import numpy as np

Steps = Sequence[Mapping[str, float]]


def tokens_of(steps: Steps) -> np.ndarray:
    """Sampled tokens of each step; NaN where that is not known."""
    return np.array([step.get("tokens", np.nan) for step in steps])


def flops_of(steps: Steps) -> np.ndarray:
    """FLOPs of each step: sampling, the forward that importance and update share, importance, and update. NaN if not counted.

    They are counted on one step (`training.counted`), and again where another part of the responses is scored. Those of other
    steps are taken to be in proportion to the tokens of the responses that have an advantage. A sampled token is taken to cost
    what a token of the forward does, as in an engine with a cache; prompts are left out there.
    """
    counted = next((step for step in steps if "update_flops" in step), None)
    if counted is None:
        return np.full(len(steps), np.nan)
    trained, per_token = np.array([step["used"] * step["length"] for step in steps]), []
    for step in steps:
        counted = step if "update_flops" in step else counted
        parts = np.array([counted[f"{part}_flops"] for part in ("forward", "importance", "update")])
        per_token.append(parts / (counted["used"] * counted["length"]))
    each = np.array(per_token)
    found: np.ndarray = each[:, 0] * tokens_of(steps) + each.sum(1) * trained
    return found


def passes_of(steps: Steps, added: float) -> np.ndarray:
    """Cost of each step of a large model in forwards of a token: a sampled token is one; log-probs and update of a token that
    has an advantage are five with checkpointed layers, of which an importance adds a share of `added`.
    """
    return tokens_of(steps) + 5 * (1 + added) * np.array([step["used"] * step["length"] for step in steps])


def reward_until(rewards: Sequence[float], spent: np.ndarray, budget: float) -> float:
    """Mean reward over what is spent up to `budget`, each step weighted by what it takes of it."""
    taken = np.clip(budget - (spent.cumsum() - spent), 0.0, spent)
    return float((taken * rewards).sum() / taken.sum())


def gain_at_equal(
    ours: Sequence[float], our_spent: np.ndarray, theirs: Sequence[float], their_spent: np.ndarray
) -> float:
    """Difference of the two mean rewards over what the cheaper training spends in all."""
    budget = min(our_spent.sum(), their_spent.sum())
    return reward_until(ours, our_spent, budget) - reward_until(theirs, their_spent, budget)
