"""The `verl.plugins` entry point: makes verl run on a CPU where that is wanted, in the driver and in every worker."""

import verl_cpu
from verl_cpu import conf

if verl_cpu.wanted():
    verl_cpu.install()
    conf.register()
