"""`oar launch`: a recipe on this machine, on bare nodes, under SLURM or on Kubernetes."""

import argparse
import importlib.util
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from oar_plugin.cli.arguments import listed, positive, whole
from oar_plugin.output import say, write_whole

if TYPE_CHECKING:
    from oar_plugin.runs.launch.finding import Finding
    from oar_plugin.runs.launch.preflight import Forecast
    from oar_plugin.runs.launch.runs import Run

_HELP = """\
Run a recipe. verl and OAR check its configuration first, and nothing is started when it cannot work. How many nodes and GPUs it
takes is read from it. --seeds, --variant oar,grpo and --sweep make a run for each combination, and a table at the end.

A run's name follows from recipe, variant, seed and overrides, and all that it writes is in a folder of that name. Every run
saves checkpoints: the same command resumes what is not finished.

  local        on this machine (recipes of one node)
  ray          on bare nodes: starts Ray on each by ssh, trains on the first, stops Ray at the end and after Ctrl-C
  slurm        writes NAME.sbatch and submits it; goes on by itself when its time is over or a node is lost
  kubernetes   creates a RayJob (KubeRay 1.2 or later), which is submitted again after a fault

What would end it is looked at first, in seconds: does it fit, are data, model and reward there, is there room for checkpoints.
--dry-run says it too, and prints what would run all the same.

exit status: 0 it ran or was submitted, 1 something is missing, it does not fit, or what ran failed, 2 the recipe or an option
cannot work
"""
_EXAMPLES = """\
examples:
  oar launch qwen2_5_7b_math --variant grpo trainer.total_epochs=1
  oar launch qwen2_5_7b_math --variant oar,grpo --seeds 3 --sweep algorithm.oar.tau=0.3,0.5,0.7 --dry-run
  oar launch qwen2_5_32b_megatron --on ray --hosts node1,node2,node3,node4
  oar launch qwen2_5_32b_megatron --on slurm --max-time 48 --sbatch='--partition=gpu --qos=long' --dry-run
  oar launch qwen2_5_32b_megatron --on kubernetes --image registry/verl-oar:1 --claim shared-disk --patch rdma.yaml
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
        "max_time": "hours of the longest job (default: 24); a longer run goes on by itself, in a job after the other",
        "srun": "further options of the step: --srun='--container-image=verl.sqsh --container-mounts=/shared:/shared'",
    },
    "kubernetes": {
        "image": "with verl, this plugin and the recipe",
        "claim": "PersistentVolumeClaim for data and checkpoints, ReadWriteMany",
        "mount": "where pods have it (default: /shared)",
        "secret": "name of a Secret with HF_TOKEN, WANDB_API_KEY",
        "cpus": "of a pod (default: no request)",
        "memory": "of a pod, such as 900Gi (default: no request)",
        "patch": "yaml that is merged into the RayJob: RDMA, tolerations, node selector, queue (recipes/CLUSTERS.md)",
    },
}
SPLIT = ("ssh", "sbatch", "srun", "hosts")  # several words each
TYPES: dict[str, Any] = {name: shlex.split for name in SPLIT} | {
    "hosts": listed,
    "max_time": positive,
    "patch": Path,
}
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NEEDED = {"ray": ("hosts",), "kubernetes": ("image", "claim")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a name that `oar recipes` lists, or a folder")
    add("overrides", nargs="*", metavar="OVERRIDE", help="as on verl's command line: trainer.total_epochs=1")
    text = "grpo: the baseline; oar,grpo: both (default: oar)"
    add("--variant", default=["oar"], type=_variants, metavar="VARIANT", help=text)
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=whole, metavar="N", help="of the run (default: the recipe's data.seed)")
    seeds.add_argument("--seeds", type=positive, metavar="N", help="so many runs, with the seeds 1 to N")
    text = (
        "a run for each value, of several --sweep for each combination; KEY of algorithm.oar or oar=PRESET: of OAR only"
    )
    add("--sweep", action="append", default=[], metavar="KEY=VALUE,...", help=text)
    add("--status", action="store_true", help="start nothing: how far these runs are, and their validation accuracy")
    again = parser.add_mutually_exclusive_group()
    text = "go on with a run whose settings were others when it was started"
    again.add_argument("--resume", action="store_true", help=text)
    text = "begin again; what is in the run's folder is moved aside, nothing is deleted"
    again.add_argument("--fresh", action="store_true", help=text)
    add("--on", default="local", choices=("local", *OPTIONS), help="where (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the command, script or manifest; do nothing, need no cluster")
    add("--template", type=Path, metavar="FILE", help="a changed copy of OAR's own (oar recipes copy cluster DIR)")
    text = "another variable for all nodes; OAR_*, HF_*, WANDB_*, NCCL_*, VLLM_* and VERL_* go there (tokens unwritten)"
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    text = "makes python and ray the right ones on a node (default: this Python's environment; in a container: nothing)"
    add("--setup", metavar="COMMAND", help=text)
    add("--recipe-on-nodes", type=Path, metavar="DIR", help="the recipe's folder there (default: as here)")
    add("--gpus-per-node", type=positive, metavar="N", help="of a machine (default: what the recipe takes of one)")
    add("--no-check", action="store_true", help="start in spite of what is missing")
    text = "that the run has, as in oar plan (default: with --on local the one here, else H100-80)"
    add("--gpu", metavar="NAME", help=text)
    add("--gpu-memory", type=float, metavar="GIB", help="another memory, as CUDA reports it")
    add("--wait", type=positive, default=900, metavar="SECONDS", help="for nodes to join (default: %(default)s)")
    for launcher, options in OPTIONS.items():
        group = parser.add_argument_group(f"--on {launcher}")
        for name, text in options.items():
            group.add_argument(f"--{name.replace('_', '-')}", type=TYPES.get(name, str), help=text)


def _variants(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in ("oar", "grpo")]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: allowed: oar, grpo, or both: oar,grpo")
    return names


def run(args: argparse.Namespace) -> int:
    """0; 1 when a run or its submission failed; 2 when the recipe or an option cannot work."""
    try:
        if importlib.util.find_spec("verl") is None:
            raise ValueError("verl is not installed here, and checks the recipe first: pip install 'verl>=0.9'")
        return _launch(args)
    except (ValueError, OSError) as error:
        say(f"oar launch: {error}", sys.stderr)
        return 2


def _launch(args: argparse.Namespace) -> int:
    from oar_plugin.runs import run_folder
    from oar_plugin.runs.launch import preflight
    from oar_plugin.runs.launch.runs import plan_runs
    from oar_plugin.runs.launch.schedule import DAY_H
    from oar_plugin.runs.recipe import check_config, find_recipe

    options = _options(args)
    environment = _environment(args, options)
    start = os.environ.get(run_folder.START, "")
    recipe = find_recipe(args.recipe)
    seeds = [args.seed] if args.seeds is None else list(range(1, args.seeds + 1))
    runs = plan_runs(recipe, args.variant, seeds, args.sweep, args.overrides)
    if args.status:
        return _report(runs)
    for run in runs:
        check_config(run.config)
        run_folder.check(run.config, start)
    _refuse_to_resume_nothing(runs, start)
    if all(run.config.trainer.device == "cpu" for run in runs):
        _add(environment, _cpu_environment(one_machine=args.on == "local"))
    local = args.on == "local"
    gpu = preflight.gpu_of_run(args.gpu, args.gpu_memory, local)
    forecasts = [preflight.forecast(run.config, run.overrides, gpu, args.max_time or DAY_H) for run in runs]
    jobs = [_job(args, run, recipe, options, environment, ahead) for run, ahead in zip(runs, forecasts, strict=True)]
    files_seen = args.recipe_on_nodes is None and not _in_container(args.on, options)
    findings = preflight.examine(forecasts, files_seen, local)
    _say(findings, jobs)
    if args.dry_run:
        print(("---\n" if args.on == "kubernetes" else "").join(job.text for job in jobs), end="")
        return 0
    _need_program(args.on)
    if not args.no_check and any(finding.level == "missing" for finding in findings):
        say("oar launch: not started; --no-check starts it in spite of what is missing", sys.stderr)
        return 1
    waiting = [job for job in jobs if not run_folder.has_finished(job.run.config, start)]
    sys.stdout.flush()
    if len(jobs) == len(waiting) == 1:
        return _start(args.on, waiting[0])
    failed = _start_all(args.on, waiting)
    _report(runs)
    return 1 if failed else 0


def _refuse_to_resume_nothing(runs: "list[Run]", start: str) -> None:
    """ValueError: none of the runs is there, as far as can be seen: a changed override has changed their names, say."""
    from oar_plugin.runs.run_folder import is_begun

    folder = runs[0].folder
    if start == "resume" and folder.absolute().parent.is_dir() and not any(is_begun(run.folder) for run in runs):
        raise ValueError(f"--resume: {folder}: no run there; name it with trainer.experiment_name=...")


@dataclass(frozen=True)
class _Job:
    """What starts a run: the words of a command here, and the text of the command, script or manifest."""

    run: "Run"
    needs: str  # said before it starts
    text: str
    words: list[str]


def _environment(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, str]:
    """What every node gets. It is set here too: the recipe's paths are made of it."""
    from oar_plugin.runs.launch import job
    from oar_plugin.runs.run_folder import START

    for name in ("TENSORBOARD_DIR", "VERL_FILE_LOGGER_PATH"):
        if os.environ.pop(name, None) is not None:
            say(f"oar launch: {name}: not used, a run's logs are in its own folder", sys.stderr)
    environment = job.for_nodes(os.environ, args.env, options.get("mount"))
    if args.resume or args.fresh:  # fresh once, and not again when a scheduler starts the driver again
        environment[START] = "resume" if args.resume else f"fresh:{secrets.token_hex(4)}"
    os.environ.update(environment)
    return environment


def _add(environment: dict[str, str], wanted: dict[str, str]) -> None:
    """Set what the user has not set, here and on the nodes."""
    environment |= {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(environment)


def _say(findings: "list[Finding]", jobs: list[_Job]) -> None:
    for finding in findings:
        if finding.level != "ok":
            advice = finding.advice and f"; {finding.advice}"
            say(f"oar launch: {finding.subject}: {finding.level}: {finding.text}{advice}", sys.stderr)
    for job in jobs:
        say(f"oar launch: {job.needs}", sys.stderr)


def _job(
    args: argparse.Namespace,
    run: "Run",
    recipe: Path,
    options: dict[str, Any],
    environment: dict[str, str],
    ahead: "Forecast",
) -> _Job:
    """What starts a run where the options say. ValueError: it cannot run there."""
    from oar_plugin.runs.launch import job
    from oar_plugin.runs.recipe import command, recipes_folder

    there = args.recipe_on_nodes or recipe
    overrides = [*ahead.added, *run.overrides]
    facts = job.facts(run.config, there, run.variant, overrides, args.gpus_per_node) | {"name": run.job}
    if args.on == "kubernetes" and args.recipe_on_nodes is None:
        if recipe.parent.resolve() != recipes_folder().resolve():
            raise ValueError(
                f"{recipe}: a folder of this machine, which pods do not have; put it into the image or on the volume, and "
                "name it there with --recipe-on-nodes"
            )
        facts["train"] = job.by_name(facts["train"], recipe)
    nodes, gpus = facts["nodes"], facts["gpus_per_node"]
    needed = f"{nodes} node{'s' if nodes > 1 else ''} with {gpus} GPU{'s' if gpus > 1 else ''}"
    needs = f"{run.name}: {needed}, checkpoints in {facts['checkpoints']}. {ahead.in_words()}"
    _check_place(args, options, facts, needed)
    if args.on == "local":
        words = [sys.executable, *command(there, run.variant, overrides)[1:]]
        shown = shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *words])
        return _Job(run, needs, f"{shown}\n", words)
    values = {**facts, **options, "environment": environment, "setup": _setup(args, options), "wait_s": args.wait}
    values |= ahead.schedule._asdict()
    text = job.fill(args.template or f"{args.on}.j2", **values)
    if args.on == "ray":
        return _Job(run, needs, text, ["bash", "-c", text])
    if args.on == "slurm":
        return _Job(run, needs, text, ["sbatch", f"{run.job}.sbatch"])
    if args.patch:
        text = job.patched(text, args.patch)
    # Not apply: of a RayJob that is there already it would say that all is well.
    return _Job(run, needs, text, ["kubectl", "create", "-f", "-"])


def _check_place(args: argparse.Namespace, options: dict[str, Any], facts: dict[str, Any], needed: str) -> None:
    if args.on == "local" and facts["nodes"] > 1:
        raise ValueError(f"--on local: the recipe needs {needed}; allowed: {', '.join(OPTIONS)}")
    if args.on == "ray" and not len(args.hosts) == len(set(args.hosts)) == facts["nodes"]:
        raise ValueError(
            f"--hosts {','.join(args.hosts)}: {len(set(args.hosts))} different hosts, the recipe needs {needed}"
        )
    if args.on == "kubernetes" and not facts["checkpoints"].startswith(f"{options['mount']}/"):
        where = f"set it to a folder in {options['mount']}, with --env OAR_CHECKPOINTS={options['mount']}/checkpoints"
        raise ValueError(
            f"trainer.default_local_dir={facts['checkpoints']}: not on the volume that all pods see; {where}"
        )


def _setup(args: argparse.Namespace, options: dict[str, Any]) -> str:
    """What makes python and ray the right ones on a node."""
    if args.setup is not None:
        return str(args.setup)
    if _in_container(args.on, options) or sys.prefix == sys.base_prefix:
        return ""
    return f"source {shlex.quote(f'{sys.prefix}/bin/activate')}"


def _in_container(on: str, options: dict[str, Any]) -> bool:
    """Whether it runs in an image of its own, with files that are not those of this machine."""
    return on == "kubernetes" or any(word.startswith("--container") for word in options.get("srun", ()))


def _need_program(on: str) -> None:
    program = PROGRAMS.get(on)
    if program is not None and shutil.which(program) is None:
        raise ValueError(f"there is no {program} here; run this where there is one, or --dry-run to see what would run")


def _start(on: str, job: _Job) -> int:
    """The exit status of what ran: 0, or 1 where it failed. On this machine it takes this process's place."""
    if on in ("local", "ray"):
        os.execvp(job.words[0], job.words)
    return _submit(on, job)


def _start_all(on: str, jobs: list[_Job]) -> int:
    """How many of them failed. On this machine and on bare nodes they run one after the other."""
    failed = 0
    for job in jobs:
        say(f"oar launch: {job.run.name} starts", sys.stderr)
        if status := _run_here(job.words) if on in ("local", "ray") else _submit(on, job):
            say(f"oar launch: {job.run.name}: failed, exit status {status}", sys.stderr)
            failed += 1
    return failed


def _run_here(words: list[str]) -> int:
    """Run a command to its end, and end it with this process.

    It gets a session of its own: from a terminal, Ctrl-C would reach it once directly and once from here, and the second one
    would break off what it does after the first.
    """
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    process: subprocess.Popen[bytes] | None = None
    before = {number: signal.signal(number, pass_on) for number in ENDED_BY}
    try:
        process = subprocess.Popen(words, start_new_session=True)
        for number in received:
            process.send_signal(number)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt
    return status


def _submit(on: str, job: _Job) -> int:
    if on == "slurm":
        write_whole(Path(job.words[-1]), job.text)
        return min(1, subprocess.run(job.words, check=False).returncode)
    return min(1, subprocess.run(job.words, input=job.text, text=True, check=False).returncode)


def _report(runs: "list[Run]") -> int:
    """The table of the runs; 1 where one has failed."""
    from oar_plugin.cli.tables import console, table
    from oar_plugin.runs.plan.setup import training_steps
    from oar_plugin.runs.run_folder import progress

    shown = table("run", "state", "steps", "validated", "best")
    states = set()
    for run in runs:
        made = progress(run.folder)
        states.add(made.state)
        last, best = "", ""
        if made.accuracy:
            step, at = max(made.accuracy), max(made.accuracy, key=lambda step: made.accuracy[step])
            last, best = f"{made.accuracy[step]:.3f} (step {step})", f"{made.accuracy[at]:.3f} (step {at})"
        total = training_steps(run.config)
        steps = f"{made.step}" if total is None else f"{made.step} of {total}"
        shown.add_row(run.name, made.state, steps, last, best)
    console().print(shown)
    return 1 if "failed" in states else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of the chosen launcher; refuses one of another launcher and misses one that is needed."""
    for launcher, names in OPTIONS.items():
        for name in names:
            if launcher != args.on and getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} belongs to --on {launcher}, this is --on {args.on}")
    if missing := [f"--{name}" for name in NEEDED.get(args.on, ()) if not getattr(args, name)]:
        raise ValueError(f"--on {args.on} needs {' and '.join(missing)}")
    options = {name: getattr(args, name) or ([] if name in SPLIT else "") for name in OPTIONS.get(args.on, ())}
    if args.on == "kubernetes":
        options["mount"] = (args.mount or "/shared").rstrip("/")
        secrets = " and ".join(name for name in ("HF_TOKEN", "WANDB_API_KEY") if os.environ.get(name))
        if secrets and not args.secret:
            say(f"oar launch: {secrets}: not passed on; make a Secret and name it: --secret NAME", sys.stderr)
    return options


def _cpu_environment(one_machine: bool) -> dict[str, str]:
    """Return the variables that the distribution verl_cpu, where it is installed, wants for a run on a CPU."""
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="oar_plugin.environments", name="cpu") or (None,)
    return {} if entry is None else entry.load()(one_machine=one_machine)
