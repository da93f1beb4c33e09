"""Whether the loggers of a run would start: most of them end it at its first metric, and mlflow quietly logs elsewhere."""

import netrc
import os
from collections.abc import Iterator, Sequence

from oar_plugin.runs.launch.finding import Finding, importable

LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "tracking": "wandb"}  # to the package of doctor's table
BUILT_IN = ("console", "file", "rl_insight")  # and those that verl's own packages bring


def examine_loggers(names: Sequence[str]) -> Iterator[Finding]:
    """What is wrong with each of `trainer.logger`."""
    for name in names:
        package = LOGGERS.get(name, name)
        if name not in BUILT_IN and not importable(package):
            yield Finding("trainer.logger", "missing", f"{name} is not installed", f"pip install {package}")
        elif package == "wandb" and not _wandb_would_start():
            advice = "export WANDB_API_KEY, or `wandb login`, or WANDB_MODE=offline"
            yield Finding("trainer.logger", "missing", "wandb has no API key, and would end the run", advice)
        elif name == "mlflow" and "MLFLOW_TRACKING_URI" not in os.environ:
            text = "MLFLOW_TRACKING_URI is not set: mlflow writes to /tmp/mlruns.db of the node that trains"
            yield Finding("trainer.logger", "note", text, "export it")


def _wandb_would_start() -> bool:
    try:
        hosts = list(netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        hosts = []
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
    return offline or "WANDB_API_KEY" in os.environ or any("wandb" in host for host in hosts)
