"""Plans and names the runs that a command line asks for. A run's folder is named after the run.

A name is made from recipe, variant, seed and overrides: different experiments never share a folder, and repeating a command
finds its folder again. The functions raise RecipeError for runs that cannot be planned.
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
from oar_plugin.runs.run_folder import affects_results

SEEDS = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
"""Keys that `--seed` sets: for the order of prompts, for sampling in the engines, for the order of mini-batches."""
OAR_SEED = "algorithm.oar.seed"
UNNAMED = (
    *("trainer.total_epochs", "trainer.total_training_steps"),
    *("*.gpu_memory_utilization", "*.max_num_seqs", "*.max_num_batched_tokens", "*.enforce_eager"),
    *("*_max_token_len_per_gpu", "*micro_batch_size_per_gpu", "*offload*", "*.enable_gradient_checkpointing"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)
"""Keys for training length, memory and speed, which are not part of a run's name. If a user changes them to train
longer, or after an out-of-memory error, `--resume` still finds the run."""
LONGEST_LABELS = 60  # characters of a run's name that come from overrides
LONGEST_JOB = 46  # characters; KubeRay appends to a job's name and allows 63


@dataclass(frozen=True)
class Run:
    """One training run. verl is started with `variant` and `overrides`; `config` is the configuration that results."""

    variant: str
    name: str
    overrides: tuple[str, ...]
    config: DictConfig

    @property
    def folder(self) -> Path:
        return Path(str(self.config.trainer.default_local_dir))

    @property
    def job(self) -> str:
        """The run's name, shortened and in characters that every scheduler accepts."""
        short = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return short if len(short) <= LONGEST_JOB else f"{short[: LONGEST_JOB - 7].rstrip('-')}-{_hash(self.name)}"


def plan_runs(
    recipe: Path,
    variants: Sequence[str],
    seeds: Sequence[int | None],
    sweeps: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Run]:
    """Return one run for every combination of variant, seed and one value of each sweep. A seed of None is the recipe's own.

    A sweep is `KEY=VALUE,VALUE,...` in Hydra's grammar; the overrides are for every run. If there are several variants, GRPO's
    runs do not get the overrides of OAR's keys.
    """
    if "oar" not in variants and (refused := [sweep for sweep in sweeps if _is_oar_key(sweep)]):
        raise RecipeError(f"--sweep {refused[0]}: GRPO has no such key; add --variant oar,grpo or remove the sweep")
    asked: dict[tuple[str, int | None, tuple[str, ...]], None] = {}
    for variant, values, seed in itertools.product(variants, itertools.product(*map(_values, sweeps)), seeds):
        all_keys = variant == "oar" or len(variants) == 1
        words = tuple(word for word in (*overrides, *values) if all_keys or not _is_oar_key(word))
        asked[variant, seed, words] = None
    runs: dict[Path, Run] = {}
    for run in (_planned(recipe, *each) for each in asked):
        if run.folder in runs:
            reason = "trainer.experiment_name is set for both, or a swept key is not part of a run's name"
            raise RecipeError(f"trainer.default_local_dir={run.folder}: two of these runs would write there; {reason}")
        runs[run.folder] = run
    return list(runs.values())


def _planned(recipe: Path, variant: str, seed: int | None, words: tuple[str, ...]) -> Run:
    keys = [] if seed is None else [*SEEDS, *([OAR_SEED] if variant == "oar" else [])]
    seeded = (*(f"{key}={seed}" for key in keys), *words)
    config = compose_recipe(recipe, variant, seeded)
    if "trainer.experiment_name" in _parsed(words):
        return Run(variant, str(config.trainer.experiment_name), seeded, config)
    name = name_of(recipe.name, variant, OmegaConf.select(config, "data.seed"), words)
    config.trainer.experiment_name = name
    return Run(variant, name, (*seeded, f"trainer.experiment_name={name}"), config)


def name_of(recipe: str, variant: str, seed: int | None, overrides: Sequence[str]) -> str:
    """Return `RECIPE-VARIANT-sSEED`, followed by the values of overrides that affect results and a hash of these overrides.

    Overrides of `UNNAMED` keys are ignored.
    """
    parts = [recipe, variant, *([] if seed is None else [f"s{seed}"])]
    named = {
        key: override
        for key, override in sorted(_parsed(overrides).items())
        if key != "data.seed" and not any(fnmatch(key, pattern) for pattern in UNNAMED) and affects_results(key)
    }
    if named:
        labels = list(map(_label, named.values()))
        while len("-".join(labels)) > LONGEST_LABELS:
            labels.pop()
        signs = {key: "~" if override.type == OverrideType.DEL else "" for key, override in named.items()}
        parts += [*labels, _hash("\n".join(f"{signs[key]}{key}={_value(named[key])}" for key in named))]
    return re.sub(r"[^\w.-]", "_", "-".join(parts), flags=re.ASCII)


def _label(override: Override) -> str:
    """Return key and value (`tau0.5`) for a number or a boolean, and only the value for text."""
    key, value = override.key_or_group.split(".")[-1], _value(override).strip("'\"").rstrip("/").split("/")[-1]
    return value if re.match(r"[A-Za-z]", value) and value.lower() not in ("true", "false", "null") else f"{key}{value}"


def _value(override: Override) -> str:
    return "" if override.value() is None and override.is_delete() else override.get_value_element_as_str()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _parsed(words: Sequence[str]) -> dict[str, Override]:
    """Return the overrides by key. If a key occurs twice, the last override wins, as in Hydra."""
    try:
        return {override.key_or_group: override for override in OverridesParser.create().parse_overrides(list(words))}
    except HydraException as error:
        raise RecipeError(f"{' '.join(words)}: {error}") from error


def _values(sweep: str) -> list[str]:
    """Return one override `KEY=VALUE` for each value of a sweep."""
    ((_, override),) = _parsed([sweep]).items()
    key = sweep.partition("=")[0]
    if not override.is_sweep_override():
        return [sweep]
    if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
        raise RecipeError(f"--sweep {sweep}: not a list of values; write them out: {key}=VALUE,VALUE,...")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _is_oar_key(word: str) -> bool:
    """Return whether an override sets one of OAR's keys."""
    key = word.lstrip("+~").partition("=")[0]
    return key == "oar" or key.split(".")[:2] == ["algorithm", "oar"]
