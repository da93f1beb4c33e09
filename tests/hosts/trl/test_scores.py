"""A training step's scores and weights are the front door's, whatever TRL's settings are."""

import pytest
from peft import LoraConfig
from transformers import Gemma2Config

import oar_plugin
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes import prediction
from tests.hosts.engine import world
from tests.hosts.trl import tiny
from tests.hosts.trl.watched import relative, watched
from tests.passes.batch import random_model

OWN = "python:tests.own_importance:Saliency"


@pytest.mark.parametrize("importance", ["fisher", "oar_g", "oar_p", OWN])
def test_scores_and_weights_equal_the_front_doors(tmp_path, importance):
    """Prompts of different length stand padded on the left; responses are sampled at another temperature than 1."""
    # oar_g reads the difference of two distributions that noise of 1e-3 keeps apart: here more noise, or rounding shows.
    oar = {"importance": importance, "sigma": 0.1, "warmup_steps": 1, "seed": 3}
    # Saliency is a sum whose terms cancel, of 1 - p, of which a sure answer leaves the rounding: 2.5e-5 on some CPUs.
    limit = 1e-4 if importance == OWN else 1e-5
    trainer = watched(tmp_path, oar, temperature=0.7, per_device_train_batch_size=8)
    assert [seen.step for seen in trainer.seen] == [1, 2]
    for seen in trainer.seen:
        assert not seen.output["prompt_mask"].all()
        assert seen.error() < limit
        got = seen.output["advantages"]
        want = oar_plugin.reshape(seen.plain_B, seen.credit).advantage_BL
        rows = (seen.plain_B != 0).nonzero()[:, 0].tolist()
        assert len(rows) == 8
        assert max(relative(got[row], seen.front(want, row)) for row in rows) < limit
        assert (got != seen.plain_B[:, None]).any()


def test_predicted_scores_equal_the_front_doors(tmp_path, monkeypatch):
    """With what the first step taught."""
    monkeypatch.setattr(prediction, "ENOUGH", world.ENOUGH)
    trainer = watched(tmp_path, {"amortize.share": world.SHARE}, temperature=0.7, per_device_train_batch_size=8)
    log = [line for line in trainer.state.log_history if "oar/scored" in line]
    assert [line["oar/amortize/predicted"] for line in log] == [0, log[1]["oar/scored"]] != [0, 0]
    assert [line["oar/amortize/learning_steps"] for line in log] == [1, 0]
    assert trainer.seen[1].error() < 1e-4


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], init_lora_weights=False, lora_dropout=0.1)
CAPPED = {"head_dim": 8, "final_logit_softcapping": 2.0, "initializer_range": 0.3, "vocab_size": len(tiny.TOKENIZER)}
SETTINGS = {
    "capped logits": {"model": random_model(Gemma2Config, **CAPPED)},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "ahead": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "num_iterations": 2},
    "bf16": {"bf16": True, "gradient_checkpointing": True},
    "fp32 head": {"bf16": True, "cast_lm_head_to_fp32": True},
    "padded": {"pad_to_multiple_of": 8},
    "lora": {"peft_config": LORA, "beta": 0.1, "gradient_checkpointing": True},
    "batch of all": {"loss_type": "cispo", "scale_rewards": "batch", "top_entropy_quantile": 0.5},
    "sequence": {"loss_type": "vespo", "off_policy_mask_threshold": 0.1},
    "no patterns": {"oar": {"answer_patterns": [], "probe": "last"}},
}
STEPS = {"iterations": [1, 3], "ahead": [1]}  # that generate


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_equal_the_front_doors_with_these_settings(tmp_path, name):
    """`Watched` looks at weights, gradients, flags, modes, hooks and random numbers before and after each pass."""
    trainer = watched(tmp_path, **{"oar": {}} | SETTINGS[name])
    assert [seen.step for seen in trainer.seen] == STEPS.get(name, [1, 2])
    for seen in trainer.seen:
        assert seen.error() < 1e-5


def test_the_masks_of_a_rollout_function_and_of_cut_off_responses(tmp_path):
    """The second token of each response is the environment's; the third response of four is cut off."""

    def rollout(prompts, trainer):
        made = tiny.scripted(prompts, trainer)
        made["completion_ids"][2] = [3] * tiny.LENGTH
        return made | {"env_mask": [[1, 0, *[1] * (len(row) - 2)] for row in made["completion_ids"]]}

    for masked in (False, True):
        trainer = watched(tmp_path, {}, rollout=rollout, mask_truncated_completions=masked)
        for seen in trainer.seen:
            assert seen.error() < 1e-5
            assert (seen.segments_BL[:, 1] == Segment.OUTSIDE).all()
            assert (seen.output["advantages"][:, 1] == seen.plain_B).all()
            assert (seen.output["advantages"][2] == seen.plain_B[2]).all()
            assert seen.status_B[2] == (Status.NOT_NEEDED if masked else Status.TRUNCATED)
