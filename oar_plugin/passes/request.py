"""A trainer's request to an actor, and the fields of the actor's answer.

The request is a plain dictionary beside the batch, under `REQUEST`; it travels to every actor rank with the log-prob call.
The answer is six nested fields of the batch, with one row per response. The trainer multiplies the weights with its advantages.
It reads importance and segments only of responses that people are to look at.

| field            | content of a row                                                             |
|------------------|------------------------------------------------------------------------------|
| `oar_importance` | float32, one value per response token: finite, 0 where a token is not scored |
| `oar_segments`   | int8, one `Segment` per response token                                       |
| `oar_weights`    | float32, one value per response token: 1 where nothing changes               |
| `oar_status`     | int64 `[1]`, the `Status`                                                    |
| `oar_measures`   | float32 `[4]`, `MEASURE_NAMES` of the weights; 0 if the status is not SCORED |
| `oar_seconds`    | float32 `[1]`, actor seconds spent on the response                           |
"""

from dataclasses import asdict, dataclass
from typing import Any

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.gate import Gate, gate_of
from oar_plugin.credit.importance import Importance, importance_of
from oar_plugin.credit.noise import step_seed
from oar_plugin.credit.probe import Probe

REQUEST = "oar_request"
NEEDED = (
    "oar_needed"  # field: int64 [1] per row: the sign of the response's advantage, 0 if it is not scored, or `UNSIGNED`
)
CONTEXT = "oar_context_"  # begins the names of fields: int64, the prompts of `Contexts` by what they show
SHOWN = IMPORTANCE, SEGMENTS = "oar_importance", "oar_segments"
USED = WEIGHTS, STATUS, MEASURES, SECONDS = "oar_weights", "oar_status", "oar_measures", "oar_seconds"
FIELDS = *SHOWN, *USED


@dataclass(frozen=True)
class Request:
    importance: str  # name; `perturbation.fallback` if rollout engines score: for responses that they did not score
    probe: Probe = "answer_mean"  # the probe of this step (the warm-up has been applied)
    sigma: float = 1e-3  # noise scale
    num_draws: int = 1  # draws to average
    seed: int = 0  # seed of the random signs and noise in this training step
    temperature: float = 1.0  # sampling temperature of the responses
    answer_patterns: tuple[str, ...] = ()  # for `make_finder`
    max_response_length: int = 0  # a response of this length counts as truncated unless its last token is an EOS
    max_answer_tokens: int = 1024  # a response with a longer answer is not scored
    importance_only: bool = False  # log-probs and entropy are not wanted (bypass mode)
    budget: float = 1.0  # share or number of masked copies; see `copies_of_budget`
    span: int = 1  # tokens that one copy masks
    replacement_token: int | None = None  # replaces masked tokens; None: a draw from the model's prediction
    gate: str = "two_level"  # name
    quantile: float = 0.85  # the gate's `tau`
    beta: float = 2.0
    floor: float = 0.1

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
        """The request at training step `step` (from 1). `config.actor_importance` must not be None."""
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
            gate=config.gate,
            quantile=config.quantile,
            beta=config.beta,
            floor=config.floor,
        )

    @property
    def importance_object(self) -> Importance:
        return importance_of(self.importance)

    @property
    def gate_object(self) -> Gate:
        return gate_of(self.gate)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Request":
        return cls(**values | {"answer_patterns": tuple(values["answer_patterns"])})


def replacement_token(config: OarConfig, tokenizer: Any) -> int | None:
    """Returns the token that replaces masked tokens in copies; None without copies, or if replacements are `sampled`.

    Raises:
        OarConfigError: there is no padding token.
    """
    if config.copies is None or config.perturbation.replacement == "sampled":
        return None
    if tokenizer.pad_token_id is None:
        fault = "the tokenizer has no padding token; allowed here: sampled"
        raise OarConfigError(f"algorithm.oar.perturbation.replacement=pad: {fault}")
    return int(tokenizer.pad_token_id)
