"""`oar launch`: a recipe on this machine, on bare nodes, under SLURM or on Kubernetes."""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from oar_plugin.cli.arguments import positive

_HELP = """\
Run a recipe. verl and OAR check its configuration first, and nothing is started when it cannot work. How many nodes and GPUs it
takes is read from it. Every run saves checkpoints: the same command resumes.

  local        on this machine (recipes of one node)
  ray          on bare nodes: starts Ray on each by ssh, trains on the first, stops Ray at the end and after Ctrl-C
  slurm        writes NAME.sbatch and submits it; SLURM starts it again when a node is lost
  kubernetes   creates a RayJob (KubeRay 1.2 or later), which is submitted again after a fault
"""
_EXAMPLES = """\
examples:
  oar launch qwen2_5_7b_math --variant grpo trainer.total_epochs=1
  oar launch qwen2_5_32b_megatron --on ray --hosts node1,node2,node3,node4
  oar launch qwen2_5_32b_megatron --on slurm --sbatch='--partition=gpu --time=2-00:00:00' --dry-run
  oar launch qwen2_5_32b_megatron --on kubernetes --image registry/verl-oar:1 --claim shared-disk \
      --recipe-on-nodes /opt/recipes/qwen2_5_32b_megatron
How to prepare nodes, and what to do when one is lost: recipes/CLUSTERS.md.
"""
PROGRAMS = {"ray": "ssh", "slurm": "sbatch", "kubernetes": "kubectl"}
OPTIONS = {
    "ray": {
        "hosts": "A,B,... as ssh knows them; training runs on the first",
        "ssh": "options for ssh: --ssh='-p 2222 -J gate'",
        "head_address": "IP of the first host on the network between them (default: its name in --hosts)",
    },
    "slurm": {
        "sbatch": "further options of the job: --sbatch='--account=me --qos=high'",
        "srun": "further options of the step: --srun='--container-image=verl.sqsh --container-mounts=/shared:/shared'",
    },
    "kubernetes": {
        "image": "with verl, this plugin and the recipe",
        "claim": "PersistentVolumeClaim for data and checkpoints, ReadWriteMany",
        "mount": "where pods have it (default: /shared)",
        "secret": "name of a Secret with HF_TOKEN, WANDB_API_KEY",
        "cpus": "of a pod (default: no request)",
        "memory": "of a pod, such as 900Gi (default: no request)",
    },
}
TYPES: dict[str, Any] = {name: shlex.split for name in ("ssh", "sbatch", "srun")} | {
    "hosts": lambda text: text.split(",")
}
NEEDED = {"ray": ("hosts",), "kubernetes": ("image", "claim")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a name that `oar recipes` lists, or a folder")
    add("overrides", nargs="*", metavar="OVERRIDE", help="as on verl's command line: trainer.total_epochs=1")
    add("--variant", default="oar", choices=("oar", "grpo"), help="grpo: the baseline (default: %(default)s)")
    add("--on", default="local", choices=("local", *OPTIONS), help="where (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the command, script or manifest; do nothing, need no cluster")
    add("--template", type=Path, metavar="FILE", help="a changed copy of OAR's own (oar recipes copy cluster DIR)")
    text = "another variable for all nodes; OAR_*, HF_*, WANDB_*, NCCL_*, VLLM_* and VERL_* go there (tokens unwritten)"
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    text = "makes python and ray the right ones on a node (default: this Python's environment; in a container: nothing)"
    add("--setup", metavar="COMMAND", help=text)
    add("--recipe-on-nodes", type=Path, metavar="DIR", help="the recipe's folder there (default: as here)")
    add("--gpus-per-node", type=positive, metavar="N", help="of a machine (default: what the recipe takes of one)")
    add("--wait", type=positive, default=900, metavar="SECONDS", help="for nodes to join (default: %(default)s)")
    for launcher, options in OPTIONS.items():
        group = parser.add_argument_group(f"--on {launcher}")
        for name, text in options.items():
            group.add_argument(f"--{name.replace('_', '-')}", type=TYPES.get(name, str), help=text)


def run(args: argparse.Namespace) -> int:
    """The exit status of what ran, or 2 when the recipe or an option cannot work."""
    try:
        if importlib.util.find_spec("verl") is None:
            raise ValueError("verl is not installed here, and checks the recipe first: pip install 'verl>=0.9'")
        return _launch(args)
    except (ValueError, OSError) as error:
        print(f"oar launch: {error}", file=sys.stderr)
        return 2


def _launch(args: argparse.Namespace) -> int:
    from oar_plugin.hosts.verl.recipe import check_config, command, compose_recipe, find_recipe
    from oar_plugin.launch import job

    options = _options(args)
    environment = job.for_nodes(os.environ, args.env, options.get("mount"))
    os.environ.update(environment)  # the recipe's paths are made of them
    recipe = find_recipe(args.recipe)
    config = compose_recipe(recipe, args.variant, args.overrides)
    check_config(config)
    there = args.recipe_on_nodes or recipe
    if args.on == "kubernetes" and args.recipe_on_nodes is None:
        print(f"oar launch: pods will look for {recipe}; --recipe-on-nodes names another folder", file=sys.stderr)
    facts = job.facts(config, there, args.variant, args.overrides, args.gpus_per_node)
    needed = f"{facts['nodes']} node{'s' if facts['nodes'] > 1 else ''} with {facts['gpus_per_node']} GPUs"
    print(
        f"oar launch: {recipe.name}, {args.variant}: {needed}, checkpoints in {facts['checkpoints']}", file=sys.stderr
    )
    if args.on == "local" and facts["nodes"] > 1:
        raise ValueError(f"--on local: the recipe needs {needed}; allowed: {', '.join(OPTIONS)}")
    if args.on == "local":
        words = [sys.executable, *command(there, args.variant, args.overrides)[1:]]
        if not args.dry_run:
            sys.stdout.flush()
            os.execv(words[0], words)
        print(shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *words]))
        return 0
    if args.on == "ray" and not len(args.hosts) == len(set(args.hosts)) == facts["nodes"]:
        raise ValueError(
            f"--hosts {','.join(args.hosts)}: {len(set(args.hosts))} different hosts, the recipe needs {needed}"
        )
    if args.on == "kubernetes" and not facts["checkpoints"].startswith(f"{options['mount']}/"):
        where = f"set it to a folder in {options['mount']}, with --env OAR_CHECKPOINTS={options['mount']}/checkpoints"
        raise ValueError(
            f"trainer.default_local_dir={facts['checkpoints']}: not on the volume that all pods see; {where}"
        )
    setup = args.setup
    if setup is None:
        here = f"source {shlex.quote(f'{sys.prefix}/bin/activate')}" if sys.prefix != sys.base_prefix else ""
        setup = "" if args.on == "kubernetes" or "--container" in " ".join(options.get("srun", [])) else here
    values = {**facts, **options, "environment": environment, "setup": setup, "wait_s": args.wait}
    text = job.fill(args.template or f"{args.on}.j2", **values)
    if args.dry_run:
        print(text, end="")
        return 0
    program, file = PROGRAMS[args.on], Path(f"{facts['name']}.sbatch")
    if shutil.which(program) is None:
        raise ValueError(f"there is no {program} here; run this where there is one, or --dry-run to see what would run")
    if program == "ssh":
        os.execvp("bash", ["bash", "-c", text])
    if program == "kubectl":  # not apply: of a RayJob that is there already it would say that all is well
        return subprocess.run(["kubectl", "create", "-f", "-"], input=text, text=True, check=False).returncode
    file.write_text(text)
    return subprocess.run(["sbatch", str(file)], check=False).returncode


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of the chosen launcher; refuses one of another launcher and misses one that is needed."""
    for launcher, names in OPTIONS.items():
        for name in names:
            if launcher != args.on and getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} belongs to --on {launcher}, this is --on {args.on}")
    if missing := [f"--{name}" for name in NEEDED.get(args.on, ()) if not getattr(args, name)]:
        raise ValueError(f"--on {args.on} needs {' and '.join(missing)}")
    options = {name: getattr(args, name) or ([] if name in TYPES else "") for name in OPTIONS.get(args.on, ())}
    if args.on == "kubernetes":
        options["mount"] = (args.mount or "/shared").rstrip("/")
        secrets = " and ".join(name for name in ("HF_TOKEN", "WANDB_API_KEY") if os.environ.get(name))
        if secrets and not args.secret:
            print(f"oar launch: {secrets}: not passed on; make a Secret and name it: --secret NAME", file=sys.stderr)
    return options
