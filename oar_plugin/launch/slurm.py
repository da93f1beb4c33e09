"""SLURM: a batch script that starts Ray on the job's nodes, trains, and can be requeued."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from oar_plugin.launch.job import RAY_PORT, Job, LaunchError


@dataclass(frozen=True)
class Allocation:
    """What is asked of SLURM.

    Args:
        time: limit, as SLURM writes it (`1-00:00:00`).
        partition: or None for the cluster's default.
        account: or None for the user's default.
        options: further lines behind `#SBATCH`.
        container: image for pyxis; None runs on the nodes themselves.
        mounts: of the container, as pyxis writes them.
        requeue: start the job again when a node is lost; it resumes from its last checkpoint.
        log: file for output; `%j` is the job's number.
    """

    time: str
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()
    container: str | None = None
    mounts: str | None = None
    requeue: bool = True
    log: str = "%x-%j.log"


def script(job: Job, allocation: Allocation) -> str:
    """The batch script.

    Raises:
        LaunchError: an option of the allocation holds a line break.
    """
    directives = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "time": allocation.time,
        "partition": allocation.partition,
        "account": allocation.account,
        "output": allocation.log,
    }
    options = [f"--{key}={value}" for key, value in directives.items() if value is not None]
    options += ["--exclusive", "--open-mode=append", "--requeue" if allocation.requeue else "--no-requeue"]
    options += allocation.options
    for option in options:
        if "\n" in option:
            raise LaunchError(f"{option!r}: a line of #SBATCH cannot hold a line break")
    header = [f"#SBATCH {_directive(option)}" for option in options]
    container = [f"--container-image={allocation.container}"] if allocation.container else []
    if allocation.mounts:
        container.append(f"--container-mounts={allocation.mounts}")
    resources = f'--cpus-per-task="$SLURM_CPUS_ON_NODE" --gpus-per-node={job.gpus_per_node}'
    step = " ".join(["srun", "--overlap", "--ntasks-per-node=1", resources, *(shlex.quote(word) for word in container)])
    common = f"--num-gpus={job.gpus_per_node} --disable-usage-stats --block"
    steps = {
        "start_head": f"exec ray start --head --port={RAY_PORT} {common}",
        "wait_for_head": job.wait(nodes=1),
        "start_worker": f'exec ray start --address="$1:{RAY_PORT}" {common}',
        "wait_for_all": job.wait(),
        "train": job.train(on_cluster=True),
    }
    workers = f'"${{step[@]}}" --nodes={job.nodes - 1} --ntasks={job.nodes - 1} --exclude="$head"'
    if job.nodes == 1:
        del steps["start_worker"], steps["wait_for_all"]
    lines = [
        "#!/usr/bin/env bash",
        *header,
        "# Written by oar launch. Submitted again, it continues from the last checkpoint.",
        "set -euo pipefail",
        *job.exports(),
        "",
        *(line for name, command in steps.items() for line in _step(name, job.setup, command)),
        "",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "head=${nodes[0]}",
        f"step=({step})",
        'at_head=("${step[@]}" --nodes=1 --ntasks=1 --nodelist="$head")',
        "trap 'jobs -p | xargs -r kill' EXIT",
        "",
        '"${at_head[@]}" bash -ec "$start_head" &',
        '"${at_head[@]}" bash -ec "$wait_for_head"',
    ]
    if job.nodes > 1:
        lines += [f'{workers} bash -ec "$start_worker" ray "$head" &', '"${at_head[@]}" bash -ec "$wait_for_all"']
    return "\n".join([*lines, '"${at_head[@]}" bash -ec "$train"']) + "\n"


def _step(name: str, setup: str, command: str) -> list[str]:
    """A shell variable with what a step runs. A container has its own files, so `setup` is done in it and not before."""
    return [f"{name}=$(cat <<'OAR_STEP'", *([setup] if setup else []), command, "OAR_STEP", ")"]


def _directive(option: str) -> str:
    """SLURM splits a directive at spaces and understands quotes."""
    key, equals, value = option.partition("=")
    return f'{key}="{value}"' if equals and any(c.isspace() for c in value) else f"{key}{equals}{value}"


def submit(text: str, file: Path) -> int:
    """Write the script and give it to `sbatch`.

    Returns:
        the exit status of `sbatch`.

    Raises:
        LaunchError: there is no `sbatch`, or the file cannot be written.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "--on slurm: there is no sbatch here; run this on a login node, or --dry-run to see the script"
        )
    try:
        file.write_text(text)
    except OSError as error:
        raise LaunchError(f"cannot write {file}: {error.strerror}; choose another place with --script") from error
    return subprocess.run(["sbatch", str(file)], check=False).returncode
