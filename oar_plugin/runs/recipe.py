"""Recipes: a folder with `recipe.yaml` (model, cluster, data) and two entry points, `oar.yaml` and `grpo.yaml`.

Each entry point adds three lines to `recipe.yaml`, which extends verl's own `ppo_trainer` through Hydra's `pkg://`. The
functions raise `RecipeError` for a recipe that cannot run, also for one with a key that verl does not know.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import oar_plugin
from oar_plugin.output import did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig


class RecipeError(ValueError):
    """The recipe does not exist, is not a valid configuration, or cannot run. The message says what to do."""


def recipes_folder() -> Path:
    """Return the folder that holds all recipes: inside the installed package, or next to the package in a checkout."""
    package = Path(oar_plugin.__file__).parent
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
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

    It reads the files of the verl that is installed. verl is imported, which takes seconds, only for config groups of its other
    plugins.

    Raises:
        ModuleNotFoundError: verl or Hydra is not installed.
        RecipeError: the recipe does not exist, its yaml is not valid, or verl does not know a key in it or in an override.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from oar_plugin.hosts.verl.hydra_conf import command_line, misspelt

    if not (folder / f"{variant}.yaml").is_file():
        advice = "name the folder of a recipe, such as recipes/qwen2_5_7b_math"
        raise RecipeError(f"{folder} has no {variant}.yaml: {advice}")
    if fault := misspelt(overrides):
        raise RecipeError(fault)

    def composed() -> DictConfig:
        with (
            command_line([*entry_point(folder, variant), *overrides]),
            initialize_config_dir(config_dir=str(folder.resolve()), version_base=None),
        ):
            return compose(config_name=variant, overrides=[*overrides, _search_path(folder / f"{variant}.yaml")])

    if any(override.startswith("+") for override in overrides):  # `+GROUP=NAME`, or a new key
        _load_other_plugins()
    try:
        try:
            config = composed()
        except MissingConfigException:  # perhaps a group in the recipe's `defaults`
            _load_other_plugins()
            config = composed()
        engine = str(config.model_engine)
        faults = _unknown_in_files(folder, variant, _generated(engine))
        faults = faults and _unknown_in_files(folder, variant, _schema(engine))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        reason = str(error).partition("Config search path:")[0].rstrip()
        faults = _unknown_in_overrides(overrides)
        raise RecipeError("\n".join(faults) or f"{folder.name}/{variant}.yaml does not compose: {reason}") from error
    if faults:
        raise RecipeError("\n".join(faults))
    return config


def _load_other_plugins() -> None:
    """Import verl, which loads its plugins, if there are others than ours: they may add config groups."""
    if any(not plugin.value.startswith("oar_plugin.") for plugin in entry_points(group="verl.plugins")):
        with contextlib.suppress(ModuleNotFoundError):
            import verl  # noqa: F401


def _search_path(file: Path) -> str:
    """Return an override of a recipe's search path that has verl's folder in place of verl's package."""
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.hydra_conf import config_folder

    given = OmegaConf.select(OmegaConf.load(file), "hydra.searchpath") or []
    places = [f"file://{config_folder()}" if place == "pkg://verl.trainer.config" else str(place) for place in given]
    return f"hydra.searchpath={json.dumps(places, ensure_ascii=False)}"


# ---- mistyped keys: Hydra accepts an unknown key in a yaml file, and verl then runs with its default for the key that was
# meant. On the command line Hydra refuses an unknown key, but suggests adding it even if it is only mistyped.

_NOT_VERLS = ("defaults", "hydra", "algorithm.oar")
"""Keys that are not looked up in verl's schema: Hydra's own, and OAR's, which `OarConfig` checks."""


def _unknown_in_files(folder: Path, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Return one line for each unknown key in a yaml file of a recipe, and in the files beside it that its `defaults` name."""
    from omegaconf import OmegaConf

    file = folder / f"{name}.yaml"
    if not file.is_file():
        return []
    tree: Any = OmegaConf.to_container(OmegaConf.load(file))
    lines = [f"{file}: {key}: verl has no such key{_hint(key, _names(schema))}" for key in _unknown(tree, schema)]
    for entry in tree.get("defaults") or []:
        if isinstance(entry, str) and entry != "_self_":
            lines += _unknown_in_files(folder, entry, schema)
    return lines


def _unknown_in_overrides(overrides: Sequence[str]) -> list[str]:
    """Return one line for each override whose key is not in verl's schema."""
    known = _names(_schema("dp")) | _names(_schema("megatron"))
    lines = []
    for word in overrides:
        key = word.partition("=")[0]
        if "." in key and not key.startswith(("+", "~", "hydra.", "algorithm.oar.")) and key not in known:
            hint = "" if any(map(_accepts_any_key, key.split("."))) else _hint(key, known)
            lines.append(f"{word}: verl's schema has no such key{hint or ';'} to add one, write +{word}")
    return lines


def _unknown(tree: Mapping[Any, Any], schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key, free = f"{prefix}{name}", _accepts_any_key(str(name))
        # Top-level keys with plain values are variables, which other values refer to.
        if key in _NOT_VERLS or (not prefix and not isinstance(value, Mapping)):
            continue
        if name not in schema:
            if not free:
                yield key
        elif isinstance(value, Mapping) and isinstance(schema[name], Mapping) and schema[name] and not free:
            yield from _unknown(value, schema[name], f"{key}.")


def _accepts_any_key(name: str) -> bool:
    """Return whether verl accepts any key in a group of this name, as in groups that are empty in its schema."""
    return "kwargs" in name or name.startswith("override_")


def _hint(key: str, known: Collection[str]) -> str:
    """Return a suggestion, a key with a similar name in the same group or with the same name elsewhere; or an empty string."""
    group, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == group}
    close = [siblings[each] for each in difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)]
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    close += difflib.get_close_matches(key, namesakes, n=1, cutoff=0.0)
    return f"; did you mean {close[0]}?" if close else ""


def _generated(engine: str) -> Any:
    """Return verl's own record of its schema: fast to read, but a fork may lack it or not keep it up to date."""
    import yaml

    from oar_plugin.hosts.verl.hydra_conf import config_folder

    file = config_folder() / f"_generated_ppo_{'' if engine == 'dp' else f'{engine}_'}trainer.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


@functools.cache
def _schema(engine: str) -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.hydra_conf import config_folder

    with initialize_config_dir(str(config_folder()), version_base=None):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]))


def _names(schema: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of all keys and groups."""
    words = [key.split(".") for key, _ in flat(schema)]
    return {".".join(each[:length]) for each in words for length in range(1, len(each) + 1)}


def flat(group: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `a.b.c`, value for all keys of a configuration; an empty group is a value."""
    for key, value in group.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def gpus_needed(config: DictConfig) -> tuple[int, int, int]:
    """Return the number of nodes, GPUs per node, and GPUs in total.

    They include verl's training pool and, if configured, the separate pools for rollout and for the reward model.
    """
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.settings import trainer_of

    keys = ["trainer"]
    if trainer_of(config) == "separate_async":
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
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from oar_plugin.config import OarConfigError
    from oar_plugin.hosts.verl import settings

    try:
        # verl prints a success message, but standard output is reserved for the command or script.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            validate_config(config, need_reference_policy(config), need_critic(config))
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # as verl's workers do
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
