"""Finds keys in recipes and overrides that verl does not know.

Hydra silently accepts an unknown key in a yaml file, and verl then runs with its default for the key that was meant. On the
command line Hydra refuses an unknown key, but suggests adding it even if it is only mistyped.
"""

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

NOT_VERLS = ("defaults", "hydra", "algorithm.oar")
"""Keys that are not looked up in verl's schema: Hydra's own, and OAR's, which `OarConfig` checks."""


def unknown_in_files(folder: Path, variant: str, engine: str) -> list[str]:
    """Return one line for each unknown key in a recipe's own files; it suggests a similar key if there is one."""
    schema = _schema(engine)
    wrong = [(file, key) for file in _files(folder, variant) for key in _unknown(_tree(file), schema)]
    return [f"{file}: {key}: verl has no such key{_hint(key, _keys(schema))}" for file, key in wrong]


def unknown_in_overrides(overrides: Sequence[str]) -> list[str]:
    """Return one line for each override whose key is not in verl's schema."""
    known = {key for engine in ("dp", "megatron") for key in _keys(_schema(engine))}
    lines = []
    for word in overrides:
        key = word.partition("=")[0]
        if "." in key and not key.startswith(("+", "~", "hydra.", "algorithm.oar.")) and key not in known:
            hint = "" if any(map(_accepts_any_key, key.split("."))) else _hint(key, known)
            lines.append(f"{word}: verl's schema has no such key{hint or ';'} to add one, write +{word}")
    return lines


def _hint(key: str, known: Collection[str]) -> str:
    """Return a suggestion, or an empty string.

    The suggested key is one with a similar name in the same group, one with the same name elsewhere, or one with a similar
    dotted name, in this order.
    """
    group, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == group}
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    close = [siblings[each] for each in difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)]
    close += difflib.get_close_matches(key, namesakes, n=1, cutoff=0.0)
    close += difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    return f"; did you mean {close[0]}?" if close else ""


@functools.cache
def _schema(engine: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]))


def _tree(file: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(file))


def _files(folder: Path, variant: str) -> Iterator[Path]:
    """Yield a variant's yaml file, and the files in the same folder that its `defaults` name."""
    file = folder / f"{variant}.yaml"
    if file.is_file():
        yield file
        for entry in _tree(file).get("defaults") or []:
            if isinstance(entry, str) and entry != "_self_":
                yield from _files(folder, entry)


def _unknown(tree: Any, schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key, free = f"{prefix}{name}", _accepts_any_key(str(name))
        # Top-level keys with plain values are variables, which other values refer to.
        if key in NOT_VERLS or (not prefix and not isinstance(value, Mapping)):
            continue
        if name not in schema:
            if not free:
                yield key
        elif isinstance(value, Mapping) and isinstance(schema[name], Mapping) and schema[name] and not free:
            yield from _unknown(value, schema[name], f"{key}.")


def _accepts_any_key(name: str) -> bool:
    """Return whether verl accepts any key in a group of this name, as in groups that are empty in its schema."""
    return "kwargs" in name or name.startswith("override_")


def _keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all keys and groups of a configuration."""
    keys = []
    for name, value in tree.items():
        keys += [f"{prefix}{name}", *(_keys(value, f"{prefix}{name}.") if isinstance(value, Mapping) else ())]
    return keys
