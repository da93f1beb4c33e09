"""The gradient pass on a plain model, against plain autograd one response at a time."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import IMPORTANCES, Importance
from oar_plugin.credit.perturbation import copies_of_budget
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes.plain import PlainPass, batch_importance
from oar_plugin.passes.request import Perturbation, Request
from tests.hosts.engine import world
from tests.passes.batch import distance, padded, rows_of, unpadded

OWN = "python:tests.own_importance:Saliency"
# The engines' tests' bounds: 5e-3 is float32's rounding of P_noisy - P, which the joint probe has none of.
BOUNDS = {"fisher": 1e-5, "oar_g": 5e-3, "onward": 1e-5, "entropy": 1e-5, OWN: 1e-4}
BY_GRADIENT = [name for name, importance in IMPORTANCES.items() if importance.backwards and importance.copies is None]


def bound(importance, probe):
    return 1e-4 if (importance, probe) == ("oar_g", "answer_joint") else BOUNDS[importance]


def run(model, batch, importance="fisher", probe="answer_mean", on_logits=None, **request):
    with PlainPass(model, Request(importance, probe, **{"temperature": 0.7, **request})) as one:
        return unpadded(one.importance(*batch, on_logits), batch[2])


def responses_of(rows):
    """Without the prompts, as the reference has them."""
    prompts = [len(world.encode()[number][0]) for number in world.SCORED]
    return [row[length:] for row, length in zip(rows, prompts, strict=True)]


def test_every_importance_by_gradient_is_compared():
    assert set(BY_GRADIENT) < set(BOUNDS)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("importance", BOUNDS)
def test_every_padding_equals_plain_autograd(model, folder, importance, probe):
    want = world.reference(folder, "own" if importance == OWN else importance, probe)
    for left in (False, True):
        for more in (0, 3):
            got = responses_of(run(model, padded(rows_of(), left, more), importance, probe))
            assert distance(got, [want[number] for number in world.SCORED]) < bound(importance, probe)


@pytest.mark.parametrize("importance", BOUNDS)
def test_padding_on_the_left_does_not_move_positions(importance):
    """A model with absolute positions, where that shows."""
    torch.manual_seed(0)
    size = {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    gpt2 = GPT2LMHeadModel(GPT2Config(**size)).eval()
    right, left = (run(gpt2, padded(rows_of(), side, more=3), importance) for side in (False, True))
    assert distance(left, right) < bound(importance, "answer_mean")


@pytest.mark.parametrize("importance", BOUNDS)
def test_a_batch_equals_one_by_one(model, importance):
    """With two draws, and without a mask: there is no padding in a batch of one."""
    together = run(model, padded(rows_of()), importance, num_draws=2, seed=5)
    for (ids, segments), row in zip(rows_of(), together, strict=True):
        with PlainPass(model, Request(importance, num_draws=2, seed=5, temperature=0.7)) as one:
            alone = one.importance(ids[None], segments[None])[0]
        assert distance([row], [alone]) < bound(importance, "answer_mean")


@pytest.mark.parametrize("importance", [*BOUNDS, "hybrid", "random"])
def test_the_hosts_logits_come_with_the_first_forward_and_change_nothing(model, importance):
    batch, seen = padded(rows_of()), []
    silent = run(model, batch, importance)
    assert distance(run(model, batch, importance, on_logits=seen.append), silent) < bound("oar_g", "answer_mean")
    (logits,) = seen
    assert not logits.requires_grad
    want = model(input_ids=batch[0], attention_mask=batch[2].long()).logits
    torch.testing.assert_close(logits[batch[2]], want[batch[2]])


def test_one_model_serves_many_batches_within_one_pass(model):
    want = [run(model, padded(rows_of([number]))) for number in world.SCORED]
    with PlainPass(model, Request("fisher", temperature=0.7)) as one:
        got = [one.importance(*padded(rows_of([number])))[0] for number in world.SCORED]
    assert all(torch.equal(a, b) for a, (b,) in zip(got, want, strict=True))


def test_copies_alone_have_no_gradient_importance(model):
    assert not any(row.any() for row in run(model, padded(rows_of()), "oar_p"))


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize(("span", "sampled"), [(1, False), (4, False), (1, True)])
def test_copies_of_a_batch_equal_single_copies(folder, probe, span, sampled):
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    perturbation = Perturbation(1.0, span, None if sampled else world.PAD)
    got = batch_importance(model, Request("oar_p", probe, perturbation=perturbation), *padded(rows_of()))
    want = world.counterfactual(folder, probe, span, sampled)
    assert distance(responses_of(unpadded(got, padded(rows_of())[2])), [want[n] for n in world.SCORED]) < 1e-5


def test_the_gradient_of_a_batch_chooses_its_copies(model):
    """The importance's own: the units with the largest `fisher` have exact scores, the others estimates in its order."""
    batch, perturbation = padded(rows_of()), Perturbation(0.3, 1, world.PAD)
    exact, hybrid = (
        unpadded(batch_importance(model, Request(name, perturbation=one), *batch), batch[2])
        for name, one in (("oar_p", Perturbation(1.0, 1, world.PAD)), ("hybrid", perturbation))
    )
    for gradient, one, all_, (_, segments) in zip(run(model, batch, "fisher"), hybrid, exact, rows_of(), strict=True):
        order = gradient.argsort(descending=True)
        chosen = order[: copies_of_budget(0.3, int((segments == Segment.REASONING).sum()))]
        torch.testing.assert_close(one[chosen], all_[chosen], rtol=1e-3, atol=1e-6)
        assert not torch.allclose(one, all_, rtol=1e-2)


@pytest.mark.parametrize("importance", BOUNDS)
def test_the_model_is_left_as_it_was(model, importance):
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[0].training = True

    def state():
        hooks = [(*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks) for m in model.modules()]
        training = [m.training for m in model.modules()]
        return hooks, training, [(p.requires_grad, p.grad, p._version, id(p)) for p in model.parameters()]

    before, rng = state(), torch.get_rng_state()
    try:
        run(model, padded(rows_of()), importance, num_draws=2)
        assert state() == before
        assert torch.equal(torch.get_rng_state(), rng)
    finally:
        model.model.norm.weight.requires_grad_(True)
        model.eval()


@pytest.mark.parametrize("importance", ["fisher", "onward", "entropy"])
def test_bf16_is_close_and_float64_closer(folder, model, importance):
    batch = padded(rows_of())
    want = run(model, batch, importance)
    for dtype, low, high in ((torch.bfloat16, 1e-5, 0.2), (torch.float64, 0, 1e-5)):
        other = Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        got = run(other, batch, importance)
        assert all(row.dtype == torch.float32 for row in got)
        assert low < distance(got, want) + 1e-12 < high
        assert {p.dtype for p in other.parameters()} == {dtype}


# ---- edges


@pytest.mark.parametrize("importance", [*BOUNDS, "random"])
def test_responses_that_have_nothing_to_score_are_zero_and_spoil_no_other(model, importance):
    """Rows 5 to 7: no answer, cut off, nothing to reason about. And one row of padding alone."""
    rows = rows_of()
    others = [(ids, torch.zeros_like(ids)) for ids, _ in rows]
    only_answer = [(ids, torch.where(segments == Segment.REASONING, 0, segments)) for ids, segments in rows[:1]]
    batch = padded([*others[:1], *rows, *only_answer])
    batch = tuple(torch.cat([x, torch.zeros_like(x[:1])]) for x in batch)
    got = run(model, batch, importance)
    assert not any(got[place].any() for place in (0, 5, 6))
    assert distance(got[1:5], run(model, padded(rows), importance)) < (
        bound(importance, "answer_mean") if importance in BOUNDS else 1e-9
    )


@pytest.mark.parametrize("importance", [*BOUNDS, "random"])
def test_no_row_of_the_batch_has_anything_to_score(model, importance):
    ids, segments = rows_of()[0]
    batch = padded([(ids, torch.zeros_like(segments)), (ids, segments * (segments == Segment.ANSWER))])
    assert not any(row.any() for row in run(model, batch, importance))
    padding = tuple(torch.zeros_like(x) for x in batch)
    assert [len(row) for row in run(model, padding, importance)] == [0, 0]


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("importance", ["fisher", "oar_g", "onward", OWN])
def test_reasoning_without_an_answer_is_zero(model, importance, probe):
    """Callers do not ask for it: but then nothing says that it moved anything."""
    ids, segments = rows_of()[0]
    segments = torch.where(segments == Segment.ANSWER, Segment.CONCLUDE, segments)
    got = run(model, padded([(ids, segments), rows_of()[1]]), importance, probe)
    assert got[1].any()
    assert (importance == "onward") == got[0].any().item()  # what it moved on the way is there all the same


@pytest.mark.parametrize("importance", BOUNDS)
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
    assert distance(got[:1], run(model, padded([alone]), importance)) < bound(importance, "answer_mean")


# ---- seeds and temperature


@pytest.mark.parametrize("importance", ["fisher", "oar_g", "onward", "random"])
def test_numbers_are_new_in_every_step_and_the_same_within_one(model, importance):
    config, batch = OarConfig(importance=importance, num_draws=2), padded(rows_of())
    first, again, second = (run(model, batch, **vars(Request.from_config(config, step, 40))) for step in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all((a - b).abs().max() > 1e-3 * b.max() for a, b in zip(first, second, strict=True))


def test_draws_are_averaged(model):
    batch = padded(rows_of())
    single = run(model, batch)
    many, more = run(model, batch, num_draws=64), run(model, batch, num_draws=64, seed=9)
    assert distance(many, more) < 0.5 * distance(single, run(model, batch, seed=9))


def test_random_is_the_same_on_every_padding_and_differs_by_response_and_step(model):
    rows = rows_of()
    seen = {}
    for seed in (0, 1):
        want = run(model, padded(rows), "random", seed=seed)
        for batch in (padded(rows, left=True), padded(rows, more=3)):
            assert all(torch.equal(a, b) for a, b in zip(run(model, batch, "random", seed=seed), want, strict=True))
        (alone,) = run(model, padded(rows[2:3]), "random", seed=seed)
        assert torch.equal(alone, want[2])
        drawn = [row[segments == Segment.REASONING] for row, (_, segments) in zip(want, rows, strict=True)]
        seen[seed] = torch.cat(drawn)
        for row, (_, segments) in zip(want, rows, strict=True):
            assert not row[segments != Segment.REASONING].any()
    values = torch.cat(list(seen.values()))
    assert 0 < values.min() < values.max() < 1
    assert len(values.unique()) == len(values)


@pytest.mark.parametrize("importance", ["entropy", "onward"])
def test_entropies_are_read_at_the_temperature_that_responses_were_sampled_with(model, folder, importance):
    for temperature in (0.5, 2.0):
        want = world.reference(folder, importance, temperature=temperature)
        got = responses_of(run(model, padded(rows_of()), importance, temperature=temperature))
        assert distance(got, [want[number] for number in world.SCORED]) < 1e-5
    assert distance(got, responses_of(run(model, padded(rows_of()), importance, temperature=1.0))) > 1e-2


@pytest.mark.parametrize("importance", ["fisher", "oar_g", OWN])
def test_probes_do_not_see_the_temperature(model, importance):
    batch = padded(rows_of())
    cold, warm = run(model, batch, importance, temperature=0.5), run(model, batch, importance, temperature=2.0)
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))
