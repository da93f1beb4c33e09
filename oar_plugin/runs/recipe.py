"""Recipes: a folder with `recipe.yaml` (model, cluster, data) and two entry points, `oar.yaml` and `grpo.yaml`.

Both entry points are three lines on top of `recipe.yaml`, which builds on verl's own `ppo_trainer` through Hydra's `pkg://`.
Raises `RecipeError` for what cannot work.
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
    """A recipe that is not there, does not compose or cannot be run. The message says what to do."""


def recipes_folder() -> Path:
    """Where the recipes are: in the installed package, or beside it in a checkout."""
    package = Path(oar_plugin.__file__).parent
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(file.parent.name for file in recipes_folder().glob("*/recipe.yaml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """The folder of a recipe: `name_or_path` where it is a folder, else the recipe of that name that comes with OAR."""
    given = Path(name_or_path)
    if given.is_dir():
        return given.resolve()
    if str(name_or_path) in recipe_names():
        return recipes_folder() / name_or_path
    known = recipe_names()
    hint = did_you_mean(str(name_or_path), known)
    raise RecipeError(f"{name_or_path}: neither a folder nor a recipe; recipes: {', '.join(known)}{hint}")


def compose_recipe(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that `python -m verl.trainer.main_ppo --config-path FOLDER --config-name VARIANT ...` would run.

    RecipeError: there is no such recipe, its yaml is broken, or it or an override has a key that verl does not know.
    """
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

    def composed(words: Sequence[str]) -> DictConfig:
        with (
            command_line([*entry_point(folder, variant), *words]),
            initialize_config_dir(config_dir=str(folder.resolve()), version_base=None),
        ):
            return compose(config_name=variant, overrides=list(words))

    try:
        config = composed(overrides)
        faults = list(keys.unknown_in_files(folder, variant, str(config.model_engine)))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        fault = (
            f"{folder.name}/{variant}.yaml does not compose: {str(error).partition('Config search path:')[0].rstrip()}"
        )
        of_keys = [word for word, _ in keys.of_keys(overrides)]
        try:
            without = composed([word for word in overrides if word not in of_keys])
        except (HydraException, OmegaConfBaseException, YAMLError):
            raise RecipeError(fault) from error
        faults = list(keys.unknown_in_overrides(overrides, without))
        if not faults:
            raise RecipeError(fault) from error
    if faults:
        raise RecipeError("\n".join(faults))
    return config


def gpus_needed(config: DictConfig, gpus_of_a_node: int | None = None) -> tuple[int, int, int]:
    """Nodes, GPUs of each and GPUs in all that verl's training pool and the pools kept apart from it use."""
    from omegaconf import OmegaConf

    keys = ["trainer"]
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async":
        keys.append("actor_rollout_ref.rollout")
    if OmegaConf.select(config, "reward.reward_model.enable_resource_pool"):
        keys.append("reward.reward_model")
    gpus = {key: int(OmegaConf.select(config, f"{key}.n_gpus_per_node") or 0) for key in keys}
    nodes = {key: int(OmegaConf.select(config, f"{key}.nnodes") or 0) for key in keys}
    # verl wants the GPUs of each node of a pool on one machine.
    parts = sorted((gpus[key] for key in keys for _ in range(nodes[key])), reverse=True)
    total, largest = sum(parts), max(keys, key=lambda key: gpus[key])
    if gpus_of_a_node is None:  # pools of one node share one, where eight GPUs are enough
        gpus_of_a_node = total if max(nodes.values()) == 1 and total <= 8 else gpus[largest]
    if gpus[largest] > gpus_of_a_node:
        raise RecipeError(
            f"--gpus-per-node {gpus_of_a_node}: {largest}.n_gpus_per_node={gpus[largest]} does not fit on a node; allowed: "
            f"at least {gpus[largest]}, or fewer GPUs a node and more nodes in the recipe"
        )
    free: list[int] = []
    for part in parts:
        place = next((index for index, left in enumerate(free) if left >= part), len(free))
        if place == len(free):
            free.append(gpus_of_a_node)
        free[place] -= part
    return len(free), gpus_of_a_node, total


def check_config(config: DictConfig) -> None:
    """Refuse what verl or OAR would refuse after the nodes were taken."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from oar_plugin.config import OarConfigError
    from oar_plugin.hosts.verl import settings

    try:
        # verl says that all is well, and that there is no critic: standard output is for what would be run.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            validate_config(config, need_reference_policy(config), need_critic(config))
        if settings.switched_on(config):
            settings.resolve(config)
    except OarConfigError as error:
        raise RecipeError(f"this configuration cannot work\n{error}") from error
    except Exception as error:  # verl asserts, and raises whatever its parts raise
        raise RecipeError(f"verl refuses this configuration: {error or type(error).__name__}") from error


def entry_point(folder: Path, variant: str = "oar") -> list[str]:
    """What names a recipe to `python -m verl.trainer.main_ppo`."""
    return ["--config-path", str(folder.resolve()), "--config-name", variant]


def command(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> list[str]:
    """The command that runs a recipe, for a Python that has verl and this plugin."""
    return ["python", "-m", "verl.trainer.main_ppo", *entry_point(folder, variant), *overrides]
