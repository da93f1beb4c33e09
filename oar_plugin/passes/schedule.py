"""The order of a training step, for every host: choose, read and predict, label, learn.

A host finds the answers before (`passes.segments`), and weighs the importance afterwards (`estimator`). `Schedule` belongs to a
run, and has all that a run remembers: the predictor. With `amortize.share=null` nothing is chosen, predicted or learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance import Forward
from oar_plugin.credit.noise import response_seeds
from oar_plugin.passes.copies import CopyRows
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed, Scores, importance_of_scores
from oar_plugin.passes.host import Host, MicroBatch, Work
from oar_plugin.passes.prediction import Features, Predictor, Units, predictor_of
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import Tap, together


@dataclass(frozen=True)
class Given:
    """What rollout engines have scored."""

    importance_T: Tensor
    scored_B: Tensor  # bool


@dataclass(frozen=True)
class Result:
    importance_T: Tensor  # float32, on the CPU; 0 outside the reasoning
    status_B: Tensor  # int64, a `Status` per response, before the gate


class Schedule:
    def __init__(self, config: OarConfig) -> None:
        self.predictor = predictor_of(config)

    @property
    def prediction_3(self) -> Tensor | None:
        """The last three of `PREDICTION_NAMES`, of the last step; None: importance is computed for all."""
        if self.predictor is None:
            return None
        return torch.tensor([*self.predictor.explained, self.predictor.learning])

    def run(
        self,
        host: Host,
        request: Request,
        packed: Packed,
        status_B: Tensor,
        chosen_B: Tensor | None = None,
        given: Given | None = None,
    ) -> Result:
        """One step. `status_B`: SCORED for responses that need credit and have an answer. Other responses are OUTSIDE.

        `chosen_B` (bool): responses to label, if a driver has chosen them.
        """
        step = _Step(self.predictor, host, request, packed, status_B.clone(), chosen_B, given)
        step.read()
        step.label()
        return Result(step.importance_T, step.status_B)


@dataclass
class _Step:
    predictor: Predictor | None
    host: Host
    request: Request
    packed: Packed
    status_B: Tensor
    chosen_B: Tensor | None
    given: Given | None

    def __post_init__(self) -> None:
        predictor, host, request, packed, given = self.predictor, self.host, self.request, self.packed, self.given
        self.kind, self.usable_B = request.importance_object, self.status_B == Status.SCORED
        self.labelled_T = packed.reasoning_T
        if predictor is not None:
            chosen_B = self.chosen_B if given is None else given.scored_B
            how = self.usable_B, lambda count: host.total(count.to(host.device)), chosen_B
            self.labelled_T = labelled_tokens(predictor, request, packed, *how)
        self.importance_T = torch.zeros(len(packed.token_T))
        self.copies: CopyRows | None = None
        if self.kind.copies and given is None:
            self.copies = CopyRows(request, packed, self.labelled_T)
        # Of each micro-batch: positions of its tokens in the batch, its labelled units, and their features.
        self._kept = list[tuple[Tensor, Units, Tensor]]()

    # ---- read and predict

    def read(self) -> None:
        reads = frozenset[str]() if self.kind.backwards else self.kind.reads
        hidden = self.predictor is not None
        work = None
        if hidden or reads or self.copies:
            reads |= {"log_prob"} if hidden and not self.host.gives_log_probs else frozenset()

            def begin(rows: Sequence[int], layout: Layout) -> MicroBatch:
                packed = self.packed.select(rows)
                reading = MicroBatchPass(self.request, packed, layout, reads, hidden)
                more = None if self.copies is None else self.copies.tap(rows, packed, layout)

                def tap(forward: Forward) -> Tap:
                    return reading.tap(forward) if more is None else together(reading.tap(forward), more)

                return MicroBatch(tap, partial(self._end_read, rows, reading))

            work = Work([Forward(None, log_probs=self.host.gives_log_probs)], begin)
        if not self.host.read(self.usable_B.nonzero()[:, 0].tolist(), work):
            self._out_of_memory()

    def _end_read(self, rows: Sequence[int], reading: MicroBatchPass, log_prob_T: Tensor | None) -> None:
        packed, scores, at_T = reading.packed, reading.scores, self.packed.at(rows)
        reading.total(self.host.share)
        if self.predictor is not None:
            features = Features(packed, scores, scores.log_prob_T if log_prob_T is None else log_prob_T)
            self.importance_T[at_T] = self.predictor.predict(features)
            units = Units(packed, self.predictor.span, self.labelled_T[at_T])
            if len(units.at_Us):
                self._kept.append((at_T, units, units.mean(features.of, self.host.device)))
        elif self.kind.reads and not self.kind.backwards:
            self.importance_T[at_T] = importance_of_scores(self.request, packed, scores)

    # ---- label and learn

    def label(self) -> None:
        """Computes scores: of labels, from which the predictor learns, or of all."""
        kind, cpu = self.kind, torch.device("cpu")
        if self.given is not None:
            score_T = self.given.importance_T
        elif self.copies is not None:
            score_T = self.copies.run(self.host)
        elif kind.backwards:
            score_T = self._gradient()
        elif kind.reads:
            return
        else:
            score_T = importance_of_scores(self.request, self.packed, Scores(kind, len(self.importance_T), cpu))
        if self.predictor is None:
            self.importance_T = score_T
            return
        for at_T, units, feature_UF in self._kept:
            score_U = units.mean(score_T[at_T].__getitem__, cpu)
            self.predictor.learn(feature_UF, score_U, units.count_B.tolist())
        self.predictor.end_step(self.host.total, self.host.device)

    def _gradient(self) -> Tensor:
        """Importance per token of the labelled responses, float32 `[T]`; 0 if memory ran out."""
        score_T = torch.zeros_like(self.importance_T)

        def begin(rows: Sequence[int], layout: Layout) -> MicroBatch:
            scored = MicroBatchPass(self.request, self.packed.select(rows), layout)

            def end(log_prob_T: Tensor | None) -> None:
                scored.total(self.host.share)
                score_T[self.packed.at(rows)] = importance_of_scores(self.request, scored.packed, scored.scores)

            return MicroBatch(scored.tap, end)

        labelled_B = self.packed.response_T[self.labelled_T].bincount(minlength=len(self.status_B)) > 0
        rows = (self.usable_B & labelled_B).nonzero()[:, 0].tolist()
        if not self.host.gradient(rows, Work(self.request.forwards(), begin)):
            self._out_of_memory()
            score_T.zero_()
        return score_T

    def _out_of_memory(self) -> None:
        """Nothing is predicted or learned."""
        self.status_B[self.usable_B] = int(Status.OUT_OF_MEMORY)
        self.usable_B, self.copies, self._kept = torch.zeros_like(self.usable_B), None, []
        self.importance_T.zero_()


def labelled_tokens(
    predictor: Predictor,
    request: Request,
    packed: Packed,
    usable_B: Tensor,
    total: Callable[[Tensor], Tensor],
    chosen_B: Tensor | None = None,
) -> Tensor:
    """Tokens of the units whose scores are computed, bool `[T]`. `chosen_B`: responses, if they are known; for `total` see
    `Predictor.choose`.
    """
    units = Units(packed, predictor.span)
    seeds = partial(response_seeds, packed.token_T, packed.response_T, len(usable_B))
    if chosen_B is None:
        chosen_B = predictor.choose(units, seeds(request.seed), usable_B, total)
    # Units not of the step: an engine may draw them in an earlier one than the actor.
    labelled_N = predictor.labelled(units, seeds(request.config.seed), usable_B & chosen_B)
    return packed.reasoning_T.masked_scatter(packed.reasoning_T, labelled_N)
