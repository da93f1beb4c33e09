"""What the trainer asks of the actor, and what comes back.

The request is a plain dictionary in the batch's `extra_info`, under `REQUEST`; it travels to every actor rank with the
log-prob call. What comes back are three nested fields of the batch, one row a response:

| field            | a row holds                                                              |
|------------------|--------------------------------------------------------------------------|
| `oar_importance` | float32, one value a response token: finite, 0 where a token is not scored |
| `oar_segments`   | int8, one `Segment` a response token                                     |
| `oar_report`     | float32 `[2]`: `Status`, and the actor seconds spent on this response    |
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from oar_plugin.config import Importance, OarConfig
from oar_plugin.credit.probe import Probe

Part = Literal["answer", "onward"]
"""What a backward starts from: the answer's rows, or those of the reasoning (`importance=onward`)."""

REQUEST = "oar_request"
NEEDED = "oar_needed"  # field: int64 [1] a row, 1 when the response's advantage is not zero
IMPORTANCE, SEGMENTS, REPORT = "oar_importance", "oar_segments", "oar_report"


@dataclass(frozen=True)
class Perturbation:
    """The masked copies of one importance pass (`oar_p`, `hybrid`); see `oar_plugin.credit.perturbation`.

    Attributes:
        budget: share or number of units that get a copy.
        span: tokens a unit, or where units end.
        replacement_token: what to mask with; None: drawn from the model's prediction.
        perturbations_per_forward: copies in one forward; None: as many as fit the token budget.
    """

    budget: float
    span: int | Literal["lines", "operators"]
    replacement_token: int | None
    perturbations_per_forward: int | None = None

    @classmethod
    def from_config(cls, config: OarConfig, replacement_token: int | None) -> Perturbation | None:
        """None when importance does not come from copies."""
        if not config.perturbs:
            return None
        settings = config.perturbation
        return cls(config.budget, settings.span, replacement_token, settings.perturbations_per_forward)


@dataclass(frozen=True)
class Request:
    """One importance pass over a batch.

    Attributes:
        importance: estimator.
        probe: the probe of this step (the warm-up has been applied).
        sigma: noise scale of `oar_g`.
        num_draws: backward passes to average.
        seed: seed of signs and noise.
        answer_patterns: for `make_finder`.
        max_response_length: a response as long as this that does not end in an end-of-sequence token is truncated.
        importance_only: nobody needs log-probs and entropy of this pass (bypass mode).
        perturbation: the masked copies, for `oar_p` and `hybrid`.
    """

    importance: Importance
    probe: Probe
    sigma: float
    num_draws: int
    seed: int
    answer_patterns: tuple[str, ...]
    max_response_length: int
    importance_only: bool = False
    perturbation: Perturbation | None = None

    @classmethod
    def from_config(
        cls,
        config: OarConfig,
        step: int,
        max_response_length: int,
        importance_only: bool = False,
        replacement_token: int | None = None,
    ) -> Request:
        """The request of training step `step` (from 1)."""
        return cls(
            importance=config.importance,
            probe=config.probe_at(step),
            sigma=config.sigma,
            num_draws=config.num_draws,
            seed=config.seed,
            answer_patterns=config.answer_patterns,
            max_response_length=max_response_length,
            importance_only=importance_only,
            perturbation=Perturbation.from_config(config, replacement_token),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The backwards of one draw."""
        return ("answer", "onward") if self.importance == "onward" else ("answer",)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: it is copied and pickled on its way."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Request:
        """The inverse of `to_dict`."""
        perturbation = values.get("perturbation")
        return cls(
            **{
                **values,
                "answer_patterns": tuple(values["answer_patterns"]),
                "perturbation": Perturbation(**perturbation) if perturbation else None,
            }
        )
