"""`oar launch` runs a recipe on this machine, on bare nodes, under SLURM or on Kubernetes."""

import argparse
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oar_plugin.cli.arguments import listed, missing_package, number, positive, whole
from oar_plugin.output import say

if TYPE_CHECKING:
    from oar_plugin.runs.launch.runs import Run

_HELP = """\
Run a recipe. Before anything starts, verl and OAR check its configuration (in a dry run the planner stands in for verl); then
data, model, reward and memory are checked.
--seeds, --variant oar,grpo and --sweep start a run for each combination, each in its own folder. The same command resumes
unfinished runs.

  local        on this machine (recipes of one node)
  ray          on bare nodes: starts Ray on each by ssh, trains on the first, stops Ray at the end and after Ctrl-C
  slurm        writes NAME.sbatch and submits it; the job resumes by itself when its time is over or a node is lost
  kubernetes   creates a RayJob (KubeRay 1.2 or later), which is submitted again after a fault

exit status: 0 it ran or was submitted, 1 something is missing or what ran failed, 2 the recipe or an option cannot work;
of a dry run: 0, 1 something is unset, 2 as above
"""
_EXAMPLES = """\
examples:
  oar launch qwen2_5_7b_math --variant oar,grpo --seeds 3 --sweep algorithm.oar.tau=0.3,0.5,0.7 --dry-run
  oar launch qwen2_5_32b_megatron --on ray --hosts node1,node2,node3,node4
  oar launch qwen2_5_32b_megatron --on slurm --max-time 48 --sbatch='--partition=gpu --qos=long'
  oar launch qwen2_5_32b_megatron --on kubernetes --image registry/verl-oar:1 --claim shared-disk --patch rdma.yaml
How to prepare nodes, and what to do when one is lost: recipes/CLUSTERS.md.
"""
OPTIONS: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "ray": {
        "hosts": (listed, None, "host names A,B,... for ssh; training runs on the first"),
        "ssh": (shlex.split, [], "options for ssh: --ssh='-p 2222 -J gate'"),
        "head_address": (str, "", "IP of the first host in the network of the hosts (default: its name in --hosts)"),
    },
    "slurm": {
        "sbatch": (shlex.split, [], "options of the job: --sbatch='--account=me --qos=high'"),
        "max_time": (positive, 24, "hours of a job (default: 24); a longer run resumes in the next job"),
        "srun": (shlex.split, [], "options of the step: --srun='--container-image=verl.sqsh --container-mounts=/s:/s'"),
    },
    "kubernetes": {
        "image": (str, None, "container image with verl, this plugin and the recipe"),
        "claim": (str, None, "PersistentVolumeClaim for data and checkpoints, ReadWriteMany"),
        "mount": (str, "/shared", "where pods mount the claim (default: /shared)"),
        "secret": (str, "", "name of a Secret with HF_TOKEN, WANDB_API_KEY"),
        "cpus": (str, "", "CPUs of a pod (default: no request)"),
        "memory": (str, "", "memory of a pod, such as 900Gi (default: no request)"),
        "patch": (Path, "", "yaml that is merged into the RayJob: RDMA, tolerations, queue (recipes/CLUSTERS.md)"),
    },
}
"""Place -> option that only this place has -> its type, its default (None: the option is needed), its help."""
COMMON = ("recipe_on_nodes", "setup", "wait", "template")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a name that `oar recipes` lists, or a folder")
    add("overrides", nargs="*", metavar="OVERRIDE", help="as on verl's command line: trainer.total_epochs=1")
    add("--variant", default=["oar"], type=_variants, help="oar (default), grpo (the baseline), or both: oar,grpo")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=whole, metavar="N", help="seed of the run (default: the recipe's data.seed)")
    seeds.add_argument("--seeds", type=positive, metavar="N", help="N runs, with the seeds 1 to N")
    text = "a run for each value, or for each combination of several --sweep; OAR's keys are swept for OAR only"
    add("--sweep", action="append", default=[], metavar="KEY=VALUE,...", help=text)
    add("--status", action="store_true", help="start nothing: show steps and validation accuracy of these runs")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="resume a run that was started with other settings")
    again.add_argument("--fresh", action="store_true", help="start again from step 0; the run's old folder is renamed")
    add("--on", default="local", choices=("local", *OPTIONS), help="where to run (default: %(default)s)")
    text = "print the command, script or manifest, with marks for what is unset; do nothing, need no cluster"
    add("--dry-run", action="store_true", help=text)
    add("--cfg", choices=("job",), help="print the composed configuration, like Hydra's option; do nothing")
    add("--template", type=Path, metavar="FILE", help="changed copy of OAR's template (oar recipes copy cluster DIR)")
    text = "variable for all nodes, besides OAR_*, HF_*, WANDB_*, NCCL_*, VLLM_* and VERL_* (scripts hold no tokens)"
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    text = "activates python and ray on a node (default: this Python's environment; in a container: nothing)"
    add("--setup", metavar="COMMAND", help=text)
    add("--recipe-on-nodes", type=Path, metavar="DIR", help="the recipe's folder on the nodes (default: as here)")
    add("--no-check", action="store_true", help="start although something is missing")
    add("--gpu", metavar="NAME", help="the nodes' GPU (default: with --on local the one here, else H100-80)")
    add("--gpu-memory", type=number, metavar="GIB", help="GPU memory as CUDA reports it (default: that of the GPU)")
    add("--wait", type=positive, default=900, metavar="SECONDS", help="for nodes to join (default: %(default)s)")
    for launcher, options in OPTIONS.items():
        group = parser.add_argument_group(f"--on {launcher}")
        for name, (kind, _, text) in options.items():
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)


def _variants(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in ("oar", "grpo")]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: allowed: oar, grpo, or both: oar,grpo")
    return names


def run(args: argparse.Namespace) -> int:
    """Return 0, 1 if a package is missing or if a run or its submission failed, or 2 if the recipe or an option cannot work."""
    try:
        if importlib.util.find_spec("verl") is None:
            return missing_package("launch", "verl")  # verl checks the recipe
        return _launch(args)
    except ModuleNotFoundError as error:
        return missing_package("launch", error.name)
    except (ValueError, OSError) as error:
        say(f"oar launch: {error}", sys.stderr)
        return max(1, run(args)) if (args.dry_run or args.cfg) and _marked(error, args) else 2


def _marked(error: Exception, args: argparse.Namespace) -> bool:
    """Whether an error says that something is unset. If so, `(... is unset)` was put in its place."""
    found = re.search(r"Environment variable '(\w+)' not found", str(error))  # OmegaConf's message
    name = found[1] if found else getattr(error, "name", "")
    mark = f"({name} is unset)"
    if name.startswith("--"):
        setattr(args, name[2:], [mark] if name == "--hosts" else mark)
    elif name:
        os.environ[name] = f"/{mark}"  # most of them are absolute paths
    return bool(name)


def _launch(args: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from oar_plugin.runs import run_folder
    from oar_plugin.runs.launch import preflight
    from oar_plugin.runs.launch.job import PROGRAMS, in_container, job_of
    from oar_plugin.runs.launch.runs import plan_runs
    from oar_plugin.runs.recipe import check_config, find_recipe

    on, options = args.on, _options(args)
    environment = _environment(args, options)
    how = os.environ.get(run_folder.START, "")
    recipe = find_recipe(args.recipe)
    seeds = [args.seed] if args.seeds is None else list(range(1, args.seeds + 1))
    runs = plan_runs(recipe, args.variant, seeds, args.sweep, args.overrides)
    if args.status:
        return _report(runs)
    if args.cfg:
        print("---\n".join(f"# {run.name}\n{OmegaConf.to_yaml(run.config)}" for run in runs), end="")
        return 0
    for run in runs:
        if not args.dry_run:
            check_config(run.config)
        run_folder.check(run.config, how)
    first = runs[0].folder
    if how == "resume" and first.absolute().parent.is_dir() and not any(run_folder.is_begun(r.folder) for r in runs):
        raise ValueError(f"--resume: {first}: no run there; name it with trainer.experiment_name=...")
    if all(run.config.trainer.device == "cpu" for run in runs):
        _add_cpu_environment(environment, one_machine=on == "local")
    gpu = preflight.gpu_of_run(args.gpu, args.gpu_memory, on == "local")
    jobs = [job_of(run, recipe, on, options, environment) for run in runs]
    files_seen = args.recipe_on_nodes is None and not in_container(on, options)
    examined = [preflight.examine(run.config, gpu, files_seen=files_seen, local=on == "local") for run in runs]
    for run, (made, _) in zip(runs, examined, strict=True):
        if args.dry_run and made is None:  # the planner's checks are verl's, which takes seconds to import
            check_config(run.config)
    findings = dict.fromkeys(finding for _, of_run in examined for finding in of_run)
    for finding in findings:
        if finding.level != "ok":
            advice = finding.advice and f"; {finding.advice}"
            say(f"oar launch: {finding.subject}: {finding.level}: {finding.text}{advice}", sys.stderr)
    for job, (made, (memory, *_)) in zip(jobs, examined, strict=True):
        hours = made.summary if made else f"Hours are not known: {memory.text}."
        say(f"oar launch: {job.run.name}: {job.needs}, checkpoints in {job.run.folder}. {hours}", sys.stderr)
    if args.dry_run:
        print(("---\n" if on == "kubernetes" else "").join(job.text for job in jobs), end="")
        return 0
    program = PROGRAMS.get(on)
    if program is not None and shutil.which(program) is None:
        raise ValueError(f"there is no {program} here; use a machine that has it, or --dry-run to see what would run")
    if not args.no_check and any(finding.level == "missing" for finding in findings):
        say("oar launch: not started; --no-check starts it in spite of what is missing", sys.stderr)
        return 1
    waiting = [job for job in jobs if not run_folder.has_finished(job.run.config, how)]
    sys.stdout.flush()
    here, failed = on in ("local", "ray"), 0
    if len(jobs) == len(waiting) == 1:
        if here:
            os.execvp(jobs[0].words[0], jobs[0].words)
        return jobs[0].submit()
    for job in waiting:
        say(f"oar launch: {job.run.name} starts", sys.stderr)
        if status := job.run_here() if here else job.submit():
            say(f"oar launch: {job.run.name}: failed, exit status {status}", sys.stderr)
            failed += 1
    _report(runs)
    return 1 if failed else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the chosen launcher. Raise ValueError if one is missing or belongs to another launcher."""
    from oar_plugin.runs.launch.job import Unset

    for launcher, names in OPTIONS.items():
        for name in names:
            if launcher != args.on and getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} belongs to --on {launcher}, this is --on {args.on}")
    own = {name: getattr(args, name) or default for name, (_, default, _) in OPTIONS.get(args.on, {}).items()}
    if missing := [f"--{name}" for name, value in own.items() if value is None]:
        raise Unset(missing[0], f"--on {args.on} needs {' and '.join(missing)}")
    options = {name: getattr(args, name) for name in COMMON} | own
    if args.on == "kubernetes":
        options["mount"] = options["mount"].rstrip("/")
        secrets = " and ".join(name for name in ("HF_TOKEN", "WANDB_API_KEY") if os.environ.get(name))
        if secrets and not args.secret:
            say(f"oar launch: {secrets}: not passed on; make a Secret and name it: --secret NAME", sys.stderr)
    return options


def _environment(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, str]:
    """Return the variables for every node, and set them here: the recipe's paths refer to them."""
    from oar_plugin.hosts.verl.capabilities import external_modules
    from oar_plugin.runs.launch.job import for_nodes
    from oar_plugin.runs.run_folder import START

    for name in ("TENSORBOARD_DIR", "VERL_FILE_LOGGER_PATH"):
        if os.environ.pop(name, None) is not None:
            say(f"oar launch: {name}: not used, a run's logs are in its own folder", sys.stderr)
    os.environ.update(external_modules())
    environment = for_nodes(os.environ, args.env, options.get("mount"))
    if args.resume or args.fresh:  # the ID: start fresh only once, even if a scheduler restarts the driver
        environment[START] = "resume" if args.resume else f"fresh:{secrets.token_hex(4)}"
    os.environ.update(environment)
    return environment


def _add_cpu_environment(environment: dict[str, str], one_machine: bool) -> None:
    """Set, here and on the nodes, the variables that verl_cpu needs for a run on a CPU, unless the user has set them."""
    from importlib.metadata import entry_points

    from oar_plugin.hosts.verl.capabilities import EXTERNAL_MODULES

    for entry in entry_points(group="oar_plugin.environments", name="cpu"):
        wanted = entry.load()(one_machine=one_machine)
        # verl_cpu extends the value of `EXTERNAL_MODULES`.
        environment |= {
            name: value for name, value in wanted.items() if name not in os.environ or name == EXTERNAL_MODULES
        }
        os.environ.update(environment)


def _report(runs: "list[Run]") -> int:
    """Print the table of the runs. Return 1 if one has failed, else 0."""
    from oar_plugin.cli.tables import console, table
    from oar_plugin.runs.plan.planning import training_steps
    from oar_plugin.runs.run_folder import logged, mean_accuracy, state

    shown = table("run", "state", "steps", "validated", "best")
    for run in runs:
        steps, accuracy, total = 0, ["", ""], training_steps(run.config)
        if metrics := logged(run.folder):
            steps = max(metrics)
            means = {step: mean for step, row in metrics.items() if (mean := mean_accuracy(row)) is not None}
            if means:
                accuracy = [
                    f"{means[step]:.3f} (step {step})" for step in (max(means), max(means, key=means.__getitem__))
                ]
        shown.add_row(run.name, state(run.folder), f"{steps}" if total is None else f"{steps} of {total}", *accuracy)
    console().print(shown)
    return 1 if any(state(run.folder) == "failed" for run in runs) else 0
