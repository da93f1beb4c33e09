"""A batch of a verl engine whose importance is predicted, of some rows or all (`oar_plugin.passes.prediction`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import response_seeds
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.passes.gradient import Packed, Scores, importance_of_scores
from oar_plugin.passes.prediction import Amortized, Features, Learned
from oar_plugin.passes.request import IMPORTANCE, NEEDED, STATUS, Request

ROW = "oar_row"  # int64 [B]: dynamic batching reorders the rows
NOT_PREDICTED_4 = torch.tensor([0.0, torch.nan, torch.nan, torch.nan])  # `PREDICTION_NAMES`


class PredictedBatch:
    """One batch with its `predictor`. `scored_B` (bool): rows whose importance is computed, here or by rollout engines.

    Features of rows in the scoring pass are kept until their importance is known.
    """

    def __init__(
        self, predictor: Amortized | Learned, request: Request, data: TensorDict, packed: Packed, status_B: Tensor
    ) -> None:
        self.predictor = predictor
        self.given: list[Tensor] | None = (
            None  # importance from rollout engines, by row; zeros where they did not score
        )
        self.scored_B = torch.zeros_like(status_B, dtype=torch.bool)
        self.prediction_B4 = NOT_PREDICTED_4.repeat(len(status_B), 1)
        self._scoring = True
        self._kept = list[tuple[list[int], Features]]()
        if isinstance(predictor, Amortized) and request.config.offloads:
            self.given = list(data[ENGINE_FIELDS[IMPORTANCE]].cpu().unbind())
            self.scored_B = (status_B == Status.SCORED) & (values_of(data, ENGINE_FIELDS[STATUS]) == Status.SCORED)
        elif isinstance(predictor, Amortized):
            seed_B = response_seeds(packed.token_T, packed.response_T, len(status_B), request.seed)
            self.scored_B = (status_B == Status.SCORED) & predictor.chosen(seed_B)

    def scoring(self, request: Request) -> Request:
        """The request of the scoring pass: for hidden states alone, if rollout engines have given importance."""
        return replace(request, predicts=self.given is not None)

    def forget(self) -> None:
        """The scoring pass was aborted."""
        self._kept = []

    def field(self, request: Request, packed: Packed, scores: Scores, rows: TensorDict, log_prob_T: Tensor) -> Tensor:
        """`ImportancePass._importance_field` of these rows. `log_prob_T` is as verl has it: at the token before."""
        features = Features(packed, scores, log_prob_T.roll(1))
        if isinstance(self.predictor, Learned):
            importance_T = self.predictor.predict(features)
            self.predictor.learn(features, values_of(rows, NEEDED))
        elif self._scoring:
            importance_T = importance_of_scores(request, packed, scores)
            self._kept.append((rows[ROW].tolist(), features))
        else:
            importance_T = self.predictor.predict(features)
        return torch.nested.nested_tensor_from_jagged(importance_T, packed.offsets)

    def learn(
        self, order: Tensor, importance: list[Tensor], total: Callable[[Tensor], Tensor], device: Any
    ) -> list[Tensor]:
        """Ends the scoring pass: learns, and returns the importance, with predictions of its other rows.

        `order` has the rows of the batch, those of the scoring pass first. `total` takes a tensor on `device`, and returns its
        sum over data-parallel ranks.
        """
        importance, predictor = self.given or importance, self.predictor
        self._scoring = False
        if not isinstance(predictor, Amortized):
            return importance
        for places, features in self._kept:
            rows, parts = order[places], list[Tensor]()
            for row, size in zip(rows.tolist(), features.packed.offsets.diff().tolist(), strict=True):
                own_L = importance[row] if self.scored_B[row] else torch.full_like(importance[row], torch.nan)
                parts.append(pad(own_L, (size - len(own_L), 0)))
            self.prediction_B4[rows, 1:3] = predictor.learn(features, torch.cat(parts))
        predictor.close(total, device)
        self.prediction_B4[:, 3] = predictor.share
        for places, features in self._kept:
            predicted = predictor.predict(features).split(features.packed.offsets.diff().tolist())
            for row, predicted_T in zip(order[places].tolist(), predicted, strict=True):
                if not self.scored_B[row]:
                    importance[row] = predicted_T[len(predicted_T) - len(importance[row]) :]
        self._kept = []
        return importance

    def close(self, status_B: Tensor, total: Callable[[Tensor], Tensor], device: Any) -> Tensor:
        """Ends the batch. Returns `PREDICTION_NAMES` of each row, float32 `[B, 4]`."""
        if isinstance(self.predictor, Learned):
            self.predictor.close(total, device)
        self.prediction_B4[:, 0] = ((status_B == Status.SCORED) & ~self.scored_B).float()
        return self.prediction_B4


def values_of(data: TensorDict, name: str) -> Tensor:
    """Returns a field with one number per row, `[B]`, on the CPU."""
    field = data[name].cpu()
    return (field.values() if field.is_nested else field).flatten()
