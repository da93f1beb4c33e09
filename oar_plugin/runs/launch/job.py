"""The needs of a recipe, and the script or manifest that runs it on a cluster. Raises ValueError for what cannot work."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from oar_plugin.runs.recipe import command, gpus_needed, recipes_folder

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
    try:
        return engine.from_string(file.read_text(encoding="utf-8")).render(values)
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
