"""Whole steps with a Megatron actor: real verl, real Ray, real vLLM, verl's real Megatron engine on stand-ins for CUDA.

verl_cpu/megatron.py lists the stand-ins.
"""

import shutil

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

from tests.hosts.whole_run import check, check_importance, smoke, whole_run

pytestmark = whole_run


def test_two_steps_with_a_megatron_actor(assets, tmp_path):
    """The recipe's smoke test: two actor processes with tensor and sequence parallelism."""
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    more = ("algorithm.oar.importance=fisher", "actor_rollout_ref.actor.optim.lr=1e-4")
    steps = smoke("qwen2_5_32b_megatron", tmp_path, *more, f"algorithm.oar.dump.dir={tmp_path}/dump")
    check(steps, [1, 2])
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the actor's weights"
    check_importance(tmp_path)
