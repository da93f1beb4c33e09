"""`oar launch` runs a recipe on this machine, on bare nodes, under SLURM or on Kubernetes."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import distributions, entry_points
from pathlib import Path

from oar_plugin.cli.arguments import COMPOSING, listed, positive, whole
from oar_plugin.output import cause, say

_HELP = f"""\
Run a recipe. Before anything starts, OAR checks data, model, reward and memory, and verl and OAR its configuration. The same
command resumes unfinished runs; with trainer.val_only=True it validates what a run has reached, and leaves the run as it is.
A dry run does without verl's check where verl cannot be imported, as after {COMPOSING}

  local        on this machine (recipes of one node)
  ray          on bare nodes: starts Ray on each by ssh, trains on the first, stops Ray at the end and after Ctrl-C
  slurm        submits a job, which resumes by itself when its time is over or a node is lost
  kubernetes   creates a RayJob (KubeRay 1.2 or later), which is submitted again after a fault

examples:
  oar launch qwen2_5_7b_math --variant oar,grpo --seeds 3 --dry-run
  oar launch qwen2_5_32b_megatron --on ray --hosts node1,node2,node3,node4
  oar launch qwen2_5_32b_megatron --on slurm --sbatch='--partition=gpu --time=48:00:00'
  oar launch qwen2_5_32b_megatron --on kubernetes --image registry/verl-oar:1 --claim shared-disk
How to prepare nodes, and what to do when one is lost: CLUSTERS.md in the folder that `oar recipes` names.
"""
OPTIONS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Place -> option that only this place has -> its help."""
_KINDS: dict[str, Callable[[str], object]] = {"hosts": listed, "sbatch": shlex.split, "srun": shlex.split}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, _HELP
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a name that `oar recipes` lists, or a folder")
    add("overrides", nargs="*", metavar="OVERRIDE", help="as on verl's command line: trainer.total_epochs=1")
    add("--variant", default="oar", choices=("oar", "grpo", "oar,grpo"), help="OAR (default), its baseline, or both")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=whole, metavar="N", help="seed of the run (default: the recipe's data.seed)")
    seeds.add_argument("--seeds", type=positive, metavar="N", help="N runs, with the seeds 1 to N")
    add("--name", metavar="NAME", help="for the runs NAME-oar-s1, ... (default: the recipe's trainer.experiment_name)")
    add("--resume", action="store_true", help="resume a run that was started with other settings")
    add("--on", default="local", choices=("local", *OPTIONS), help="where to run (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the command, script or manifest; do nothing, need no cluster")
    add("--template", type=Path, metavar="FILE", help="changed copy of a template in `cluster`, beside the recipes")
    add("--setup", metavar="COMMAND", help="activates python and ray on a node (default: as here; pods: nothing)")
    add("--recipe-on-nodes", type=Path, metavar="DIR", help="the recipe's folder on the nodes (default: as here)")
    add("--no-check", action="store_true", help="start although something is missing")
    add("--gpu", metavar="NAME", help="the nodes' GPU (default: with --on local the one here, else H100-80)")
    for place, options in OPTIONS.items():
        group = parser.add_argument_group(f"--on {place}")
        for name, text in options.items():
            group.add_argument(f"--{name}", type=_KINDS.get(name, str), help=text)


def run(args: argparse.Namespace) -> int:
    from oar_plugin.hosts.verl.capabilities import EXTERNAL_MODULES, external_modules
    from oar_plugin.runs import run_folder
    from oar_plugin.runs.launch import preflight
    from oar_plugin.runs.launch.job import for_nodes, job_of, plan_runs, sees_files
    from oar_plugin.runs.recipe import check_config, find_recipe

    on, local, recipe = args.on, args.on == "local", find_recipe(args.recipe)
    _check_places(args)
    os.environ.update(external_modules() | ({run_folder.START: "resume"} if args.resume else {}))
    environment = for_nodes(os.environ, in_pods=on == "kubernetes")
    os.environ.update(environment)  # the recipe's paths refer to it
    seeds = [args.seed] if args.seeds is None else list(range(1, args.seeds + 1))
    named = [f"trainer.experiment_name='{args.name}-${{algorithm.adv_estimator}}-s${{data.seed}}'"] if args.name else []
    runs = plan_runs(recipe, args.variant.split(","), seeds, [*args.overrides, *named])
    if all(run.config.trainer.device == "cpu" for run in runs):
        for entry in entry_points(group="oar_plugin.environments", name="cpu"):
            wanted = entry.load()(one_machine=local)  # verl_cpu's, which extends the value of `EXTERNAL_MODULES`
            environment |= {k: v for k, v in wanted.items() if k not in os.environ or k == EXTERNAL_MODULES}
            os.environ.update(environment)
    gpu = preflight.gpu_of_run(args.gpu, local)
    files_seen = args.recipe_on_nodes is None and sees_files(on, vars(args))
    jobs, said = [], set[preflight.Finding]()
    for run in runs:
        done = run_folder.check(run.config, os.environ.get(run_folder.START, ""))
        jobs.append((done, job := job_of(run, recipe, on, vars(args), environment)))
        words = *run.overrides, *(["algorithm.oar"] if run.variant == "oar" else [])
        made, findings = preflight.examine(run.config, gpu, words, files_seen=files_seen, local=local)
        # Importing verl takes seconds, from a slow disk minutes: what is missing is said before.
        if args.dry_run or args.no_check or all(finding.level != "missing" for finding in findings):
            try:
                check_config(run.config)
            except ImportError as error:
                level: preflight.Level = "missing" if files_seen and not args.dry_run else "not checked"
                verls = (line for found in distributions(name="verl") for line in found.requires or ())
                wanted = next((line for line in verls if line.startswith("transformers")), "its own packages")
                advice = f"to train, use an environment that was made for this verl, which wants {wanted}"
                findings.append(preflight.Finding("verl", level, f"cannot be imported here: {cause(error)}", advice))
        for subject, level, text, advice in (one for one in findings if one.level != "ok" and one not in said):
            say(f"oar launch: {subject}: {level}: {text}{advice and f'; {advice}'}", sys.stderr)
        said.update(findings)
        hours = made.summary if made else "Hours are not known."
        if validated := run_folder.only_validates(run.config):
            hours = f"Validates {validated if files_seen else 'its last checkpoint, or the untrained model'}."
        say(f"oar launch: {run.name}: {job.needs}, checkpoints in {run.folder}. {hours}", sys.stderr)
    if args.dry_run:
        print(("---\n" if on == "kubernetes" else "").join(job.text for _, job in jobs), end="")
        return 0
    if not args.no_check and any(finding.level == "missing" for finding in said):
        say("oar launch: not started; --no-check starts it in spite of what is missing", sys.stderr)
        return 1
    failed = 0
    for done, job in jobs:
        say(f"oar launch: {job.run.name} {'has finished' if done else 'starts'}", sys.stderr)
        if not done and (status := job.start()):
            say(f"oar launch: {job.run.name}: failed, exit status {status}", sys.stderr)
            failed = 1
    return failed


def _check_places(args: argparse.Namespace) -> None:
    """Raise ValueError if an option of the chosen place is missing, or if one belongs to another place."""
    for place, options in OPTIONS.items():
        for name, text in options.items():
            given = getattr(args, name) is not None
            if given and place != args.on:
                raise ValueError(f"--{name} belongs to --on {place}, this is --on {args.on}")
            if not given and place == args.on and text.startswith("needed"):
                raise ValueError(f"--on {args.on} needs --{name}")
