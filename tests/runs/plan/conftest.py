"""Recipes' configurations, composed once: Hydra takes seconds for each."""

import pytest

from oar_plugin.runs.recipe import compose_recipe, find_recipe


@pytest.fixture(scope="session")
def fsdp():
    return compose_recipe(find_recipe("qwen2_5_7b_math"))


@pytest.fixture(scope="session")
def megatron():
    return compose_recipe(find_recipe("qwen2_5_32b_megatron"))
