"""Turns a run into a command, script or manifest for one place (this machine, Ray, SLURM or Kubernetes), and submits it.

The functions raise ValueError if the run cannot be started there.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from omegaconf import DictConfig

from oar_plugin.output import write_whole
from oar_plugin.runs.launch.runs import Run
from oar_plugin.runs.recipe import command, gpus_needed, recipes_folder

PROGRAMS = {"ray": "ssh", "slurm": "sbatch", "kubernetes": "kubectl"}
"""Place -> the program that must be installed on this machine."""
RESTARTS = 10  # limit for a SLURM job that fails, or whose folder the batch script cannot see
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Environment variables that every node gets: folders; settings of hubs and loggers; settings of communication libraries.
PATHS = ("OAR_DATA", "OAR_CHECKPOINTS", "OAR_SMOKE", "HF_HOME", "HF_HUB_CACHE", "WANDB_DIR")
NAMES = (
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME"),
)
PREFIXES = ("GLOO_", "NCCL_", "UCX_", "VERL_", "VLLM_")
ON_VOLUME = {"OAR_DATA": "data/oar", "OAR_CHECKPOINTS": "checkpoints", "HF_HOME": "huggingface"}
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""Never written into a script, a manifest or a command line."""


class Unset(ValueError):
    """Something that a run needs is not set. `name`: an environment variable, or an option, such as `--hosts`."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Job(NamedTuple):
    """How to start a run: `words` is the command to run on this machine, `text` the shell command, script or manifest."""

    run: Run
    needs: str  # number of nodes and GPUs, as text
    text: str
    words: list[str]

    def submit(self) -> int:
        """Submit the run to the scheduler. Return 0, or 1 if that failed."""
        if self.words[0] == "sbatch":
            write_whole(Path(self.words[-1]), self.text)
        return min(1, subprocess.run(self.words, input=self.text, text=True, check=False).returncode)

    def run_here(self) -> int:
        """Run until the end and return the exit status. Signals that end this process are passed on to the run.

        After such a signal and the end of the run, KeyboardInterrupt is raised. The run gets its own session. Otherwise a
        terminal would also send Ctrl-C to it, and this second signal would interrupt its cleanup.
        """
        received: list[int] = []
        process: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, frame: FrameType | None) -> None:
            received.append(number)
            if process is not None:
                process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in ENDED_BY}
        try:
            process = subprocess.Popen(self.words, start_new_session=True)
            for number in received:
                process.send_signal(number)
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if received:
            raise KeyboardInterrupt
        return status


def in_container(on: str, options: Mapping[str, Any]) -> bool:
    """Return whether a run uses a container image and so does not see the files of this machine."""
    return on == "kubernetes" or any(word.startswith("--container") for word in options.get("srun", ()))


def job_of(run: Run, recipe: Path, on: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> Job:
    """Return the job that starts a run on `local` or a key of `PROGRAMS`.

    `recipe` is the recipe's folder on this machine, `options` are those of `oar launch`, `environment` is for every node.
    """
    there = options["recipe_on_nodes"] or recipe
    values = template_values(run.config, there, run.variant, run.overrides)
    nodes, gpus, checkpoints = values["nodes"], values["gpus_per_node"], values["checkpoints"]
    needs = f"{nodes} node{'s' if nodes > 1 else ''} with {gpus} GPU{'s' if gpus > 1 else ''}"
    if on == "local":
        if nodes > 1:
            raise ValueError(f"--on local: the recipe needs {needs}; allowed: {', '.join(PROGRAMS)}")
        words = [sys.executable, *command(there, run.variant, run.overrides)[1:]]
        shown = shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *words])
        return Job(run, needs, f"{shown}\n", words)
    hosts = options.get("hosts", ())
    if on == "ray" and "(" not in hosts[0] and not len(hosts) == len(set(hosts)) == nodes:  # "(": a dry run's mark
        raise ValueError(f"--hosts {','.join(hosts)}: {len(set(hosts))} different hosts, the recipe needs {needs}")
    if on == "kubernetes":
        if not checkpoints.startswith(f"{(mount := options['mount'])}/"):
            where = f"set it to a folder in {mount}, with --env OAR_CHECKPOINTS={mount}/checkpoints"
            raise ValueError(f"trainer.default_local_dir={checkpoints}: not on the volume that all pods see; {where}")
        if there == recipe and recipe.parent.resolve() != recipes_folder().resolve():
            where = "put it into the image or on the volume, and name it there with --recipe-on-nodes"
            raise ValueError(f"{recipe}: a folder of this machine, which pods do not have; {where}")
        if there == recipe:
            values["train"] = by_name(values["train"], recipe)
    setup = options["setup"]
    if setup is None:
        here = sys.prefix == sys.base_prefix or in_container(on, options)
        setup = "" if here else f"source {shlex.quote(f'{sys.prefix}/bin/activate')}"
    values |= {**options, "name": run.job, "environment": environment, "setup": setup, "wait_s": options["wait"]}
    values |= {"job_h": options.get("max_time"), "restarts": RESTARTS}
    text = fill(options["template"] or f"{on}.j2", values)
    if options.get("patch"):
        text = patched(text, options["patch"])
    # Not `kubectl apply`, which succeeds if the RayJob already exists and then starts nothing.
    submit = {"slurm": ["sbatch", f"{run.job}.sbatch"], "kubernetes": ["kubectl", "create", "-f", "-"]}
    return Job(run, needs, text, submit.get(on, ["bash", "-c", text]))


def for_nodes(environment: Mapping[str, str], wanted: Sequence[str], volume: str | None = None) -> dict[str, str]:
    """Return the environment variables for every node, without secrets: those of this machine that nodes need, and `wanted`.

    An entry of `wanted` is `NAME=VALUE`, or `NAME` with its value on this machine. If the nodes have a `volume`, its folders
    replace this machine's.
    """
    chosen = {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}
    if volume is None:
        chosen.update((name, environment[name]) for name in PATHS if name in environment)
    else:
        chosen.update((name, f"{volume}/{folder}") for name, folder in ON_VOLUME.items())
    for entry in wanted:
        name, equals, value = entry.partition("=")
        if not (name.isidentifier() and name.isascii()):
            raise ValueError(f"--env {entry}: not a name of an environment variable; write NAME=VALUE or NAME")
        if name in SECRETS:
            raise ValueError(f"--env {name}: a secret; export it, so that no script or command line contains it")
        if not equals and name not in environment:
            raise Unset(name, f"--env {name}: not set here; export it, or write {name}=VALUE")
        chosen[name] = value if equals else environment[name]
    return dict(sorted(chosen.items()))


def template_values(config: DictConfig, recipe: Path, variant: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with which templates are filled. `recipe` is the recipe's folder on the nodes."""
    nodes, gpus_per_node, gpus = gpus_needed(config)
    checkpoints = str(config.trainer.default_local_dir)
    if nodes > 1 and not Path(checkpoints).is_absolute():
        reason = f"a relative path, but the recipe runs on {nodes} nodes, which must all see the folder to resume"
        text = f"trainer.default_local_dir={checkpoints}: {reason}; set OAR_CHECKPOINTS to a folder on shared storage"
        raise ValueError(text) if "OAR_CHECKPOINTS" in os.environ else Unset("OAR_CHECKPOINTS", text)
    return {
        "train": shlex.join(command(recipe, variant, ["+ray_kwargs.ray_init.address=auto", *overrides])),
        "train_alone": shlex.join(command(recipe, variant, overrides)),  # verl starts Ray itself
        **{"nodes": nodes, "gpus_per_node": gpus_per_node, "gpus": gpus},
        **{"checkpoints": checkpoints, "secrets": SECRETS},
    }


def fill(template: Path | str, values: Mapping[str, Any]) -> str:
    """Return a filled template. `template` is a file, or the name of one in `recipes/cluster`.

    Templates insert values through the filters `quote`, `sbatch` and `tojson`, which escape any value.
    """
    import jinja2

    engine = jinja2.Environment(  # noqa: S701  no HTML
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    engine.filters.update(quote=shlex.quote, sbatch=_sbatch)
    file = template if isinstance(template, Path) else recipes_folder() / "cluster" / template
    text = file.read_text(encoding="utf-8")
    text = text.replace(" oar_plugin.launch.wait", " oar_plugin.runs.launch.wait")  # its old name, in copied templates
    try:
        return engine.from_string(text).render(values)
    except jinja2.TemplateError as error:
        raise ValueError(f"--template {file}: {error}") from error


def _sbatch(option: str) -> str:
    if "\n" in option:
        raise ValueError(f"{option!r}: an #SBATCH line cannot hold a line break")
    return shlex.quote(option)


def by_name(train: str, recipe: Path) -> str:
    """Return a training command that looks up the recipe in the package installed on the machine where it runs."""
    find = f"from oar_plugin.runs.recipe import find_recipe; print(find_recipe({recipe.name!r}))"
    return f"recipe=$(python -c {shlex.quote(find)})\n" + train.replace(shlex.quote(str(recipe.resolve())), '"$recipe"')


def patched(manifest: str, file: Path) -> str:
    """Return a RayJob manifest with the sections of a yaml file merged into it.

    Section `rayjob` is merged into the RayJob, `pod` into every pod's template, `container` into every pod's first container.
    Maps are merged, lists are extended, other values are replaced.
    """
    import yaml

    try:
        patch = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        unknown = sorted(set(patch) - {"rayjob", "pod", "container"})
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"--patch {file}: not a yaml file with sections: {error}") from error
    if unknown:
        raise ValueError(f"--patch {file}: {unknown[0]}: not a section; allowed: rayjob, pod, container")
    job = _merged(yaml.safe_load(manifest), patch.get("rayjob"), "rayjob")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())):
        group["template"] = _merged(group["template"], patch.get("pod"), "pod")
        containers = group["template"]["spec"]["containers"]
        containers[0] = _merged(containers[0], patch.get("container"), "container")
    return str(yaml.safe_dump(job, sort_keys=False, width=10**6))


def _merged(there: Any, patch: Any, where: str) -> Any:
    if patch is None:
        return there
    if isinstance(there, dict | list) and type(there) is not type(patch):
        kind = "map" if isinstance(there, dict) else "list"
        raise ValueError(f"--patch: {where}: {patch!r}: the RayJob has a {kind} there")
    if isinstance(there, dict):
        return {**there, **{key: _merged(there.get(key), value, f"{where}.{key}") for key, value in patch.items()}}
    return [*there, *patch] if isinstance(there, list) else patch
