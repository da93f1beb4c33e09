"""What a recipe takes before it is started: memory by phase, hours, what OAR adds, whether it fits, and what to change.

>>> from oar_plugin.runs.recipe import compose_recipe, find_recipe
>>> Plan(compose_recipe(find_recipe("qwen2_5_7b_math"))).verdict
'fits'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oar_plugin.runs.plan.hardware import choose_gpu
    from oar_plugin.runs.plan.models import PlanError
    from oar_plugin.runs.plan.planning import Plan, suggest
    from oar_plugin.runs.plan.setup import Expected, on_gpus, with_overrides

__all__ = ["Expected", "Plan", "PlanError", "choose_gpu", "on_gpus", "suggest", "with_overrides"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: `oar plan --help` and a refused option need no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"choose_gpu": "hardware", "PlanError": "models", "Plan": "planning", "suggest": "planning"}
    return getattr(importlib.import_module(f"oar_plugin.runs.plan.{home.get(name, 'setup')}"), name)
