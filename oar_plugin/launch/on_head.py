"""Runs the shell script of an environment variable: the entry point of a RayJob, free of anything that a shell reads."""

from __future__ import annotations

import os
import sys

VARIABLE = "OAR_LAUNCH_SCRIPT"

if __name__ == "__main__":
    if VARIABLE not in os.environ:
        sys.exit(f"{VARIABLE} is not set: this is the entry point of a RayJob that oar launch made")
    os.execvp("bash", ["bash", "-c", os.environ[VARIABLE]])
