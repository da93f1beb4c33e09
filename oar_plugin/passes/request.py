"""A trainer's request to an actor, and the fields of the actor's answer.

The request is a plain dictionary beside the batch, under `REQUEST`; it travels to every actor rank with the log-prob call.
The answer is six nested fields of the batch, with one row per response. The trainer multiplies the weights with its advantages.
It reads importance only of responses that people are to look at, and segments of those and where answers are compared.

| field            | content of a row                                                             |
|------------------|------------------------------------------------------------------------------|
| `oar_importance` | float32, one value per response token: finite, 0 where a token is not scored |
| `oar_segments`   | int8, one `Segment` per response token                                       |
| `oar_weights`    | float32, one value per response token: 1 where nothing changes               |
| `oar_status`     | int64 `[1]`, the `Status`                                                    |
| `oar_measures`   | float32 `[4]`, `MEASURE_NAMES`, or `[8]`, also `PREDICTION_NAMES`; of weights: 0 if not SCORED |
| `oar_seconds`    | float32 `[1]`, an equal part of the rank's seconds for copies and backwards  |
"""

import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.importance import Forward, Importance, importance_of
from oar_plugin.credit.noise import step_seed
from oar_plugin.credit.probe import Probe

REQUEST = "oar_request"
NEEDED = (
    "oar_needed"  # field, int64 [1] per row: 1 if the response needs credit (`estimator.needs_credit`), or `CHOSEN`
)
CHOSEN = 2  # it needs credit, and its scores are computed, to predict the others from (`oar_plugin.passes.prediction.Choice`)
SHOWN = IMPORTANCE, SEGMENTS = "oar_importance", "oar_segments"
USED = WEIGHTS, STATUS, MEASURES, SECONDS = "oar_weights", "oar_status", "oar_measures", "oar_seconds"
FIELDS = *SHOWN, *USED


@dataclass(frozen=True)
class Request:
    config: OarConfig
    probe: Probe  # of this training step (the warm-up has been applied)
    seed: int  # of signs and noise in this training step
    max_response_length: int = sys.maxsize  # a response of this length is truncated unless its last token is an EOS
    max_length: int = sys.maxsize  # the same of prompt and response together
    temperature: float = 1.0  # sampling temperature of the responses
    importance_only: bool = False  # log-probs and entropy are not wanted (bypass mode)
    replacement_token: int | None = None  # replaces masked tokens; None: a draw from the model's prediction

    @classmethod
    def of_step(cls, config: OarConfig, step: int, **more: Any) -> "Request":
        """The request at training step `step` (from 1). `more`: the other fields."""
        return cls(config, config.probe_at(step), step_seed(config.seed, step), **more)

    @property
    def importance(self) -> str:
        """The importance to compute. If rollout engines score, it is for responses that they did not score."""
        assert self.config.actor_importance is not None, "the actor is asked for nothing"
        return self.config.actor_importance

    @property
    def importance_object(self) -> Importance:
        return importance_of(self.importance)

    def forwards(self) -> list[Forward]:
        """The forwards of the gradient pass over a micro-batch, in order."""
        return self.importance_object.forwards(self.config.num_draws)

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"config": self.config.model_dump()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Request":
        return cls(**values | {"config": OarConfig.parse(values["config"])})


def nested(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a jagged nested tensor, the form of a batch's fields, from one tensor per row."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def replacement_fault(token: int | None, tokenizer: Any, eos_ids: Collection[int]) -> str | None:
    """A sentence about `replacement_token`, if it ends responses or, by its name, documents (`docs/oar-p.md`)."""
    if token is None:
        return None
    name = str(tokenizer.convert_ids_to_tokens(token))
    if token not in eos_ids and not re.search(r"end[\W_]?of[\W_]?(text|document|sentence)|</s>", name, re.IGNORECASE):
        return None
    says = f"{name!r} ends responses or separates documents. In a copy it says that the text before it has ended, and scores"
    return f"{says} follow the position; set another pad_token, or perturbation.replacement=sampled"


def replacement_token(config: OarConfig, tokenizer: Any) -> int | None:
    """The token that replaces masked ones; None without copies, or if it is `sampled`. OarConfigError: no padding token."""
    if not config.importance_object.copies or config.perturbation.replacement == "sampled":
        return None
    if tokenizer.pad_token_id is None:
        fault = "the tokenizer has no padding token; give it a pad_token of its own, or set sampled"
        raise OarConfigError(f"algorithm.oar.perturbation.replacement=pad: {fault}")
    return int(tokenizer.pad_token_id)
