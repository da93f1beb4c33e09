"""What verl's keys may be (`allowed.yaml`), where verl itself would find a wrong value after minutes, or not name its key."""

import importlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from oar_plugin.hosts.verl.capabilities import host_folder
from oar_plugin.output import did_you_mean

_ALLOWED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def wrong_values(config: DictConfig, written: Mapping[str, Any], verls: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence per key whose value is no number or switch, or out of bounds.

    `written` are the values of all keys before they are resolved, `verls` those of verl's own configuration.
    """
    for key, default in verls.items():
        matching = (one for one in _ALLOWED["numbers"] if any(fnmatchcase(key, pattern) for pattern in one["keys"]))
        rule: dict[str, Any] = next(matching, {})
        refers = re.match(r"\$\{(?!oc.env)", str(written.get(key)))  # to a key that is looked at itself
        if refers or rule.get("free") or not (rule or isinstance(default, int | float)):
            continue
        value, text = OmegaConf.select(config, key), rule.get("text", "a number")
        if isinstance(default, bool):
            text, fits = "True or False", value in (True, False, None)
        elif value is None:
            fits = default is None or not rule or "unset" in rule
        else:
            fits = isinstance(value, int if rule.get("whole") else int | float) and not isinstance(value, bool)
            fits = fits and rule.get("least", -math.inf) <= value <= rule.get("most", math.inf)
        if not fits:
            yield f"{key}={value!r}: allowed: {text}"


def unknown_names(config: DictConfig) -> Iterator[str]:
    """Yield a sentence per name that the installed verl does not have, and no module of the user's registers in it."""
    for key, rule in _ALLOWED["names"].items():
        given = OmegaConf.select(config, key)
        if any(OmegaConf.select(config, other) != value for other, value in rule.get("only", {}).items()):
            continue
        for name in given if isinstance(given, ListConfig) else [given]:
            if name in (None, *rule["names"]):
                continue
            names = {*rule["names"], *_of_verl(rule, name, config)}
            if name not in names:
                hint = did_you_mean(str(name), names)
                yield f"{key}={name}: verl has no such name{hint}; allowed: {', '.join(sorted(names))}"


def _of_verl(rule: Mapping[str, Any], name: str, config: DictConfig) -> Collection[str]:
    """Return the names in a registry of verl, or `name` if it is in a file of verl's, or if that is not installed here."""
    if "file" in rule:
        file = host_folder() / rule["file"]
        return [] if file.is_file() and f'"{name}"' not in file.read_text("utf-8") else [name]
    module, _, registry = rule["registry"].partition(":")
    own = OmegaConf.select(config, "actor_rollout_ref.model.external_lib") or []
    try:  # the user's modules as verl's workers do
        *_, held = map(importlib.import_module, [*([own] if isinstance(own, str) else own), module])
        return list(attrgetter(registry)(held))
    except Exception:  # a module of the user's may need what only the run's nodes have: verl looks the name up there
        return [name]
