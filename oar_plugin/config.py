"""Every knob of OAR, in one place, validated when a run starts.

In a verl run they live under `algorithm.oar.*`; the defaults are the paper's (arXiv 2601.07408) but for the importance
estimator, where `fisher` is the default because it measured better (see `oar_plugin.credit.gradient`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oar_plugin.credit.answer import make_finder
from oar_plugin.credit.gradient import Importance
from oar_plugin.credit.probe import Probe

PREFIX = "algorithm.oar"

BaseEstimator = Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"]


class OarConfigError(ValueError):
    """A setting that cannot work. The message names the key, its value and what is allowed."""


class OarConfig(BaseModel):
    """The settings of `algorithm.oar`. Build it with `OarConfig.parse`, which explains what is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    importance: Importance = Field(
        "fisher",
        description="How a token's importance is computed. fisher: squared gradient norm of a random root of the answer's "
        "Fisher information, one backward, no noise. oar_g: as published, KL under Gaussian noise on the embeddings.",
    )
    base_estimator: BaseEstimator = Field(
        "grpo",
        description="verl's own estimator whose advantage is reshaped. std normalisation of grpo stays with "
        "algorithm.norm_adv_by_std_in_grpo.",
    )
    probe: Probe = Field(
        "answer_mean",
        description="What 'the answer distribution' is: last (first answer token, answer not shown), answer_mean (mean "
        "logits over the answer's tokens; best in the paper's ablations), answer_joint (product over the answer's tokens).",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Training steps that use the probe 'last' before 'probe' takes over; for models whose answers are not "
        "well formed yet.",
    )
    answer_patterns: tuple[str, ...] = Field(
        ("boxed", "hash", "answer_tag", "the_answer_is"),
        description="Where the answer stands; the last complete match in a response counts. Names: boxed, hash, answer_tag, "
        "the_answer_is; or 'regex:<expression>' (group 1 is the answer); or 'python:<module>:<function>'. Empty: the last "
        "token of the response (probe=last only).",
    )
    tau: float = Field(0.4, ge=0, le=1, description="Quantile of the scores that splits damped from boosted tokens.")
    beta: float = Field(2.0, ge=0, description="Boost of the tokens above the quantile.")
    floor: float = Field(
        0.1, gt=0, le=1, description="Smallest weight of the tokens below it, before mass is restored."
    )
    sigma: float = Field(1e-3, gt=0, le=1, description="Noise scale of oar_g.")
    num_draws: int = Field(
        1,
        ge=1,
        le=64,
        description="Sign vectors (fisher) or noise draws (oar_g) averaged per response; each is a backward.",
    )
    seed: int = Field(
        0, ge=0, lt=2**31, description="Seed of the signs and the noise; the host's RNG is never touched."
    )
    dump_dir: str | None = Field(
        None,
        description="Write the weights of a few responses of every step here, as JSON lines that `oar inspect` shows.",
    )
    dump_responses: int = Field(4, ge=1, description="How many responses a step to dump.")

    @model_validator(mode="after")
    def _check_together(self) -> OarConfig:
        if not self.answer_patterns and self.probe != "last":
            raise ValueError(
                f"probe={self.probe} needs to know where the answer is, but answer_patterns is empty; "
                "allowed: probe=last, or at least one pattern"
            )
        make_finder(self.answer_patterns)
        return self

    @classmethod
    def parse(cls, settings: Mapping[str, Any] | None, prefix: str = PREFIX) -> OarConfig:
        """Validate plain settings.

        Args:
            settings: the content of `algorithm.oar`; None or empty for the defaults.
            prefix: how the user calls this group, for messages.

        Raises:
            OarConfigError: unknown key, value of the wrong type or out of range, or a combination that cannot work; one
                line a fault, each with the key, its value and what is allowed.
        """
        try:
            return cls.model_validate(dict(settings or {}))
        except ValidationError as error:
            lines = [cls._explain(fault, prefix) for fault in error.errors()]
            raise OarConfigError("\n".join(lines)) from None

    @classmethod
    def _explain(cls, fault: Any, prefix: str) -> str:
        key = ".".join(str(part) for part in fault["loc"])
        where = f"{prefix}.{key}" if key else prefix
        if fault["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, cls.model_fields, n=1)
            hint = f"did you mean {prefix}.{close[0]}? " if close else ""
            return f"{where}={fault['input']!r}: unknown key; {hint}allowed keys: {', '.join(cls.model_fields)}"
        message = fault["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if not key else f"{where}={fault['input']!r}: {message}"

    def probe_at(self, step: int) -> Probe:
        """The probe of training step `step` (the first step is 1)."""
        return "last" if step <= self.warmup_steps else self.probe
