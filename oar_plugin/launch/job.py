"""What a recipe needs of a cluster, and the script that runs it there. Raises ValueError for what cannot work."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from oar_plugin.hosts.verl.recipe import command, gpus_needed, recipes_folder

# What all nodes get: folders, how to reach hubs and loggers, settings of the libraries that talk between nodes.
PATHS = ("OAR_DATA", "OAR_CHECKPOINTS", "HF_HOME", "HF_HUB_CACHE", "TENSORBOARD_DIR", "WANDB_DIR")
NAMES = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE")
ON_VOLUME = {"OAR_DATA": "data/oar", "OAR_CHECKPOINTS": "checkpoints", "HF_HOME": "huggingface"}
PREFIXES = ("GLOO_", "NCCL_", "UCX_", "VERL_", "VLLM_")
# Never written to a script, a manifest or a command line.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")


def for_nodes(environment: Mapping[str, str], wanted: Sequence[str], volume: str | None = None) -> dict[str, str]:
    """What every node gets, without secrets: as the environment here says, and `wanted`, each `NAME=VALUE` or `NAME`.

    Folders of this machine mean nothing where nodes have a `volume` of their own.
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


def facts(
    config: DictConfig, recipe: Path, variant: str, overrides: Sequence[str], gpus_of_a_node: int | None
) -> dict[str, Any]:
    """What the templates say of a recipe; `recipe` is its folder as the nodes see it."""
    nodes, gpus_per_node, gpus = gpus_needed(config, gpus_of_a_node)
    checkpoints = str(OmegaConf.select(config, "trainer.default_local_dir"))
    if nodes > 1 and not Path(checkpoints).is_absolute():
        raise ValueError(
            f"trainer.default_local_dir={checkpoints}: relative, and the recipe runs on {nodes} nodes, which must all see it "
            "to resume; set OAR_CHECKPOINTS to a folder on shared storage"
        )
    # In letters that every scheduler takes, and so short that KubeRay can make names of it.
    short = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[: 46 - len(variant)].rstrip("-")
    name = f"{short}-{variant}"
    train = shlex.join(command(recipe, variant, ["+ray_kwargs.ray_init.address=auto", *overrides]))
    train_alone = shlex.join(command(recipe, variant, overrides))  # verl starts Ray itself
    facts = {"name": name, "train": train, "train_alone": train_alone, "checkpoints": checkpoints, "secrets": SECRETS}
    return {**facts, "nodes": nodes, "gpus_per_node": gpus_per_node, "gpus": gpus}


def fill(template: Path | str, **values: Any) -> str:
    """A template, filled: a file, or one of `recipes/cluster`. Filters `quote`, `sbatch` and `tojson` make any value safe."""
    import jinja2

    def sbatch(option: str) -> str:
        if "\n" in option:
            raise ValueError(f"{option!r}: a line of #SBATCH cannot hold a line break")
        return shlex.quote(option)

    engine = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.keep_trailing_newline = True
    engine.filters.update(quote=shlex.quote, sbatch=sbatch)
    file = template if isinstance(template, Path) else recipes_folder() / "cluster" / template
    try:
        return engine.from_string(file.read_text()).render(values)
    except jinja2.TemplateError as error:
        raise ValueError(f"--template {file}: {error}") from error
