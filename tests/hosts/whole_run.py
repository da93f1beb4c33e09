"""Shared by the tests of whole runs of verl: the time limit, and the checks of a healthy run.

Five run with every change, each for several features at once: one in `test_verl_run`, and those of `test_offload_run`,
`test_ray_trainer_run` and `test_smoke`. The others are `nightly`.
"""

import math
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from transformers import AutoTokenizer

from oar_plugin.credit.noise import step_seed
from oar_plugin.hosts.verl.capabilities import host_version
from oar_plugin.page.record import parse_response
from tests.hosts.engine import world
from tests.hosts.engine.compare import error

RECIPES = Path(__file__).parents[2] / "recipes"

OLD = host_version().startswith("0.8.")
OF_OLD = ["~actor_rollout_ref.rollout.seed"]
"""A recipe's overrides for verl 0.8, which has this key as little as `trainer.use_v1`."""

LIMIT_S = 1200
"""The limit for a run that hangs. A run takes two minutes, mostly imports in a dozen processes; on a busy machine one on two
nodes took seven."""

ADAPTER = (
    "actor_rollout_ref.model.lora_rank=64",
    "actor_rollout_ref.model.lora_alpha=64",
    "actor_rollout_ref.actor.optim.lr=2e-05",
    "actor_rollout_ref.rollout.load_format=safetensors",
)
"""What sets the recipe `qwen2_5_7b_lora` apart from the standard one, in a smoke test."""

whole_run = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 120)]
"""`pytestmark` of a module whose tests each wait for one run."""


def loads_adapters() -> bool:
    """Whether this verl can load an adapter into this vLLM. Otherwise such a run hangs, with GRPO too."""
    import verl
    import vllm
    from vllm.model_executor.models.utils import WeightsMapper

    # vLLM 0.25 changed the names of layers. verl 0.9.1 asks vLLM for them, by a function that vLLM 0.31 lacks.
    if Version(vllm.__version__) < Version("0.25"):
        return True
    return Version(verl.__version__) >= Version("0.9.1") and hasattr(WeightsMapper, "get_unstacked_mapper")


def smoke(recipe, folder, *overrides, **more):
    """Metrics of each step of a recipe's smoke test."""
    from recipes.smoke import run_smoke  # it needs verl

    return run_smoke(RECIPES / recipe, folder, overrides=[*overrides], timeout_s=LIMIT_S, **more)


def dumped(folder, step=1, scored_only=True):
    """The responses that a step left in `folder/dump`."""
    _, *lines = (folder / "dump" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [row for row in map(parse_response, lines) if row.status == "scored" or not scored_only]


def check_importance(folder):
    """`fisher` of the first step's responses equals autograd on a plain HuggingFace model with the weights on disk."""
    model = world.load_model(folder / "model", torch.float32)
    rows = dumped(folder)
    assert rows
    for row in rows:
        ids = torch.tensor([*prompt_ids(folder, row), *row.token_ids])
        seed = step_seed(1, 1)  # the recipes' seed
        want = world.gradient_importance(model, ids, torch.tensor(row.segments), seed=seed)
        assert error(torch.tensor(row.importance["fisher"]), want) < 1e-4


def prompt_ids(folder, row):
    """The prompt's token ids by the run's tokenizer. A dump has the prompt's text only."""
    return AutoTokenizer.from_pretrained(folder / "model").encode(row.prompt, add_special_tokens=False)


def with_a_signal(steps):
    """The steps in which rewards differed within a group. By chance one step in ten thousand has no such group."""
    signalled = [step for step in steps if step["oar/scored"] > 0]
    assert signalled, "eight groups, and in every step all of them without a signal?"
    return signalled


def check(steps, expected_steps):
    assert [step["step"] for step in steps] == expected_steps
    for step in steps:
        assert step["oar/fallback/non_finite"] == step["oar/fallback/not_scored"] == 0
        assert step["oar/scored"] <= 1
        assert math.isfinite(step["actor/grad_norm"])
    for step in with_a_signal(steps):
        assert 0 < step["actor/grad_norm"] < 100
        assert step["timing_s/oar"] > 0
        # The model has learnt to write answers. The large updates of a test may make it forget some of that.
        untouched = step["step"] == 1
        assert step["oar/answer_found"] > (0.8 if untouched else 0.4)
        assert step["oar/fallback/any"] < (0.3 if untouched else 0.6)
        assert 0.1 < step["oar/ess_ratio"] < 1, "weights are neither even nor on one token"
        assert 0.1 < step["oar/top10_mass"] < 1
        assert 1 < step["oar/weight_max"] < 10
