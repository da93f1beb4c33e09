"""The recipes' configurations, composed once: Hydra takes seconds for each."""

from pathlib import Path

import pytest
from omegaconf import DictConfig

from oar_plugin.hosts.verl.recipe import compose_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="session")
def fsdp_config() -> DictConfig:
    return compose_recipe(RECIPES / "qwen2_5_7b_math")


@pytest.fixture(scope="session")
def megatron_config() -> DictConfig:
    return compose_recipe(RECIPES / "qwen2_5_32b_megatron")
