"""Waits until the Ray cluster on this machine has enough nodes and GPUs, and prints them whenever they change."""

import argparse
import os
import sys
import time

LOOK_AGAIN_S = 2.0


def cluster() -> list[tuple[str, int]]:
    """Return the address and number of GPUs of each live node in Ray's cluster; an empty list if no cluster runs yet."""
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        except ConnectionError:
            return []
    return sorted((n["NodeManagerAddress"], int(n["Resources"].get("GPU", 0))) for n in ray.nodes() if n.get("Alive"))


def main(arguments: list[str] | None = None) -> None:
    """Wait for the cluster. Exit with status 1 if it is not complete in time."""
    parser = argparse.ArgumentParser(prog="python -m oar_plugin.runs.launch.wait", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes to wait for")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs to wait for, over all nodes")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds to wait at most (default: %(default)s)")
    parser.add_argument("--then", metavar="VARIABLE", help="environment variable with a shell script to run afterwards")
    args = parser.parse_args(arguments)
    until, said = time.monotonic() + args.timeout, None
    while True:
        nodes = cluster()
        gpus = sum(of_node for _, of_node in nodes)
        if nodes != said:
            there = ", ".join(f"{address} ({of_node})" for address, of_node in nodes) or "nothing yet"
            print(f"oar launch: {len(nodes)} of {args.nodes} nodes, {gpus} of {args.gpus} GPUs: {there}", flush=True)
            said = nodes
        if len(nodes) >= args.nodes and gpus >= args.gpus:
            break
        if time.monotonic() >= until:
            sys.exit(
                f"oar launch: cluster not complete after {args.timeout:g} s. If a node is missing, it did not start "
                "Ray or cannot reach this node (firewall, wrong network interface). If a node has too few GPUs, "
                "others are in use or hidden (nvidia-smi, CUDA_VISIBLE_DEVICES)"
            )
        time.sleep(LOOK_AGAIN_S)
    if args.then:
        os.execvp("bash", ["bash", "-c", os.environ[args.then]])  # noqa: S607  the bash in PATH, as in the templates


if __name__ == "__main__":
    main()
