"""A recipe on a Ray cluster of two nodes that loses one of them, and goes on from its checkpoint.

Both nodes are on this machine: two raylets, a pretended GPU each. A real cluster adds the network and shared storage.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from oar_plugin.hosts.verl.cpu import cpu_environment
from oar_plugin.hosts.verl.cpu.session import session
from oar_plugin.hosts.verl.recipe import entry_point
from oar_plugin.hosts.verl.run_folder import START
from recipes.smoke import make_assets
from tests.hosts.whole_run import LIMIT_S, RECIPES

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


class TwoNodes:
    """The cluster, and runs of the recipe on it. Ended with the session that it belongs to."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.environment = {
            **os.environ,
            **cpu_environment(),
            "OAR_SMOKE": str(folder),
            # Processes of a cluster have its environment, not the driver's.
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
            **environment,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.lost_node_cluster"],
            cwd=RECIPES.parent,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "cluster.log").open("w"),
            text=True,
        )
        self.address = self._read()

    def _read(self) -> str:
        for line in self._process.stdout:
            if ":" in line.split(" ")[0] or line.endswith("done\n"):
                return line.strip()
        raise AssertionError((self.folder / "cluster.log").read_text()[-3000:])

    def tell(self, what: str) -> None:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        self._read()

    def start(self, name: str, steps: int) -> "subprocess.Popen[bytes]":
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


def checkpointed(folder: Path) -> int:
    latest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.exists() else 0


def updating(folder: Path) -> bool:
    """Whether the step after a checkpoint has its advantages, and its update is running.

    A node that is lost while verl 0.9.1 waits for rollouts leaves their prompts "running" for ever: `ReplayBuffer.sample` asks
    nobody whether they still are. An update ends at once, with the error of the actor that died.
    """
    step = checkpointed(folder) + 1
    return step > 2 and (folder / "dumps" / f"step_{step:06d}.jsonl").exists()


def test_a_run_that_loses_a_node_goes_on_from_its_checkpoint(tmp_path):
    make_assets(tmp_path)
    with session() as opened:
        cluster = TwoNodes(tmp_path, opened.environment())
        driver = cluster.start("first", steps=50)
        while not updating(tmp_path) and driver.poll() is None:
            time.sleep(0.2)
        assert updating(tmp_path), cluster.log("first")
        cluster.tell("kill")
        assert driver.wait(LIMIT_S) > 0, "a lost node ends the run with an error; it must not hang"

        saved = checkpointed(tmp_path)
        cluster.tell("add")
        again = cluster.start("second", steps=saved + 2)
        assert again.wait(LIMIT_S) == 0, cluster.log("second")
        assert cluster.steps() == [saved + 1, saved + 2], "no step is lost but those after the checkpoint"
