"""`oar launch`: a recipe on this machine, on bare nodes, under SLURM or on Kubernetes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oar_plugin.cli.arguments import positive

if TYPE_CHECKING:
    from oar_plugin.launch.job import Job

_HELP = """\
Run a recipe. Its configuration is composed and checked by verl and by OAR first; nothing is started when it cannot work. The
number of nodes and GPUs is read from the recipe.

  local        on this machine (recipes of one node)
  ray          on bare nodes: starts Ray on each by ssh, trains on the first, stops Ray at the end and after Ctrl-C
  slurm        writes a batch script and submits it; SLURM starts it again when a node is lost
  kubernetes   creates a RayJob (KubeRay 1.2 or later), which is submitted again after a fault

Every run saves checkpoints and continues from the last one when it is started again: with the same command it resumes.
--dry-run prints what would be done (commands, script or manifest) and does nothing.
"""

_EXAMPLES = """\
examples:
  oar launch recipes/qwen2_5_7b_math
  oar launch recipes/qwen2_5_7b_math --variant grpo trainer.total_epochs=1
  oar launch recipes/qwen2_5_32b_megatron --on ray --hosts node1,node2,node3,node4
  oar launch recipes/qwen2_5_32b_megatron --on slurm --partition gpu --time 2-00:00:00 --dry-run
  oar launch recipes/qwen2_5_32b_megatron --on kubernetes --image registry/verl-oar:1 --claim shared-disk \\
      --recipe-on-nodes /workspace/recipes/qwen2_5_32b_megatron

How to prepare nodes, and what to do when one is lost: recipes/CLUSTERS.md.
"""

# Which options belong to one launcher only.
_OPTIONS_OF = {
    "ray": ("hosts", "ssh_option", "head_address", "keep"),
    "slurm": ("time", "partition", "account", "sbatch", "container", "mounts", "no_requeue", "log", "script"),
    "kubernetes": ("image", "claim", "namespace", "mount", "secret", "cpus", "memory", "retries"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `oar launch` on `parser`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    parser.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="folder of a recipe, such as recipes/qwen2_5_7b_math"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="as on verl's command line: trainer.total_epochs=1"
    )
    parser.add_argument(
        "--variant", default="oar", choices=("oar", "grpo"), help="grpo: the baseline (default: %(default)s)"
    )
    parser.add_argument("--on", default="local", choices=("local", *_OPTIONS_OF), help="where (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, do nothing")
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a further environment variable for all nodes. OAR_DATA, OAR_CHECKPOINTS, and those of the hub, wandb, NCCL, vLLM "
        "and verl go there by themselves; HF_TOKEN and WANDB_API_KEY too, without being written down",
    )
    nodes.add_argument(
        "--setup",
        metavar="COMMAND",
        help="shell command that makes python and ray the right ones on a node (default: activate this Python's environment; "
        "nothing in a container or pod)",
    )
    nodes.add_argument(
        "--recipe-on-nodes", type=Path, metavar="DIR", help="the recipe's folder there (default: as here)"
    )
    nodes.add_argument(
        "--gpus-per-node",
        type=positive,
        metavar="N",
        help="of the machines, if they have more than the recipe takes of one (default: what the recipe says)",
    )
    nodes.add_argument(
        "--wait", type=positive, default=900, metavar="SECONDS", help="for nodes to join (default: %(default)s)"
    )
    ray = parser.add_argument_group("--on ray")
    ray.add_argument("--hosts", metavar="A,B,...", help="as ssh knows them; training runs on the first")
    ray.add_argument(
        "--ssh-option", action="append", default=[], metavar="OPTION", help="for ssh: '-p 2222', '-i key', '-J gate'"
    )
    ray.add_argument(
        "--head-address", metavar="HOST", help="of the first host for the others (default: its name in --hosts)"
    )
    ray.add_argument("--keep", action="store_true", help="leave Ray running at the end")
    slurm = parser.add_argument_group("--on slurm")
    slurm.add_argument("--time", default="1-00:00:00", help="limit (default: %(default)s)")
    slurm.add_argument("--partition", help="default: the cluster's")
    slurm.add_argument("--account", help="default: yours")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="a further option: --sbatch=--qos=high"
    )
    slurm.add_argument("--container", metavar="IMAGE", help="run in it (needs pyxis; default: on the nodes themselves)")
    slurm.add_argument("--mounts", metavar="HERE:THERE,...", help="of the container")
    slurm.add_argument("--no-requeue", action="store_true", help="do not start again when a node is lost")
    slurm.add_argument("--log", default="%x-%j.log", metavar="FILE", help="(default: %(default)s: name and number)")
    slurm.add_argument("--script", type=Path, metavar="FILE", help="where to write it (default: NAME.sbatch)")
    kubernetes = parser.add_argument_group("--on kubernetes")
    kubernetes.add_argument("--image", help="with verl, this plugin and the recipe")
    kubernetes.add_argument(
        "--claim", metavar="NAME", help="PersistentVolumeClaim for data and checkpoints, ReadWriteMany"
    )
    kubernetes.add_argument(
        "--mount", default="/shared", metavar="DIR", help="where pods have it (default: %(default)s)"
    )
    kubernetes.add_argument("--namespace", help="default: the current one")
    kubernetes.add_argument("--secret", metavar="NAME", help="Secret with HF_TOKEN, WANDB_API_KEY")
    kubernetes.add_argument("--cpus", help="of a pod (default: no request)")
    kubernetes.add_argument("--memory", help="of a pod, such as 900Gi (default: no request)")
    kubernetes.add_argument(
        "--retries", type=int, default=3, metavar="N", help="submit again after a fault (default: %(default)s)"
    )
    # Which of one launcher's options were given is found by their difference from these.
    parser.set_defaults(
        option_defaults={name: parser.get_default(name) for group in _OPTIONS_OF.values() for name in group}
    )


def run(args: argparse.Namespace) -> int:
    """Run `oar launch`; the launcher's exit status, or 2 when the recipe or an option cannot work."""
    problem = _misplaced(args)
    if problem is None and importlib.util.find_spec("verl") is None:
        problem = (
            "verl is not installed here, and checks the recipe before anything is started: pip install verl==0.9.1"
        )
    if problem is not None:
        print(f"oar launch: {problem}", file=sys.stderr)
        return 2

    from oar_plugin.hosts.verl.recipe import RecipeError
    from oar_plugin.launch.job import LaunchError

    try:
        job = _job(args)
        print(
            f"oar launch: {job.recipe.name}, {job.variant}: {job.nodes} node{'s' if job.nodes > 1 else ''} with "
            f"{job.gpus_per_node} GPUs, checkpoints in {job.checkpoints}",
            file=sys.stderr,
        )
        return {"local": _local, "ray": _ray, "slurm": _slurm, "kubernetes": _kubernetes}[args.on](args, job)
    except (LaunchError, RecipeError, ValueError) as error:
        print(f"oar launch: {error}", file=sys.stderr)
        return 2


def _misplaced(args: argparse.Namespace) -> str | None:
    for launcher, names in _OPTIONS_OF.items():
        for name in names:
            if launcher != args.on and getattr(args, name) != args.option_defaults[name]:
                return f"--{name.replace('_', '-')} belongs to --on {launcher}, this is --on {args.on}"
    needed = {"ray": ("hosts",), "kubernetes": ("image", "claim")}.get(args.on, ())
    missing = [f"--{name}" for name in needed if not getattr(args, name)]
    return f"--on {args.on} needs {' and '.join(missing)}" if missing else None


def _job(args: argparse.Namespace) -> Job:
    from oar_plugin.launch import environment
    from oar_plugin.launch.job import activation, read_job

    in_pods = args.on == "kubernetes"
    chosen = environment.for_nodes(os.environ, args.env, paths=not in_pods)
    if in_pods:
        folders = {"OAR_DATA": "data/oar", "OAR_CHECKPOINTS": "checkpoints", "HF_HOME": "huggingface"}
        chosen = {**{name: f"{args.mount.rstrip('/')}/{folder}" for name, folder in folders.items()}, **chosen}
    os.environ.update(chosen)  # the recipe's paths are made of them
    contained = in_pods or args.container
    setup = args.setup if args.setup is not None else ("" if contained else activation())
    return read_job(
        args.recipe, args.variant, args.overrides, chosen, setup, args.recipe_on_nodes, args.gpus_per_node, args.wait
    )


def _local(args: argparse.Namespace, job: Job) -> int:
    from oar_plugin.launch import local

    if args.dry_run:
        print(local.script(job), end="")
        return 0
    return local.run(job)


def _ray(args: argparse.Namespace, job: Job) -> int:
    from oar_plugin.launch import environment, ray_nodes

    options = [word for option in args.ssh_option for word in shlex.split(option)]
    steps = ray_nodes.plan(job, args.hosts.split(","), options, args.head_address, args.keep)
    secrets = environment.secrets(os.environ)
    if args.dry_run:
        print(ray_nodes.script(steps, secrets), end="")
        return 0
    return ray_nodes.run(steps, secrets)


def _slurm(args: argparse.Namespace, job: Job) -> int:
    from oar_plugin.launch import slurm

    allocation = slurm.Allocation(
        time=args.time,
        partition=args.partition,
        account=args.account,
        options=tuple(args.sbatch),
        container=args.container,
        mounts=args.mounts,
        requeue=not args.no_requeue,
        log=args.log,
    )
    text, file = slurm.script(job, allocation), args.script or Path(f"{job.name}.sbatch")
    if args.dry_run:
        print(text, end="")
        print(f"oar launch: would write this to {file} and run: {shlex.join(['sbatch', str(file)])}", file=sys.stderr)
        return 0
    return slurm.submit(text, file)


def _kubernetes(args: argparse.Namespace, job: Job) -> int:
    from oar_plugin.launch import environment, kubernetes

    pods = kubernetes.Pods(
        image=args.image,
        claim=args.claim,
        namespace=args.namespace,
        mount=args.mount,
        secret=args.secret,
        cpus=args.cpus,
        memory=args.memory,
        retries=args.retries,
    )
    text = kubernetes.text(job, pods)
    unsaid = sorted(environment.secrets(os.environ))
    if unsaid and not args.secret:
        print(
            f"oar launch: {' and '.join(unsaid)}: not passed on; make a Secret and name it: --secret NAME",
            file=sys.stderr,
        )
    if args.dry_run:
        print(text, end="")
        print("oar launch: would run with this: kubectl create -f -", file=sys.stderr)
        return 0
    return kubernetes.submit(text)
