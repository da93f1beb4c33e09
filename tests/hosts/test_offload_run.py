"""OAR-P on the rollout engines in whole runs: real verl, real Ray, real vLLM on a CPU.

Importance is compared with a plain HuggingFace model in float64, one whole forward a copy, before and after an update.
"""

import json

import pytest
import torch
from packaging.version import Version

pytest.importorskip("verl")
pytest.importorskip("vllm")

import vllm

from benchmarks.tiny.words import PAD
from oar_plugin.credit.noise import step_seed
from recipes.smoke import make_assets
from tests.hosts.engine import world
from tests.hosts.whole_run import check, dumped, loads_adapters, prompt_ids, smoke, whole_run, with_a_signal

pytestmark = whole_run

RECIPE = "qwen2_5_7b_oar_p"
COPIES = "algorithm.oar.perturbation"
# Of the prefix cache: the smallest that vLLM's CPU build takes. The smaller, the more of their prefix copies share.
BLOCK = 16 if Version(vllm.__version__) < Version("0.31") else 32
LONG = [
    f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK}",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.max_model_len=96",
    "algorithm.oar.dump.every=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("verl")
    make_assets(path, filler=(20, 45))
    return path


def model_of(folder, checkpoint=None):
    """The model on disk, or that of a checkpoint: its weights, or its adapter merged into those on disk."""
    model = world.load_model(folder / "model")
    if checkpoint is not None:
        state = torch.load(checkpoint / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
        state = {name: getattr(value, "_local_tensor", value).double() for name, value in state.items()}
        if not loads_adapters():
            model.load_state_dict(state)
            return model
        settings = json.loads((checkpoint / "actor" / "lora_train_meta.json").read_text())
        adapted = [name for name in state if "lora_A" in name]
        assert adapted
        for name in adapted:
            layer = model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
            change = state[name.replace("lora_A", "lora_B")] @ state[name]
            layer.weight.data += change * settings["lora_alpha"] / settings["r"]
    return model


def worst(folder, rows, model):
    """Largest error, relative to the response's largest score, or to a thousandth of a nat where that is smaller: a divergence
    of two nearly equal distributions carries the rounding of float32 logits."""
    errors = []
    for row in rows:
        ids, segments = torch.tensor([*prompt_ids(folder, row), *row.token_ids]), torch.tensor(row.segments)
        want = world.of_response(model, ids, segments, replacement=PAD, seed=step_seed(1, row.step))
        error = (torch.tensor(row.importance["oar_p"], dtype=torch.float64) - want).abs().max()
        errors.append((error / want.max().clamp_min(1e-3)).item())
    assert len(errors) >= 4, "at least one group with a signal was dumped"
    return max(errors)


@pytest.fixture(scope="module")
def offloaded(folder):
    """The smoke test of the recipe, with a copy for every token of every response, and an update that is felt."""
    adapter = ["actor_rollout_ref.model.lora_rank=4"] if loads_adapters() else []
    rate = 1e-2 if adapter else 1e-3  # with more, a model that learns as a whole says the same to everything
    return smoke(
        RECIPE,
        folder,
        *LONG,
        f"{COPIES}.span=1",
        f"{COPIES}.replacement=pad",
        "algorithm.oar.amortize.share=null",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=null",
        *adapter,
        f"actor_rollout_ref.actor.optim.lr={rate}",
        f"algorithm.oar.dump.dir={folder}/dump",
    )


def test_a_run_whose_engines_score(offloaded):
    """With a LoRA adapter, which vLLM applies beside the weights, where verl can."""
    check(offloaded, [1, 2])
    for step in offloaded:
        assert step["oar/offload/left_for_actor"] == 0
        assert not [name for name in step if "offload/fault" in name]
    for step in with_a_signal(offloaded):
        assert step["oar/offload/scored"] == 1
        assert 0 <= step["oar/offload/hidden_share"] <= 1


def test_offloaded_scores_equal_single_copies_of_the_same_weights(offloaded, folder):
    assert worst(folder, dumped(folder), model_of(folder)) < 1e-4


def test_after_an_update_the_engines_score_with_the_new_weights(offloaded, folder):
    rows = dumped(folder, 2)
    assert worst(folder, rows, model_of(folder, folder / "checkpoints" / "global_step_1")) < 1e-4
    assert worst(folder, rows, model_of(folder)) > 1e-2, "the old weights would not be told from the new ones"
