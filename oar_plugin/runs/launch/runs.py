"""The runs that a command line asks for, and their names. A run's folder has its name.

A name follows from recipe, variant, seed and overrides: two experiments never share a folder, and the same command finds its
folder again. Raises RecipeError for what cannot work.
"""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from oar_plugin.runs.recipe import RecipeError, compose_recipe
from oar_plugin.runs.run_folder import counts

SEEDS = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
"""The keys that make a run another sample: order of the prompts, sampling of the engines, order of the mini-batches."""
OARS_SEED = "algorithm.oar.seed"
UNNAMED = (
    *("trainer.total_epochs", "trainer.total_training_steps"),
    *("*.gpu_memory_utilization", "*.max_num_seqs", "*.max_num_batched_tokens", "*.enforce_eager"),
    *("*_max_token_len_per_gpu", "*micro_batch_size_per_gpu", "*offload*", "*.enable_gradient_checkpointing"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)
"""Keys of length, memory and speed. They are settings, but do not name a run: `--resume` finds the run that goes on for longer,
or that ran out of memory."""
LONGEST_LABELS = 60
LONGEST_JOB = 46  # KubeRay makes names of it, which may have 63 letters


@dataclass(frozen=True)
class Run:
    """One training run: verl is started with `variant` and `overrides`, and composes `config` from them."""

    variant: str
    name: str
    overrides: tuple[str, ...]
    config: DictConfig

    @property
    def folder(self) -> Path:
        """The folder of everything that the run writes."""
        return Path(str(self.config.trainer.default_local_dir))

    @property
    def job(self) -> str:
        """The name, in letters that every scheduler accepts."""
        short = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return short if len(short) <= LONGEST_JOB else f"{short[: LONGEST_JOB - 7].rstrip('-')}-{_hash(self.name)}"


def plan_runs(
    recipe: Path,
    variants: Sequence[str],
    seeds: Sequence[int | None],
    sweeps: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Run]:
    """Return a run for every combination of variant, seed and one value of each sweep. A baseline is without OAR's keys.

    A sweep is `KEY=VALUE,VALUE,...` in Hydra's grammar; the seed None stands for the recipe's own.
    """
    if "oar" not in variants and (ours := [sweep for sweep in sweeps if _is_oars(sweep)]):
        raise RecipeError(f"--sweep {ours[0]}: GRPO has no such key; add --variant oar,grpo, or leave it out")
    asked: dict[tuple[str, int | None, tuple[str, ...]], None] = {}
    for variant, values, seed in itertools.product(variants, itertools.product(*map(_values, sweeps)), seeds):
        all_keys = variant == "oar" or len(variants) == 1
        words = tuple(word for word in (*overrides, *values) if all_keys or not _is_oars(word))
        asked[variant, seed, words] = None
    runs: dict[Path, Run] = {}
    for run in (_planned(recipe, *each) for each in asked):
        if run.folder in runs:
            reason = "trainer.experiment_name, or a sweep over a key that does not name a run"
            raise RecipeError(f"trainer.default_local_dir={run.folder}: two of these runs would write there ({reason})")
        runs[run.folder] = run
    return list(runs.values())


def _planned(recipe: Path, variant: str, seed: int | None, words: tuple[str, ...]) -> Run:
    keys = [] if seed is None else [*SEEDS, *([OARS_SEED] if variant == "oar" else [])]
    seeded = (*(f"{key}={seed}" for key in keys), *words)
    config = compose_recipe(recipe, variant, seeded)
    if "trainer.experiment_name" in _parsed(words):
        return Run(variant, str(config.trainer.experiment_name), seeded, config)
    name = name_of(recipe.name, variant, OmegaConf.select(config, "data.seed"), words)
    config.trainer.experiment_name = name
    return Run(variant, name, (*seeded, f"trainer.experiment_name={name}"), config)


def name_of(recipe: str, variant: str, seed: int | None, overrides: Sequence[str]) -> str:
    """Return `RECIPE-VARIANT-sSEED`; overrides that change what is learned append their values and a hash of all of them."""
    parts = [recipe, variant, *([] if seed is None else [f"s{seed}"])]
    named = {
        key: override
        for key, override in sorted(_parsed(overrides).items())
        if key != "data.seed" and not any(fnmatch(key, pattern) for pattern in UNNAMED) and counts(key)
    }
    if named:
        labels = list(map(_label, named.values()))
        while len("-".join(labels)) > LONGEST_LABELS:
            labels.pop()
        signs = {key: "~" if override.type == OverrideType.DEL else "" for key, override in named.items()}
        parts += [*labels, _hash("\n".join(f"{signs[key]}{key}={_value(named[key])}" for key in named))]
    return re.sub(r"[^\w.-]", "_", "-".join(parts), flags=re.ASCII)


def _label(override: Override) -> str:
    """Return `tau0.5` for a number, and a word without its key."""
    key, value = override.key_or_group.split(".")[-1], _value(override).strip("'\"").rstrip("/").split("/")[-1]
    return value if re.match(r"[A-Za-z]", value) and value.lower() not in ("true", "false", "null") else f"{key}{value}"


def _value(override: Override) -> str:
    return "" if override.value() is None and override.is_delete() else override.get_value_element_as_str()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _parsed(words: Sequence[str]) -> dict[str, Override]:
    """Return the overrides by key; the last one of a key counts, as in Hydra."""
    try:
        return {override.key_or_group: override for override in OverridesParser.create().parse_overrides(list(words))}
    except HydraException as error:
        raise RecipeError(f"{' '.join(words)}: {error}") from error


def _values(sweep: str) -> list[str]:
    """Return `KEY=VALUE` for each value of a sweep."""
    ((_, override),) = _parsed([sweep]).items()
    key = sweep.partition("=")[0]
    if not override.is_sweep_override():
        return [sweep]
    if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
        raise RecipeError(f"--sweep {sweep}: not a list of values; write them out: {key}=VALUE,VALUE,...")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _is_oars(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return key == "oar" or key.split(".")[:2] == ["algorithm", "oar"]
