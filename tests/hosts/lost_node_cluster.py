"""Run by test_lost_node.py: a Ray cluster of two nodes on this machine, driven by lines on standard input.

Each node is a raylet of its own with one pretended GPU. `kill` ends the second one as a power cut would; `add` starts another.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 16, "num_gpus": 1, "object_store_memory": 200_000_000}

cluster = Cluster(initialize_head=True, head_node_args=NODE)
lost = cluster.add_node(**NODE)
print(cluster.address, flush=True)
for line in sys.stdin:
    match line.strip():
        case "kill":
            cluster.remove_node(lost, allow_graceful=False)
        case "add":
            lost = cluster.add_node(**NODE)
    print(line.strip(), "done", flush=True)
