"""Every recipe for two steps on a CPU: its own yaml, real verl, real Ray, real vLLM, a tiny model."""

import math
import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

from oar_plugin.hosts.verl.cpu.smoke import SmokeFailed, architecture_of, run_smoke
from oar_plugin.hosts.verl.cpu.tiny_model import ARCHITECTURES, make_assets
from oar_plugin.hosts.verl.settings import resolve
from tests.recipes.test_recipes import RECIPES, composed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ELSEWHERE = {
    "qwen2_5_7b_math": "tests/hosts/test_verl_run.py",
    "qwen2_5_14b_deepmath": "tests/hosts/test_lost_node.py",
    "qwen2_5_32b_megatron": "tests/hosts/test_megatron_run.py",
    "qwen2_5_7b_colocate_async": "tests/hosts/test_verl_run.py",
    "qwen2_5_7b_lora": "tests/hosts/test_verl_run.py",
    "qwen2_5_7b_oar_p": "tests/hosts/test_offload_run.py",
}
"""Smoke tests that look closer, and so stand beside what they look at. A whole run takes a minute of two cores."""
MORE = {
    # Context parallelism in place of tensor parallelism, which the other Megatron recipe covers, and importance for chains.
    "yi_1_5_34b_megatron": [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "oar=onward",
    ],
    "qwen2_5_1_5b_math": ["oar=onward"],
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """The folder of each tiny model."""
    made = {}
    for architecture in ARCHITECTURES:
        made[architecture] = tmp_path_factory.mktemp(architecture)
        make_assets(made[architecture], architecture=architecture)
    return made


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.name not in ELSEWHERE], ids=lambda path: path.name)
def test_two_steps(recipe, assets, tmp_path):
    model = composed(recipe).actor_rollout_ref.model.path
    shutil.copytree(assets[architecture_of(model)], tmp_path, dirs_exist_ok=True)
    steps = run_smoke(recipe, tmp_path, overrides=MORE.get(recipe.name, []))
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert math.isfinite(step["actor/grad_norm"])
        assert step["oar/fallback/non_finite"] == step["oar/fallback/not_scored"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-3, "the rollout has the actor's weights"
    with_signal = [step for step in steps if step["oar/scored"] > 0]
    assert with_signal, "eight groups, and in every step all of them without a signal?"
    for step in with_signal:
        assert step["actor/grad_norm"] > 0
        assert step["oar/answer_found"] > 0.8, "the answer that the reward looks for is the one whose tokens count"
        assert 0.1 < step["oar/ess_ratio"] < 1
        assert ("oar/offload/scored" in step) == resolve(composed(recipe)).offloads
    assert any(name.startswith("val-core/") for name in steps[-1]), "validated as the recipe would"


def test_every_other_recipe_is_run_elsewhere():
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (Path(__file__).parents[2] / file).read_text()


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "data.parquet").touch()
    with pytest.raises(SmokeFailed, match=r"(?s)status 1.*algorithm\.oar\.tau=1\.5"):
        run_smoke(RECIPES[0], tmp_path, overrides=["algorithm.oar.tau=1.5"], timeout_s=200)
