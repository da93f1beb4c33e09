"""Importance of the package that is predicted from hidden states, for the small trainer: its own forward has these."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from oar_plugin.credit.importance import Importance
from oar_plugin.credit.noise import response_seeds
from oar_plugin.credit.regression import projected
from oar_plugin.passes.gradient import Scores
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.prediction import Features, Predictor, ScorePredictor, ValuePredictor
from oar_plugin.passes.request import Request

CPU = torch.device("cpu")
Control = Literal["inverted", "doubt", "shuffled"]
"""What is predicted turned round; the columns without hidden states alone; learned from the outcomes of other responses."""


def chosen(predictor: Predictor | None, request: Request, rollout: Any) -> Tensor:
    """Whether to score each response, bool `[B]`."""
    if not isinstance(predictor, ScorePredictor):
        return torch.full((len(rollout.token_BL),), predictor is None)
    packed = packed_rows(rollout.token_BL, rollout.segments_BL, rollout.mask_BL)[0]
    seed_B = response_seeds(packed.token_T, packed.response_T, len(rollout.token_BL), request.seed)
    return predictor.chosen(seed_B, lambda: torch.tensor([int(packed.reasoning_T.sum()), len(seed_B)]))


def with_predictions(
    predictor: Predictor,
    rollout: Any,
    passes: Sequence[Any],
    scored_B: Tensor,
    computed: Callable[[], Tensor],
    control: Control | None = None,
    step: int = 0,
) -> Tensor:
    """Importance `[B, L]`. `computed` returns that of the rows of `scored_B`, which no pass shares with other rows."""
    features = [_features(rollout, one, control == "doubt") for one in passes]
    sign_B = rollout.advantage_B.sign()
    if control == "shuffled":
        sign_B = sign_B[torch.randperm(len(sign_B), generator=torch.Generator().manual_seed(step))]
    importance_BL = torch.zeros(rollout.token_BL.shape)
    if isinstance(predictor, ScorePredictor):
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
        if isinstance(predictor, ValuePredictor):
            predictor.learn(of_pass, sign_B[one.rows])
    if isinstance(predictor, ValuePredictor):
        predictor.end_step(lambda tensor: tensor, CPU)
    return 1 / importance_BL.clamp_min(1e-30) if control == "inverted" else importance_BL


def _mask(rollout: Any, one: Any) -> Tensor:
    mask_bL: Tensor = rollout.mask_BL[one.rows, : one.token_bL.shape[1]]
    return mask_bL


def _features(rollout: Any, one: Any, doubt_only: bool) -> Features:
    mask_bL = _mask(rollout, one)
    segments_bL = rollout.segments_BL[one.rows, : one.token_bL.shape[1]]
    packed = packed_rows(one.token_bL, segments_bL, mask_bL)[0]
    scores = Scores(Importance(), 0, CPU, True)
    scores.hidden_TP = projected(one.hidden_bLH.detach()[mask_bL]) * (not doubt_only)
    chosen_bl = one.log_prob_blV.detach().gather(-1, one.token_bL[:, 1:, None])[..., 0]
    return Features(packed, scores, torch.nn.functional.pad(chosen_bl, (1, 0))[mask_bL])
