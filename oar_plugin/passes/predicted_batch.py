"""One batch whose importance is computed for some responses and predicted for the others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.credit.noise import response_seeds
from oar_plugin.passes.gradient import Packed, Scores, importance_of_scores
from oar_plugin.passes.prediction import Features, Predictor
from oar_plugin.passes.request import Request

NOT_PREDICTED_4 = torch.tensor([0.0, torch.nan, torch.nan, torch.nan])  # `PREDICTION_NAMES`


class PredictedBatch:
    """A host runs the rows of `scored_B` first, with the request `scoring`, and calls `field` for each micro-batch. It calls
    `learn`, runs the other rows with the request `predicting`, calls `field` for them too, and then `end_step`.

    Args:
        predictor: of the run. It learns from the batch.
        request: of the step.
        packed: all rows of the batch.
        usable_B: bool, rows that have reasoning and an answer.
        total: takes a tensor on `device`, returns its sum over the ranks that hold different rows.
        given: importance that is known already, of rollout engines, with the rows that have it (bool `[B]`).
    """

    def __init__(
        self,
        predictor: Predictor,
        request: Request,
        packed: Packed,
        usable_B: Tensor,
        total: Callable[[Tensor], Tensor],
        device: torch.device,
        given: tuple[list[Tensor], Tensor] | None = None,
    ) -> None:
        self.predictor, self._given, self._scoring = predictor, given, True
        self._total, self._device = total, device
        size_2 = torch.stack([packed.reasoning_T.sum(), usable_B.sum()])
        self._size = lambda: total(size_2.to(device, copy=True))
        self._kept = list[tuple[Sequence[int], Features]]()  # of the scoring pass, until importance is known
        self.scoring = request if given is None else replace(request, predicts=True)
        self.predicting = replace(request, predicts=True)
        self.prediction_B4 = NOT_PREDICTED_4.repeat(len(usable_B), 1)
        if given is not None:
            self.scored_B = usable_B & given[1]
        else:
            seed_B = response_seeds(packed.token_T, packed.response_T, len(usable_B), request.seed)
            self.scored_B = usable_B & predictor.chosen(seed_B, self._size)

    def field(self, packed: Packed, scores: Scores, log_prob_T: Tensor, rows: Sequence[int]) -> Tensor:
        """Importance per token of a micro-batch, float32 `[T]`, on the CPU, as far as it is known yet.

        `log_prob_T` has the log-prob of each packed token. `rows` are numbers that the host gives its rows, for `learn`.
        """
        features = Features(packed, scores, log_prob_T)
        if not self._scoring:
            return self.predictor.predict(features)
        self._kept.append((rows, features))
        if self._given is not None:
            return torch.zeros(len(packed.token_T))
        return importance_of_scores(self.scoring, packed, scores)

    def forget(self) -> None:
        """The scoring pass was aborted."""
        self._kept = []

    def learn(self, row_of: Tensor, importance: list[Tensor]) -> list[Tensor]:
        """Ends the scoring pass: learns, and returns importance, with predictions where rows of that pass have no scores.

        Args:
            row_of: int64, the row of the batch of each number that `field` got.
            importance: a row's last tokens, all of its response at least.
        """
        importance, self._scoring = importance if self._given is None else self._given[0], False
        for numbers, features in self._kept:
            rows, parts = row_of[numbers], list[Tensor]()
            for row, size in zip(rows.tolist(), features.packed.offsets.diff().tolist(), strict=True):
                own_L = importance[row] if self.scored_B[row] else torch.full_like(importance[row], torch.nan)
                parts.append(pad(own_L, (size - len(own_L), 0)))
            self.prediction_B4[rows, 1:3] = self.predictor.learn(features, torch.cat(parts))
        self.predictor.end_step(self._total, self._device)
        self.prediction_B4[:, 3] = self.predictor.wanted(self._size)
        for numbers, features in self._kept:
            predicted = self.predictor.predict(features).split(features.packed.offsets.diff().tolist())
            for row, predicted_T in zip(row_of[numbers].tolist(), predicted, strict=True):
                if not self.scored_B[row]:
                    importance[row] = predicted_T[len(predicted_T) - len(importance[row]) :]
        self._kept = []
        return importance

    def end_step(self, usable_B: Tensor) -> Tensor:
        """Ends the batch. Returns `PREDICTION_NAMES` of each row, float32 `[B, 4]`; `usable_B` are rows with an importance."""
        self.prediction_B4[:, 0] = (usable_B & ~self.scored_B).float()
        return self.prediction_B4
