"""Training begins when all nodes are there, and what is missing is named."""

import os
import subprocess
import sys

import pytest

from oar_plugin.launch.wait import Node, main, wait
from tests.limits import PROCESS_S


def test_it_returns_when_nodes_and_gpus_are_there_and_says_what_it_sees(capsys):
    looks = iter([[], [Node("10.0.0.1", 8)], [Node("10.0.0.1", 8)], [Node("10.0.0.2", 8), Node("10.0.0.1", 8)]])
    assert wait(2, 16, 60, lambda: next(looks), lambda _: None)
    assert capsys.readouterr().out.splitlines() == [
        "oar launch: 0 of 2 nodes, 0 of 16 GPUs: nothing yet",
        "oar launch: 1 of 2 nodes, 8 of 16 GPUs: 10.0.0.1 (8)",
        "oar launch: 2 of 2 nodes, 16 of 16 GPUs: 10.0.0.1 (8), 10.0.0.2 (8)",
    ]


def test_it_gives_up_in_time_when_gpus_are_missing(capsys):
    assert not wait(1, 8, 0, lambda: [Node("10.0.0.1", 4)], lambda _: None)
    assert "1 of 1 nodes, 4 of 8 GPUs: 10.0.0.1 (4)" in capsys.readouterr().out


@pytest.mark.slow
def test_it_sees_the_nodes_of_a_real_cluster():
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2})
    try:
        cluster.add_node(num_cpus=1, num_gpus=2)
        command = [sys.executable, "-m", "oar_plugin.launch.wait", "--nodes", "2", "--gpus", "4", "--timeout", "60"]
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        there = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
        assert there.returncode == 0, there.stderr
        assert "2 of 2 nodes, 4 of 4 GPUs" in there.stdout
        more = [*command[:-4], "--gpus", "5", "--timeout", "0"]
        missing = subprocess.run(more, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
        assert missing.returncode == 1
        assert "not complete after 0 s" in missing.stderr
    finally:
        cluster.shutdown()


def test_the_command_needs_its_numbers(capsys):
    with pytest.raises(SystemExit):
        main(["--nodes", "1"])
    assert "--gpus" in capsys.readouterr().err
