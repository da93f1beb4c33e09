"""Recipes' configurations, composed once: Hydra takes seconds for each."""

import pytest
from omegaconf import OmegaConf

from oar_plugin.runs.recipe import compose_recipe, find_recipe


@pytest.fixture(scope="session")
def fsdp():
    return compose_recipe(find_recipe("qwen2_5_7b_math"))


@pytest.fixture(scope="session")
def megatron():
    return compose_recipe(find_recipe("qwen2_5_32b_megatron"))


@pytest.fixture(scope="session")
def experts():
    return compose_recipe(find_recipe("qwen3_30b_a3b_megatron"))


def with_overrides(config, overrides):
    """A copy with other values, in place of interpolations too."""
    changed = config.copy()
    OmegaConf.set_readonly(changed, False)
    OmegaConf.set_struct(changed, False)
    for key, value in overrides.items():
        OmegaConf.update(changed, key, value)
    return changed
