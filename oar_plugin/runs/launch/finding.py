"""The result of a check, which `oar doctor` and `oar launch` print as one line; and the check of a run's loggers.

`oar doctor` imports this module on machines that lack many packages, so the module imports only the standard library.
"""

import netrc
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal, NamedTuple

Level = Literal["ok", "note", "not checked", "missing"]
"""`ok`; `note`: worth knowing; `not checked`: cannot be checked on this machine; `missing`: a run would not start."""

LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "tracking": "wandb"}
"""verl's logger -> the package that it needs. `oar doctor` lists these packages."""
_BUILT_IN = ("console", "file", "rl_insight")  # loggers that need no package


class Finding(NamedTuple):
    """The result of one check."""

    subject: str
    level: Level
    text: str
    advice: str = ""


def cause(error: BaseException) -> str:
    """Return the first line of the innermost cause of an error; verl wraps a reward function's errors in its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def importable(module: str) -> bool:
    """Return whether Python finds a module, without importing it; False if a parent package is missing or broken."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def examine_loggers(names: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each logger in `trainer.logger` that would end the run when it logs its first metric."""
    for name in names:
        package = LOGGERS.get(name, name)
        if name not in _BUILT_IN and not importable(package):
            yield Finding("trainer.logger", "missing", f"{name} is not installed", f"pip install {package}")
        elif package == "wandb" and not _wandb_would_start():
            advice = "export WANDB_API_KEY, or `wandb login`, or WANDB_MODE=offline"
            yield Finding("trainer.logger", "missing", "wandb has no API key and would end the run", advice)


def _wandb_would_start() -> bool:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled") or "WANDB_API_KEY" in os.environ:
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
