"""Counts that the package ships: those of all recipes, and those that a user adds for a recipe of their own."""

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from benchmarks.count.fake_step import count
from benchmarks.count.shapes import Memory, Work
from oar_plugin.runs.plan import known
from oar_plugin.runs.plan.known import COUNTS, NotCountedError
from oar_plugin.runs.plan.planning import Plan
from oar_plugin.runs.recipe import compose_recipe, find_recipe, recipe_names

SHIPPED = Path(known.__file__).with_name("counts.json")
CHANGES = "use_fused_kernels=True", "enable_gradient_checkpointing=False"


def add_counts(config: DictConfig) -> None:
    """Count what a plan of this configuration lacks, for this process. Raise PlanError if it cannot run or be known."""
    while True:
        try:
            Plan(config)
        except NotCountedError as error:
            kind, values, name = error.args
            shape = {"Work": Work, "Memory": Memory}[kind](**values)
            print(shape)
            COUNTS[name] = count(shape)
        else:
            return


def ship(recipe: str, overrides: Sequence[str]) -> str:
    """Add a recipe's counts to `counts.json`, or count "all" recipes and two changes anew; return what was done."""
    runs = [(recipe, list(overrides))]
    if recipe == "all":
        COUNTS.clear()
        runs = [
            *((name, []) for name in recipe_names()),
            *(("qwen2_5_7b_math", [f"actor_rollout_ref.model.{one}"]) for one in CHANGES),
        ]
    before = len(COUNTS)
    for name, changes in runs:
        add_counts(compose_recipe(find_recipe(name), "oar", changes))
    lines = (f"{json.dumps(name)}: {json.dumps(of)}" for name, of in COUNTS.items())
    SHIPPED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return f"shapes added to {SHIPPED}: {len(COUNTS) - before}"
