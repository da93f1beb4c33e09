"""What a trainer asks of an actor, and what comes back.

The request is a plain dictionary beside the batch, under `REQUEST`; it travels to every actor rank with the log-prob call.
What comes back are four nested fields of the batch, one row a response:

| field            | a row holds                                                              |
|------------------|--------------------------------------------------------------------------|
| `oar_importance` | float32, one value a response token: finite, 0 where a token is not scored |
| `oar_segments`   | int8, one `Segment` a response token                                     |
| `oar_status`     | int64 `[1]`: `Status`                                                    |
| `oar_seconds`    | float32 `[1]`: actor seconds spent on this response                      |
"""

from dataclasses import asdict, dataclass
from typing import Any

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.importance import Importance, importance_of
from oar_plugin.credit.noise import step_seed
from oar_plugin.credit.probe import Probe

REQUEST = "oar_request"
NEEDED = "oar_needed"  # field: int64 [1] a row, 1 when the response's advantage is not zero
FIELDS = IMPORTANCE, SEGMENTS, STATUS, SECONDS = "oar_importance", "oar_segments", "oar_status", "oar_seconds"


@dataclass(frozen=True)
class Request:
    """One importance pass over a batch."""

    # name, for `importance_of`. Where rollout engines score, the one that the actor uses for responses they failed to
    # score (`algorithm.oar.perturbation.fallback`).
    importance: str
    probe: Probe = "answer_mean"  # the probe of this step (the warm-up has been applied)
    sigma: float = 1e-3  # noise scale
    num_draws: int = 1  # draws to average
    seed: int = 0  # of this training step's signs and noise
    temperature: float = 1.0  # that responses were sampled with
    answer_patterns: tuple[str, ...] = ()  # for `make_finder`
    # a response as long as this that does not end in an end-of-sequence token is truncated
    max_response_length: int = 0
    max_answer_tokens: int = 1024  # a response with a longer answer is not scored
    importance_only: bool = False  # nobody needs log-probs and entropy of this pass (bypass mode)
    budget: float = 1.0  # of masked copies, for an importance that has them; see `copies_of_budget`
    span: int = 1  # tokens that one copy masks
    replacement_token: int | None = None  # what stands in for them; None: a draw from the model's prediction

    @classmethod
    def from_config(
        cls,
        config: OarConfig,
        step: int,
        max_response_length: int,
        importance_only: bool = False,
        replacement_token: int | None = None,
        temperature: float = 1.0,
    ) -> "Request":
        """The request to the actor at training step `step` (from 1). `config.actor_importance` must not be None."""
        assert config.actor_importance is not None, "the actor is asked for nothing"
        return cls(
            importance=config.actor_importance,
            probe=config.probe_at(step),
            sigma=config.sigma,
            num_draws=config.num_draws,
            seed=step_seed(config.seed, step),
            temperature=temperature,
            answer_patterns=config.answer_patterns,
            max_response_length=max_response_length,
            max_answer_tokens=config.max_answer_tokens,
            importance_only=importance_only,
            budget=config.budget,
            span=config.perturbation.span,
            replacement_token=replacement_token,
        )

    @property
    def importance_object(self) -> Importance:
        """What `importance` names."""
        return importance_of(self.importance)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: it is copied and pickled on its way."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Request":
        return cls(**values | {"answer_patterns": tuple(values["answer_patterns"])})


def replacement_token(config: OarConfig, tokenizer: Any) -> int | None:
    """The token that masks (`algorithm.oar.perturbation.replacement`); None where none does, or each place draws its own.

    Raises:
        OarConfigError: there is no padding token.
    """
    if config.copies is None or config.perturbation.replacement == "sampled":
        return None
    if tokenizer.pad_token_id is None:
        raise OarConfigError(
            "algorithm.oar.perturbation.replacement=pad: the tokenizer has no padding token; allowed here: sampled"
        )
    return int(tokenizer.pad_token_id)
