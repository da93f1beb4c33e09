"""`python -m benchmarks.count.ship` counts the shapes of all recipes and writes them into the package, in some minutes.

The 7B recipe is counted with fused kernels and without activation checkpointing too.
"""

import json
import logging

from oar_plugin.runs.plan.count import Memory, Work
from oar_plugin.runs.plan.counted import SHIPPED, name_of
from oar_plugin.runs.plan.fake_step import count
from oar_plugin.runs.plan.models import PlanError
from oar_plugin.runs.plan.setup import Setup
from oar_plugin.runs.recipe import compose_recipe, find_recipe, recipe_names

MODEL = "actor_rollout_ref.model"
CHANGES = ([f"{MODEL}.use_fused_kernels=True"], [f"{MODEL}.enable_gradient_checkpointing=False"])


def main() -> None:
    runs: list[tuple[str, list[str]]] = [(name, []) for name in recipe_names()]
    counted = {}
    for name, overrides in [*runs, *(("qwen2_5_7b_math", change) for change in CHANGES)]:
        try:
            setup = Setup(compose_recipe(find_recipe(name), "oar", overrides))
        except PlanError as error:  # its model is made on the user's machine
            logging.warning("%s: not counted: %s", name, error)
            continue
        keys: list[Work | Memory] = [setup.work_key]
        keys += [] if setup.megatron else [setup.memory_key(update) for update in (False, True)]
        for key in keys:
            if name_of(key) not in counted:
                print(name, key)
                counted[name_of(key)] = count(key)
    lines = (f"{json.dumps(name)}: {json.dumps(of)}" for name, of in counted.items())
    SHIPPED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
