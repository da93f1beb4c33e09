"""What a recipe takes before it is started: memory, arithmetic, communication and time of a step, and whether it fits.

>>> from pathlib import Path
>>> from oar_plugin.hosts.verl.recipe import compose_recipe
>>> from oar_plugin.plan import plan
>>> plan(compose_recipe(Path("recipes/qwen2_5_7b_math")), gpu="H100-80").fits
True
"""

from oar_plugin.plan.hardware import GPUS, Efficiency, Gpu, choose_gpu
from oar_plugin.plan.layout import LayoutError, on_cluster
from oar_plugin.plan.planning import Plan, plan
from oar_plugin.plan.shape import ShapeError
from oar_plugin.plan.verdict import Suggestion, suggest

__all__ = [
    "GPUS",
    "Efficiency",
    "Gpu",
    "LayoutError",
    "Plan",
    "ShapeError",
    "Suggestion",
    "choose_gpu",
    "on_cluster",
    "plan",
    "suggest",
]
