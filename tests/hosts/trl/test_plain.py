"""Where all tokens matter alike the run is plain `GRPOTrainer`'s, bit for bit; and a run goes on from its checkpoint."""

import math

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from oar_plugin.credit.importance import importance_of
from oar_plugin.hosts.trl import OarGRPOTrainer
from oar_plugin.hosts.trl.trainer import PAY_TOKENS
from tests.hosts.siblings import EVEN
from tests.hosts.trl import tiny
from tests.hosts.trl.watched import BAD, Bad

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]


def after(kind, folder, resume=None, **changes):
    """Weights, and the trainer, after a run with dropout whose responses come from torch's random numbers."""
    trainer = tiny.make(kind, folder, **{"rollout": tiny.drawn, "max_steps": 2} | changes)
    trainer.train(resume_from_checkpoint=resume)
    return tiny.weights(trainer), trainer


@pytest.mark.parametrize(
    "changes",
    [
        *({"loss_type": loss} for loss in LOSSES),
        {"num_iterations": 2, "gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True},
        {"rollout": None},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_constant_importance_is_plain_grpo_bit_for_bit(tmp_path, changes):
    """A whole pass is run, with a backward; its weights are all 1. `rollout=None`: the model samples."""
    plain, _ = after(GRPOTrainer, tmp_path, **changes)
    even, trainer = after(OarGRPOTrainer, tmp_path, oar={"importance": EVEN}, **changes)
    assert tiny.same_weights(plain, even)
    if changes.get("rollout", True):
        assert max(tiny.logged(trainer, "oar/fallback/constant")) == 1


@pytest.mark.parametrize("loss", PAY_TOKENS)
def test_credit_counts_where_the_ratio_is_the_whole_responses(tmp_path, loss):
    """In the losses that are not refused for it."""
    changes = {"loss_type": loss, "importance_sampling_level": "sequence"}
    plain, _ = after(GRPOTrainer, tmp_path, **changes)
    even, _ = after(OarGRPOTrainer, tmp_path, oar={"importance": EVEN}, **changes)
    shaped, _ = after(OarGRPOTrainer, tmp_path, oar={}, **changes)
    assert tiny.same_weights(plain, even)
    assert max((plain[name] - shaped[name]).abs().max() for name in plain) > 1e-3


def test_an_importance_that_is_no_number_falls_back_and_is_counted(tmp_path, monkeypatch):
    plain, _ = after(GRPOTrainer, tmp_path)
    importance_of(BAD)  # has passed the check of its class
    monkeypatch.setattr(Bad, "value", math.nan)
    bad, trainer = after(OarGRPOTrainer, tmp_path, oar={"importance": BAD})
    assert tiny.same_weights(plain, bad)
    assert max(tiny.logged(trainer, "oar/fallback/non_finite")) == 1
    assert tiny.logged(trainer, "oar/scored") == [0, 0]


class Stop(TrainerCallback):
    def on_save(self, args, state, control, **_):
        control.should_training_stop = True


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """As one that was not interrupted: weights, and metrics but for seconds. So does TRL's own."""
    metrics = {}
    for kind, oar in ((GRPOTrainer, {}), (OarGRPOTrainer, {"oar": {"importance": "oar_g"}})):
        named = {"max_steps": 4, "save_steps": 2, "num_iterations": 2, "gradient_accumulation_steps": 2, **oar}
        whole, trainer = after(kind, tmp_path / "whole", save_strategy="no", **named)
        folder = tmp_path / kind.__name__
        after(kind, folder, save_strategy="steps", callbacks=[Stop()], **named)
        resumed, again = after(kind, folder, resume=str(folder / "checkpoint-2"), save_strategy="no", **named)
        assert tiny.same_weights(whole, resumed)
        last, later = ([line for line in one.state.log_history if "reward" in line][-1] for one in (trainer, again))
        metrics = {name: last[name] for name in last if name.startswith("oar/") and name != "oar/seconds"}
        assert metrics.items() <= later.items()
    assert max(tiny.logged(again, "oar/scored")) > 0
    assert torch.tensor(list(metrics.values())).isfinite().all()
