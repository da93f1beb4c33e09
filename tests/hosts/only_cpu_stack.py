"""Loaded through VERL_USE_EXTERNAL_MODULES by a run without the plugin: the CPU stack and nothing of OAR."""

from oar_plugin.hosts.verl import cpu

if cpu.wanted():
    cpu.install()
