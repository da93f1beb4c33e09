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


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory):
    return shutil.copytree(assets, tmp_path_factory.mktemp("verl"), dirs_exist_ok=True)


@pytest.fixture(scope="module")
def two_steps(folder):
    """The recipe's smoke test: two actor processes with tensor and sequence parallelism."""
    more = ("actor_rollout_ref.actor.optim.lr=1e-4", f"algorithm.oar.dump.dir={folder}/dump")
    return smoke("qwen2_5_32b_megatron", folder, *more)


def test_two_steps_with_a_megatron_actor(two_steps):
    check(two_steps, [1, 2])
    for step in two_steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the actor's weights"


def test_importance_of_the_first_step_equals_a_plain_backward(two_steps, folder):
    check_importance(folder)
