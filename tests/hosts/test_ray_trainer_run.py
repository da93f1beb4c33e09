"""Whole steps with verl's `RayPPOTrainer`, the experimental trainers and Megatron: real verl, real Ray, real vLLM."""

import inspect
import shutil

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from recipes.smoke import EXPERIMENTAL, MAIN
from tests.hosts.whole_run import OF_OLD, OLD, check, check_importance, dumped, smoke, whole_run

pytestmark = whole_run

BYPASS = "algorithm.rollout_correction.bypass_mode=True"
nightly = pytest.mark.nightly


def rounding():
    """The most that probabilities of rollout and actor differ: verl 0.8 and its branch `neo` send weights in bfloat16."""
    return 0.05 if ".to(torch.bfloat16" in inspect.getsource(FSDPEngine.get_per_tensor_param) else 1e-4


@pytest.mark.parametrize(
    ("recipe", "module", "more"),
    [
        ("qwen2_5_7b_math", MAIN, "trainer.n_gpus_per_node=2"),
        pytest.param("qwen2_5_7b_math", MAIN, BYPASS, marks=nightly),
        pytest.param("qwen2_5_32b_megatron", MAIN, "trainer.test_freq=2", marks=nightly),
        *(pytest.param("qwen2_5_7b_math", module, BYPASS, marks=nightly) for module in EXPERIMENTAL),
    ],
)
def test_two_steps(recipe, module, more, assets, tmp_path):
    """The first case has two actor processes. `RayPPOTrainer` validates at the end."""
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    told = OF_OLD if OLD else ["trainer.use_v1=False"]
    told = [
        *told,
        "algorithm.oar.importance=fisher",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        f"algorithm.oar.dump.dir={tmp_path}/dump",
    ]
    steps = smoke(recipe, tmp_path, *told, more, module=module)
    check(steps, [1, 2])
    assert all(step["oar/dump_failed"] == 0 for step in steps)
    if more != BYPASS:
        assert max(step["training/rollout_probs_diff_max"] for step in steps) < rounding(), (
            "the rollout has the actor's weights"
        )
    assert any(name.startswith("val-core/") for name in steps[-1]) is (module == MAIN)
    check_importance(tmp_path)
    assert all(value < 0 for row in dumped(tmp_path) for value in row.log_probs)


def test_two_steps_with_a_megatron_actor(assets, tmp_path):
    """The recipe's smoke test: two actor processes with tensor and sequence parallelism, on the stand-ins of verl_cpu."""
    pytest.importorskip("megatron.core")
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    more = ("algorithm.oar.importance=fisher", "actor_rollout_ref.actor.optim.lr=1e-4")
    steps = smoke("qwen2_5_32b_megatron", tmp_path, *more, f"algorithm.oar.dump.dir={tmp_path}/dump")
    check(steps, [1, 2])
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the actor's weights"
    check_importance(tmp_path)
