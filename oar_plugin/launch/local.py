"""On this machine."""

from __future__ import annotations

import os
import shlex
import sys
from typing import NoReturn

from oar_plugin.hosts.verl.recipe import command
from oar_plugin.launch.job import Job, LaunchError


def arguments(job: Job) -> list[str]:
    """The command, with this Python.

    Raises:
        LaunchError: the recipe needs more than one machine.
    """
    if job.nodes > 1:
        raise LaunchError(f"the recipe needs {job.nodes} nodes; allowed here: --on ray, --on slurm or --on kubernetes")
    return [sys.executable, *command(job.recipe, job.variant, job.overrides)[1:]]


def script(job: Job) -> str:
    """What `run` does, to read."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return " ".join([*(["env", *assignments] if assignments else []), shlex.join(arguments(job))]) + "\n"


def run(job: Job) -> NoReturn:
    """Become the training process; does not return."""
    words = arguments(job)
    sys.stdout.flush()
    os.execve(words[0], words, {**os.environ, **job.environment})
