"""What a recipe takes before it is started: memory by phase, hours, what OAR adds, whether it fits, and what to change.

>>> from oar_plugin.hosts.verl.recipe import compose_recipe, find_recipe
>>> Plan(compose_recipe(find_recipe("qwen2_5_7b_math"))).verdict
'fits'
"""

from oar_plugin.plan.hardware import choose_gpu
from oar_plugin.plan.models import PlanError
from oar_plugin.plan.planning import Plan, suggest
from oar_plugin.plan.setup import Expected, on_gpus, with_overrides

__all__ = ["Expected", "Plan", "PlanError", "choose_gpu", "on_gpus", "suggest", "with_overrides"]
