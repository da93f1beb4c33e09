"""Keys that verl does not know.

Hydra merges those of a yaml file without a word, and verl then runs with its default. On the command line it refuses them, and
advises to add what was only mistyped.
"""

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

NOT_VERLS = ("defaults", "hydra", "algorithm.oar")
"""Hydra's own, and OAR's, which `OarConfig` checks."""


def unknown_in_files(folder: Path, variant: str, engine: str) -> Iterator[str]:
    """What is wrong with the keys of a recipe's own files: a line each, with the key that was meant."""
    schema = _schema(engine)
    known = [".".join(path) for path in _paths(schema)]
    for file in _files(folder, variant):
        for key in _unknown(OmegaConf.to_container(OmegaConf.load(file)), schema):
            yield f"{file}: {key}: verl has no such key{_hint(key, known)}"


def unknown_in_overrides(overrides: Sequence[str], config: DictConfig) -> Iterator[str]:
    """What is wrong with the keys of overrides; `config` is composed without those that set one key."""
    tree: Any = OmegaConf.to_container(config)
    known = {".".join(path) for path in _paths(tree)}
    for word, key in of_keys(overrides):
        if key not in known:
            hint = "" if any(map(_is_free, key.split("."))) else _hint(key, known)
            yield f"{word}: verl's schema has no such key{hint or ';'} to add one, write +{word}"


def of_keys(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """The overrides that set one key which must be there, with that key; the others choose groups, add or delete."""
    try:
        parsed = [(word, OverridesParser.create().parse_override(word)) for word in overrides]
    except HydraException:
        return []
    plain = [(word, one) for word, one in parsed if not (one.is_add() or one.is_force_add() or one.is_delete())]
    return [(word, str(one.key_or_group)) for word, one in plain if "." in one.key_or_group and one.package is None]


def nearest(key: str, known: Collection[str]) -> str | None:
    """The key that was meant: one of the same group spelt alike, the same name elsewhere, or one that is alike as a whole."""
    group, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == group}
    if found := difflib.get_close_matches(name, list(siblings), n=1, cutoff=0.7):
        return siblings[found[0]]
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    found = difflib.get_close_matches(key, namesakes, n=1, cutoff=0.0) or difflib.get_close_matches(
        key, known, n=1, cutoff=0.85
    )
    return found[0] if found else None


def _hint(key: str, known: Collection[str]) -> str:
    meant = nearest(key, known)
    return "" if meant is None else f"; did you mean {meant}?"


@functools.cache
def _schema(engine: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]))


def _files(folder: Path, variant: str) -> Iterator[Path]:
    """The file of a variant and those beside it that its defaults name."""
    file = folder / f"{variant}.yaml"
    if file.is_file():
        yield file
        for entry in OmegaConf.select(OmegaConf.load(file), "defaults") or []:
            if isinstance(entry, str) and entry != "_self_":
                yield from _files(folder, entry)


def _unknown(tree: Any, schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key, free = f"{prefix}{name}", _is_free(str(name))
        if key in NOT_VERLS or (not prefix and not isinstance(value, Mapping)):  # the latter is there to be referred to
            continue
        if name not in schema:
            if not free:
                yield key
        elif isinstance(value, Mapping) and isinstance(schema[name], Mapping) and schema[name] and not free:
            yield from _unknown(value, schema[name], f"{key}.")


def _is_free(name: str) -> bool:
    """Whether verl passes on what is below this name as it is; so it does with groups that are empty in its schema."""
    return "kwargs" in name or name.startswith("override_")


def _paths(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        yield (*prefix, str(name))
        if isinstance(value, Mapping):
            yield from _paths(value, (*prefix, str(name)))
