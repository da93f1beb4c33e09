"""Which environment variables a run needs on all of its nodes. The one place that knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Folders: data, checkpoints, models, logs.
PATHS = ("OAR_DATA", "OAR_CHECKPOINTS", "HF_HOME", "HF_HUB_CACHE", "TENSORBOARD_DIR", "WANDB_DIR")
# How to reach hubs and loggers.
NAMES = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE")
# Settings of the libraries that talk between nodes or generate.
PREFIXES = ("GLOO_", "NCCL_", "UCX_", "VERL_", "VLLM_")
# Never written to a script, a manifest or a command line.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")


def for_nodes(environment: Mapping[str, str], wanted: Sequence[str] = (), paths: bool = True) -> dict[str, str]:
    """Variables without secrets that every node gets.

    Args:
        environment: of this process.
        wanted: further ones: `NAME=VALUE`, or `NAME` to take its value from `environment`.
        paths: whether folders of this machine mean something on the nodes.

    Raises:
        ValueError: one that is wanted has no value, or is a secret.
    """
    names = (*NAMES, *PATHS) if paths else NAMES
    chosen = {name: value for name, value in environment.items() if name in names or name.startswith(PREFIXES)}
    for entry in wanted:
        name, equals, value = entry.partition("=")
        if not name.isidentifier():
            raise ValueError(f"--env {entry}: not a name of an environment variable; write NAME=VALUE or NAME")
        if name in SECRETS:
            raise ValueError(f"--env {name}: a secret; export it instead, launchers pass it on without writing it down")
        if not equals and name not in environment:
            raise ValueError(f"--env {name}: not set here; export it, or write {name}=VALUE")
        chosen[name] = value if equals else environment[name]
    return dict(sorted(chosen.items()))


def secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The secrets that are set."""
    return {name: environment[name] for name in SECRETS if environment.get(name)}
