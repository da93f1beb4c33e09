"""Whole steps with verl's `RayPPOTrainer`: real verl, real Ray, real vLLM."""

import shutil

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl.trainer.ppo import ray_trainer

from tests.hosts.whole_run import OF_OLD, OLD, check, check_importance, dumped, smoke, whole_run

pytestmark = whole_run
only_neo = pytest.mark.skipif(not hasattr(ray_trainer, "build_data_plane"), reason="a key of verl's branch neo")


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("qwen2_5_7b_math", ["trainer.n_gpus_per_node=2"]),
        pytest.param("qwen2_5_7b_math", ["trainer.data_plane=neoproto"], marks=only_neo),
        pytest.param("qwen2_5_32b_megatron", [], marks=pytest.mark.nightly),
        pytest.param(
            "qwen2_5_7b_math", ["algorithm.rollout_correction.bypass_mode=True"], marks=pytest.mark.nightly, id="bypass"
        ),
    ],
)
def test_two_steps_of_a_recipe(recipe, more, assets, tmp_path):
    """With two actor processes, a file of responses, and a validation at the end."""
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    dump = f"algorithm.oar.dump.dir={tmp_path}/dump"
    trainer = OF_OLD if OLD else ["trainer.use_v1=False"]
    steps = smoke(recipe, tmp_path, *trainer, "actor_rollout_ref.actor.optim.lr=1e-4", dump, *more)
    check(steps, [1, 2])
    for step in steps:
        assert step["oar/dump_failed"] == 0
        if "bypass_mode" not in str(more):
            assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the actor's weights"
    assert any(name.startswith("val-core/") for name in steps[-1])
    check_importance(tmp_path)
    for row in dumped(tmp_path):
        assert all(value < 0 for value in row.log_probs)
