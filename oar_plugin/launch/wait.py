"""`python -m oar_plugin.launch.wait --nodes 4 --gpus 32`: returns when the Ray cluster of this machine has them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_BETWEEN_LOOKS_S = 2.0


class Node(NamedTuple):
    """A machine that joined."""

    address: str
    gpus: int


def cluster() -> list[Node]:
    """The machines that are alive, by asking Ray. None as long as there is no cluster here."""
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        except ConnectionError:
            return []
    nodes: list[dict[str, Any]] = ray.nodes()
    return [
        Node(node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0))) for node in nodes if node.get("Alive")
    ]


def wait(
    nodes: int,
    gpus: int,
    timeout_s: float,
    look: Callable[[], list[Node]] = cluster,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Look until there are enough; says what is there whenever that changes.

    Returns:
        False when `timeout_s` seconds were not enough.
    """
    until = time.monotonic() + timeout_s
    said = ""
    while True:
        found = look()
        there = sum(node.gpus for node in found)
        state = f"{len(found)} of {nodes} nodes, {there} of {gpus} GPUs"
        if state != said:
            print(
                f"oar launch: {state}: {', '.join(f'{n.address} ({n.gpus})' for n in sorted(found)) or 'nothing yet'}",
                flush=True,
            )
            said = state
        if len(found) >= nodes and there >= gpus:
            return True
        if time.monotonic() >= until:
            return False
        sleep(_BETWEEN_LOOKS_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the cluster is complete, 1 when it was not in time."""
    parser = argparse.ArgumentParser(prog="python -m oar_plugin.launch.wait", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="machines to wait for")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs to wait for, of all machines")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds (default: %(default)s)")
    args = parser.parse_args(arguments)
    if wait(args.nodes, args.gpus, args.timeout):
        return 0
    print(
        f"oar launch: not complete after {args.timeout:g} s. A node that is missing did not start Ray or cannot reach this one "
        "(firewall, wrong network interface); a node with too few GPUs has others in use or hidden (nvidia-smi, "
        "CUDA_VISIBLE_DEVICES)",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
