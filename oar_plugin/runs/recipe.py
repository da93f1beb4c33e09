"""Recipes: a folder with `recipe.yaml` (model, cluster, data) and two entry points, `oar.yaml` and `grpo.yaml`.

Each entry point adds three lines to `recipe.yaml`, which extends verl's own `ppo_trainer` through Hydra's `pkg://`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import oar_plugin
from oar_plugin.output import cause, did_you_mean, say

if TYPE_CHECKING:
    from omegaconf import DictConfig


class RecipeError(ValueError):
    """The recipe does not exist, is not valid, has a key that verl lacks, or cannot run. The message says what to do."""


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
    if str(given) in known:
        return recipes_folder() / given
    hint = did_you_mean(str(given), known)
    raise RecipeError(f"{given}: neither a folder nor a recipe; recipes: {', '.join(known)}{hint}")


def compose_recipe(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> DictConfig:
    """Return the configuration that verl's `main_ppo --config-path FOLDER --config-name VARIANT OVERRIDES` would run."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from oar_plugin.hosts.verl.hydra_conf import command_line, config_folder, misspelt
    from oar_plugin.runs.allowed import wrong_values

    if not (folder / f"{variant}.yaml").is_file():
        raise RecipeError(f"{folder} has no {variant}.yaml: name a recipe's folder, or one that `oar recipes` lists")
    if fault := misspelt(overrides):
        raise RecipeError(fault)
    others = any(not plugin.value.startswith("oar_plugin.") for plugin in entry_points(group="verl.plugins"))
    if others and any(re.match(r"\+\w+=", word) for word in overrides):
        import verl  # noqa: F401  it takes seconds; `+GROUP=NAME`: other plugins add their groups when it is imported

    try:
        paths = [path for name in (variant, "recipe") if (path := folder / f"{name}.yaml").is_file()]
        files = {path: OmegaConf.load(path) for path in paths}
        # Its folder in place of verl's package, which would be imported.
        places = (str(place) for place in OmegaConf.select(files[paths[0]], "hydra.searchpath") or [])
        found = [f"file://{config_folder()}" if place == "pkg://verl.trainer.config" else place for place in places]
        started = command_line([*entry_point(folder, variant), *overrides])
        with started, initialize_config_dir(str(folder.resolve()), version_base=None):
            config = compose(variant, [*overrides, f"hydra.searchpath={json.dumps(found, ensure_ascii=False)}"])
        # In a file Hydra accepts an unknown key, and verl then runs with its default for the key that was meant.
        given = [(key, path) for path, file in files.items() for key, _ in flat(OmegaConf.to_container(file))]
        verls = _verls(config.model_engine)
        faults = list(wrong_values(config, dict(flat(OmegaConf.to_container(config))), verls))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        reason = str(error).partition("Config search path:")[0].rstrip()
        of_words = re.match(r"Could not (?:append|delete|override) ", reason)
        if unknown := re.match(r"Could not override '([\w.]+)'", reason):
            hint = _hint(unknown[1], _verls("dp") | _verls("megatron"))
            reason = f"verl has no key {unknown[1]}{hint}; on the command line ++KEY adds one"
        swept = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'", reason)  # KEY=a,b
        if word := swept[1] if swept else getattr(error, "override", None):  # of an OverrideParseException
            special = "a text with special characters such as = , ( { ~ needs quotes of its own, opened and closed"
            advice = f"{special}: \"KEY='/a=b'\", in a list \"KEY=['/a=b']\""
            raise RecipeError(f"{word}: is not read as one KEY=VALUE; {advice}") from error
        raise RecipeError(reason if of_words else f"{folder / variant}.yaml does not compose: {reason}") from error
    added = [(word.lstrip("+~").partition("=")[0], word) for word in overrides if "=" in word]
    known = "".join(f"\n{key}." for key in verls)
    for key, place in [*given, *added]:
        group, dot, _ = key.partition(".")  # a key without a dot is a variable, one with "@" a group of files
        if not dot or "@" in key or _PASSED_ON.search(key) or f"\n{key}." in known:
            continue
        if place in overrides and f"\n{group}." in known:
            effect = "verl's configuration does not list this key; it has no effect where nothing reads it"
            _note(f"oar: {place}: {effect}{_hint(key, verls)}")
        elif place not in overrides or f"${{{group}." not in OmegaConf.to_yaml(config):
            faults.append(f"{place}: verl has no key {key}{_hint(key, verls)}")
    if faults:
        raise RecipeError("\n".join(faults))
    return config


def _hint(key: str, known: Iterable[str]) -> str:
    """Return which key was meant: one that only lacks its first groups, else the closest in spelling."""
    return did_you_mean(key, [one for one in known if one.endswith(f".{key}")] or known)


_note = functools.cache(lambda text: say(text, sys.stderr))  # once, for whatever number of runs
_PASSED_ON = re.compile(r"^hydra\.|^algorithm\.oar\b|kwargs|kw_args|\boverride_|\bmbridge_config")
"""Keys that verl does not define: Hydra's, OAR's, which `OarConfig` checks, and those that verl passes on."""


@functools.cache
def _verls(engine: str) -> dict[str, Any]:
    """Return `a.b.c -> value` for all keys of verl's own configuration."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.hydra_conf import config_folder

    with initialize_config_dir(str(config_folder()), version_base=None):
        return dict(flat(OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]), resolve=True)))


def flat(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `a.b.c`, value for all keys of a configuration; an empty group is a value."""
    for key, value in group.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def gpus_needed(config: DictConfig) -> tuple[int, int]:
    """Return the numbers of nodes and of GPUs per node, with separate pools for rollout and reward model."""
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.settings import trainer_of

    pools = ["trainer"]
    pools += ["actor_rollout_ref.rollout"] if trainer_of(config) == "separate_async" else []
    pools += ["reward.reward_model"] if OmegaConf.select(config, "reward.reward_model.enable_resource_pool") else []
    # verl needs all GPUs of one node of a pool on the same machine; pools may share a machine.
    keys = ("nnodes", "n_gpus_per_node")
    sizes = [[int(OmegaConf.select(config, f"{pool}.{key}") or 0) for key in keys] for pool in pools]
    parts = sorted((gpus for nodes, gpus in sizes for _ in range(nodes)), reverse=True)
    if max(nodes for nodes, _ in sizes) == 1 and sum(parts) <= 8:
        return 1, sum(parts)  # small pools share one machine
    free: list[int] = []  # GPUs that are left on each machine
    for part in parts:
        place = next((index for index, left in enumerate(free) if left >= part), len(free))
        free[place:] = free[place:] or [parts[0]]
        free[place] -= part
    return len(free), parts[0]


def check_config(config: DictConfig) -> None:
    """Raise RecipeError for a configuration that verl or OAR would refuse at the start of training or at the first update."""
    from hydra.utils import get_class
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from oar_plugin.config import OarConfigError
    from oar_plugin.hosts.verl import settings
    from oar_plugin.runs.allowed import unknown_names

    if faults := list(unknown_names(config)):
        raise RecipeError("\n".join(faults))
    try:
        # verl prints a success message, but standard output is reserved for the command or script.
        with contextlib.redirect_stdout(nowhere := io.StringIO()), contextlib.redirect_stderr(nowhere):
            validate_config(config, need_reference_policy(config), need_critic(config))
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # as verl's workers do
        model = config.actor_rollout_ref.model  # building it would load a tokenizer
        if unknown := model.keys() - {"_target_", *(field.name for field in fields(get_class(model._target_)))}:
            raise RecipeError(f"no such key: actor_rollout_ref.model.{min(unknown)}")
        if settings.switched_on(config):
            settings.resolve(config)
    except OarConfigError as error:
        raise RecipeError(f"this configuration cannot work\n{error}") from error
    except Exception as error:  # verl raises AssertionError and errors of many other types
        if "full_key: critic.model" in str(error):
            fault = f"critic.model.path={config.critic.model.path}: {cause(error)}"
            given = f"algorithm.adv_estimator={config.algorithm.adv_estimator}, critic.enable={config.critic.enable}"
            advice = "set one that can be read, or do without: algorithm.adv_estimator=oar critic.enable=False"
            raise RecipeError(f"{fault}; with {given} verl trains a critic: {advice}") from error
        raise RecipeError(f"verl refuses this configuration: {error or type(error).__name__}") from error


def entry_point(folder: Path, variant: str = "oar") -> list[str]:
    """Return the options that make `python -m verl.trainer.main_ppo` run a recipe."""
    return ["--config-path", str(folder.resolve()), "--config-name", variant]


def command(folder: Path, variant: str = "oar", overrides: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a recipe in a Python environment with verl and this plugin."""
    return ["python", "-m", "verl.trainer.main_ppo", *entry_point(folder, variant), *overrides]
