"""What a launcher needs to know of a recipe: how many nodes and GPUs, and the command."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from oar_plugin.hosts.verl.recipe import command, compose_recipe

RAY_PORT = 6379
# So large are the nodes that recipes assume; pools of one node that fit together share one.
_GPUS_OF_A_NODE = 8


class LaunchError(Exception):
    """A run that cannot be started. The message says what to do."""


@dataclass(frozen=True)
class Job:
    """A recipe that is to be run.

    Args:
        recipe: its folder, as the nodes see it.
        variant: `oar` or `grpo`.
        overrides: of the configuration.
        nodes: machines that it needs.
        gpus_per_node: GPUs of each.
        gpus: that it needs in all.
        checkpoints: folder that the recipe writes them to.
        environment: variables for all nodes, without secrets.
        setup: shell command that makes `python` and `ray` the right ones on a node; empty if they are.
        wait_s: seconds that the nodes may take to join.
    """

    recipe: Path
    variant: str
    overrides: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    gpus: int
    checkpoints: str
    environment: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    wait_s: int = 900

    @property
    def name(self) -> str:
        """Of the job, in letters that every scheduler takes."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.recipe.name}-{self.variant}".lower()).strip("-")

    def train(self, on_cluster: bool) -> str:
        """The shell command that trains; `on_cluster` when Ray already runs on the nodes."""
        address = ["+ray_kwargs.ray_init.address=auto"] if on_cluster else []
        return shlex.join(command(self.recipe, self.variant, [*address, *self.overrides]))

    def wait(self, nodes: int | None = None) -> str:
        """The shell command that returns when the nodes are there, or fails and names what is missing."""
        count = self.nodes if nodes is None else nodes
        gpus = self.gpus if nodes is None else nodes * self.gpus_per_node
        arguments = ["--nodes", str(count), "--gpus", str(gpus), "--timeout", str(self.wait_s)]
        return shlex.join(["python", "-m", "oar_plugin.launch.wait", *arguments])

    def exports(self) -> list[str]:
        """Lines of a shell script that set the environment."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]


def activation() -> str:
    """Command that makes another machine with the same files use this Python's environment; empty outside of one."""
    if sys.prefix == sys.base_prefix:
        return ""
    return f"source {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))}"


def needs(config: DictConfig, gpus_of_a_node: int | None = None) -> tuple[int, int, int]:
    """Nodes, GPUs of each and GPUs in all that a configuration uses: its training pool and what it keeps apart from it.

    Args:
        config: verl's.
        gpus_of_a_node: GPUs of each machine, where the configuration leaves that open.

    Raises:
        LaunchError: a pool does not fit on machines of this size.
    """

    def pool(key: str) -> tuple[int, int]:
        return int(OmegaConf.select(config, f"{key}.nnodes") or 0), int(
            OmegaConf.select(config, f"{key}.n_gpus_per_node") or 0
        )

    pools = {"trainer": pool("trainer")}
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async":
        pools["actor_rollout_ref.rollout"] = pool("actor_rollout_ref.rollout")
    if OmegaConf.select(config, "reward.reward_model.enable_resource_pool"):
        pools["reward.reward_model"] = pool("reward.reward_model")
    total = sum(nodes * gpus for nodes, gpus in pools.values())
    largest = max(gpus for _, gpus in pools.values())
    if gpus_of_a_node is None:
        together = all(nodes == 1 for nodes, _ in pools.values()) and total <= _GPUS_OF_A_NODE
        gpus_of_a_node = total if together else largest
    if largest > gpus_of_a_node:
        key = max(pools, key=lambda name: pools[name][1])
        raise LaunchError(
            f"--gpus-per-node {gpus_of_a_node}: {key}.n_gpus_per_node={largest} does not fit on a node; allowed: at least "
            f"{largest}, or fewer GPUs a node and more nodes in the recipe"
        )
    # Each node of a pool needs its GPUs on one machine, so a machine holds so many of them and no fraction.
    if len({gpus for _, gpus in pools.values()}) == 1:
        parts = sum(nodes for nodes, _ in pools.values())
        return -(-parts // (gpus_of_a_node // largest)), gpus_of_a_node, total
    return (
        _first_fit([gpus for nodes, gpus in pools.values() for _ in range(nodes)], gpus_of_a_node),
        gpus_of_a_node,
        total,
    )


def _first_fit(parts: list[int], size: int) -> int:
    """Machines of `size` GPUs that hold all parts, the largest placed first."""
    free: list[int] = []
    for part in sorted(parts, reverse=True):
        place = next((index for index, left in enumerate(free) if left >= part), None)
        if place is None:
            free.append(size - part)
        else:
            free[place] -= part
    return len(free)


def check(config: DictConfig) -> None:
    """Everything that verl and OAR would refuse after the nodes were taken.

    Raises:
        LaunchError: with the reason.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from oar_plugin.config import OarConfigError
    from oar_plugin.hosts.verl import settings

    try:
        # verl says that all is well, and that there is no critic: standard output is for what would be run.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            validate_config(config, need_reference_policy(config), need_critic(config))
        if settings.switched_on(config):
            settings.resolve(config)
    except OarConfigError as error:
        raise LaunchError(f"this configuration cannot work\n{error}") from error
    except Exception as error:  # verl asserts, and raises whatever its parts raise
        raise LaunchError(f"verl refuses this configuration: {error or type(error).__name__}") from error


def read_job(
    recipe: Path,
    variant: str,
    overrides: Sequence[str],
    environment: dict[str, str],
    setup: str,
    on_nodes: Path | None,
    gpus_of_a_node: int | None,
    wait_s: int,
) -> Job:
    """Compose and check a recipe.

    Args:
        recipe: its folder here.
        variant: `oar` or `grpo`.
        overrides: of the configuration.
        environment: for all nodes.
        setup: see `Job`.
        on_nodes: where the nodes have the recipe's folder, if somewhere else.
        gpus_of_a_node: see `needs`.
        wait_s: see `Job`.

    Raises:
        LaunchError: it does not fit the machines, or verl or OAR refuse it.
        RecipeError: it does not compose.
    """
    config = compose_recipe(recipe, variant, overrides)
    check(config)
    nodes, gpus_per_node, gpus = needs(config, gpus_of_a_node)
    checkpoints = str(OmegaConf.select(config, "trainer.default_local_dir"))
    if nodes > 1 and not Path(checkpoints).is_absolute():
        raise LaunchError(
            f"trainer.default_local_dir={checkpoints}: relative, and the recipe runs on {nodes} nodes, which must all see it "
            "to resume; set OAR_CHECKPOINTS to a folder on shared storage"
        )
    folder = on_nodes or recipe.resolve()
    return Job(folder, variant, tuple(overrides), nodes, gpus_per_node, gpus, checkpoints, environment, setup, wait_s)
