"""Makes of a run the command, script or manifest that starts it at a place, and starts it. ValueError: it cannot run there."""

import re
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
"""Place -> the program that it needs here."""
RESTARTS = 10  # of a SLURM job that fails, or whose folder cannot be seen
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Variables for all nodes: folders, hubs and loggers, settings of the libraries that talk between nodes.
PATHS = ("OAR_DATA", "OAR_CHECKPOINTS", "OAR_SMOKE", "HF_HOME", "HF_HUB_CACHE", "WANDB_DIR")
NAMES = (
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME"),
)
PREFIXES = ("GLOO_", "NCCL_", "UCX_", "VERL_", "VLLM_")
ON_VOLUME = {"OAR_DATA": "data/oar", "OAR_CHECKPOINTS": "checkpoints", "HF_HOME": "huggingface"}
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""Never written into a script, a manifest or a command line."""


class Job(NamedTuple):
    """What starts a run: a command here, and the text of that command, of the script or of the manifest."""

    run: Run
    needs: str  # nodes and GPUs
    text: str
    words: list[str]

    def submit(self) -> int:
        """Hand the run to the scheduler, and return 0, or 1 where that failed."""
        if self.words[0] == "sbatch":
            write_whole(Path(self.words[-1]), self.text)
        return min(1, subprocess.run(self.words, input=self.text, text=True, check=False).returncode)

    def run_here(self) -> int:
        """Run to the end, end the run with this process, and return the exit status.

        The run gets a session of its own: a terminal would send Ctrl-C to it too, and the second signal would break off its
        cleaning up.
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
    """Return whether a run has an image of its own, and does not see the files of this machine."""
    return on == "kubernetes" or any(word.startswith("--container") for word in options.get("srun", ()))


def job_of(run: Run, recipe: Path, on: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> Job:
    """Return what starts a run; `recipe` is its recipe's folder here, `environment` goes to every node."""
    there = options["recipe_on_nodes"] or recipe
    values = facts(run.config, there, run.variant, run.overrides)
    nodes, gpus, checkpoints = values["nodes"], values["gpus_per_node"], values["checkpoints"]
    needs = f"{nodes} node{'s' if nodes > 1 else ''} with {gpus} GPU{'s' if gpus > 1 else ''}"
    if on == "local":
        if nodes > 1:
            raise ValueError(f"--on local: the recipe needs {needs}; allowed: {', '.join(PROGRAMS)}")
        words = [sys.executable, *command(there, run.variant, run.overrides)[1:]]
        shown = shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *words])
        return Job(run, needs, f"{shown}\n", words)
    if on == "ray" and not len(options["hosts"]) == len(set(options["hosts"])) == nodes:
        hosts = f"--hosts {','.join(options['hosts'])}: {len(set(options['hosts']))} different hosts"
        raise ValueError(f"{hosts}, the recipe needs {needs}")
    if on == "kubernetes":
        if not checkpoints.startswith(f"{(mount := options['mount'])}/"):
            where = f"set it to a folder in {mount}, with --env OAR_CHECKPOINTS={mount}/checkpoints"
            raise ValueError(f"trainer.default_local_dir={checkpoints}: not on the volume that all pods see; {where}")
        if there == recipe:
            if recipe.parent.resolve() != recipes_folder().resolve():
                raise ValueError(
                    f"{recipe}: a folder of this machine, which pods do not have; put it into the image or on the volume, and "
                    "name it there with --recipe-on-nodes"
                )
            values["train"] = by_name(values["train"], recipe)
    setup = options["setup"]
    if setup is None:
        here = sys.prefix == sys.base_prefix or in_container(on, options)
        setup = "" if here else f"source {shlex.quote(f'{sys.prefix}/bin/activate')}"
    values |= {**options, "name": run.job, "environment": environment, "setup": setup, "wait_s": options["wait"]}
    values |= {"job_h": options.get("max_time") or 24, "restarts": RESTARTS}
    text = fill(options["template"] or f"{on}.j2", values)
    if on == "ray":
        return Job(run, needs, text, ["bash", "-c", text])
    if on == "slurm":
        return Job(run, needs, text, ["sbatch", f"{run.job}.sbatch"])
    text = patched(text, options["patch"]) if options["patch"] else text
    return Job(
        run, needs, text, ["kubectl", "create", "-f", "-"]
    )  # not apply, which takes an existing RayJob for success


def for_nodes(environment: Mapping[str, str], wanted: Sequence[str], volume: str | None = None) -> dict[str, str]:
    """Return the variables for every node, without secrets: those here, and `wanted`, each `NAME=VALUE` or `NAME`.

    Nodes with a `volume` of their own do not have the folders of this machine.
    """
    chosen = {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}
    if volume is None:
        chosen.update((name, environment[name]) for name in PATHS if name in environment)
    else:
        chosen.update((name, f"{volume}/{folder}") for name, folder in ON_VOLUME.items())
    for entry in wanted:
        name, equals, value = entry.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(f"--env {entry}: not a name of an environment variable; write NAME=VALUE or NAME")
        if name in SECRETS:
            raise ValueError(f"--env {name}: a secret; export it instead, it is passed on without being written down")
        if not equals and name not in environment:
            raise ValueError(f"--env {name}: not set here; export it, or write {name}=VALUE")
        chosen[name] = value if equals else environment[name]
    return dict(sorted(chosen.items()))


def facts(config: DictConfig, recipe: Path, variant: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a recipe for the templates; `recipe` is its folder as the nodes see it."""
    nodes, gpus_per_node, gpus = gpus_needed(config)
    checkpoints = str(config.trainer.default_local_dir)
    if nodes > 1 and not Path(checkpoints).is_absolute():
        raise ValueError(
            f"trainer.default_local_dir={checkpoints}: relative, and the recipe runs on {nodes} nodes, which must all see it "
            "to resume; set OAR_CHECKPOINTS to a folder on shared storage"
        )
    return {
        "train": shlex.join(command(recipe, variant, ["+ray_kwargs.ray_init.address=auto", *overrides])),
        "train_alone": shlex.join(command(recipe, variant, overrides)),  # verl starts Ray itself
        **{
            "nodes": nodes,
            "gpus_per_node": gpus_per_node,
            "gpus": gpus,
            "checkpoints": checkpoints,
            "secrets": SECRETS,
        },
    }


def fill(template: Path | str, values: Mapping[str, Any]) -> str:
    """Fill a template: a file, or one of `recipes/cluster`. Filters `quote`, `sbatch` and `tojson` make any value safe."""
    import jinja2

    engine = jinja2.Environment(  # noqa: S701  no HTML
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    engine.filters.update(quote=shlex.quote, sbatch=_sbatch)
    file = template if isinstance(template, Path) else recipes_folder() / "cluster" / template
    text = file.read_text(encoding="utf-8")
    text = text.replace(" oar_plugin.launch.wait", " oar_plugin.runs.launch.wait")  # its name in older copies
    try:
        return engine.from_string(text).render(values)
    except jinja2.TemplateError as error:
        raise ValueError(f"--template {file}: {error}") from error


def _sbatch(option: str) -> str:
    if "\n" in option:
        raise ValueError(f"{option!r}: a line of #SBATCH cannot hold a line break")
    return shlex.quote(option)


def by_name(train: str, recipe: Path) -> str:
    """Return the training command for a machine that has the recipe in its own copy of this package."""
    find = f"from oar_plugin.runs.recipe import find_recipe; print(find_recipe({recipe.name!r}))"
    return f"recipe=$(python -c {shlex.quote(find)})\n" + train.replace(shlex.quote(str(recipe.resolve())), '"$recipe"')


def patched(manifest: str, file: Path) -> str:
    """Return a RayJob with the sections of a file merged into it. ValueError: the file cannot be used.

    `rayjob` goes into the job, `pod` into every pod's template, `container` into every pod's container. Maps are merged, lists
    are extended, other values are replaced.
    """
    import yaml

    try:
        patch = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        unknown = sorted(set(patch) - {"rayjob", "pod", "container"})
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"--patch {file}: not a yaml file of sections: {error}") from error
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
