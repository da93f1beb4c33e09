"""A plan says beforehand what is trained: tasks, methods, learning rates, and which pairs of model and seed are for what."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learning.tasks import TASKS
from benchmarks.learning.training import ORACLES, SPARE, Credit, Run
from oar_plugin.config import OarConfigError
from oar_plugin.credit.importance import importance_of

PLANS = Path(__file__).parent / "plans"
BASELINE = "grpo"


@dataclass(frozen=True)
class Pairs:
    """Warm models crossed with seeds."""

    warm: tuple[int, ...]
    seeds: tuple[int, ...]

    def all(self) -> list[tuple[int, int]]:
        return list(itertools.product(self.warm, self.seeds))


@dataclass(frozen=True)
class Plan:
    """What a file of `plans` says.

    Attributes:
        named: methods that are held against GRPO and corrected for together; the others are controls, or explored.
        rates: the learning rates that every method has to choose from.
        choose: pairs that a rate is chosen on; none where there is one rate.
        judge: pairs that methods are compared on; they share no model with `choose`.
        through_verl: trained with real verl, Ray and vLLM.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    methods: Mapping[str, Credit]
    rates: tuple[float, ...]
    choose: Pairs
    judge: Pairs
    named: tuple[str, ...] = ()
    steps: int = 40
    through_verl: bool = False

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
    except (ValueError, TypeError, KeyError, OSError, yaml.YAMLError) as error:
        told = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{file}: {told}") from None


def _plan(name: str, values: dict[str, Any]) -> Plan:
    methods = {method: Credit(**settings) for method, settings in values.pop("methods").items()}
    pairs = {key: Pairs(*map(tuple, (values[key]["warm"], values[key]["seeds"]))) for key in ("choose", "judge")}
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    plan = Plan(name, methods=methods, **{**values, **lists, **pairs})
    if unknown := set(plan.tasks) - set(TASKS):
        raise ValueError(f"tasks: {', '.join(sorted(unknown))}; allowed: {', '.join(TASKS)}")
    if BASELINE not in methods:
        raise ValueError(f"methods: no {BASELINE}, which the others are held against")
    if unknown := set(plan.named) - set(methods):
        raise ValueError(f"named: {', '.join(sorted(unknown))}; allowed: {', '.join(methods)}")
    if shared := set(plan.choose.warm) & set(plan.judge.warm):
        raise ValueError(f"choose and judge share warm model {min(shared)}: a rate is judged on other models")
    if len(plan.rates) > 1 and not plan.choose.all():
        raise ValueError("rates: of several one is chosen on the pairs of choose, which has none")
    for method, credit in methods.items():
        try:
            if credit.importance not in (None, *ORACLES):
                importance_of(str(credit.importance))
            credit.config(0)
        except (ValueError, OarConfigError) as error:
            raise ValueError(
                f"methods.{method}: {error} (importance: or {', '.join(ORACLES)}; gate: or {SPARE})"
            ) from None
        if plan.through_verl and (credit.importance in ORACLES or SPARE in (credit.gate, credit.only)):
            raise ValueError(f"methods.{method}: oracles and {SPARE} are not served by verl")
    return plan
