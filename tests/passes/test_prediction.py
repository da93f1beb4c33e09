"""Predicted importance: what is labelled, what is learned from it, what is paid, and what is said.

That predictions are right on every layout of verl's engines is in tests/hosts/test_engine.py.
"""

import logging
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from math import ceil, exp
from threading import Barrier

import pytest
import torch

from oar_plugin.credit import regression
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.perturbation import units as cut
from oar_plugin.passes import prediction
from oar_plugin.passes.copies import CopyRows
from oar_plugin.passes.gradient import Layout, Packed, Scores
from oar_plugin.passes.plain import PlainHost, batch_importance
from oar_plugin.passes.prediction import Features, Predictor
from oar_plugin.passes.schedule import Schedule
from tests.asked import asked
from tests.hosts.engine import world
from tests.passes.batch import padded, rows_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_labels(monkeypatch):
    monkeypatch.setattr(prediction, "ENOUGH", world.ENOUGH)
    monkeypatch.setattr(prediction, "FEWEST", 1)
    run = CopyRows.run
    monkeypatch.setattr(CopyRows, "run", lambda copies, host: getattr(host, "known", partial(run, host=host))(copies))


# ---- a plain model


@pytest.fixture
def scored(monkeypatch):
    rows, gradient = [], PlainHost.gradient
    monkeypatch.setattr(PlainHost, "gradient", lambda *given: rows.append(given[1]) or gradient(*given))
    return rows


def predict(model, schedule, request, max_tokens=2**13, count=4):
    rows = [tensor_BL[:count] for tensor_BL in padded(rows_of())]
    return batch_importance(model, request, *rows, max_tokens, schedule=schedule)


@pytest.mark.parametrize(("importance", "max_tokens"), [("fisher", 2**13), ("fisher", 1), ("oar_g", 90), ("oar_p", 90)])
def test_every_token_is_paid_by_what_earlier_steps_taught(model, folder, scored, importance, max_tokens):
    """Those of responses that are scored too."""
    more = {"replacement_token": world.PAD, "temperature": world.TEMPERATURE}
    request = asked(importance, amortize={"share": world.SHARE, "units": None}, **more)
    schedule = Schedule(request.config)
    first, second = (predict(model, schedule, request, max_tokens) for _ in range(2))
    assert not first.any()
    if importance != "oar_p":
        assert list(map(len, scored)) == [4, ceil(world.SHARE * 4)], "first as many labels as are needed"
    scores = world.counterfactual if importance == "oar_p" else lambda folder: world.reference(folder, importance)
    want = world.predicted(folder, lambda: scores(folder), torch.float32)
    for got_L, (ids, _), row in zip(second, rows_of(), world.SCORED, strict=True):
        before = len(ids) - len(want[row])
        assert not got_L[:before].any()
        close = {"rtol": 2e-2 if importance == "oar_g" else 1e-3, "atol": 1e-8}  # rounding of P_noisy - P
        torch.testing.assert_close(got_L[before : len(ids)], want[row], **close)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not predict(model, schedule, request, count=0).numel(), "a rank without rows"


def test_only_units_that_are_labels_get_copies(model, folder, monkeypatch):
    masked, run, learned, learn = [], PlainHost.copies, [], Predictor.learn
    monkeypatch.setattr(PlainHost, "copies", lambda *given: masked.append(given[1:3]) or run(*given))
    monkeypatch.setattr(Predictor, "learn", lambda *given: learned.extend(given[2].tolist()) or learn(*given))
    request = asked("oar_p", span=2, replacement_token=world.PAD, amortize={"share": 1.0, "units": 3})
    predict(model, Schedule(request.config), request)
    ((copies, like),) = masked
    assert sorted(like) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    exact, want = world.counterfactual(folder, span=2), []
    for row, token_t in zip(like, copies.token_T.split(copies.offsets.diff().tolist()), strict=True):
        ids, prompt = rows_of()[row][0], len(world.encode()[world.SCORED[row]][0])
        want.append(exact[world.SCORED[row]][(token_t != ids[: len(token_t)]).nonzero()[:, 0] - prompt].mean().item())
    assert sorted(learned) == pytest.approx(sorted(want), rel=1e-3, abs=1e-7)


def test_rows_that_are_not_scored_keep_nothing_for_a_backward(model):
    request, kept = asked(amortize={"share": 1e-9}), []
    schedule, hooks = Schedule(request.config), (lambda x: kept[-1].append(x.numel()) or x, lambda x: x)
    for _ in range(2):
        kept.append([])
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            predict(model, schedule, request)
    assert sum(kept[0]) > 2 * sum(kept[1]) > 0


# ---- made-up responses


Made = namedtuple("Made", "token_T segments_T hidden_TP log_prob_T score_T")  # a response, with gaps in its reasoning


def units_of(made, span=2):
    return [cut((one.segments_T == 1).tolist(), span) for one in made]


def responses(seed, count=24, by_position=False, zeros=0.05):
    """Their scores follow from hidden states, or from the position."""
    g, made = torch.Generator().manual_seed(seed), []
    for size in torch.randint(12, 60, (count,), generator=g).tolist():
        segments_T, hidden_TP = (torch.rand(size, generator=g) < 0.85).long(), torch.randn(size, 256, generator=g)
        segments_T[0] = 0
        told_T = torch.arange(size) / 10 if by_position else hidden_TP[:, 0]
        score_T = (told_T + 0.1 * torch.randn(size, generator=g)).exp() * (torch.rand(size, generator=g) >= zeros)
        log_prob_T = -torch.rand(size, generator=g)
        made.append(Made(torch.randint(1000, (size,), generator=g), segments_T, hidden_TP, log_prob_T, score_T))
    return made


def packed_of(made):
    offsets = torch.tensor([0, *(len(one.token_T) for one in made)]).cumsum(0)
    return Packed(torch.cat([one.token_T for one in made]), torch.cat([one.segments_T for one in made]), offsets)


def given_to_features(*made):
    scores = Scores(asked("random").importance_object, 0, CPU, True)
    scores.hidden_TP = torch.cat([one.hidden_TP for one in made])
    return packed_of(made), scores, torch.cat([one.log_prob_T for one in made])


class KnownHost:
    """Has read what is made up, `split` responses at a time."""

    device, gives_log_probs = CPU, True

    def __init__(self, made, total=torch.clone, split=5):
        self.made, self.total, self.split = made, total, split

    def read(self, rows, work):
        for part in (rows[start : start + self.split] for start in range(0, len(rows), self.split)):
            at_T = torch.arange(sum(len(self.made[row].token_T) for row in part))
            read = work.begin(part, Layout(at_T, at_T, len(at_T)))
            _, scores, log_prob_T = given_to_features(*(self.made[row] for row in part))
            own = read.end.args[1].scores.hidden_TP
            own.copy_(scores.hidden_TP)
            read.end(log_prob_T)
            hidden, own, read = weakref.ref(own), None, None
            assert hidden() is None, "hidden states are kept"
        return True

    def known(self, copies):
        """In place of `CopyRows.run`."""
        self.labelled = copies._labelled_T.split(copies.packed.offsets.diff().tolist())
        return torch.cat([one.score_T for one in self.made]) * copies._labelled_T

    def share(self, tensor):
        return tensor


def step(predictor, made, seed=0, *how):
    """A step: what each response is paid, and which tokens are labels, by response."""
    request = asked("oar_p", seed=seed, span=predictor.span, amortize={"share": 0.5})
    schedule, packed, host = Schedule(request.config), packed_of(made), KnownHost(made, *how)
    schedule.predictor = predictor
    answer = schedule.run(host, request, packed, torch.full((len(made),), int(Status.SCORED)))
    return answer.importance_T.split(packed.offsets.diff().tolist()), host.labelled


def test_predictions_are_a_ridge_regression_of_what_earlier_steps_labelled(monkeypatch):
    """By hand: lag, centring, floor, what is forgotten, and what predictions explain of labels before these are learned."""
    monkeypatch.setattr(regression, "REMEMBERED", (100, 20))
    predictor, taught, judged = Predictor(0.5, 4, 2), [], torch.zeros(3)
    for number in range(3):
        made, fits = (
            responses(number),
            [world.ridge(taught, *one) for one in ((slice(None), 100), (slice(-4, None), 1)) if taught],
        )
        paid, labelled = step(predictor, made, number)
        features, scores = [], []
        for one, units, paid_T, labelled_T in zip(made, units_of(made), paid, labelled, strict=True):
            of_one, want_T = Features(*given_to_features(one)), torch.zeros(len(paid_T))
            for fit_F, level in fits[:1]:
                x_RF = of_one.of(of_one.at_N).double()
                want_T[of_one.at_N] = ((x_RF - x_RF.mean(0)) @ fit_F + level).exp().float()
            torch.testing.assert_close(paid_T, want_T, rtol=1e-4, atol=1e-7)
            if chosen := [torch.tensor(unit) for unit in units if labelled_T[unit[0]]]:
                features.append(torch.stack([of_one.of(unit).mean(0) for unit in chosen]))
                scores.append(torch.stack([one.score_T[unit].mean() for unit in chosen]))
        kept = exp(-min(sum(map(len, scores)) / 100, len(scores) / 20))
        of_step = [(1.0, *one) for one in zip(features, world.logs(scores), strict=True)]
        judged *= kept
        for _, x_UF, y_U in of_step if fits else ():
            c_UF, c_U = (x_UF - x_UF.mean(0)).double(), y_U - y_U.mean()
            off = c_U, c_U - c_UF @ fits[0][0], c_U - c_UF[:, -4:] @ fits[1][0]
            judged += torch.stack([one.square().sum() for one in off])
        assert predictor.explained == pytest.approx((1 - judged[1:] / judged[0]).tolist(), rel=1e-4, nan_ok=True)
        taught = [(kept * weight, *one) for weight, *one in taught] + of_step
        assert predictor.regression.responses == pytest.approx(sum(weight for weight, *_ in taught))
        assert predictor.regression.labels == pytest.approx(sum(weight * len(y_U) for weight, _, y_U in taught))
    assert judged[0] > 0


def test_ranks_micro_batches_and_order_change_nothing():
    """Three responses of 24 are on one of two ranks, which are threads."""
    one, two, held, barrier = Predictor(0.3, 4, 1), [Predictor(0.3, 4, 1) for _ in range(2)], {}, Barrier(2, timeout=60)
    rows = [20, 3, 11], [row for row in reversed(range(24)) if row not in (20, 3, 11)]

    def of_rank(rank, made, number):
        def total(tensor):
            held[rank] = tensor.clone()
            barrier.wait()
            summed = held[0] + held[1]
            barrier.wait()
            return summed

        return step(two[rank], [made[row] for row in rows[rank]], number, total, 2)

    for number in range(3):
        made = responses(number)
        want = step(one, made, number)
        with ThreadPoolExecutor(2) as threads:
            apart = [threads.submit(of_rank, rank, made, number) for rank in range(2)]
        for place, row in enumerate(rows[0]):
            torch.testing.assert_close(apart[0].result()[0][place], want[0][row], rtol=1e-4, atol=1e-7)
            assert apart[0].result()[1][place].equal(want[1][row])
        for other in two:
            assert other.regression.labels == one.regression.labels
            torch.testing.assert_close(other.regression._coefficient_F2, one.regression._coefficient_F2)
            assert other.explained == pytest.approx(one.explained, rel=1e-3, abs=1e-6, nan_ok=True)


def test_a_read_without_memory_predicts_and_learns_nothing(monkeypatch):
    """As in verl's bypass mode, where the read is a pass of ours."""
    made, request = responses(0, 4), asked("oar_p", amortize={"share": 0.5, "units": 2}, replacement_token=1)
    monkeypatch.setattr(KnownHost, "read", lambda *_: False)
    schedule, scored_B = Schedule(request.config), torch.full((4,), int(Status.SCORED))
    answer = schedule.run(KnownHost(made), request, packed_of(made), scored_B)
    assert {*answer.status_B.tolist()} == {Status.OUT_OF_MEMORY}
    assert not answer.importance_T.any()
    assert (schedule.predictor.regression.labels, schedule.predictor.learning) == (0, 1)


def test_responses_and_units_are_drawn_anew_in_each_step_and_spread_over_a_response():
    made, drawn, predictor = responses(0, 200), [0] * 200, Predictor(0.2, 4, 2)
    lists = units_of(made)
    for seed in range(20):
        predictor.regression.labels, predictor.regression.responses = world.ENOUGH
        _, labelled = step(predictor, made, seed)
        scored = [row for row, of_row in enumerate(labelled) if of_row.any()]
        assert len(scored) in (40, 41), "a fifth; a bin may have one more"
        for row in scored:
            drawn[row] += 1
            chosen = [labelled[row][list(unit)].tolist() for unit in lists[row]]
            numbers, parts = [number for number, one in enumerate(chosen) if all(one)], min(4, len(chosen))
            assert not any(any(one) and not all(one) for one in chosen), "whole units"
            edges = [part * len(chosen) // parts for part in range(parts + 1)]
            assert all(a <= number < b for number, (a, b) in zip(numbers, pairwise(edges), strict=True))
    assert sum(map(bool, drawn)) > 180
    assert max(drawn) < 12


@pytest.mark.parametrize(
    ("labels", "of", "fewest", "count", "want"),
    [
        (0, 0, 1, 50, 60),  # twice what is missing
        (10, 3, 1, 50, 40),
        (30, 0, 1, 50, 12),  # three responses
        (30, 3, 1, 50, 4),
        (30, 3, 20, 50, 20),
        (30, 3, 20, 3, 12),  # all that there is
    ],
)
def test_a_step_labels_as_many_as_are_needed(monkeypatch, labels, of, fewest, count, want):
    monkeypatch.setattr(prediction, "FEWEST", fewest)
    predictor = Predictor(1e-9, 4, 1)
    predictor.regression.labels, predictor.regression.responses = labels, of
    _, labelled = step(predictor, responses(0, count))
    assert want <= torch.cat(labelled).sum() < want + 8, "a bin may have one more"


def learn(predictor, score_U, *sizes):
    feature_UF = torch.randn(len(score_U), regression.FEATURES, generator=torch.Generator().manual_seed(0))
    predictor.learn(feature_UF, score_U, [*sizes])
    predictor.end_step(torch.clone, CPU)
    return predictor.predict(Features(*given_to_features(*responses(0, 1))))


@pytest.mark.parametrize("bad", [[torch.nan, 1.0], [1.0, torch.inf], [0.0, 0.0], [1.0], [-1.0, -2.0]])
def test_a_response_without_usable_scores_teaches_nothing(bad):
    good, (clean, spoiled) = torch.rand(40), (Predictor(0.5, None, 1) for _ in range(2))
    assert learn(clean, good, *[10] * 4).equal(
        learn(spoiled, torch.cat([good, torch.tensor(bad)]), *[10] * 4, len(bad))
    )
    assert (spoiled.regression.labels, spoiled.regression.responses) == (40, 4)


# ---- what is said


def test_a_run_that_never_predicts_is_told_after_twenty_steps_and_once(caplog):
    predictor, told = Predictor(0.5, None, 1), []
    for _ in range(45):
        learn(predictor, torch.tensor([1.0, torch.nan]), 2)
        told.append(len(caplog.records))
    assert predictor.learning == 45
    assert (told[18], told[19], told[-1]) == (0, 1, 1)
    assert "0 labels of 0 responses so far, needed 30 of 3" in caplog.messages[0]


@pytest.mark.parametrize("by_position", [False, True])
def test_hidden_states_that_add_nothing_to_position_are_told_once(caplog, by_position):
    predictor = Predictor(1.0, 60, 1)
    with caplog.at_level(logging.WARNING, "oar_plugin"):
        for number in range(6):
            step(predictor, responses(number, 25, by_position, zeros=0.0), number)
            assert len(caplog.records) == (by_position and number > 1), "not of the first labels"
    assert (predictor.explained[0] > predictor.explained[1]) != by_position
    assert all("position and probability alone" in message for message in caplog.messages)
