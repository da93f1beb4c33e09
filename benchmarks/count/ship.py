"""`python -m benchmarks.count.ship` counts the shapes of all recipes and writes them into the package, in some minutes.

The 7B recipe is counted with every importance and with fused kernels too.
"""

import logging
from dataclasses import replace

from oar_plugin.credit.importance import IMPORTANCES
from oar_plugin.runs.plan.count import ship
from oar_plugin.runs.plan.models import PlanError
from oar_plugin.runs.plan.setup import Setup
from oar_plugin.runs.recipe import compose_recipe, find_recipe, recipe_names

FUSED = "actor_rollout_ref.model.use_fused_kernels"

if __name__ == "__main__":
    keys, changes = [], [*(f"algorithm.oar.importance={name}" for name in IMPORTANCES), f"{FUSED}=True"]
    runs: list[tuple[str, list[str]]] = [(name, []) for name in recipe_names()] + [
        ("qwen2_5_7b_math", [change]) for change in changes
    ]
    for name, overrides in runs:
        try:
            setup = Setup(compose_recipe(find_recipe(name), "oar", overrides))
        except PlanError as error:  # its model is made by the user's machine
            logging.warning("%s: not counted: %s", name, error)
        else:
            keys += [setup.key, replace(setup.key, tokens=int(setup.micro_batch(False))), setup.whole_key]
    ship(keys)
