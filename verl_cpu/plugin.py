"""The `verl.plugins` entry point: makes verl run on the CPU where that is wanted, in the driver and in every worker.

verl logs a plugin that fails to load at DEBUG only. This module reports its own failure on stderr, and raises nothing: a
process that needs no CPU stack goes on. So that it gets there, this module and `verl_cpu/__init__.py` import nothing but the
standard library at their top.
"""

import sys
import traceback

import verl_cpu


def load() -> None:
    """Install the stand-ins and the config groups, or do nothing where verl does not run on the CPU."""
    try:
        if verl_cpu.wanted():
            from verl_cpu import conf

            verl_cpu.install()
            conf.register()
    except Exception:
        print("verl_cpu failed to load; verl cannot run on the CPU in this process:", file=sys.stderr)
        traceback.print_exc()


load()
