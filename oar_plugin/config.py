"""Every knob of OAR, in one place, validated when a run starts.

In a verl run they live under `algorithm.oar.*`; the defaults are the paper's (arXiv 2601.07408) but for importance and gate,
and the preset `oar=published` has the paper's of those too.

`fisher` because, of what an engine can compute with one backward, it agrees best with exact OAR-P (0.67 of the top 20 %
against 0.52 for `oar_g`, twelve models, `benchmarks/results/fidelity_cpu.md`). `two_level` with tau 0.85 because one
outlier takes the scale of `bi_level` with it (`benchmarks/results/gate_edges.md`), and which of
them small models learn faster with could not be told (`benchmarks/results/learning_explored.md`).
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from oar_plugin.credit.answer import make_finder
from oar_plugin.credit.gate import GATES, Gate, gate_of
from oar_plugin.credit.importance import IMPORTANCES, Copies, Importance, importance_of, of_engines, without_copies
from oar_plugin.credit.probe import Probe

PREFIX = "algorithm.oar"

BaseEstimator = Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"]


class OarConfigError(ValueError):
    """A setting that cannot work. The message names the key, its value and what is allowed."""


class PerturbationConfig(BaseModel):
    """The settings of `algorithm.oar.perturbation`: counterfactual importance (importances with `copies`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    backend: Literal["actor", "rollout"] = Field(
        "actor",
        description="Who runs the masked copies. actor: the training engine, after the log-prob pass. rollout: the vLLM "
        f"engines, from the moment a response is finished, while others are still being generated ({of_engines()} only).",
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="How many units of a response get a copy of their own: up to 1 a share, above 1 a number. null: all of "
        "them for oar_p, 0.3 for hybrid. hybrid chooses them by gradient, oar_p block by block; the others get a "
        "calibrated estimate.",
    )
    span: int = Field(
        1,
        ge=1,
        le=1024,
        description="What one copy replaces: that many tokens in a row. The score is shared out evenly.",
    )
    replacement: Literal["pad", "sampled"] = Field(
        "pad",
        description="What stands in for a token. pad: the padding token, as published. sampled: a token drawn from the "
        "model's own prediction at that place.",
    )
    timeout_s: float = Field(
        300.0, gt=0, description="Seconds that one copy may take in a rollout engine, once it is its turn."
    )
    fallback: str = Field(
        "fisher",
        description="What a response gets that the rollout engines could not score: an importance without copies, computed by "
        "the actor in the log-prob pass, or none, its plain advantage.",
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


class DumpConfig(BaseModel):
    """The settings of `algorithm.oar.dump`: responses for people to look at."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    dir: str | None = Field(
        None,
        description="Folder for a file of JSON lines a step, which `oar inspect` shows; null: none. A relative path is below "
        "trainer.default_local_dir. On several nodes: a folder that all of them see.",
    )
    every: int = Field(
        10,
        ge=1,
        description="Steps from one to the next; step 1 has them too. Of files, and of what wandb, TensorBoard or MLflow get "
        "if they log the run: histograms of weights and importance, and a page of one group.",
    )
    groups: int = Field(
        2, ge=1, description="How many prompts, each with all its responses; those with right and wrong ones first."
    )


GROUPS: dict[str, type[BaseModel]] = {"perturbation": PerturbationConfig, "dump": DumpConfig}
"""Keys of `algorithm.oar` that are groups of keys."""


def unknown_key(path: Sequence[str], prefix: str = PREFIX) -> str | None:
    """What is wrong with a key below `prefix`, and which one was meant; None where there is such a key."""
    keys = list(OarConfig.model_fields)
    keys += [f"{group}.{key}" for group, model in GROUPS.items() for key in model.model_fields]
    if ".".join(path) in keys:
        return None
    inside = f"{path[0]}." if path[0] in GROUPS else ""
    known = [key.removeprefix(inside) for key in keys if key.startswith(inside) and key not in GROUPS]
    close = difflib.get_close_matches(".".join(path).removeprefix(inside), known, n=1)
    hint = f"did you mean {prefix}.{inside}{close[0]}? " if close else ""
    return f"unknown key; {hint}allowed keys: {', '.join(known)}"


class OarConfig(BaseModel):
    """The settings of `algorithm.oar`. Build it with `OarConfig.parse`, which explains what is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    importance: str = Field(
        "fisher",
        description="How a token's importance is computed. "
        + " ".join(f"{name}: {importance.help}" for name, importance in IMPORTANCES.items())
        + " Or your own: 'python:<module>:<class>'.",
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
        "the_answer_is; or 'regex:<expression>' (group 1 is the answer; it has 2 seconds for a response); or "
        "'python:<module>:<function>' (your code: nothing ends it when it takes long). A response on which one of these fails "
        "keeps its plain advantage (fallback/search_failed). Empty: the last token of the response (probe=last only).",
    )
    max_answer_tokens: int = Field(
        1024,
        ge=1,
        description="A response whose answer is longer keeps its plain advantage (fallback/answer_too_long): a pattern that "
        "matched half of the response has found no answer, and a masked copy holds the logits of a whole answer.",
    )
    gate: str = Field(
        "two_level",
        description="From importance to weights. two_level: 1 + beta above the quantile, 1 below, before mass is restored. "
        "bi_level: the paper's, damps below it and boosts above it by how much. Or your own: 'python:<module>:<function>'.",
    )
    tau: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Quantile of the scores that splits the tokens. null: "
        + ", ".join(f"{gate.tau} for {name}" for name, gate in GATES.items())
        + " (the paper's).",
    )
    beta: float = Field(2.0, ge=0, description="Boost of the tokens above the quantile.")
    floor: float = Field(
        0.1, gt=0, le=1, description="Smallest weight of the tokens below it, before mass is restored (bi_level only)."
    )
    sigma: float = Field(1e-3, gt=0, le=1, description="Noise scale of oar_g.")
    num_draws: int = Field(
        1,
        ge=1,
        le=64,
        description="Draws of signs or noise that are averaged per response; each repeats the importance's backwards.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="Seed of the signs and the noise, new in every step; the host's RNG is never touched.",
    )
    perturbation: PerturbationConfig = Field(
        default_factory=PerturbationConfig, description="Counterfactual importance: masked copies."
    )
    dump: DumpConfig = Field(
        default_factory=DumpConfig, description="Groups of responses with their weights, for people to look at."
    )

    @model_validator(mode="after")
    def _check_together(self) -> "OarConfig":
        if not self.answer_patterns and self.probe != "last":
            raise ValueError(
                f"probe={self.probe} needs to know where the answer is, but answer_patterns is empty; "
                "allowed: probe=last, or at least one pattern"
            )
        make_finder(self.answer_patterns)
        self._check_conflicts(self.importance_object)
        if self.offloads and self.actor_importance is not None:
            try:
                fallback = importance_of(self.perturbation.fallback)
            except ValueError as error:
                raise ValueError(f"perturbation.fallback={self.perturbation.fallback}: {error}") from None
            if fallback.copies is not None:
                raise ValueError(
                    f"perturbation.fallback={self.perturbation.fallback}: the actor would run masked copies; allowed: none, "
                    f"{without_copies()}, or python:<module>:<class>"
                )
            self._check_conflicts(fallback)
        return self

    @field_validator("base_estimator", mode="before")
    @classmethod
    def _without_critic(cls, name: object) -> object:
        if name == "gae":
            raise ValueError(
                "a critic already gives each token its own advantage, which OAR's weights would distort; allowed: "
                + ", ".join(get_args(BaseEstimator))
            )
        return name

    @field_validator("importance", "gate")
    @classmethod
    def _exists(cls, name: str, info: ValidationInfo) -> str:
        (importance_of if info.field_name == "importance" else gate_of)(name)
        return name

    @property
    def importance_object(self) -> Importance:
        """What `importance` names."""
        return importance_of(self.importance)

    @property
    def gate_object(self) -> Gate:
        """What `gate` names."""
        return gate_of(self.gate)

    @property
    def quantile(self) -> float:
        """`tau` with its default filled in."""
        return self.gate_object.tau if self.tau is None else self.tau

    @property
    def copies(self) -> Copies | None:
        """How the importance uses masked copies; None where it does not."""
        return self.importance_object.copies

    @property
    def backwards(self) -> int:
        """Backwards to the embeddings in one gradient pass."""
        return sum(forward.backward is not None for forward in self.importance_object.forwards(self.num_draws))

    @property
    def extra_forwards(self) -> int:
        """Forwards of a gradient pass beside the one that log-probs need anyway."""
        return max(0, len(self.importance_object.forwards(self.num_draws)) - 1)

    @property
    def offloads(self) -> bool:
        """Whether the rollout engines compute importance."""
        return self.copies is not None and self.perturbation.backend == "rollout"

    @property
    def budget(self) -> float:
        """`perturbation.budget` with its default filled in."""
        default = 1.0 if self.copies is None else self.copies.budget
        return default if self.perturbation.budget is None else self.perturbation.budget

    @property
    def actor_importance(self) -> str | None:
        """The importance that the actor computes; if rollout engines score, for the responses that they failed to score.

        None: the actor computes none.
        """
        if not self.offloads:
            return self.importance
        return None if self.perturbation.fallback == "none" else self.perturbation.fallback

    def _check_conflicts(self, importance: Importance) -> None:
        settings = self.model_dump() | {"tau": self.quantile}
        settings["perturbation"] |= {"budget": self.budget}
        try:
            conflicts = list(importance.conflicts(settings))
        except Exception as error:  # a user's class runs code of its own
            raise ValueError(f"importance={importance.name}: conflicts failed: {error!r}") from error
        if conflicts:
            raise ValueError("; ".join(conflicts))

    @classmethod
    def parse(cls, settings: Mapping[str, Any] | None, prefix: str = PREFIX) -> "OarConfig":
        """Validate plain settings, the content of `algorithm.oar`; `prefix` is how the user calls this group, for messages.

        OarConfigError: unknown key, value of the wrong type or out of range, or a combination that cannot work; one line a
        fault, each with the key, its value and what is allowed.
        """
        try:
            return cls.model_validate(dict(settings or {}))
        except ValidationError as error:
            lines = [cls._explain(fault, prefix) for fault in error.errors()]
            raise OarConfigError("\n".join(lines)) from None

    @classmethod
    def _explain(cls, fault: Any, prefix: str) -> str:
        parts = [str(part) for part in fault["loc"]]
        nested = parts[0] in GROUPS if parts else False
        # Of a union, pydantic names the branch that failed as well.
        key = ".".join(parts[: 2 if nested else 1])
        where = f"{prefix}.{key}" if key else prefix
        if fault["type"] == "extra_forbidden":
            return f"{where}={fault['input']!r}: {unknown_key(parts, prefix)}"
        message = fault["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if not key else f"{where}={fault['input']!r}: {message}"

    def probe_at(self, step: int) -> Probe:
        """The probe of training step `step` (the first step is 1)."""
        return "last" if step <= self.warmup_steps else self.probe
