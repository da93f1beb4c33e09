"""OAR in OpenRLHF, through the hook that `patches/` adds: `--algo.advantage.plugin oar_plugin.hosts.openrlhf:OarAdvantage`."""

from oar_plugin.hosts.openrlhf.plugin import OarAdvantage

__all__ = ["OarAdvantage"]
