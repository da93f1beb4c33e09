"""A plan says beforehand what is trained: tasks, methods, learning rates, and which pairs of model and seed are for what."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, with_config

from benchmarks.learning.tasks import TASKS
from benchmarks.learning.training import BLAME, Credit, Run
from oar_plugin.config import OarConfigError

PLANS = Path(__file__).parent / "plans"
BASELINE = "grpo"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Pairs:
    """Warm models crossed with seeds."""

    warm: tuple[Annotated[int, Field(ge=0)], ...]
    seeds: tuple[Annotated[int, Field(ge=0)], ...]

    def all(self) -> list[tuple[int, int]]:
        return list(itertools.product(self.warm, self.seeds))


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Plan:
    """What a file of `plans` says.

    Attributes:
        trim: share of the models that is left out at each end of the mean over models: what falls apart decides nothing.
        named: methods that are held against GRPO and corrected for together; the others are controls, or explored.
        rates: the learning rates that every method has to choose from.
        rate_of: by task, a rate that is not chosen.
        added: by method, what it adds to the FLOPs of log-probs and update of a 7B model (`benchmarks/results/count.md`).
        choose: pairs that a rate is chosen on; none where there is one rate.
        judge: pairs that methods are compared on; they share no model with `choose`.
    """

    name: str
    title: str
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    methods: Mapping[str, Credit]
    rates: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    choose: Pairs
    judge: Pairs
    rate_of: Mapping[str, Annotated[float, Field(gt=0)]] = field(default_factory=dict)
    added: Mapping[str, Annotated[float, Field(ge=0)]] = field(default_factory=dict)
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    named: tuple[str, ...] = ()
    steps: Annotated[int, Field(ge=1)] = 40

    def runs(self, pairs: Pairs, rates: Mapping[tuple[str, str], Sequence[float]]) -> list[tuple[str, Run]]:
        """Name of the method and training; pair by pair, so that a study that is cut short has whole pairs."""
        return [
            (name, Run(task=task, credit=credit, lr=lr, warm=warm, seed=seed, steps=self.steps))
            for warm, seed in pairs.all()
            for task in self.tasks
            for name, credit in self.methods.items()
            for lr in rates[task, name]
        ]

    def grid(self) -> list[tuple[str, Run]]:
        """The trainings that rates are chosen by."""
        every = {(task, name): self.rates for task in self.tasks for name in self.methods}
        return self.runs(self.choose, every)


def read_plan(file: Path) -> Plan:
    """Raises ValueError for a plan that cannot work; the message names the file, the key and what is allowed."""
    try:
        return _plan(file.stem, yaml.safe_load(file.read_text(encoding="utf-8")))
    except (ValueError, OSError, yaml.YAMLError) as error:  # of pydantic too
        raise ValueError(f"{file}: {error}") from None


def _plan(name: str, values: Any) -> Plan:
    if not isinstance(values, dict):
        raise ValueError(f"{values!r} is no plan; allowed: title, tasks, methods, rates, choose, judge and so on")
    plan = TypeAdapter(Plan).validate_python({**values, "name": name})
    if unknown := set(plan.tasks) - set(TASKS):
        raise ValueError(f"tasks: {', '.join(sorted(unknown))}; allowed: {', '.join(TASKS)}")
    if BASELINE not in plan.methods:
        raise ValueError(f"methods: no {BASELINE}, which the others are held against")
    for key in ("named", "added"):
        if unknown := set(getattr(plan, key)) - set(plan.methods):
            raise ValueError(f"{key}: {', '.join(sorted(unknown))}; allowed: {', '.join(plan.methods)}")
    if shared := set(plan.choose.warm) & set(plan.judge.warm):
        raise ValueError(f"choose and judge share warm model {min(shared)}: a rate is judged on other models")
    if not plan.judge.all():
        raise ValueError("judge: no pair to compare methods on; allowed: a model and a seed or more")
    if len(plan.rates) > 1 and not plan.choose.all():
        raise ValueError("rates: of several one is chosen on the pairs of choose, which has none")
    for method, credit in plan.methods.items():
        try:
            credit.config(0)
        except (ValueError, OarConfigError) as error:
            raise ValueError(f"methods.{method}: {error} (importance: or {BLAME})") from None
    return plan
