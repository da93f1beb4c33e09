"""Recipes' configurations, composed once: Hydra takes seconds for each."""

import pytest
from omegaconf import OmegaConf

from oar_plugin.runs.recipe import compose_recipe, find_recipe


def composed(name):
    return pytest.fixture(scope="session")(lambda: compose_recipe(find_recipe(name)))


fsdp, megatron, experts = map(composed, ("qwen2_5_7b_math", "qwen2_5_32b_megatron", "qwen3_30b_a3b_megatron"))


def with_overrides(config, overrides):
    """A copy with other values, in place of interpolations too."""
    changed = config.copy()
    OmegaConf.set_readonly(changed, False)
    OmegaConf.set_struct(changed, False)
    for key, value in overrides.items():
        OmegaConf.update(changed, key, value)
    return changed
