"""All settings of OAR and their defaults, validated when a run starts. In a verl run they are below `algorithm.oar`.

The defaults are the paper's (arXiv 2601.07408), except for importance and gate; the preset `oar=published` has the paper's. By
default OAR-P is predicted from a few exact scores: it is ahead of GRPO in the most pairs of trainings, for 2.8 % more FLOPs
(`docs/amortized.md`). Under the paper's gate one outlier makes other weights nearly even (`docs/evidence`, gate_edges).
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.functional_validators import AfterValidator

from oar_plugin.credit.answer import make_finder
from oar_plugin.credit.gate import GATES, Gate, gate_of
from oar_plugin.credit.importance import IMPORTANCES, Importance, importance_of, named
from oar_plugin.credit.probe import Probe

PREFIX = "algorithm.oar"
SHARE, UNITS = 0.025, 8
"""`auto` of `amortize`: about 123 labels a step of 1,024 responses, 60 % of which need credit (docs/evidence/prediction.md)."""
PUBLISHED = "importance=oar_g, gate=bi_level, warmup_steps=20"  # what verl's preset `published` changes of the defaults
_Pattern = Annotated[str, AfterValidator(lambda pattern: make_finder((pattern,)) and pattern)]
_ImportanceName = Annotated[str, AfterValidator(lambda name: _known_importance(name) and name)]
_GateName = Annotated[str, AfterValidator(lambda name: gate_of(name) and name)]

BaseEstimator = Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"]


class OarConfigError(ValueError):
    """A setting that cannot work. The message names the key, its value and what is allowed."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)


class PerturbationConfig(_Settings):
    """The settings of `algorithm.oar.perturbation`: the masked copies of importances that have `copies`."""

    backend: Literal["actor", "rollout"] = Field(
        "actor",
        description="Who runs the masked copies. actor: the training engine, after the log-prob pass. rollout: the vLLM "
        "engines, as soon as a response is finished, while other responses are still being generated "
        f"({named(copies=True)} only).",
    )
    span: int = Field(1, ge=1, le=1024)
    """Number of consecutive tokens that one copy replaces. They share its score evenly."""
    replacement: Literal["pad", "sampled"] = "sampled"
    """What replaces a token. pad: the padding token, as published; scores depend on it. sampled: a token drawn from the model's
    own prediction at that position."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds that one copy may take in a rollout engine, without the wait for its turn."""
    fallback: str = "fisher"
    """What a response gets if the rollout engines could not score it: an importance without copies, which the actor computes,
    or none: the response falls back to GRPO."""
    max_in_flight: int = Field(64, ge=1)
    """Number of copies that a rollout engine runs at once while it generates nothing."""
    share_while_generating: float = Field(0.15, gt=0, le=1)
    """Largest share of the time in which copies may run on a rollout engine while it generates. 1: no limit; copies then have a
    lower priority than generation."""


class AmortizeConfig(_Settings):
    """The settings of `algorithm.oar.amortize`: importance is computed for a share of the responses, predicted for all."""

    share: float | None = Field("auto", gt=0, le=1)  # type: ignore[assignment]
    """Importance is computed for this share of the responses that need credit. From it, the scores of all are predicted, by
    their hidden states. null: it is computed for all. auto: 0.025 for masked copies in the actor, otherwise null. Until enough
    labels were seen, the share is larger, and responses fall back to GRPO."""
    units: int | None = Field("auto", ge=2)  # type: ignore[assignment]
    """Number of units (perturbation.span tokens) of each of these responses that get a masked copy. null: all. auto: 8 where
    scores are predicted from copies, otherwise null."""


class DumpConfig(_Settings):
    """The settings of `algorithm.oar.dump`: responses for people to look at."""

    dir: str | None = None
    """Folder for one file of JSON lines per dumped step, for `oar inspect`; null: no files. A relative path is below
    trainer.default_local_dir. On several nodes: a folder that all nodes see."""
    every: int = Field(10, ge=1)
    """Number of steps from one dump to the next; step 1 is dumped too. It also counts for what wandb, TensorBoard or MLflow get
    if they log the run: the responses of one group."""
    groups: int = Field(2, ge=1)
    """Number of prompts per dump, each with all its responses; prompts with both right and wrong responses come first."""


GROUPS: dict[str, type[BaseModel]] = dict(perturbation=PerturbationConfig, amortize=AmortizeConfig, dump=DumpConfig)
"""The keys of `algorithm.oar` that hold other keys."""
LEFT, LEFT_DEFAULTS = json.loads(Path(__file__).with_name("left.json").read_text(encoding="utf-8")).values()
"""Settings, and arguments of `oar_plugin.importance`, that were removed in version 0.4.0 -> why, and what to write instead; and
keys that left -> their default, which runs of older versions have recorded."""


def left(setting: str) -> str | None:
    """A message for a key, or `key=value`, that left the package; None if it has not."""
    instead = LEFT.get(setting) or LEFT.get(setting.partition(".")[0])
    return instead and f"was removed in oar_plugin 0.4.0: {instead}"


def unknown_key(path: Sequence[str], prefix: str = PREFIX) -> str | None:
    """A message for an unknown key below `prefix`, with the closest known key; None if the key is known."""
    if message := left(".".join(path)):
        return message
    if path[0] == "oar":
        return f"presets are for verl's command line; instead of oar=published write here {PUBLISHED}"
    keys = list(OarConfig.model_fields)
    keys += [f"{group}.{key}" for group, model in GROUPS.items() for key in model.model_fields]
    if ".".join(path) in keys:
        return None
    inside = f"{path[0]}." if path[0] in GROUPS else ""
    known = [key.removeprefix(inside) for key in keys if key.startswith(inside) and key not in GROUPS]
    close = difflib.get_close_matches(".".join(path).removeprefix(inside), known, n=1)
    hint = f"did you mean {prefix}.{inside}{close[0]}? " if close else ""
    return f"unknown key; {hint}allowed keys: {', '.join(known)}"


class OarConfig(_Settings):
    """The settings of `algorithm.oar`. `OarConfig.parse` builds it and explains faults."""

    importance: _ImportanceName = Field(
        "oar_p",
        description="How a token's importance is computed. "
        + " ".join(f"{name}: {importance.help}" for name, importance in IMPORTANCES.items())
        + " Or your own: 'python:<module>:<class>'.",
    )
    base_estimator: BaseEstimator = "grpo"
    """verl's own estimator whose advantage is reshaped. algorithm.norm_adv_by_std_in_grpo still says whether grpo divides by
    the standard deviation."""
    probe: Probe = "answer_mean"
    """Definition of the answer's distribution: last (first answer token, answer not shown), answer_mean (mean logits over the
    answer's tokens; best in the paper's ablations), answer_joint (product over the answer's tokens)."""
    warmup_steps: int = Field(0, ge=0)
    """Number of first training steps that use the probe 'last' instead; for models whose answers are not well formed yet."""
    answer_patterns: tuple[_Pattern, ...] = ("boxed", "hash", "answer_tag", "the_answer_is")
    """Where the answer is; in the last turn with a match, the last complete one counts. Names: boxed, hash, answer_tag,
    the_answer_is; or 'regex:<expression>' (group 1 is the answer; at most 2 seconds per turn); or 'python:<module>:<function>'
    (your code, without a time limit). A response on which one of these fails falls back to GRPO (fallback/search_failed).
    Empty: the answer is the last token of the response (probe=last only)."""
    max_answer_tokens: int = Field(1024, ge=1)
    """A response with a longer answer falls back to GRPO (fallback/answer_too_long): a pattern that matches half of a response
    has not matched an answer, and a masked copy holds the logits of the whole answer."""
    gate: _GateName = "two_level"
    """How importance becomes weights, which are then scaled to average 1. two_level: 1 + beta above the quantile, 1 below.
    bi_level: the paper's gate; the further a token is above or below the quantile, the more it is boosted or damped. top_only:
    0 below the quantile, equal weights above (with entropy: the 80/20 rule). z_score: GRAIL's; standardized logarithm of the
    scores, clipped. Or your own: 'python:<module>:<function>'."""
    tau: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Quantile of the scores that splits the tokens. null: "
        + ", ".join(f"{gate.tau} for {name}" for name, gate in GATES.items() if "tau" in gate.settings)
        + " (as in their papers, except for two_level).",
    )
    beta: float = Field(2.0, ge=0)
    """Boost of the tokens above the quantile."""
    floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Smallest weight of a token before the weights are scaled to average 1 "
        f"({', '.join(name for name, gate in GATES.items() if 'floor' in gate.settings)} only).",
    )
    sigma: float = Field(1e-3, gt=0, le=1)
    """Noise scale of oar_g."""
    num_draws: int = Field(1, ge=1, le=64)
    """Number of draws of signs or noise to average per response; each draw repeats the backwards."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the signs and the noise, which differ in every step; the host's RNG is never touched. null (verl only): drawn at
    the start, and kept in the run's folder."""
    fallback_warning: float = Field(0.5, gt=0, le=1)
    """A warning in the log says why, if over 20 steps a larger share of the responses that need credit falls back to GRPO. 1:
    no such warning after the first step."""
    perturbation: PerturbationConfig = Field(default_factory=PerturbationConfig)
    """The masked copies of counterfactual importance."""
    amortize: AmortizeConfig = Field(default_factory=AmortizeConfig)
    """Importance is computed for a share of the responses and predicted from it for all."""
    dump: DumpConfig = Field(default_factory=DumpConfig)
    """Groups of responses with their weights, for people to look at."""

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, settings: Any) -> Any:
        """Puts numbers in the place of `auto`."""
        given, names = dict(settings), ("perturbation", "amortize")
        if not all(isinstance(given.get(name, {}), Mapping | BaseModel) for name in names):
            return settings
        groups = {name: dict(given.get(name, {})) for name in names}
        try:
            copies = importance_of(given.get("importance", cls.model_fields["importance"].default)).copies
        except ValueError:  # the field says why
            copies = False
        amortize, offloads = groups["amortize"], groups["perturbation"].get("backend") == "rollout"
        if amortize.get("share", "auto") == "auto":
            amortize["share"] = SHARE if copies and not offloads else None
        if amortize.get("units", "auto") == "auto":
            amortize["units"] = UNITS if copies and amortize["share"] is not None else None
        return given | {"amortize": amortize}

    @model_validator(mode="after")
    def _check_together(self) -> "OarConfig":
        if not self.answer_patterns and self.probe != "last":
            fault = f"probe={self.probe} needs to know where the answer is, but answer_patterns is empty"
            raise ValueError(f"{fault}; allowed: probe=last, or at least one pattern")
        importance, share, units = self.importance_object, self.amortize.share, self.amortize.units
        if share is not None and not (importance.backwards or importance.copies):
            fault = f"amortize.share={share:g} with importance={self.importance}: it computes no scores"
            raise ValueError(f"{fault} to predict; allowed: null, or an importance with a backward or copies")
        if units is not None and (share is None or not importance.copies):
            fault = f"amortize.units={units} with importance={self.importance}, share={share or 'null'}: all units are scored"
            raise ValueError(f"{fault}; allowed: null, or importance={named(copies=True)} with a share")
        if share == 1 and units is None:
            raise ValueError("amortize.share=1: all units are scored; allowed: null, where scores are used as they are")
        if self.offloads and share is None and (name := self.actor_importance) is not None:
            try:
                if _known_importance(name).copies:
                    allowed = f"none, {named(copies=False)}, or python:<module>:<class>"
                    raise ValueError(f"the actor would run masked copies; allowed: {allowed}")
            except ValueError as error:
                raise ValueError(f"perturbation.fallback={name}: {error}") from None
        return self

    @field_validator("base_estimator", mode="before")
    @classmethod
    def _without_critic(cls, name: object) -> object:
        if name == "gae":
            fault = "a critic already gives each token its own advantage, which OAR's weights would distort"
            raise ValueError(f"{fault}; allowed: {', '.join(get_args(BaseEstimator))}")
        return name

    @property
    def importance_object(self) -> Importance:
        return importance_of(self.importance)

    @property
    def gate_object(self) -> Gate:
        return gate_of(self.gate)

    @property
    def quantile(self) -> float:
        """`tau`; if it is null, the gate's default."""
        return self.gate_object.tau if self.tau is None else self.tau

    @property
    def backwards(self) -> int:
        """Number of backwards to the embeddings in one gradient pass."""
        return sum(forward.backward is not None for forward in self.importance_object.forwards(self.num_draws))

    @property
    def forwards(self) -> int:
        """Number of forwards in one gradient pass; 0 without a backward: what such an importance reads, log-probs give."""
        return len(self.importance_object.forwards(self.num_draws)) if self.backwards else 0

    @property
    def offloads(self) -> bool:
        """Whether the rollout engines compute importance."""
        return self.importance_object.copies and self.perturbation.backend == "rollout"

    @property
    def actor_importance(self) -> str | None:
        """The importance that the actor computes, or None. If rollout engines score, it is for responses without scores."""
        if not self.offloads or self.amortize.share is not None:  # with engines, it predicts what they did not score
            return self.importance
        return None if self.perturbation.fallback == "none" else self.perturbation.fallback

    @classmethod
    def parse(cls, settings: Any, prefix: str = PREFIX, predicts: bool = True) -> "OarConfig":
        """Validates a mapping of settings, nested or dotted (`dump.dir`), or None. OarConfigError: a line per fault, each of
        which calls the settings `prefix`.

        `predicts`: false for a host without steps that follow one another: `amortize.share=auto` is then null.
        """
        if not isinstance(settings, Mapping | None):
            raise OarConfigError(
                f'{prefix}={settings!r}: must be a mapping of settings, such as {{"importance": "fisher"}}'
            )
        nested: dict[str, Any] = dict(settings or {})
        for key in [key for key in nested if str(key).partition(".")[0] in GROUPS.keys() - {key}]:
            group, _, name = key.partition(".")
            value, given = nested.pop(key), nested.get(group, {})
            if isinstance(given, Mapping | BaseModel):
                nested[group] = {**dict(given), name: value}
        amortize = nested.get("amortize", {})
        if not predicts and isinstance(amortize, Mapping) and amortize.get("share", "auto") == "auto":
            nested["amortize"] = {**amortize, "share": None}
        try:
            return cls.model_validate(nested)
        except ValidationError as error:
            raise OarConfigError("\n".join(_explain(fault, prefix) for fault in error.errors())) from None

    def probe_at(self, step: int) -> Probe:
        """The probe of training step `step` (the first step is 1)."""
        return "last" if step <= self.warmup_steps else self.probe


def _known_importance(name: str) -> Importance:
    if message := left(f"importance={name}"):
        raise ValueError(message)
    return importance_of(name)


def _explain(fault: Any, prefix: str) -> str:
    parts = [str(part) for part in fault["loc"]]
    # In a union, pydantic adds the branch that failed to the path.
    key = ".".join([prefix, *parts[: 2 if GROUPS.keys() & parts[:1] else 1]])
    key += "".join(f"[{part}]" for part in fault["loc"][1:] if isinstance(part, int))
    said = fault["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
    said += "; null is for verl only" * (parts == ["seed"] and fault["input"] is None)
    message = unknown_key(parts, prefix) if fault["type"] == "extra_forbidden" else said
    return f"{key}={fault['input']!r}: {message}" if parts else f"{key}: {message}"
