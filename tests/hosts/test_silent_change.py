"""With another estimator a whole run is bit for bit the same with and without the plugin, in every trainer.

A first run records its responses with verl's own `skip`, and two others replay them.
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
from oar_plugin.hosts.verl.capabilities import EXTERNAL_MODULES, PLUGIN, TRAINERS, missing
from oar_plugin.runs.recipe import compose_recipe, entry_point
from recipes.smoke import EXPERIMENTAL, MAIN, group_of
from tests.hosts.whole_run import LIMIT_S, OF_OLD, OLD, RECIPES
from verl_cpu.session import run_verl

STEPS = 3
MATH = "qwen2_5_7b_math"
ONE_STEP_OFF, FULLY_ASYNC = EXPERIMENTAL
NUMBERED = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=tests.hosts.numbered.Numbered"
# It trains on prompts in the order in which they are answered: one at a time, and two batches of four a step.
IN_ORDER = [
    "async_training.concurrent_samples_per_replica=1",
    "async_training.require_batches=1",
    f"rollout.total_rollout_steps={8 * STEPS}",
    f"skip.async_rollout.steps={list(range(1, 8 * STEPS + 1))}",
    "trainer.total_training_steps=null",
]
MODES = {
    "sync": (MATH, MAIN, "rollout_tq", []),
    "colocate_async": ("qwen2_5_7b_colocate_async", MAIN, "rollout_tq", []),
    "separate_async": ("qwen2_5_7b_separate_async", MAIN, "rollout_tq", []),
    "ray_trainer": (MATH, MAIN, "rollout", []),
    "megatron": ("qwen2_5_32b_megatron", MAIN, "rollout", []),
    "one_step_off": (MATH, ONE_STEP_OFF, "rollout", [NUMBERED]),
    "fully_async": (MATH, FULLY_ASYNC, "async_rollout", IN_ORDER),
}
"""Recipe, program, which part of `skip` replays, and what else the run needs. The first three are of `trainer.v1`."""
WITHOUT = {EXTERNAL_MODULES: "verl_cpu.plugin"} if OLD else {"VERL_USE_EXTERNAL_PLUGINS": "cpu"}  # the CPU stack alone
WITH = {EXTERNAL_MODULES: f"verl_cpu.plugin,{PLUGIN}"} if OLD else {"VERL_USE_EXTERNAL_PLUGINS": "auto"}
OF_THE_MACHINE = ("timing_s/", "timing_per_token_ms/", "perf/", "actor/perf/", "fully_async/", "dynamic_resource/")
"""Metrics of time, memory and queues, which differ from run to run."""


def whole(mode: str, folder: Path) -> None:
    """Write the configuration of a run that records or replays to one file, which composes without the plugin."""
    name, program, replayed_by, more = MODES[mode]
    skip, how = f"skip.{replayed_by}", f"steps={list(range(1, STEPS + 2))}"
    if OLD:
        skip, how = "actor_rollout_ref.rollout.skip", f"max_dump_step={STEPS + 1}"
    recipe = RECIPES / name
    group = group_of(compose_recipe(recipe, "grpo"), program)
    overrides = [
        f"+cpu_smoke={group}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.default_local_dir=${oc.env:OAR_CHECKPOINTS}",
        "trainer.experiment_name=replayed",
        "trainer.v1.sampler.custom_sampler.path=pkg://tests.hosts.in_order",
        f"trainer.v1.sampler.custom_sampler.name={'InOrderAsync' if mode.endswith('async') else 'InOrder'}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *(OF_OLD if OLD else [f"trainer.use_v1={mode in TRAINERS}"]),
        f"{skip}.enable=True",
        f"{skip}.dump_dir={folder}/rollouts",
        f"{skip}.{how}",
        *more,
    ]
    OmegaConf.save(compose_recipe(recipe, "grpo", overrides), folder / "whole.yaml")


def run(folder: Path, name: str, plugin: dict[str, str], program: str):
    """Metrics of each step without those of time and memory, the weights at the end, and the log."""
    metrics, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    told = {**training_environment(metrics), "OAR_SMOKE": str(folder), "OAR_CHECKPOINTS": str(folder / name), **plugin}
    status = run_verl(entry_point(folder, "whole"), told, log, LIMIT_S, module=program)
    said = log.read_text(encoding="utf-8", errors="replace")
    assert status == 0, said[-4000:]
    steps = read_metrics(metrics)
    steps = [{key: step[key] for key in step if not key.startswith(OF_THE_MACHINE)} for step in steps]
    (weights,) = (folder / name / f"global_step_{STEPS}" / "actor").rglob("huggingface/*.safetensors")
    return steps, load_file(weights), said


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("mode", MODES)
def test_without_the_plugin_nothing_differs(mode, assets, tmp_path):
    program = MODES[mode][1]
    if program in EXPERIMENTAL:
        pytest.importorskip("verl.utils.skip", reason="this verl does not replay responses in this trainer")
    elif lacking := missing(mode):
        pytest.skip("; ".join(lacking))
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    whole(mode, tmp_path)
    run(tmp_path, "recorded", WITHOUT, program)
    steps, weights, log = run(tmp_path, "without", WITHOUT, program)
    steps_with, weights_with, log_with = run(tmp_path, "with", WITH, program)
    for text in (log, log_with):
        assert "The trainer will generate" not in text, "responses are replayed"
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    norms = [step["actor/grad_norm"] for step in steps]
    assert all(map(math.isfinite, norms))
    assert any(norms), "by chance the groups of one step may have no signal"
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
