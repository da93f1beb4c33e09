"""Makes `algorithm.oar.*` known to Hydra, so that overrides need no `+` and presets can be chosen by name.

Two of Hydra's own extension points do it. A search-path plugin adds the config group `oar` (presets: `+oar=published`) and
puts verl's primary config, with the group `algorithm.oar` added to it, in front of verl's. A callback checks the composed
configuration in the driver, before Ray starts. Apart from the presets, they act only when the command line mentions OAR:
with any other estimator, verl composes exactly what it would without the plugin.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.hosts.verl.settings import resolve, switched_on

PRIMARY = "ppo_trainer"  # verl's one trainer config; model_engine=dp|megatron selects the rest
_PROVIDER = "oar_plugin"


def mentions_oar(arguments: list[str]) -> bool:
    """Whether a command line switches OAR on or sets one of its keys.

    False when a key is *added* (`+algorithm.oar.tau=...`): Hydra refuses to add what is already there.
    """
    if any(a.startswith("+algorithm.oar") for a in arguments):
        return False
    return any("adv_estimator=oar" in a or "algorithm.oar" in a or a.startswith("+oar=") for a in arguments)


class OarSearchPath(SearchPathPlugin):
    """Adds the presets; puts the extended primary config in front when the command line asks for OAR."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See `SearchPathPlugin`."""
        search_path.append(_PROVIDER, "pkg://oar_plugin.hosts.verl.conf")
        if mentions_oar(sys.argv[1:]):
            search_path.prepend(_PROVIDER, f"file://{_extended_primary_config()}")


class CheckAtStart(Callback):
    """Stops a run whose OAR settings cannot work, with the reason on one screen and nothing started yet."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See `Callback`. Exits with status 2; Hydra would swallow an exception."""
        if not switched_on(config):
            return
        try:
            resolve(config)
        except OarConfigError as error:
            sys.exit(f"oar: this configuration cannot work\n{error}")


def register() -> None:
    """Make the search-path plugin known to Hydra. Idempotent."""
    Plugins.instance().register(OarSearchPath)


def _extended_primary_config() -> str:
    """Write verl's own primary config, read from its package, with our defaults under `algorithm.oar`.

    Returns:
        A folder that holds it, removed when the process ends. (Hydra's ConfigStore cannot stand in front of a file:
        Hydra then takes its own built-in configs for schemas of themselves.)
    """
    import verl

    source = Path(verl.__file__).parent / "trainer" / "config" / f"{PRIMARY}.yaml"
    config = OmegaConf.load(source)
    assert isinstance(config, DictConfig)
    config.algorithm.oar = OarConfig().model_dump(mode="json")
    target = f"{CheckAtStart.__module__}.{CheckAtStart.__qualname__}"
    config.hydra = OmegaConf.merge(config.get("hydra", {}), {"callbacks": {"oar": {"_target_": target}}})
    folder = tempfile.mkdtemp(prefix="oar_conf_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    OmegaConf.save(config, Path(folder) / source.name)
    return folder
