"""One batch whose importance is predicted, from that of some units, which is computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.credit.noise import response_seeds
from oar_plugin.passes.gradient import Packed, Scores, importance_of_scores
from oar_plugin.passes.prediction import Features, Predictor, Units
from oar_plugin.passes.request import Request


class PredictedBatch:
    """A host runs the rows of `scored_B` first, with the request `scoring`, and calls `field` for each micro-batch. It calls
    `learn`, runs the other rows with the request `predicting`, calls `field` for them too, and then `end_step`.

    Args:
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
        self.predictor, self._given, self._request, self._scoring = predictor, given, request, True
        self._total, self._device = lambda tensor: total(tensor.to(device)), device
        # Of each micro-batch of the scoring pass, until scores are known: rows, their sizes, labels, features, predictions.
        self._kept = list[tuple[Sequence[int], list[int], Units, Tensor, Tensor]]()
        self.scoring = request if given is None else replace(request, predicts=True)
        self.predicting = replace(request, predicts=True)
        if given is None:
            units, seed_B = self._units(packed)
            self._threshold = predictor.threshold(units, seed_B, usable_B, self._total)
            self.labelled_T = self._labelled(packed, units, seed_B)
            self.scored_B = usable_B & (packed.response_T[self.labelled_T].bincount(minlength=len(usable_B)) > 0)
        else:
            self._threshold, self.scored_B = torch.inf, usable_B & given[1]  # `learn` leaves out rows without scores

    def _units(self, packed: Packed) -> tuple[Units, Tensor]:
        """All units, and the seeds of this step by which some are chosen."""
        seed_B = response_seeds(packed.token_T, packed.response_T, len(packed.offsets) - 1, self._request.seed)
        return Units(packed, self.predictor.span), seed_B

    def _labelled(self, packed: Packed, units: Units, seed_B: Tensor) -> Tensor:
        """Tokens of the units that are scored, bool `[T]`."""
        labelled_N = self.predictor.labelled(units, seed_B, self._threshold)
        return packed.reasoning_T.masked_scatter(packed.reasoning_T, labelled_N)

    def field(self, packed: Packed, scores: Scores, log_prob_T: Tensor, rows: Sequence[int]) -> Tensor:
        """Importance per token of a micro-batch, float32 `[T]`, on the CPU: computed in the scoring pass, else predicted.

        `log_prob_T` has the log-prob of each packed token. `rows` are numbers that the host gives its rows, for `learn`.
        """
        features = Features(packed, scores, log_prob_T)
        predicted_T = self.predictor.predict(features)
        if not self._scoring:
            return predicted_T
        labelled_T, sizes = self._labelled(packed, *self._units(packed)), packed.offsets.diff().tolist()
        units = Units(packed, self.predictor.span, labelled_T)
        self._kept.append((rows, sizes, units, units.mean(features.of, self._device), predicted_T))
        if self._given is not None:
            return torch.zeros(len(packed.token_T))
        return importance_of_scores(self.scoring, packed, scores)

    def forget(self) -> None:
        """The scoring pass was aborted."""
        self._kept = []

    def learn(self, row_of: Tensor, importance: list[Tensor]) -> list[Tensor]:
        """Ends the scoring pass: keeps its scores as labels, and returns importance with predictions in their place.

        Args:
            row_of: int64, the row of the batch of each number that `field` got.
            importance: a row's last tokens, all of its response at least.
        """
        computed, self._scoring, found = importance if self._given is None else self._given[0], False, list(importance)
        for numbers, sizes, units, feature_UF, predicted_T in self._kept:
            parts = list[Tensor]()
            for row, size, part in zip(row_of[numbers].tolist(), sizes, predicted_T.split(sizes), strict=True):
                own_L = computed[row] if self.scored_B[row] else torch.full_like(computed[row], torch.nan)
                parts.append(pad(own_L, (size - len(own_L), 0)))
                found[row] = part[size - len(found[row]) :]
            self.predictor.learn(
                feature_UF, units.mean(torch.cat(parts).__getitem__, torch.device("cpu")), units.count_B.tolist()
            )
        self._kept = []
        return found

    def end_step(self) -> Tensor:
        """Ends the batch. Returns the last three of `PREDICTION_NAMES`, float32 `[3]`."""
        self.predictor.end_step(self._total, self._device)
        return torch.tensor([*self.predictor.explained, self.predictor.learning])
