"""Recipes: a folder with `recipe.yaml` (model, cluster, data) and two entry points, `oar.yaml` and `grpo.yaml`.

Each entry point adds three lines to `recipe.yaml`, which extends verl's own `ppo_trainer` through Hydra's `pkg://`. The
functions raise `RecipeError` for a recipe that cannot run.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import oar_plugin
from oar_plugin.output import did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

VARIANTS = ("oar", "grpo")


class RecipeError(ValueError):
    """The recipe does not exist, is not a valid configuration, or cannot run. The message says what to do."""


def recipes_folder() -> Path:
    """Return the folder that holds all recipes: inside the installed package, or next to the package in a checkout."""
    package = Path(oar_plugin.__file__).parent
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names of OAR's own recipes, sorted."""
    return sorted(file.parent.name for file in recipes_folder().glob("*/recipe.yaml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """Return a recipe's folder: `name_or_path` if that is a folder, else the folder of OAR's own recipe with that name."""
    given, known = Path(name_or_path), recipe_names()
    if given.is_dir():
        return given.resolve()
    if str(name_or_path) in known:
        return recipes_folder() / name_or_path
    hint = did_you_mean(str(name_or_path), known)
    raise RecipeError(f"{name_or_path}: neither a folder nor a recipe; recipes: {', '.join(known)}{hint}")


def compose_recipe(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> DictConfig:
    """Return the configuration that `python -m verl.trainer.main_ppo --config-path FOLDER --config-name VARIANT ...` would run.

    Raises:
        RecipeError: the recipe does not exist, its yaml is not valid, or verl does not know a key in it or in an override.
    """
    import verl  # noqa: F401  loads the plugins, which add config groups
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from oar_plugin.hosts.verl.hydra_conf import command_line, misspelt
    from oar_plugin.runs import keys

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
            config = compose(config_name=variant, overrides=list(overrides))
        faults = keys.unknown_in_files(folder, variant, str(config.model_engine))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        reason = str(error).partition("Config search path:")[0].rstrip()
        faults = keys.unknown_in_overrides(overrides)
        raise RecipeError("\n".join(faults) or f"{folder.name}/{variant}.yaml does not compose: {reason}") from error
    if faults:
        raise RecipeError("\n".join(faults))
    return config


def gpus_needed(config: DictConfig) -> tuple[int, int, int]:
    """Return the number of nodes, GPUs per node, and GPUs in total.

    They include verl's training pool and, if configured, the separate pools for rollout and for the reward model.
    """
    from omegaconf import OmegaConf

    keys = ["trainer"]
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async":
        keys.append("actor_rollout_ref.rollout")
    if OmegaConf.select(config, "reward.reward_model.enable_resource_pool"):
        keys.append("reward.reward_model")
    # verl needs all GPUs of one node of a pool on the same machine; pools may share a machine.
    nodes = [int(OmegaConf.select(config, f"{key}.nnodes") or 0) for key in keys]
    gpus = [int(OmegaConf.select(config, f"{key}.n_gpus_per_node") or 0) for key in keys]
    parts = sorted((size for size, count in zip(gpus, nodes, strict=True) for _ in range(count)), reverse=True)
    total = sum(parts)
    gpus_per_node = total if max(nodes) == 1 and total <= 8 else max(gpus)  # small pools share one machine
    free: list[int] = []
    for part in parts:
        place = next((index for index, left in enumerate(free) if left >= part), len(free))
        if place == len(free):
            free.append(gpus_per_node)
        free[place] -= part
    return len(free), gpus_per_node, total


def check_config(config: DictConfig) -> None:
    """Raise RecipeError for a configuration that verl or OAR would refuse at the start of training."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from oar_plugin.config import OarConfigError
    from oar_plugin.hosts.verl import settings

    try:
        # verl prints a success message, but standard output is reserved for the command or script.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            validate_config(config, need_reference_policy(config), need_critic(config))
        if settings.switched_on(config):
            settings.resolve(config)
    except OarConfigError as error:
        raise RecipeError(f"this configuration cannot work\n{error}") from error
    except Exception as error:  # verl raises AssertionError and errors of many other types
        raise RecipeError(f"verl refuses this configuration: {error or type(error).__name__}") from error


def entry_point(folder: Path, variant: str = "oar") -> list[str]:
    """Return the options that make `python -m verl.trainer.main_ppo` run a recipe."""
    return ["--config-path", str(folder.resolve()), "--config-name", variant]


def command(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a recipe in a Python environment with verl and this plugin."""
    return ["python", "-m", "verl.trainer.main_ppo", *entry_point(folder, variant), *overrides]
