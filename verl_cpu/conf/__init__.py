"""Hydra's config groups `cpu` and `cpu_smoke`."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin


class CpuSearchPath(SearchPathPlugin):
    """Lets an override select a file of this folder: `+cpu=dp`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("verl_cpu", "pkg://verl_cpu.conf")


def register() -> None:
    """Make the search-path plugin known to Hydra. The second call does nothing."""
    Plugins.instance().register(CpuSearchPath)
