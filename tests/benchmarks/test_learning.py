from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import pad

from benchmarks.learning import measure as learning
from benchmarks.learning.credit import METHODS, method_of
from benchmarks.learning.measure import Record, Run, describe_weights, grid, study, train
from benchmarks.learning.rollout import Rollout
from benchmarks.tiny.model import build_model
from benchmarks.tiny.warm_start import WarmStart
from benchmarks.tiny.words import PAD
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import GATES
from oar_plugin.credit.importance import IMPORTANCES
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.passes.request import Request
from tests.bench.rollouts import TASK, demonstrated

PADDED = {"token_BL": PAD, "segments_BL": int(Segment.OUTSIDE), "response_BL": False}
RUN = Run("parallel", "grpo", 1e-3, 0, steps=2, prompts=2, copies=2, evaluate_every=2)


@pytest.fixture
def model():
    return build_model(0, hidden=16, layers=1)


@pytest.fixture
def rollout(model):
    return demonstrated(model)


def test_rollout_lays_out_segments_and_results(rollout: Rollout):
    assert rollout.graded.reward == 0.5
    assert rollout.graded.answered == 1
    assert (rollout.advantage_B > 0).sum() == 2
    assert (rollout.segments_BL[:, : rollout.prompt_length] == Segment.OUTSIDE).all()
    assert ((rollout.segments_BL == Segment.ANSWER).sum(-1) == TASK.steps).all()
    assert (rollout.causal_BL.sum(-1) == TASK.steps).all()
    assert not (rollout.causal_BL & ~rollout.reasoning_BL).any()
    assert torch.equal(rollout.response_BL, rollout.segments_BL != Segment.OUTSIDE)
    assert torch.equal(rollout.mask_BL, rollout.token_BL != PAD)


def request_of(name):
    run = replace(RUN, method=name)
    return Request.from_config(run.config(), 1, 100, replacement_token=PAD)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method is not None])
def test_every_method_scores_and_leaves_the_model_alone(name, model, rollout):
    before = [parameter.clone() for parameter in model.parameters()]
    importance_BL = METHODS[name](model, rollout, request_of(name))
    kept = importance_BL[rollout.reasoning_BL]
    assert importance_BL.shape == rollout.token_BL.shape
    assert torch.isfinite(kept).all()
    assert (kept >= -1e-6).all()
    assert name == "uniform" or kept.std() > 0
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert parameter.requires_grad
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("name", IMPORTANCES)
def test_padding_changes_no_score(name, model, rollout):
    """Nor do the random numbers in it depend on how long the other responses of a batch are."""
    longer = {field: pad(getattr(rollout, field), (0, 3), value=value) for field, value in PADDED.items()}
    alone, together = (METHODS[name](model, r, request_of(name)) for r in (rollout, replace(rollout, **longer)))
    torch.testing.assert_close(together[:, :-3], alone, rtol=1e-3, atol=1e-5 * alone.max().item())


def test_training_moves_the_model_and_methods_see_the_same_problems(model):
    records = [train(replace(RUN, method=name), build_model(0, hidden=16, layers=1)) for name in ("grpo", "uniform")]
    assert records[0].steps[0]["reward"] == records[1].steps[0]["reward"]
    assert set(records[0].held_out) == {0, 2}
    again = Record.from_json(records[0].to_json())
    assert again == records[0]


def test_update_raises_what_was_good(model, rollout):
    def gap():
        with torch.no_grad():
            row = model(rollout.token_BL).logits[:, :-1].log_softmax(-1)
        chosen = row.gather(-1, rollout.token_BL[:, 1:, None])[..., 0] * rollout.response_BL[:, 1:]
        return (chosen.sum(-1) * rollout.advantage_B).sum()

    before = gap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learning._update(model, optimizer, rollout, torch.ones(rollout.token_BL.shape))
    assert gap() > before


def test_weights_decide_which_tokens_learn(model, rollout):
    """With all weight on the results, only their rows have a gradient on the logits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    nothing = learning._update(model, optimizer, rollout, torch.zeros(rollout.token_BL.shape))
    results = learning._update(model, optimizer, rollout, rollout.causal_BL.float())
    assert nothing["gradient_norm"] == 0
    assert results["gradient_norm"] > 0


def test_recall_counts_results_among_the_highest_scores():
    importance_BL = torch.tensor([[0.1, 0.9, 0.5, 0.8]])
    usable_BL = torch.tensor([[True, True, True, True]])
    causal_BL = torch.tensor([[False, True, True, False]])
    found = describe_weights(importance_BL, importance_BL, usable_BL, causal_BL)
    assert found["recall"] == 0.5
    assert found["weight_causal"] == pytest.approx(0.7)
    assert found["weight_other"] == pytest.approx(0.45)


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    small = WarmStart(hidden=16, layers=1, short_steps=1, full_steps=1, batch=2)
    monkeypatch.setattr(learning, "learned_model", partial(_tiny, settings=small))
    runs = grid(RUN, ["parallel"], ["grpo"], [1e-3], [0, 1])
    first = study(runs, tmp_path / "runs", tmp_path)
    monkeypatch.setattr(learning, "train", lambda *_: pytest.fail("trained again"))
    named = []
    again = study(runs, tmp_path / "runs", tmp_path, named.append)
    assert again == first
    assert named == ["parallel grpo lr 0.001 seed 0", "parallel grpo lr 0.001 seed 1"]


def _tiny(task, seed, cache, settings):
    from benchmarks.tiny.warm_start import warm_model

    return warm_model(task, seed, settings, cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "cooking"}, "cooking"),
        ({"method": "magic"}, "grpo, uniform"),
        ({"method": "python:oar_plugin.config:nothing"}, "nothing"),
        ({"method": "python:oar_plugin.config:OarConfig"}, "derived from"),
        ({"gate": "magic"}, "bi_level"),
        ({"copies": 1}, "--copies 2"),
    ],
)
def test_what_cannot_work_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **change).check()


def test_the_probe_warms_up(model, rollout):
    """`last` for as many steps as were asked for."""
    probes = []

    def oracle(model, rollout, request):
        probes.append(request.probe)
        return rollout.causal_BL.float()

    run = replace(RUN, method="oracle", warmup_steps=2)
    for step in range(4):
        learning.reshaped_weights(run, model, rollout, oracle, step, {})
    assert probes == ["last", "last", "answer_mean", "answer_mean"]


def test_own_methods_are_scored_as_the_packages_are(model, rollout):
    path = "python:oar_plugin.credit.importance.fisher:Fisher"
    own, ours = (method_of(name)(model, rollout, request_of(name)) for name in (path, Fisher.name))
    assert torch.equal(own, ours)


def flat_gate(importance_BL, reasoning_BL, tau, beta, floor):
    return torch.ones(importance_BL.shape)


def test_own_gate_is_used_and_described(model, rollout):
    entry = {}
    run = replace(RUN, method="oracle", gate="python:tests.bench.test_learning:flat_gate")
    weight_BL = learning.reshaped_weights(run, model, rollout, METHODS["oracle"], 0, entry)
    assert (weight_BL == 1).all()
    assert entry["ess_ratio"] == pytest.approx(1)
    learning.reshaped_weights(replace(run, gate="bi_level"), model, rollout, METHODS["oracle"], 0, entry)
    assert entry["ess_ratio"] < 1
    assert entry["weight_causal"] > entry["weight_other"]


def test_a_gate_brings_its_own_quantile():
    assert {name: replace(RUN, gate=name).config().quantile for name in GATES} == {n: g.tau for n, g in GATES.items()}
    assert replace(RUN, tau=0.7).config().quantile == 0.7


def test_gate_settings_are_none_of_grpos():
    runs = grid(replace(RUN, tau=0.7, gate="m:f"), ["parallel"], ["grpo", "fisher"], [1e-3], [0])
    assert [(run.tau, run.gate) for run in runs] == [(None, OarConfig().gate), (0.7, "m:f")]
