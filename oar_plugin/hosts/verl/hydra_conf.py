"""Makes `algorithm.oar.*` known to Hydra, so that overrides need no `+` and presets can be chosen by name: `oar=published`.

Two of Hydra's own extension points do it. A search-path plugin adds the config group `oar` and puts verl's primary config,
extended by that group and by a callback, in front of verl's. The callback checks the composed configuration in the driver,
before Ray starts. Apart from the presets, they act only when the command line mentions OAR: with any other estimator, verl
composes exactly what it would without the plugin.
"""

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from oar_plugin.config import PREFIX, OarConfigError, left, unknown_key
from oar_plugin.hosts.verl.capabilities import host_folder
from oar_plugin.hosts.verl.settings import doubts, resolve, switched_on, unused

PRIMARY = "ppo_trainer"  # verl's one trainer config; model_engine=dp|megatron selects the rest
_PROVIDER = "oar_plugin"


def mentions_oar(arguments: Sequence[str]) -> bool:
    """Whether a command line chooses a preset, switches OAR on or sets one of its keys."""
    return any(re.search(r"^\+?oar=|adv_estimator=oar|algorithm\.oar", word) for word in arguments)


def misspelt(arguments: Sequence[str]) -> str | None:
    """The fault in how a command line chooses a preset or names OAR's keys, and what to write; None: there is none."""
    for word in arguments:
        key, equals, value = (bare := word.lstrip("+")).partition("=")
        if key == "oar" and (message := left(bare)):
            return f"{word}: {message}"
        if word.startswith("+oar="):
            return f"{word}: presets are chosen without the plus sign; write {bare}"
        outside = key.startswith("oar.")  # where nothing reads it
        key = f"algorithm.{key}" if outside else key
        if equals and key.startswith(f"{PREFIX}.") and ((fault := unknown_key(key.split(".")[2:])) or outside):
            return f"{word}: {fault or f'OAR has its keys below {PREFIX}; write {key}={value}'}"
    return None


class OarSearchPath(SearchPathPlugin):
    """Adds the presets; puts the extended primary config in front when the command line asks for OAR."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra's hook. Exits at a misspelt preset or key: Hydra's own message would not help."""
        arguments = sys.argv[1:]
        folders = [element.path for element in search_path.get_path() if element.provider == "main"]
        search_path.append(_PROVIDER, "pkg://oar_plugin.hosts.verl.conf")
        if mentions_oar(arguments):  # with another estimator, `oar.x` is the user's own
            if fault := misspelt(arguments):
                sys.exit(f"oar: {fault}")
            folder = _extended_primary_config(with_group=not _has_group(folders, arguments))
            search_path.prepend(_PROVIDER, f"file://{folder}")


class CheckAtStart(Callback):
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra's hook. Exits where the configuration cannot work; Hydra would swallow an exception."""
        if not switched_on(config):
            if text := unused(config, sys.argv[1:]):
                print(f"oar: warning: {text}", file=sys.stderr)
            return
        for _, stops, text in doubts(config, ()):
            if stops:
                sys.exit(f"oar: this configuration cannot work\n{text}")
            print(f"oar: warning: {text}", file=sys.stderr)
        from unittest import mock  # here, because every process of a run imports this module

        try:
            # Importing vLLM sets variables that the workers of a Ray started here would inherit.
            with mock.patch.dict(os.environ):
                resolve(config, here=True)
        except OarConfigError as error:
            sys.exit(f"oar: this configuration cannot work\n{error}")


def register() -> None:
    """Make the search-path plugin known to Hydra. Idempotent."""
    Plugins.instance().register(OarSearchPath)


@contextmanager
def command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Within it, Hydra composes as if the process had been started with these arguments."""
    from unittest import mock

    register()
    with mock.patch.object(sys, "argv", [sys.argv[0], *arguments]):
        yield


def _has_group(folders: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether the config that a command line names has `oar` in its defaults list, as recipes have: Hydra refuses it twice."""
    named = get_args_parser().parse_known_args(list(arguments))[0]
    places = [Path(folder.removeprefix("file://")) for folder in (named.config_dir, *folders) if folder]

    def has(name: str) -> bool:
        file = next((file for place in places if (file := place / f"{name}.yaml").is_file()), None)
        config = OmegaConf.create() if file is None else OmegaConf.load(file)
        entries = config.get("defaults", []) if isinstance(config, DictConfig) else []
        return any(has(entry) if isinstance(entry, str) else "oar" in entry for entry in entries)

    return has((named.config_name or PRIMARY).removesuffix(".yaml"))


def config_folder() -> Path:
    """verl's folder of configurations. ModuleNotFoundError: there is no verl."""
    return host_folder() / "trainer" / "config"


def _extended_primary_config(with_group: bool) -> str:
    """Write verl's own primary config, read from its package, with our check and, on demand, our group of keys.

    Returns a folder that holds it, removed when the process ends. (Hydra's ConfigStore cannot stand in front of a file: Hydra
    then takes its own built-in configs for schemas of themselves.)
    """
    source = config_folder() / f"{PRIMARY}.yaml"
    config = OmegaConf.load(source)
    assert isinstance(config, DictConfig)
    if with_group:
        config.defaults.insert(list(config.defaults).index("_self_"), {"oar": "default"})
    target = f"{CheckAtStart.__module__}.{CheckAtStart.__qualname__}"
    config.hydra = OmegaConf.merge(config.get("hydra", {}), {"callbacks": {"oar": {"_target_": target}}})
    folder = tempfile.mkdtemp(prefix="oar_conf_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    OmegaConf.save(config, Path(folder) / source.name)
    return folder
