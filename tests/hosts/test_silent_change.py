"""With another estimator a whole run is bit for bit the same with and without the plugin, in every trainer.

A first run records its responses with verl's own `skip.rollout_tq` (`skip.rollout` in `RayPPOTrainer`), and two others replay
them.
"""

import math
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

pytest.importorskip("verl")
pytest.importorskip("vllm")

from benchmarks.tiny.verl_run import read_metrics, training_environment
from oar_plugin.runs.recipe import compose_recipe, entry_point
from recipes.smoke import group_of
from tests import in_order
from tests.hosts.whole_run import LIMIT_S, RECIPES
from verl_cpu.session import run_verl

STEPS = 3
MODES = ["sync", "colocate_async", "separate_async", "ray_trainer"]
WITHOUT = {"VERL_USE_EXTERNAL_PLUGINS": "cpu"}  # the CPU stack alone
WITH = {"VERL_USE_EXTERNAL_PLUGINS": "auto"}
OF_THE_MACHINE = ("timing_s/", "timing_per_token_ms/", "perf/", "actor/perf/")
"""Metrics of time and memory, which differ from run to run."""


def whole(mode: str, folder: Path) -> None:
    """Write the configuration of a run that records or replays to one file, which composes without the plugin."""
    asynchronous, skip = mode.endswith("async"), "rollout" if mode == "ray_trainer" else "rollout_tq"
    recipe = RECIPES / f"qwen2_5_7b_{mode if asynchronous else 'math'}"
    group = group_of(compose_recipe(recipe, "grpo"))
    overrides = [
        f"+cpu_smoke={group}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.default_local_dir=${oc.env:OAR_CHECKPOINTS}",
        "trainer.experiment_name=replayed",
        f"trainer.v1.sampler.custom_sampler.path={in_order.PATH}",
        f"trainer.v1.sampler.custom_sampler.name={'InOrderAsync' if asynchronous else 'InOrder'}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.use_v1={mode != 'ray_trainer'}",
        f"skip.{skip}.enable=True",
        f"skip.{skip}.dump_dir={folder}/rollouts",
        f"skip.{skip}.steps={list(range(1, STEPS + 2))}",
    ]
    OmegaConf.save(compose_recipe(recipe, "grpo", overrides), folder / "whole.yaml")


def run(folder: Path, name: str, plugin: dict[str, str]):
    """Metrics of each step without those of time and memory, the weights at the end, and the log."""
    metrics, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    told = {**training_environment(metrics), "OAR_SMOKE": str(folder), "OAR_CHECKPOINTS": str(folder / name), **plugin}
    status = run_verl(entry_point(folder, "whole"), told, log, LIMIT_S)
    said = log.read_text(encoding="utf-8", errors="replace")
    assert status == 0, said[-4000:]
    steps = read_metrics(metrics)
    steps = [{key: step[key] for key in step if not key.startswith(OF_THE_MACHINE)} for step in steps]
    weights = load_file(folder / name / f"global_step_{STEPS}" / "actor" / "huggingface" / "model.safetensors")
    return steps, weights, said


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("mode", MODES)
def test_without_the_plugin_nothing_differs(mode, assets, tmp_path):
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    whole(mode, tmp_path)
    run(tmp_path, "recorded", WITHOUT)
    steps, weights, log = run(tmp_path, "without", WITHOUT)
    steps_with, weights_with, log_with = run(tmp_path, "with", WITH)
    for text in (log, log_with):
        assert "The trainer will generate" not in text, "responses are replayed"
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(math.isfinite(step["actor/grad_norm"]) and step["actor/grad_norm"] > 0 for step in steps)
    differing = [
        (one["step"], key, one.get(key), other.get(key))
        for one, other in zip(steps, steps_with, strict=True)
        for key in one.keys() | other.keys()
        if one.get(key) != other.get(key)
    ]
    assert not differing
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert weights.keys() == weights_with.keys()
    for name, weight in weights.items():
        assert weight.equal(weights_with[name])
        assert not weight.equal(start[name])
