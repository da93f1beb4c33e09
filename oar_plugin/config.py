"""Every knob of OAR, in one place, validated when a run starts.

In a verl run they live under `algorithm.oar.*`; the defaults are the paper's (arXiv 2601.07408) but for importance and gate,
and the preset `+oar=published` has the paper's of those too.

`fisher` because, of what an engine can compute with one backward, it agrees best with exact OAR-P (0.67 of the top 20 %
against 0.52 for `oar_g`, twelve models, `benchmarks/fidelity_cpu.md`). `two_level` with tau 0.85 because with `bi_level` it
was behind GRPO on a chain in all of six seeds (-0.030; `two_level` -0.010) and nowhere ahead of it by more than the noise:
over four tasks and six seeds each +0.012 against +0.004 mean reward (`benchmarks/learning_variants.md`; their difference
alone is within the noise, p 0.26). `onward` was ahead of GRPO over these 24 pairs (+0.010, p 0.04) and on the chain at its
best learning rate, but its second forward and backward cost 2.6 times as much (`oar plan`): it is for those who know that
their task is a chain.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oar_plugin.credit.answer import make_finder
from oar_plugin.credit.perturbation import Replacement
from oar_plugin.credit.probe import Probe

PREFIX = "algorithm.oar"

Importance = Literal["fisher", "oar_g", "onward", "oar_p", "hybrid"]
PERTURBING: tuple[Importance, ...] = ("oar_p", "hybrid")
HYBRID_BUDGET = 0.3

Gate = Literal["two_level", "bi_level"]
QUANTILE: dict[Gate, float] = {"two_level": 0.85, "bi_level": 0.4}
BaseEstimator = Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"]


class OarConfigError(ValueError):
    """A setting that cannot work. The message names the key, its value and what is allowed."""


class PerturbationConfig(BaseModel):
    """The settings of `algorithm.oar.perturbation`: counterfactual importance (`importance=oar_p` or `hybrid`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    backend: Literal["actor", "rollout"] = Field(
        "actor",
        description="Who runs the masked copies. actor: the training engine, after the log-prob pass. rollout: the vLLM "
        "engines, from the moment a response is finished, while others are still being generated (oar_p only).",
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="How many units of a response get a copy of their own: up to 1 a share, above 1 a number. null: all of "
        "them for oar_p, 0.3 for hybrid. hybrid chooses them by gradient, oar_p block by block; the others get a "
        "calibrated estimate.",
    )
    span: Annotated[int, Field(ge=1, le=1024)] | Literal["lines", "operators"] = Field(
        1,
        description="What one copy replaces: that many tokens in a row, or everything up to a newline (lines) or to an "
        "operator or newline (operators). The score is shared out evenly.",
    )
    replacement: Replacement = Field(
        "pad",
        description="What stands in for a token. pad: the padding token, as published. mean: the token whose embedding is "
        "nearest to the mean embedding. sampled: a token drawn from the model's own prediction at that place.",
    )
    perturbations_per_forward: int | None = Field(
        None,
        ge=1,
        description="Copies in one forward of the actor. null: as many as fit the token budget of the log-prob pass "
        "(log_prob_max_token_len_per_gpu).",
    )
    timeout_s: float = Field(
        300.0, gt=0, description="Seconds that one copy may take in a rollout engine, once it is its turn."
    )
    fallback: Literal["fisher", "none"] = Field(
        "fisher",
        description="What a response gets that the rollout engines could not score: fisher, computed by the actor in the "
        "log-prob pass, or none, its plain advantage.",
    )
    max_in_flight: int = Field(
        64, ge=1, description="Copies that a rollout engine works on at once when it generates nothing."
    )
    share_while_generating: float = Field(
        0.15,
        gt=0,
        le=1,
        description="Share of the time that copies may be in flight on a rollout engine that is generating: generation "
        "keeps at least the rest. 1 lets them run freely, behind generation in priority.",
    )


class OarConfig(BaseModel):
    """The settings of `algorithm.oar`. Build it with `OarConfig.parse`, which explains what is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    importance: Importance = Field(
        "fisher",
        description="How a token's importance is computed. fisher: squared gradient norm of a random root of the answer's "
        "Fisher information, one backward, no noise. oar_g: as published, KL under Gaussian noise on the embeddings. onward: "
        "how much a token moves the answer or what is written on the way to it, two backwards; for chains of reasoning, with "
        "the gate two_level. "
        "oar_p: exact, each token replaced in a forward of its own. hybrid: oar_p for the tokens with the largest fisher "
        "score.",
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
    gate: Gate = Field(
        "two_level",
        description="From importance to weights. two_level: 1 + beta above the quantile, 1 below, before mass is restored. "
        "bi_level: the paper's, damps below it and boosts above it by how much.",
    )
    tau: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Quantile of the scores that splits the tokens. null: 0.85 for two_level, 0.4 for bi_level (the paper's).",
    )
    beta: float = Field(2.0, ge=0, description="Boost of the tokens above the quantile.")
    floor: float = Field(
        0.1, gt=0, le=1, description="Smallest weight of the tokens below it, before mass is restored (bi_level only)."
    )
    max_weight: float | None = Field(
        None,
        gt=1,
        description="Bound on the weight of any single token; what is cut off goes to the response's other tokens. null: none.",
    )
    sigma: float = Field(1e-3, gt=0, le=1, description="Noise scale of oar_g.")
    num_draws: int = Field(
        1,
        ge=1,
        le=64,
        description="Sign vectors (fisher, onward) or noise draws (oar_g) averaged per response; each is a backward, of "
        "onward two.",
    )
    seed: int = Field(
        0, ge=0, lt=2**31, description="Seed of the signs and the noise; the host's RNG is never touched."
    )
    perturbation: PerturbationConfig = Field(
        default_factory=PerturbationConfig, description="Counterfactual importance: oar_p and hybrid only."
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
        if self.importance == "hybrid" and self.perturbation.backend != "actor":
            raise ValueError(
                "importance=hybrid with perturbation.backend=rollout: the gradient comes from the log-prob pass, when the "
                "rollout engines have already given up weights and cache; allowed: perturbation.backend=actor, or "
                "importance=oar_p"
            )
        if self.importance == "hybrid" and self.perturbation.budget == 1:
            raise ValueError(
                "importance=hybrid with perturbation.budget=1: nothing is left for the gradient to choose; allowed: a "
                "budget below 1 or a number of positions, or importance=oar_p"
            )
        return self

    @property
    def quantile(self) -> float:
        """`tau` with its default filled in."""
        return QUANTILE[self.gate] if self.tau is None else self.tau

    @property
    def backwards(self) -> int:
        """Backwards to the embeddings in one gradient importance pass."""
        return self.num_draws * (2 if self.importance == "onward" else 1)

    @property
    def extra_forwards(self) -> int:
        """Forwards of a gradient importance pass beside the one that log-probs need anyway."""
        # The first backward shares the forward for log-probs; `oar_g` needs that one without noise.
        return self.backwards if self.importance == "oar_g" else self.backwards - 1

    @property
    def perturbs(self) -> bool:
        """Whether importance comes from masked copies."""
        return self.importance in PERTURBING

    @property
    def offloads(self) -> bool:
        """Whether the rollout engines compute importance."""
        return self.perturbs and self.perturbation.backend == "rollout"

    @property
    def budget(self) -> float:
        """`perturbation.budget` with its default filled in."""
        default = HYBRID_BUDGET if self.importance == "hybrid" else 1.0
        return default if self.perturbation.budget is None else self.perturbation.budget

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
        parts = [str(part) for part in fault["loc"]]
        nested = parts[:1] == ["perturbation"]
        # Of a union, pydantic names the branch that failed as well.
        key = ".".join(parts[: 2 if nested else 1])
        where = f"{prefix}.{key}" if key else prefix
        if fault["type"] == "extra_forbidden":
            group, fields = (
                (f"{prefix}.perturbation", PerturbationConfig.model_fields) if nested else (prefix, cls.model_fields)
            )
            close = difflib.get_close_matches(parts[-1], fields, n=1)
            hint = f"did you mean {group}.{close[0]}? " if close else ""
            return f"{where}={fault['input']!r}: unknown key; {hint}allowed keys: {', '.join(fields)}"
        message = fault["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if not key else f"{where}={fault['input']!r}: {message}"

    def probe_at(self, step: int) -> Probe:
        """The probe of training step `step` (the first step is 1)."""
        return "last" if step <= self.warmup_steps else self.probe
