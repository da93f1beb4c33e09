"""The gradient pass on a plain model, against plain autograd one response at a time."""

from functools import partial

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    HyperCLOVAXConfig,
    Qwen2ForCausalLM,
    RecurrentGemmaConfig,
)

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import IMPORTANCES, Importance
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request
from tests.asked import asked
from tests.hosts.engine import world
from tests.passes.batch import distance, error, gradient_pass, padded, positions, random_model, rows_of, unpadded

OWN = "python:tests.own_importance:Saliency"
TWO = "python:benchmarks.candidates.learning:Onward"  # two backwards
WORDS = {OWN: "own", TWO: "onward"}
# The engines' tests' bounds: 5e-3 is float32's rounding of P_noisy - P, which the joint probe has none of.
BOUNDS = {"fisher": 1e-5, "oar_g": 5e-3, "grail": 1e-5, TWO: 1e-5, "entropy": 1e-5, OWN: 1e-4}
CHANGED = {  # the logits of these models, after the vocabulary projection
    CohereConfig: {"logit_scale": 0.3},
    Gemma2Config: {"final_logit_softcapping": 2.0, "head_dim": 8},
    GraniteConfig: {"logits_scaling": 3.0},
    HyperCLOVAXConfig: {"logits_scaling": 0.3},
    RecurrentGemmaConfig: {"logits_soft_cap": 2.0, "head_dim": 8, "block_types": ["recurrent", "attention"]},
}
every_importance = pytest.mark.parametrize("importance", BOUNDS)
every_probe = pytest.mark.parametrize("probe", PROBES)


def bound(importance, probe="answer_mean"):
    return 1e-4 if (importance, probe) == ("oar_g", "answer_joint") else BOUNDS[importance]


def run(model, batch=None, importance="fisher", probe="answer_mean", request=None, **more):
    batch, request = batch or padded(rows_of()), request or asked(importance, probe, **{"temperature": 0.7, **more})
    return unpadded(gradient_pass(model, request, *batch), batch[2])


@every_probe
@every_importance
def test_every_padding_equals_plain_autograd(model, folder, importance, probe):
    want = world.reference(folder, WORDS.get(importance, importance), probe)
    for left in (False, True):
        for more in (0, 3):
            got = run(model, padded(rows_of(), left, more), importance, probe)
            assert error(got, want) < bound(importance, probe)


@pytest.mark.parametrize("kind", CHANGED)
def test_a_model_that_changes_its_logits_equals_plain_autograd_and_whole_copies(kind, monkeypatch):
    model = random_model(kind, vocab_size=300, **CHANGED[kind]).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)  # logits so large that a cap changes them
    batch, responses = padded(rows_of()), [(ids, segments[positions(segments)[0] :]) for ids, segments in rows_of()]

    def error(importance, reference, probe="answer_mean"):
        request = asked(importance, probe, temperature=0.7, replacement_token=world.PAD)
        got = unpadded(batch_importance(model, request, *batch), batch[2])
        want = [torch.nn.functional.pad(reference(*row), (len(row[0]) - len(row[1]), 0)) for row in responses]
        return distance(got, want)

    for importance in ("fisher", OWN):
        for probe in PROBES:
            named = {"importance": WORDS.get(importance, importance), "probe": probe, "temperature": 0.7}
            reference = partial(world.gradient_importance, model, **named)
            assert error(importance, reference, probe) < BOUNDS[importance]
    assert error("oar_p", partial(world.of_response, model)) < 1e-5
    monkeypatch.setattr("oar_plugin.passes.taps.LOGIT_CHANGES", {})  # unchanged logits would be noticed
    assert error("fisher", partial(world.gradient_importance, model, temperature=0.7)) > 0.05


@every_importance
def test_padding_on_the_left_does_not_move_positions(importance):
    """A model with absolute positions, where that shows."""
    torch.manual_seed(0)
    size = {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    gpt2 = GPT2LMHeadModel(GPT2Config(**size)).eval()
    right, left = (run(gpt2, padded(rows_of(), side, more=3), importance) for side in (False, True))
    assert distance(left, right) < bound(importance)


@pytest.mark.parametrize("importance", [*BOUNDS, "random"])
def test_a_batch_equals_one_by_one(model, importance):
    """With two draws, padding on either side, and without a mask: there is no padding in a batch of one."""
    draws, limit = {"num_draws": 2, "seed": 5, "temperature": 0.7}, BOUNDS.get(importance, 0.0)
    for left in (False, True):
        together = run(model, padded(rows_of(), left), importance, **draws)
        for (ids, segments), row in zip(rows_of(), together, strict=True):
            alone = gradient_pass(model, asked(importance, **draws), ids[None], segments[None])
            assert distance([row], [alone[0]]) <= limit


@pytest.mark.parametrize(("importance", "power"), [("grail", 0), ("fisher", -2)])
def test_the_scale_of_the_embeddings_is_in_scores_only_where_they_say_so(folder, importance, power):
    """The same function with embeddings, and all that is added to them, of another size."""
    want = run(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(), importance=importance)
    for scale in (1e-3, 1e3):
        other = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64, rms_norm_eps=1e-6 * scale**2).eval()
        for name, weight in other.named_parameters():
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                weight.data.mul_(scale)
        for norm in (module for name, module in other.named_modules() if name.endswith("norm")):
            norm.variance_epsilon = 1e-6 * scale**2
        got = run(other, importance=importance)
        assert distance([row / scale**power for row in got], want) < 1e-5


# ---- edges


@pytest.mark.parametrize("importance", [*BOUNDS, "random"])
def test_responses_that_have_nothing_to_score_are_zero_and_spoil_no_other(model, importance):
    """No segments at all, an answer alone, and one row of padding alone; then with nothing to score in the whole batch."""
    rows = rows_of()
    nothing = (rows[0][0], torch.zeros_like(rows[0][1]))
    only_answer = (rows[0][0], torch.where(rows[0][1] == Segment.REASONING, 0, rows[0][1]))
    batch = tuple(torch.cat([x, torch.zeros_like(x[:1])]) for x in padded([nothing, *rows, only_answer]))
    got = run(model, batch, importance)
    assert not any(got[place].any() for place in (0, 5, 6))
    limit = bound(importance) if importance in BOUNDS else 1e-9
    assert distance(got[1:5], run(model, importance=importance)) < limit
    batch = padded([nothing, only_answer])
    assert not any(row.any() for row in run(model, batch, importance))
    padding = tuple(torch.zeros_like(x) for x in batch)
    assert [len(row) for row in run(model, padding, importance)] == [0, 0]


@every_importance
def test_a_response_without_a_prompt(model, importance):
    """Its first token was drawn from a distribution that nobody computed: no row predicts it."""
    ids, segments = rows_of()[0]
    start = int((segments == Segment.REASONING).nonzero()[0])
    alone = (ids[start:], segments[start:])
    got = run(model, padded([alone, rows_of()[1]]), importance)
    assert torch.isfinite(got[0]).all()
    assert got[0][1:8].all()
    if IMPORTANCES.get(importance, Importance()).reads:
        assert got[0][0] == 0
    assert distance(got[:1], run(model, padded([alone]), importance)) < bound(importance)


# ---- seeds


@pytest.mark.parametrize("importance", ["fisher", "oar_g", TWO, "random"])
def test_numbers_are_the_same_within_a_step_and_others_in_every_step_response_and_place(model, importance):
    config = OarConfig(importance=importance, num_draws=2)
    first, again, second = (run(model, request=Request.of_step(config, step)) for step in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all((a - b).abs().max() > 1e-3 * b.max() for a, b in zip(first, second, strict=True))
    if importance == "random":  # a number of its own for each place of each response, and nothing elsewhere
        values = torch.cat([row[row != 0] for row in (*first, *second)])
        assert 0 < values.min() < values.max() < 1
        assert len(values.unique()) == 2 * sum(len(positions(segments)) for _, segments in rows_of())
