"""A recipe on a Ray cluster of two nodes that loses one of them, or the network to it, and goes on from its checkpoint.

Both nodes are on this machine: two raylets, a pretended GPU each. A network that can be cut takes root.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from oar_plugin.runs.recipe import entry_point
from oar_plugin.runs.run_folder import START
from tests.hosts.whole_run import LIMIT_S, RECIPES
from verl_cpu import cpu_environment
from verl_cpu.session import session

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3 * LIMIT_S)]

RECIPE = RECIPES / "qwen2_5_14b_deepmath"
TWO_NODES = [
    "+cpu_smoke=dp",
    "trainer.nnodes=2",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "ray_kwargs.ray_init.num_cpus=null",
    "actor_rollout_ref.actor.ppo_epochs=10",  # the update is most of a step, so that a loss falls into it for sure
    *(f"~ray_kwargs.ray_init.{key}" for key in ("num_gpus", "object_store_memory", "include_dashboard")),
]


CABLE = f"oar{os.getpid()}"  # both of its ends, and the namespace that it leads to
HERE, THERE = "10.213.77.1", "10.213.77.2"
NOBODY = "02:00:00:00:00:01"


@contextmanager
def another_network() -> Iterator[str]:
    """The name of a network namespace, with a cable to it."""
    try:
        for command in (
            f"ip netns add {CABLE}",
            f"ip link add {CABLE} type veth peer name {CABLE} netns {CABLE}",
            f"ip addr add {HERE}/24 dev {CABLE}",
            f"ip link set {CABLE} up",
            f"ip -n {CABLE} addr add {THERE}/24 dev {CABLE}",
            f"ip -n {CABLE} link set {CABLE} up",
            f"ip -n {CABLE} link set lo up",
        ):
            subprocess.run(command.split(), check=True)
        yield CABLE
    finally:
        subprocess.run(f"ip netns delete {CABLE}".split())  # and the cable with it


class TwoNodes:
    """A Ray cluster of two nodes on this machine and the recipe's runs on it; a second node in the namespace `network`."""

    def __init__(self, folder: Path, environment: dict[str, str], network: str = "") -> None:
        self.folder, self.metrics, self._network = folder, folder / "metrics.jsonl", network
        here, self._there = (HERE, THERE) if network else ("127.0.0.1", "127.0.0.1")
        self.environment = {
            **os.environ,
            **cpu_environment(),
            "OAR_SMOKE": str(folder),
            # Processes of a cluster have its environment, not the driver's.
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
            **environment,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # more than one node
            "GLOO_SOCKET_IFNAME": CABLE if network else "lo",
            # Nodes that `ray start` makes and the driver that joins them ask for the token alike.
            "RAY_AUTH_MODE": "token",
        }
        with socket.create_server((here, 0)) as free:
            port = free.getsockname()[1]
        self.address = f"{here}:{port}"
        self._node("head", f"--head --port={port} --node-ip-address={here} --include-dashboard=false")
        self.add()

    def add(self) -> None:
        """Start a second node."""
        name = f"node{len(list(self.folder.glob('node*.log')))}"
        within = f"ip netns exec {self._network} " if self._network else ""
        self._last = self._node(name, f"--address={self.address} --node-ip-address={self._there}", within)

    def _node(self, name: str, told: str, within: str = "") -> psutil.Process:
        ray = f"{within}{sys.executable} -m ray.scripts.scripts start --block --num-cpus=16 --num-gpus=1"
        log = self.folder / f"{name}.log"
        process = psutil.Popen(
            f"{ray} --object-store-memory=200000000 {told}".split(),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        while "Ray runtime started" not in self.log(name):
            assert process.poll() is None, self.log(name)
            time.sleep(0.2)
        return process

    def kill(self) -> None:
        """End the second node as a power cut would."""
        for process in (self._last, *self._last.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def cut(self, seconds: float) -> None:
        """What is sent goes to nobody, and nobody is told."""
        ends = {THERE: "ip", HERE: f"ip -n {self._network}"}
        for other, ip in ends.items():
            subprocess.run(
                f"{ip} neighbour replace {other} lladdr {NOBODY} nud permanent dev {CABLE}".split(), check=True
            )
        time.sleep(seconds)
        for other, ip in ends.items():
            subprocess.run(f"{ip} neighbour delete {other} dev {CABLE}".split(), check=True)

    def start(self, name: str, steps: int) -> "subprocess.Popen[bytes]":
        """A run of the recipe: its driver."""
        overrides = [
            f"ray_kwargs.ray_init.address={self.address}",
            f"trainer.total_training_steps={steps}",
            f"hydra.run.dir={self.folder}/{name}",
            f"algorithm.oar.dump.dir={self.folder}/dumps",
            "algorithm.oar.dump.every=1",
            f"trainer.default_local_dir={self.folder}/checkpoints",
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *entry_point(RECIPE), *TWO_NODES, *overrides],
            env=self.environment | {START: "resume"},  # with another number of steps
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / f"{name}.log").open("w"),
            stderr=subprocess.STDOUT,
        )

    def steps(self) -> list[int]:
        """Of the last run: each writes the file anew."""
        return [json.loads(line)["step"] for line in self.metrics.read_text().splitlines()]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def run_into(self, fault: Callable[[], None], steps: int) -> "subprocess.Popen[bytes]":
        """Start a run, wait for an update, and let the fault happen."""
        driver = self.start("first", steps)
        while not updating(self.folder) and driver.poll() is None:
            time.sleep(0.2)
        assert updating(self.folder), self.log("first")
        fault()
        return driver

    def goes_on_from_its_checkpoint(self) -> None:
        """Start again with another second node: no step is lost but those after the checkpoint."""
        saved = checkpointed(self.folder)
        self.add()
        assert self.start("second", steps=saved + 2).wait(LIMIT_S) == 0, self.log("second")
        assert self.steps() == [saved + 1, saved + 2]


def checkpointed(folder: Path) -> int:
    latest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.exists() else 0


def updating(folder: Path) -> bool:
    """Whether the step after a checkpoint has its advantages, and its update is running. verl 0.9.1 would wait for ever for the
    rollouts of a lost node; an update ends at once, with the error of the actor that died."""
    step = checkpointed(folder) + 1
    return step > 2 and (folder / "dumps" / f"step_{step:06d}.jsonl").exists()


def test_a_run_that_loses_a_node_goes_on_from_its_checkpoint(assets, tmp_path):
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    with session() as opened:
        cluster = TwoNodes(tmp_path, opened.environment())
        driver = cluster.run_into(cluster.kill, steps=50)
        assert driver.wait(LIMIT_S) > 0, "a lost node ends the run with an error; it must not hang"
        cluster.goes_on_from_its_checkpoint()


@pytest.mark.skipif(os.getuid() != 0, reason="makes a network namespace: for root")
@pytest.mark.parametrize(("seconds", "goes_on"), [(5, True), (60, False)])
def test_a_network_that_is_cut(seconds, goes_on, assets, tmp_path):
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    with another_network() as network, session() as opened:
        cluster = TwoNodes(tmp_path, opened.environment(), network)
        driver = cluster.run_into(lambda: cluster.cut(seconds), steps=4 if goes_on else 50)
        if goes_on:
            assert driver.wait(LIMIT_S) == 0, cluster.log("first")
            assert cluster.steps() == [1, 2, 3, 4]
            return
        assert driver.wait(LIMIT_S) > 0, "Ray gives a node up that does not answer; the run must not hang"
        cluster.goes_on_from_its_checkpoint()
