"""Return when the Ray cluster of this machine has its nodes and GPUs; say what is there whenever that changes."""

import argparse
import os
import sys
import time

LOOK_AGAIN_S = 2.0


def cluster() -> list[tuple[str, int]]:
    """Address and GPUs of each node that is alive, by asking Ray; none as long as there is no cluster here."""
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        except ConnectionError:
            return []
    return sorted((n["NodeManagerAddress"], int(n["Resources"].get("GPU", 0))) for n in ray.nodes() if n.get("Alive"))


def main(arguments: list[str] | None = None) -> None:
    """Ends with status 1 where the cluster was not complete in time."""
    parser = argparse.ArgumentParser(prog="python -m oar_plugin.runs.launch.wait", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="to wait for")
    parser.add_argument("--gpus", type=int, required=True, help="to wait for, of all nodes")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds (default: %(default)s)")
    parser.add_argument("--then", metavar="VARIABLE", help="become the shell script that this variable holds")
    args = parser.parse_args(arguments)
    until, said = time.monotonic() + args.timeout, None
    while True:
        found = cluster()
        gpus = sum(of_node for _, of_node in found)
        if found != said:
            there = ", ".join(f"{address} ({of_node})" for address, of_node in found) or "nothing yet"
            print(f"oar launch: {len(found)} of {args.nodes} nodes, {gpus} of {args.gpus} GPUs: {there}", flush=True)
            said = found
        if len(found) >= args.nodes and gpus >= args.gpus:
            break
        if time.monotonic() >= until:
            sys.exit(
                f"oar launch: not complete after {args.timeout:g} s. A node that is missing did not start Ray or cannot reach "
                "this one (firewall, wrong network interface); a node with too few GPUs has others in use or hidden "
                "(nvidia-smi, CUDA_VISIBLE_DEVICES)"
            )
        time.sleep(LOOK_AGAIN_S)
    if args.then:
        os.execvp("bash", ["bash", "-c", os.environ[args.then]])  # noqa: S607  the one of PATH, as `oar launch` means it


if __name__ == "__main__":
    main()
