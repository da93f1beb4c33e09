"""The small trainer of the study of learning against the package and the textbook."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import oar_plugin
from benchmarks.learning import training
from benchmarks.learning.tasks import TASKS, NamedParallel
from benchmarks.learning.training import Credit, Run, forward, roll_out
from benchmarks.tiny.fast import micro_batches
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD, encode, make_tokenizer
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance import Importance
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes import prediction

TASK = NamedParallel("parallel", steps=2, filler=(1, 2), error_rate=0.2)
ONWARD = "python:benchmarks.candidates.learning:Onward"
RUN = Run(task="parallel", credit=Credit(), lr=1e-3, warm=0, seed=0, steps=2, prompts=4, copies=2)


class Uniform(Importance):
    name = "Uniform"
    help = "Every token matters as much."

    def combine(self, parts):
        return torch.ones(parts.reasoning_BL.shape)


def writes(task, problems):
    """A `sample` of demonstrations to what `problems` draws: every other response has nothing but errors, but for the third
    problem, where all are right; the very last one does not end. A model with random weights would write no answers."""

    def sample(model, prompt_BP, copies, *_):
        rng, rows = random.Random(0), []
        for number, _ in enumerate(prompt_BP):
            problem = task.problem(problems)
            rows += [task.demonstration(problem, rng, copy % 2 * (number != 2)) for copy in range(copies)]
        rows[-1] = (rows[-1][:-1] + encode(["so"]) * 99)[: task.max_response_length]
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)

    return sample


def small():
    """Its norms' weights are no ones, or the small trainer could leave them out."""
    model = build_model(0, hidden=16, layers=1, tied=False)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter *= 1 + 0.1 * torch.sin(torch.arange(parameter.shape[-1]) + number)
    return model


@pytest.fixture
def model():
    return small()


@pytest.fixture
def rollout(model, monkeypatch):
    monkeypatch.setattr(training, "sample", writes(TASK, random.Random(0)))
    return roll_out(model, TASK, random.Random(0), torch.Generator(), RUN.prompts, RUN.copies)


def trained(run, monkeypatch, **settings):
    """The model after `run`, on demonstrations, and its record."""
    model = build_model(0, hidden=16, layers=1)
    monkeypatch.setitem(TASKS, "parallel", TASK)
    monkeypatch.setattr(training, "sample", writes(TASK, random.Random(run.draw)))
    monkeypatch.setattr(training, "HELD_OUT", 4)
    return model, training.train(replace(run, **settings), model)


def test_a_rollout_has_the_responses_that_teach_something(rollout):
    """The third of four problems has no advantage; the last response has no end."""
    assert rollout.graded["reward"] == 5 / 8
    assert rollout.advantage_B.sign().tolist() == [1, -1] * 3
    assert rollout.advantage_B.abs().tolist() == pytest.approx([0.5**0.5] * 6, abs=1e-5), "(r - mean) / (std + 1e-6)"
    assert rollout.status_B.tolist() == [Status.SCORED] * 5 + [Status.TRUNCATED]
    assert (rollout.segments_BL[-1] == Segment.OUTSIDE).all()
    assert torch.equal(rollout.wrong_BL, rollout.causal_BL & rollout.negative_B1)


@pytest.mark.parametrize(
    ("name", "probe", "share", "units", "replacement"),
    [(name, "answer_mean", None, None, "pad") for name in ("fisher", "entropy", "oar_g", ONWARD)]
    + [("oar_p", probe, None, None, "pad") for probe in PROBES]
    + [("fisher", "answer_mean", 0.5, None, "pad"), ("oar_p", "answer_mean", 0.5, None, "pad")]
    + [("oar_p", "answer_mean", None, None, "sampled"), ("oar_p", "answer_mean", 0.1, 3, "sampled")],
)
def test_importance_of_the_shared_graph_and_of_many_copies_is_the_packages(
    name, probe, share, units, replacement, model, rollout, monkeypatch
):
    """Predicted importance too, from the second step on."""
    monkeypatch.setattr(training, "micro_batches", partial(micro_batches, rows=4))
    monkeypatch.setattr(prediction, "ENOUGH", (20, 2))
    monkeypatch.setattr(prediction, "FEWEST", 6)
    run = replace(RUN, credit=Credit(importance=name, probe=probe, share=share, units=units, replacement=replacement))
    here, there = training.predictor_for(run), None
    if share is not None:  # the small trainer predicts from hidden states without this weight
        torch.nn.init.ones_(model.model.norm.weight)
    given = {"attention_mask": rollout.mask_BL, "response_mask": rollout.response_BL, "segments": rollout.segments_BL}
    given |= {"tokenizer": make_tokenizer(), "importance": name, "probe": probe}
    given |= {"amortize.share": share, "amortize.units": units, "perturbation.replacement": replacement}
    for step in range(1 if share is None else 4):
        labelled_BL = training.labelled(here, training.request_of(run, step), rollout)
        here_BL = training.importance(run, rollout, forward(model, rollout, labelled_BL), step, here, labelled_BL)
        credit = oar_plugin.importance(model, rollout.token_BL, step=step + 1, predictor=there, **given)
        there, there_BL = credit.predictor, credit.importance
        assert (here_BL > 0).sum() > 20 or (share is not None and step < 2)
        torch.testing.assert_close(here_BL, there_BL, rtol=2e-3, atol=1e-5 * max(1.0, there_BL.max().item()))
    assert (labelled_BL.sum() < rollout.reasoning_BL.sum()) == (share is not None)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_update_is_the_textbooks(model, rollout, monkeypatch):
    """REINFORCE, a mean over the tokens of all responses, its norm clipped."""
    monkeypatch.setattr(training, "MAX_GRADIENT_NORM", 0.01)
    weight_BL, other = torch.rand(rollout.token_BL.shape), small()
    log_prob_BLV = other(rollout.token_BL).logits[:, :-1].log_softmax(-1)
    log_prob_BL = log_prob_BLV.gather(-1, rollout.token_BL[:, 1:, None])[..., 0]
    gain_BL = (rollout.advantage_B[:, None] * weight_BL)[:, 1:]
    loss = -(log_prob_BL * gain_BL)[rollout.response_BL[:, 1:]].sum() / rollout.graded["tokens"]
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    told = training.update(model, optimizer, rollout, forward(model, rollout), weight_BL)
    assert told["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_uniform_credit_is_grpo_bit_for_bit(monkeypatch):
    grpo, uniform, entropy = (
        trained(RUN, monkeypatch, credit=Credit(importance=name))
        for name in (None, f"python:{__name__}:Uniform", "entropy")
    )
    assert torch.equal(flat(grpo[0]), flat(uniform[0]))
    assert not torch.equal(flat(grpo[0]), flat(entropy[0]))
    assert [step["fallback/any"] for step in uniform[1].steps] == [1.0] * RUN.steps


def flat(model):
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_the_oracle_pays_no_right_result_of_a_wrong_response(rollout):
    """Three for a result, one for other tokens, before the mean over a response's reasoning becomes 1."""
    run = replace(RUN, credit=Credit(importance="blame"))
    rollout.wrong_BL[1, rollout.causal_BL[1].nonzero()[0]] = False
    raw_BL = torch.where(rollout.causal_BL, 3.0, 1.0).masked_fill(rollout.right_in_wrong_BL, 0.0)
    weight_BL, told = training.weights(run, rollout, training.importance(run, rollout, [], 0))
    for raw_L, weight_L, keep_L in zip(raw_BL, weight_BL, rollout.reasoning_BL, strict=True):
        torch.testing.assert_close(weight_L[keep_L], raw_L[keep_L] / raw_L[keep_L].mean())
        assert (weight_L[~keep_L] == 1).all()
    assert told["right_in_wrong"] == 0 < told["wrong_in_wrong"]
