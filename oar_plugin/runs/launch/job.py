"""The runs that a command line asks for, and what starts one: a command, or a script or manifest for a cluster."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from omegaconf import DictConfig

from oar_plugin.hosts.verl.settings import OARS
from oar_plugin.runs.recipe import RecipeError, command, compose_recipe, gpus_needed, recipes_folder

SEEDS = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
"""Keys that `--seed` sets: for the order of prompts, for sampling in the engines, for the order of mini-batches."""
LONGEST_JOB = 46  # characters; KubeRay appends to a job's name and allows 63
SUBMIT = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "create", "-f", "-"]}
"""Scheduler -> the command that reads a script or manifest. (`kubectl apply` starts nothing if the RayJob exists.)"""
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FOR_NODES = re.compile("(OAR|HF|WANDB|MLFLOW|GLOO|NCCL|UCX|VERL|VLLM)_")
"""Environment variables that every node gets: folders; settings of hubs and loggers; settings of libraries."""
SECRET = re.compile("TOKEN|KEY|PASSWORD|SECRET")
"""Variables that are never written into a script, a manifest or a command line."""
VOLUME = "/shared"  # where pods have the volume for data and checkpoints
ON_VOLUME = {"OAR_DATA": "data/oar", "OAR_CHECKPOINTS": "checkpoints", "HF_HOME": "huggingface"}


class Run(NamedTuple):
    """One training run. verl is started with `variant` and `overrides`; `config` is the configuration that results."""

    variant: str
    overrides: tuple[str, ...]
    config: DictConfig

    @property
    def name(self) -> str:
        return str(self.config.trainer.experiment_name)

    @property
    def folder(self) -> Path:
        return Path(str(self.config.trainer.default_local_dir))

    @property
    def job(self) -> str:
        """The run's name, shortened and in characters that every scheduler accepts."""
        short = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        mark = sha256(self.name.encode()).hexdigest()[:6]
        return short if len(short) <= LONGEST_JOB else f"{short[: LONGEST_JOB - 7].rstrip('-')}-{mark}"


def plan_runs(recipe: Path, variants: list[str], seeds: Sequence[int | None], overrides: Sequence[str]) -> list[Run]:
    """Return one run for every combination of variant and seed; None is the recipe's own seed.

    RecipeError: two runs have one folder, or one is wrong.
    """
    runs: dict[Path, Run] = {}
    for variant, seed in itertools.product(variants, seeds):
        keys = [] if seed is None else [*SEEDS, *(["algorithm.oar.seed"] if variant == "oar" else [])]
        kept = [word for word in overrides if variant == "oar" or len(variants) == 1 or not OARS.match(word)]
        words = *(f"{key}={seed}" for key in keys), *kept
        run = Run(variant, words, compose_recipe(recipe, variant, words))
        if run.folder in runs:
            advice = "use --name, or trainer.experiment_name='NAME-${algorithm.adv_estimator}-s${data.seed}'"
            raise RecipeError(f"trainer.default_local_dir={run.folder}: two of these runs would write there; {advice}")
        runs[run.folder] = run
    return list(runs.values())


class Job(NamedTuple):
    """How to start a run: `words` is the command for this machine, `text` the shell command, script or manifest."""

    run: Run
    needs: str  # number of nodes and GPUs, as text
    text: str
    words: list[str]

    def start(self) -> int:
        """Give a script or manifest to the scheduler's command, run anything else until the end; return the exit status.

        The run also gets the signals that end this process; KeyboardInterrupt: one has come. In a session of its own it does
        not get a terminal's Ctrl-C twice, in its cleanup.
        """
        if self.words in SUBMIT.values():
            return subprocess.run(self.words, input=self.text, text=True, check=False).returncode
        process = subprocess.Popen(self.words, start_new_session=True)
        received: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            received.append(number)
            process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in ENDED_BY}
        status = process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            raise KeyboardInterrupt
        return status


def sees_files(on: str, options: Mapping[str, Any]) -> bool:
    """Return whether a run sees the files of this machine: not in pods, and not in a container of SLURM."""
    return on != "kubernetes" and not any(word.startswith("--container") for word in options.get("srun") or ())


def job_of(run: Run, recipe: Path, on: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> Job:
    """Return the job that starts a run on `local`, `ray` or a key of `SUBMIT`. Raise ValueError if it cannot start there."""
    there = options["recipe_on_nodes"] or recipe
    values = template_values(run.config, there, run.variant, run.overrides)
    nodes, gpus = values["nodes"], values["gpus_per_node"]
    needs = f"{nodes} node{'s' if nodes > 1 else ''} with {gpus} GPU{'s' if gpus > 1 else ''}"
    if on == "local":
        if nodes > 1:
            raise ValueError(f"--on local: the recipe needs {needs}; allowed: ray, slurm, kubernetes")
        words = [sys.executable, *command(there, run.variant, run.overrides)[1:]]
        shown = shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *words])
        return Job(run, needs, f"{shown}\n", words)
    hosts = options["hosts"] or ()
    if on == "ray" and not len(hosts) == len(set(hosts)) == nodes:
        raise ValueError(f"--hosts {','.join(hosts)}: {len(set(hosts))} different hosts, the recipe needs {needs}")
    if on == "kubernetes" and there == recipe:
        if recipe.parent.resolve() != recipes_folder().resolve():
            where = "put it into the image or on the volume, and name it there with --recipe-on-nodes"
            raise ValueError(f"{recipe}: a folder of this machine, which pods do not have; {where}")
        # Pods look it up in the package that is installed there.
        find = f"from oar_plugin.runs.recipe import find_recipe; print(find_recipe({recipe.name!r}))"
        train = values["train"].replace(shlex.quote(str(recipe.resolve())), '"$recipe"')
        values["train"] = f"recipe=$(python -c {shlex.quote(find)})\n{train}"
    setup = options["setup"]
    if setup is None and sys.prefix != sys.base_prefix and sees_files(on, options):
        setup = f"source {shlex.quote(f'{sys.prefix}/bin/activate')}"
    values |= {**options, "name": run.job, "environment": environment, "setup": setup, "volume": VOLUME}
    text = fill(options["template"] or f"{on}.j2", values)
    return Job(run, needs, text, SUBMIT.get(on, ["bash", "-c", text]))


def for_nodes(environment: Mapping[str, str], in_pods: bool = False) -> dict[str, str]:
    """Return this machine's variables that every node gets, without secrets. Pods have folders of the volume instead."""
    chosen = {name: value for name, value in environment.items() if FOR_NODES.match(name) and not SECRET.search(name)}
    if in_pods:
        chosen = {name: value for name, value in chosen.items() if not value.startswith("/")}
        chosen |= {name: f"{VOLUME}/{folder}" for name, folder in ON_VOLUME.items()}
    return dict(sorted(chosen.items()))


def template_values(config: DictConfig, recipe: Path, variant: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with which templates are filled. `recipe` is the recipe's folder on the nodes."""
    nodes, gpus_per_node = gpus_needed(config)
    checkpoints = str(config.trainer.default_local_dir)
    if nodes > 1 and not Path(checkpoints).is_absolute():
        reason = f"a relative path, but the recipe runs on {nodes} nodes, which must all see the folder to resume"
        advice = "set OAR_CHECKPOINTS to a folder on shared storage"
        raise ValueError(f"trainer.default_local_dir={checkpoints}: {reason}; {advice}")
    return {
        "train": shlex.join(command(recipe, variant, ["+ray_kwargs.ray_init.address=auto", *overrides])),
        "train_alone": shlex.join(command(recipe, variant, overrides)),  # verl starts Ray itself
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "checkpoints": checkpoints,
        # Bare nodes get them through ssh's standard input.
        "secrets": [name for name in os.environ if FOR_NODES.match(name) and SECRET.search(name)],
    }


def fill(template: Path | str, values: Mapping[str, Any]) -> str:
    """Return a filled template: a file, or one of `recipes/cluster`. The filters `quote`, `sbatch`, `tojson` escape values."""
    import jinja2

    engine = jinja2.Environment(  # noqa: S701  no HTML
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    engine.filters.update(quote=shlex.quote, sbatch=_sbatch)
    file = template if isinstance(template, Path) else recipes_folder() / "cluster" / template
    try:
        return engine.from_string(file.read_text(encoding="utf-8")).render(values)
    except jinja2.TemplateError as error:
        raise ValueError(f"--template {file}: {error}") from error


def _sbatch(option: str) -> str:
    if "\n" in option:
        raise ValueError(f"{option!r}: an #SBATCH line cannot hold a line break")
    return shlex.quote(option)
