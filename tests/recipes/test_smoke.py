"""Every recipe for two steps on a CPU: its own yaml, real verl, real Ray, real vLLM, a tiny model."""

import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

from oar_plugin.hosts.verl.settings import resolve
from recipes.smoke import architecture_of, sizes
from tests.hosts.whole_run import check, smoke, whole_run, with_a_signal
from tests.limits import PROCESS_S
from tests.recipes.test_recipes import FOLDER, RECIPES, composed

pytestmark = whole_run

HERE = {
    # With KL in the reward, RLOO, rollout correction, and OAR-P on the rollout engines: each exchange of weights aborts their
    # masked copies, which run again with the new weights.
    "qwen2_5_7b_separate_async": [
        # An update lies between a rollout and its log-probs. With the recipe's learning rate it moves probabilities by more
        # than the check of the rollout's weights allows.
        "actor_rollout_ref.actor.optim.lr=1e-8",
        "algorithm.use_kl_in_reward=True",
        "algorithm.oar.base_estimator=rloo",
        "algorithm.oar.importance=oar_p",
        "algorithm.oar.perturbation.backend=rollout",
    ]
}
SCORED = "algorithm.oar.importance=fisher"  # two steps are too few to predict from
NIGHTLY = {
    "qwen2_5_14b_deepmath": [SCORED],
    "qwen2_5_7b_deepmath": [SCORED],  # the synchronous trainer replaces groups; a penalty for long responses
    "qwen3_30b_a3b_fsdp": [SCORED],  # a mixture of experts
    # The same with expert parallelism, and routes that the log-prob pass records for the update.
    "qwen3_30b_a3b_megatron": [
        SCORED,
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
    ],
    # Context parallelism in place of tensor parallelism, which the other Megatron recipe covers.
    "yi_1_5_34b_megatron": [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "oar=published",
    ],
}
"""Recipes that are run here, with what overrides."""


@pytest.mark.parametrize("name", [*HERE, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)])
def test_two_steps(name, assets, tmp_path):
    overrides = (HERE | NIGHTLY)[name]
    if architecture_of(composed(FOLDER / name).actor_rollout_ref.model.path) == "qwen2":  # that of the assets
        shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    steps = smoke(name, tmp_path, *overrides)
    config = composed(FOLDER / name, "oar", *overrides)
    check(steps, [1, 2])
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-3, "the rollout has the actor's weights"
    for step in with_a_signal(steps):
        assert step["oar/answer_found"] > 0.8, "the answer that the reward looks for is the one whose tokens count"
        assert step.get("oar/offload/scored", 0) >= 0.5 * resolve(config).offloads
    if config.algorithm.use_kl_in_reward or config.algorithm.filter_groups.enable:
        # No advantage is known to be zero, or every group differs.
        assert all(step["oar/scored"] > 0.9 for step in steps)
    if config.reward.reward_manager.name == "dapo":
        assert min(step["critic/score/min"] for step in steps) < 0, "a long response has a penalty"
    assert any(metric.startswith("val-core/") for metric in steps[-1]), "validated as the recipe would"


def test_on_a_machine_with_gpus_the_sizes_are_found_as_well():
    """There the plugin verl_cpu adds no config groups."""
    words = [sys.executable, "-m", "verl.trainer.main_ppo", *sizes(RECIPES[0], "oar", "tiny"), "--cfg", "job"]
    environment = {**os.environ, "VERL_PLATFORM": "nvidia", "OAR_SMOKE": "/made/up"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
    assert "path: ${smoke}/model" in done.stdout, done.stderr
