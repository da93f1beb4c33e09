"""Importance of the package that is predicted from hidden states, for the small trainer: its own forward has these."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oar_plugin.credit.importance import Importance
from oar_plugin.credit.noise import response_seeds
from oar_plugin.credit.regression import projected
from oar_plugin.passes.gradient import Scores
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.prediction import Features, Predictor
from oar_plugin.passes.request import Request

CPU = torch.device("cpu")


def chosen(predictor: Predictor | None, request: Request, rollout: Any) -> Tensor:
    """Whether to score each response, bool `[B]`."""
    if predictor is None:
        return torch.ones(len(rollout.token_BL), dtype=torch.bool)
    packed = packed_rows(rollout.token_BL, rollout.segments_BL, rollout.mask_BL)[0]
    seed_B = response_seeds(packed.token_T, packed.response_T, len(rollout.token_BL), request.seed)
    return predictor.chosen(seed_B, lambda: torch.tensor([int(packed.reasoning_T.sum()), len(seed_B)]))


def with_predictions(
    predictor: Predictor,
    rollout: Any,
    passes: Sequence[Any],
    scored_B: Tensor,
    computed: Callable[[], Tensor],
) -> Tensor:
    """Importance `[B, L]`. `computed` returns that of the rows of `scored_B`, which no pass shares with other rows."""
    features = [_features(rollout, one) for one in passes]
    importance_BL = computed()
    for one, of_pass in zip(passes, features, strict=True):
        if scored_B[one.rows].all():
            predictor.learn(of_pass, importance_BL[one.rows, : one.token_bL.shape[1]][_mask(rollout, one)])
    predictor.end_step(lambda tensor: tensor, CPU)
    for one, of_pass in zip(passes, features, strict=True):
        if not scored_B[one.rows].any():
            part_bL = torch.zeros(one.token_bL.shape)
            part_bL[_mask(rollout, one)] = predictor.predict(of_pass)
            importance_BL[one.rows, : part_bL.shape[1]] = part_bL
    return importance_BL


def _mask(rollout: Any, one: Any) -> Tensor:
    mask_bL: Tensor = rollout.mask_BL[one.rows, : one.token_bL.shape[1]]
    return mask_bL


def _features(rollout: Any, one: Any) -> Features:
    mask_bL = _mask(rollout, one)
    segments_bL = rollout.segments_BL[one.rows, : one.token_bL.shape[1]]
    packed = packed_rows(one.token_bL, segments_bL, mask_bL)[0]
    scores = Scores(Importance(), 0, CPU, True)
    scores.hidden_TP = projected(one.hidden_bLH.detach()[mask_bL])
    chosen_bl = one.log_prob_blV.detach().gather(-1, one.token_bL[:, 1:, None])[..., 0]
    return Features(packed, scores, torch.nn.functional.pad(chosen_bl, (1, 0))[mask_bL])
