"""The gradient pass over one micro-batch: what backwards start from, what is read on the way, and in which order."""

import pytest
import torch

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Backward, importance_of
from oar_plugin.credit.importance.base import squared_norm
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.credit.noise import gaussian, position_seeds, response_seeds, signs
from oar_plugin.passes import rows as rows_module
from oar_plugin.passes.gradient import MicroBatchPass, Packed, Scores, importance_of_scores
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.taps import ModelTaps, Projection
from tests.asked import asked
from tests.passes.batch import distance, padded, positions, rows_of

TEMPERATURE = 0.7
TWO = "python:benchmarks.candidates.learning:Onward"  # two backwards
NOISY = (Backward("probe", noise=True),)
CPU = torch.device("cpu")


class Reads(Fisher):
    """What a pass reads while its backwards start from the probe."""

    reads = frozenset({"entropy", "log_prob"})

    def coefficients(self, number, rows):
        assert not rows.logits_NV.requires_grad
        return rows.vocabulary.softmax(rows.logits_NV)


class NoisyReads(Reads):
    backwards = NOISY


class Surprise(Reads):
    """A backward from the reasoning's rows, which are read as well; the noisy kind must read what is clean."""

    backwards = (Backward("reasoning"),)

    def coefficients(self, number, rows):
        chosen_NV = -rows.vocabulary.subtract_one_at(torch.zeros_like(rows.logits_NV), rows.token_N)
        return rows.entropy_N[:, None] * chosen_NV * rows.signs()


class NoisySurprise(Surprise):
    backwards = (Backward("reasoning", noise=True),)


class Mixed(Reads):
    """Three backwards, one of them noisy."""

    backwards = (Backward("reasoning"), *NOISY, Backward("probe"))

    def coefficients(self, number, rows):
        if number == 0:
            return Surprise().coefficients(number, rows)
        assert (rows.clean_NV is not None) == (number == 1 and rows.token_N is None)
        return super().coefficients(number, rows)

    def combine(self, parts):
        return parts.score_KBL.sum(0)


def request_of(kind, **more):
    name = f"python:{__name__}:{kind.__name__}" if isinstance(kind, type) else kind
    return asked(name, **{"temperature": TEMPERATURE, "sigma": 0.05, **more})


def measure(model, kind, batch=None, **more):
    """Run the plan of an importance over the four responses; returns the scores, packed."""
    request, batch = request_of(kind, **more), batch or padded(rows_of())
    one = MicroBatchPass(request, *packed_rows(*batch))
    with ModelTaps(model) as taps:
        for forward in one.importance.forwards(request.config.num_draws):
            with taps.running(forward):
                taps.tap = one.tap(forward)
                model(input_ids=batch[0], attention_mask=batch[2].long(), use_cache=False)
    return one.scores


def directly(model, rows, temperature=TEMPERATURE):
    """Entropy and log-probability of each token of the reasoning, 0 elsewhere, from the model's logits."""
    entropy, log_prob = [], []
    for ids, segments in rows:
        with torch.no_grad():
            log_p = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        keep = segments[1:] == Segment.REASONING
        entropy.append(torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1) * keep]))
        log_prob.append(torch.cat([torch.zeros(1), log_p.gather(-1, ids[1:, None])[:, 0] * keep]))
    return torch.cat(entropy), torch.cat(log_prob)


# ---- what is read on the way


@pytest.mark.parametrize("chunk", [5, 256])
@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("kind", [Reads, NoisyReads, Surprise, NoisySurprise, Mixed])
def test_readings_are_of_the_clean_distribution_that_tokens_were_drawn_from(model, monkeypatch, kind, draws, chunk):
    """At the temperature of the rollout; also where a backward's forward is noisy; once, however many draws there are."""
    monkeypatch.setattr(rows_module, "CHUNK", chunk)
    for temperature in (0.5, 1.5):
        batch = padded(rows_of(), left=chunk == 5)
        scores = measure(model, kind, batch, num_draws=draws, temperature=temperature)
        entropy_T, log_prob_T = directly(model, rows_of(), temperature)
        torch.testing.assert_close(scores.log_prob_T, log_prob_T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scores.entropy_T, entropy_T, rtol=1e-4, atol=1e-5)


# ---- what a backward starts from


@pytest.mark.parametrize("chunk", [5, 256])
@pytest.mark.parametrize("kind", [Surprise, NoisySurprise])
def test_a_backward_from_the_reasonings_rows_equals_plain_autograd(model, monkeypatch, kind, chunk):
    """Coefficients are of clean entropies, the gradient goes through noisy embeddings."""
    monkeypatch.setattr(rows_module, "CHUNK", chunk)
    scores = measure(model, kind)
    want, vocabulary, hidden = [], model.config.vocab_size, model.config.hidden_size
    for ids, segments in rows_of():
        reasoning = positions(segments)
        seed_1 = response_seeds(ids, torch.zeros_like(ids), 1, 0)
        seed_N = seed_1.expand(len(reasoning))
        noise_TH = torch.zeros(len(ids), hidden)
        if kind.backwards[0].noise:
            noise = gaussian(position_seeds(seed_1.expand(len(reasoning)), reasoning), hidden)
            noise_TH[reasoning] = request_of(kind).config.sigma * noise
        entropy_T, _ = directly(model, [(ids, segments)])
        sign_NV = signs(position_seeds(seed_N, torch.arange(len(reasoning))), 0, vocabulary)
        embedding = model.get_input_embeddings()(ids[None]).detach().requires_grad_(True)
        logits_NV = model(inputs_embeds=embedding + noise_TH).logits[0, reasoning - 1]
        chosen_N = (sign_NV * logits_NV).gather(-1, ids[reasoning][:, None])[:, 0]
        (gradient,) = torch.autograd.grad((entropy_T[reasoning] * chosen_N).sum(), embedding)
        want.append(squared_norm(gradient)[0])
    assert distance(scores.score_KT[0].split([len(ids) for ids, _ in rows_of()]), want) < 1e-4


def test_each_backward_of_several_is_what_it_is_alone(model):
    scores = measure(model, Mixed, num_draws=2)
    for number, kind in enumerate((Surprise, NoisyReads, Reads)):
        alone = measure(model, kind, num_draws=2)
        torch.testing.assert_close(scores.score_KT[number], alone.score_KT[0])


@pytest.mark.parametrize("kind", ["fisher", "oar_g", TWO, NoisySurprise])
def test_every_draw_of_every_backward_is_another_one(model, kind):
    first, both = (measure(model, kind, num_draws=draws) for draws in (1, 2))
    for one_T, two_T in zip(first.score_KT, both.score_KT, strict=True):
        second_T = two_T - one_T
        assert (second_T >= -1e-6 * one_T.max()).all()
        assert ((second_T - one_T).abs() > 0.05 * one_T).sum() > 0.2 * (one_T > 0).sum()


def test_a_linear_projection_is_gone_back_through_once_per_response(model, monkeypatch):
    """Through every row, scores would be the same up to rounding, which depends on the number of rows in a product."""
    call, rows, scores = Projection.__call__, [], []
    monkeypatch.setattr(Projection, "__call__", lambda *given: rows.append(given[1]) or call(*given))
    for linear in (True, False):
        monkeypatch.setattr(Projection, "linear", linear)
        scores.append(measure(model, "fisher").score_KT)
    assert [len(one) for one in rows if one.requires_grad] == [len(rows_of()), 7]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-6)


# ---- many micro-batches, many ranks, many responses


@pytest.mark.parametrize(("name", "field", "want"), [("fisher", "score_KT", 2.0), ("entropy", "entropy_T", 8.0)])
def test_draws_are_averaged_and_readings_are_not(name, field, want):
    packed = Packed(torch.arange(3), torch.full((3,), int(Segment.REASONING)), torch.tensor([0, 3]))
    scores = Scores(importance_of(name), 3, CPU)
    getattr(scores, field)[:] = 8.0
    assert importance_of_scores(asked(name, num_draws=4), packed, scores).tolist() == [want] * 3
