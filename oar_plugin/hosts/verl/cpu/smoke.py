"""Smoke test of a recipe: the recipe's own yaml, two steps on a CPU with a tiny model, through real verl, Ray and vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from benchmarks.tiny.smoke_model import Architecture, make_assets
from oar_plugin.hosts.verl.cpu.launch import cpu_environment
from oar_plugin.hosts.verl.cpu.session import TIMED_OUT, run_verl
from oar_plugin.hosts.verl.recipe import compose_recipe, entry_point

ARCHITECTURE_OF_NAME: dict[str, Architecture] = {
    "a3b": "qwen3_moe",
    "moe": "qwen3_moe",
    "yi-": "llama",
    "llama": "llama",
}
"""What a model's name says about its architecture; anything else is taken for a dense Qwen."""


class SmokeFailed(RuntimeError):
    """The run did not end well. The message says where its log is, and how it ends."""


def group_of(config: DictConfig) -> str:
    """Which of `conf/cpu_smoke/*.yaml` fits a recipe."""
    mode = str(config.trainer.v1.trainer_mode)
    if config.actor_rollout_ref.actor.strategy == "megatron":
        return "megatron"
    return "dp" if mode == "sync" else mode


def architecture_of(model: str) -> Architecture:
    """The tiny model that stands in for one of this name."""
    name = model.lower()
    return next((architecture for part, architecture in ARCHITECTURE_OF_NAME.items() if part in name), "qwen2")


def run_smoke(
    recipe: Path,
    folder: Path,
    variant: str = "oar",
    overrides: Sequence[str] = (),
    timeout_s: float = 600.0,
    on_line: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Run a recipe for two steps.

    Args:
        recipe: its folder.
        folder: for the model, the data (made when not there), the log and the metrics.
        variant: `oar` or `grpo`.
        overrides: on top of the recipe and of the smoke test's sizes.
        timeout_s: the run is ended after this many seconds.
        on_line: called with each line of verl's output.

    Returns:
        The metrics of each step, as verl's file logger wrote them.

    Raises:
        RecipeError: the recipe does not compose.
        SmokeFailed: the run failed or took too long.
    """
    config = compose_recipe(recipe, variant)
    if not (folder / "data.parquet").exists():
        make_assets(folder, architecture=architecture_of(str(config.actor_rollout_ref.model.path)))
    metrics, log = folder / "metrics.jsonl", folder / "verl.log"
    metrics.unlink(missing_ok=True)
    status = run_verl(
        [*entry_point(recipe, variant), f"+cpu_smoke={group_of(config)}", f"hydra.run.dir={folder}/hydra", *overrides],
        env={**cpu_environment(), "OAR_SMOKE": str(folder), "VERL_FILE_LOGGER_PATH": str(metrics)},
        log_path=log,
        timeout_s=timeout_s,
        on_line=on_line,
    )
    if status != 0:
        why = f"took longer than {timeout_s:.0f} s" if status == TIMED_OUT else f"ended with status {status}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SmokeFailed(f"{recipe.name}/{variant}.yaml {why}; its log, {log}, ends with:\n{tail}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{"step": record["step"], **record["data"]} for record in records]
