import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from oar_plugin.bench import learning
from oar_plugin.bench.learning import Record, Run, describe_weights, grid, study, train
from oar_plugin.bench.learning_credit import METHODS, CreditPass, method_of
from oar_plugin.bench.learning_rollout import Rollout, roll_out
from oar_plugin.bench.reasoning.model import build_model
from oar_plugin.bench.reasoning.tasks import TASKS
from oar_plugin.bench.reasoning.vocabulary import PAD
from oar_plugin.bench.reasoning.warm_start import WarmStart
from oar_plugin.credit.answer import Segment

TASK = replace(TASKS["parallel"], steps=2, filler=(1, 2))
RUN = Run("parallel", "grpo", 1e-3, 0, steps=2, prompts=2, copies=2, evaluate_every=2)


@pytest.fixture
def model():
    return build_model(0, hidden=16, layers=1)


@pytest.fixture
def rollout(monkeypatch, model):
    """Demonstrations in place of samples: a model with random weights writes no answers."""
    rng = random.Random(0)

    def demonstrations(model, prompt_BP, copies, max_new_tokens, generator):
        rows = []
        for number in range(len(prompt_BP) * copies):
            problem = problems[number // copies]
            rows.append(TASK.demonstration(problem, rng, 0.0 if number % 2 else 1.0))
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])

    problems = []

    class Remembering(type(TASK)):
        def problem(self, rng):
            problems.append(super().problem(rng))
            return problems[-1]

    task = Remembering(TASK.name, TASK.steps, TASK.filler, TASK.error_rate)
    monkeypatch.setattr("oar_plugin.bench.learning_rollout.sample", demonstrations)
    return roll_out(model, task, rng, torch.Generator(), prompts=2, copies=2)


def test_rollout_lays_out_segments_and_results(rollout: Rollout):
    assert rollout.graded.reward == 0.5
    assert rollout.graded.answered == 1
    assert (rollout.advantage_B > 0).sum() == 2
    assert (rollout.segments_BL[:, : rollout.prompt_length] == Segment.OUTSIDE).all()
    assert (rollout.answer_BL.sum(-1) == TASK.steps).all()
    assert (rollout.causal_BL.sum(-1) == TASK.steps).all()
    assert not (rollout.causal_BL & ~rollout.reasoning_BL).any()
    assert torch.equal(rollout.response_BL, rollout.segments_BL != Segment.OUTSIDE)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method is not None])
def test_every_method_scores_and_leaves_the_model_alone(name, model, rollout):
    before = [parameter.clone() for parameter in model.parameters()]
    importance_BL = METHODS[name](CreditPass(model, rollout, "answer_mean", 0))
    kept = importance_BL[rollout.reasoning_BL]
    assert importance_BL.shape == rollout.token_BL.shape
    assert torch.isfinite(kept).all()
    assert (kept >= -1e-6).all()
    assert name == "uniform" or kept.std() > 0
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert parameter.requires_grad
        assert torch.equal(parameter, old)


def test_fisher_norm_of_the_answer_is_the_expected_squared_gradient(model, rollout):
    """Against all rows of the Fisher matrix's root, one backward each; the mean over signs comes near it."""
    draws = 200
    total = 0.0
    for seed in range(draws):
        with CreditPass(model, rollout, "answer_joint", seed) as credit:
            total = total + credit.fisher_norm(rollout.answer_BL.float())
    estimate = (total / draws)[rollout.reasoning_BL]

    rows = (rollout.answer_BL.nonzero() - torch.tensor([0, 1])).tolist()
    embedding = model.get_input_embeddings()(rollout.token_BL).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedding, use_cache=False).logits
    exact = torch.zeros(rollout.token_BL.shape)
    for row, position in rows:
        p = logits[row, position].softmax(-1).detach()
        for v in range(0, len(p)):
            scalar = p[v].sqrt() * logits[row, position].log_softmax(-1)[v]
            exact += torch.autograd.grad(scalar, embedding, retain_graph=True)[0].square().sum(-1)
    exact = exact[rollout.reasoning_BL]
    assert torch.corrcoef(torch.stack([estimate, exact]))[0, 1] > 0.98
    assert abs(estimate.sum() / exact.sum() - 1) < 0.15


def test_fisher_norm_ignores_what_comes_later(model, rollout):
    with CreditPass(model, rollout, "answer_mean", 0) as credit:
        weight_BL = torch.zeros(rollout.token_BL.shape)
        weight_BL[:, rollout.prompt_length + 2] = 1.0
        found = credit.fisher_norm(weight_BL)
    assert (found[:, : rollout.prompt_length + 2] > 0).all()
    assert (found[:, rollout.prompt_length + 2 :] == 0).all()


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
    from oar_plugin.bench.reasoning.warm_start import warm_model

    return warm_model(task, seed, settings, cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "cooking"}, "cooking"),
        ({"method": "magic"}, "grpo, uniform"),
        ({"method": "oar_plugin.config:nothing"}, "nothing"),
        ({"gate": "magic"}, "bi_level"),
        ({"copies": 1}, "--copies 2"),
    ],
)
def test_what_cannot_work_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **change).check()


def test_the_probe_warms_up(model, rollout, monkeypatch):
    """`last` for as many steps as were asked for."""
    probes = []
    monkeypatch.setitem(METHODS, "oracle", lambda credit: probes.append(credit.probe) or rollout.causal_BL.float())
    run = replace(RUN, method="oracle", warmup_steps=2)
    for step in range(4):
        learning.reshaped_weights(run, model, rollout, method_of("oracle"), step, {})
    assert probes == ["last", "last", "answer_mean", "answer_mean"]


def test_own_methods_are_imported():
    assert method_of("oar_plugin.bench.learning_credit:_random") is METHODS["random"]


def flat_gate(importance_BL, reasoning_BL, tau, beta, floor):
    return torch.ones(importance_BL.shape)


def test_own_gate_is_used_and_described(model, rollout):
    entry = {}
    run = replace(RUN, method="oracle", gate="tests.bench.test_learning:flat_gate")
    weight_BL = learning.reshaped_weights(run, model, rollout, METHODS["oracle"], 0, entry)
    assert (weight_BL == 1).all()
    assert entry["ess_ratio"] == pytest.approx(1)
    learning.reshaped_weights(replace(run, gate="bi_level"), model, rollout, METHODS["oracle"], 0, entry)
    assert entry["ess_ratio"] < 1
    assert entry["weight_causal"] > entry["weight_other"]


def test_gate_settings_are_none_of_grpos():
    runs = grid(replace(RUN, tau=0.85, gate="m:f"), ["parallel"], ["grpo", "fisher"], [1e-3], [0])
    assert [(run.tau, run.gate) for run in runs] == [(0.4, "bi_level"), (0.85, "m:f")]
