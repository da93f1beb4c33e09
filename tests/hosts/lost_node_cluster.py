"""Run by test_lost_node.py: a Ray cluster of two nodes on this machine, driven by lines on standard input.

Each node is a raylet of its own with one pretended GPU. `kill` ends the second one as a power cut would; `add` starts another.
"""

import sys
from collections.abc import Callable
from typing import Any

from ray._private.node import Node as ClusterNode
from ray.cluster_utils import Cluster

from verl_cpu.session import ATTEMPTS, RAY_DID_NOT_START

KNOWN_S = 300.0
NODE = {"num_cpus": 16, "num_gpus": 1, "object_store_memory": 200_000_000}


def persistently(start: Callable[[], Any]) -> Any:
    """What `start` returns; called again where the machine was too busy for Ray's own limit."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return start()
        except Exception as error:
            if attempt == ATTEMPTS or RAY_DID_NOT_START not in str(error):
                raise
    raise AssertionError


def two_nodes() -> tuple[Cluster, ClusterNode]:
    """A cluster, and the second of its nodes."""
    cluster = Cluster()
    try:
        cluster.add_node(**NODE)
        return cluster, cluster.add_node(**NODE)
    except Exception:
        cluster.shutdown()  # a node that is late must not join
        raise


cluster, lost = persistently(two_nodes)
print(cluster.address, flush=True)
for line in sys.stdin:
    match line.strip():
        case "kill":
            cluster.remove_node(lost, allow_graceful=False)
        case "add":
            cluster.wait_for_nodes(KNOWN_S)  # until Ray knows of the loss: it would start actors there
            lost = persistently(lambda: cluster.add_node(**NODE))
    print(line.strip(), "done", flush=True)
