"""The CPU stack without the plugin: for `VERL_USE_EXTERNAL_MODULES`, beside `VERL_USE_EXTERNAL_PLUGINS=none`."""

import verl_cpu as cpu

if cpu.wanted():
    cpu.install()
