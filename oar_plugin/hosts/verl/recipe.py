"""Recipes: a folder with `recipe.yaml` (model, cluster, data) and two entry points, `oar.yaml` and `grpo.yaml`.

Both entry points are three lines on top of `recipe.yaml`, which builds on verl's own `ppo_trainer` through Hydra's `pkg://`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

VARIANTS = ("oar", "grpo")


class RecipeError(ValueError):
    """A folder that is not a recipe, or a recipe that does not compose. The message says what to do."""


def compose_recipe(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that `python -m verl.trainer.main_ppo --config-path FOLDER --config-name VARIANT ...` would run.

    Args:
        folder: of the recipe.
        variant: `oar` or its baseline `grpo`.
        overrides: as on verl's command line.

    Raises:
        RecipeError: there is no such recipe, or Hydra refuses an override.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    from oar_plugin.hosts.verl.hydra_conf import command_line, misspelt

    if not (folder / f"{variant}.yaml").is_file():
        raise RecipeError(
            f"{folder} has no {variant}.yaml: name the folder of a recipe, such as recipes/qwen2_5_7b_math"
        )
    if fault := misspelt(overrides):
        raise RecipeError(fault)
    try:
        with (
            command_line([*entry_point(folder, variant), *overrides]),
            initialize_config_dir(config_dir=str(folder.resolve()), version_base=None),
        ):
            return compose(config_name=variant, overrides=list(overrides))
    except HydraException as error:
        raise RecipeError(f"{folder.name}/{variant}.yaml does not compose: {error}") from error


def entry_point(folder: Path, variant: str = "oar") -> list[str]:
    """What names a recipe to `python -m verl.trainer.main_ppo`."""
    return ["--config-path", str(folder.resolve()), "--config-name", variant]


def command(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> list[str]:
    """The command that runs a recipe, for a Python that has verl and this plugin."""
    return ["python", "-m", "verl.trainer.main_ppo", *entry_point(folder, variant), *overrides]
