"""Importance of the package that is predicted from hidden states, for the small trainer: its own forward has these."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oar_plugin.credit.importance import Importance
from oar_plugin.credit.regression import projected
from oar_plugin.passes.gradient import Packed, Scores
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.prediction import Features, Predictor, Units
from oar_plugin.passes.request import Request
from oar_plugin.passes.schedule import labelled_tokens

CPU = torch.device("cpu")


def labelled(predictor: Predictor | None, request: Request, rollout: Any) -> Tensor:
    """Which tokens get scores, bool `[B, L]`: all reasoning tokens if nothing is predicted."""
    reasoning_BL: Tensor = rollout.reasoning_BL
    if predictor is None:
        return reasoning_BL
    packed = packed_rows(rollout.token_BL, rollout.segments_BL, rollout.mask_BL)[0]
    labelled_T = labelled_tokens(predictor, request, packed, reasoning_BL.any(-1), lambda tensor: tensor)
    return torch.zeros_like(reasoning_BL).masked_scatter(reasoning_BL, labelled_T[packed.reasoning_T])


def with_predictions(
    predictor: Predictor,
    rollout: Any,
    passes: Sequence[Any],
    labelled_BL: Tensor,
    computed: Callable[[], Tensor],
    surface: bool,
) -> Tensor:
    """Importance `[B, L]`, predicted from the labels of earlier steps. `computed` returns the scores of `labelled_BL`.

    `surface`: a control, from position and doubt alone.
    """
    importance_BL, score_BL = torch.zeros(rollout.token_BL.shape), computed()
    for one in passes:
        here = one.rows, slice(one.token_bL.shape[1])
        mask_bL, packed, features = _features(rollout, one, surface)
        part_bL = torch.zeros(one.token_bL.shape)
        part_bL[mask_bL] = predictor.predict(features)
        importance_BL[here] = part_bL
        units = Units(packed, predictor.span, labelled_BL[here][mask_bL])
        score_U = units.mean(score_BL[here][mask_bL].__getitem__, CPU)
        predictor.learn(units.mean(features.of, CPU), score_U, units.count_B.tolist())
    predictor.end_step(lambda tensor: tensor, CPU)
    return importance_BL


def _features(rollout: Any, one: Any, surface: bool) -> tuple[Tensor, Packed, Features]:
    """Which tokens of a micro-batch are no padding, the others packed, and what is known of them."""
    here = one.rows, slice(one.token_bL.shape[1])
    mask_bL = rollout.mask_BL[here]
    packed = packed_rows(one.token_bL, rollout.segments_BL[here], mask_bL)[0]
    scores = Scores(Importance(), 0, CPU, True)
    scores.hidden_TP = projected(one.hidden_bLH.detach()[mask_bL]) * (not surface)
    chosen_bl = one.log_prob_blV.detach().gather(-1, one.token_bL[:, 1:, None])[..., 0]
    return mask_bL, packed, Features(packed, scores, torch.nn.functional.pad(chosen_bl, (1, 0))[mask_bL])
