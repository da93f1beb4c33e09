"""The CPU stack without the plugin: for `VERL_USE_EXTERNAL_MODULES`, beside `VERL_USE_EXTERNAL_PLUGINS=none`."""

from oar_plugin.hosts.verl import cpu

if cpu.wanted():
    cpu.install()
