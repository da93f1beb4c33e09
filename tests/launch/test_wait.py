"""Training begins when all nodes are there, and what is missing is named."""

import os
import subprocess
import sys

import pytest

from oar_plugin.launch import wait
from tests.limits import PROCESS_S


def test_it_returns_when_nodes_and_gpus_are_there_and_says_what_it_sees(capsys, monkeypatch):
    looks = iter([[], [("10.0.0.1", 8)], [("10.0.0.1", 8)], [("10.0.0.1", 8), ("10.0.0.2", 8)]])
    monkeypatch.setattr(wait, "cluster", lambda: next(looks))
    monkeypatch.setattr(wait, "LOOK_AGAIN_S", 0)
    wait.main(["--nodes", "2", "--gpus", "16"])
    assert capsys.readouterr().out.splitlines() == [
        "oar launch: 0 of 2 nodes, 0 of 16 GPUs: nothing yet",
        "oar launch: 1 of 2 nodes, 8 of 16 GPUs: 10.0.0.1 (8)",
        "oar launch: 2 of 2 nodes, 16 of 16 GPUs: 10.0.0.1 (8), 10.0.0.2 (8)",
    ]


def test_it_gives_up_in_time_when_gpus_are_missing(capsys, monkeypatch):
    monkeypatch.setattr(wait, "cluster", lambda: [("10.0.0.1", 4)])
    with pytest.raises(SystemExit, match="not complete after 0 s"):
        wait.main(["--nodes", "1", "--gpus", "8", "--timeout", "0"])
    assert "1 of 1 nodes, 4 of 8 GPUs: 10.0.0.1 (4)" in capsys.readouterr().out


@pytest.mark.slow
def test_it_sees_the_nodes_of_a_real_cluster_and_then_trains():
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2})
    command = [sys.executable, "-m", "oar_plugin.launch.wait", "--nodes", "2", "--gpus"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "SCRIPT": "echo 'trained'"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": PROCESS_S}
    try:
        cluster.add_node(num_cpus=1, num_gpus=2)
        there = subprocess.run([*command, "4", "--timeout", "60", "--then", "SCRIPT"], **options)
        assert there.returncode == 0, there.stderr
        assert "2 of 2 nodes, 4 of 4 GPUs" in there.stdout
        assert there.stdout.splitlines()[-1] == "trained"
        missing = subprocess.run([*command, "5", "--timeout", "0", "--then", "SCRIPT"], **options)
        assert missing.returncode == 1
        assert "not complete after 0 s" in missing.stderr
        assert "trained" not in missing.stdout
    finally:
        cluster.shutdown()
