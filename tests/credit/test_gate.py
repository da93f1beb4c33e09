"""The gates, their invariants and their edges."""

from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.credit.gate import GATES, SETTINGS, Gate, _fault, bi_level, gate_of, kept_total, relative, row_sums

scores = st.lists(st.floats(0, 1e6, allow_nan=False, width=32), min_size=1, max_size=40)


def everywhere(importance):
    return torch.ones_like(importance, dtype=torch.bool)


def padded(batch):
    """Responses of any length with padding on both sides, `[B, L]`, and a mask of their tokens."""
    importance = torch.full((len(batch), max(map(len, batch)) + 2), torch.nan)
    for row, values in enumerate(batch):
        importance[row, 1 : 1 + len(values)] = torch.tensor(values)
    return importance, ~importance.isnan()


def plain_bi_level(score, tau, beta, floor):
    """One response, written out step by step as in the paper."""
    s = score.log1p()
    spread = s.max() - s.min()
    s = (s - s.min()) / spread if spread > 0 else torch.zeros_like(s)
    q = torch.quantile(s, tau)
    w = [max(float(x / q), floor) if x < q else 1 + beta * float((x - q) / (1 - q)) if q < 1 else 1.0 for x in s]
    return torch.tensor(w, dtype=torch.float64)


def above(score, tau):
    """A token at the minimum never is, and the size of an outlier changes nothing."""
    return ((score >= torch.quantile(score, tau)) & (score > score.min())).double()


def plain_z_score(score, *_):
    """The published map."""
    log = (score + 1e-8).log()
    return (1 + 0.5 * (log - log.mean()) / (log.var(correction=0) + 1e-8).sqrt()).clip(0.5, 5)


PLAIN = {
    "bi_level": plain_bi_level,
    "two_level": lambda score, tau, beta, floor: 1 + beta * above(score, tau),
    "top_only": lambda score, tau, *_: above(score, tau) if score.max() > score.min() else torch.ones_like(score),
    "z_score": plain_z_score,
}
# With more than tau of the scores at the minimum, the quantile is the minimum, and everything is at or above it.
ties = st.lists(st.sampled_from([0.5, 0.5, 0.5, 0.5, 3.0, 1e30]), min_size=1, max_size=40)


@pytest.mark.parametrize("name", PLAIN)
@given(st.lists(st.one_of(scores, ties), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 8), st.floats(0.01, 1))
@settings(max_examples=250)
def test_a_gate_on_a_padded_batch_equals_its_formula_response_by_response(name, batch, tau, beta, floor):
    """The published code overwrote tau with each response's quantile: the next response then saw another gate."""
    importance, mask = padded(batch)
    weights = GATES[name].weights(importance, mask, tau, beta, floor)
    limits = {"rtol": 1e-4, "atol": 1e-5} if name == "bi_level" else {"rtol": 1e-5, "atol": 1e-6}
    assert (weights[~mask] == 1).all()
    for row, values in enumerate(batch):
        got, score = weights[row, mask[row]], torch.tensor(values).double()
        want = PLAIN[name](score, tau, beta, floor)
        torch.testing.assert_close(got.double(), want * len(values) / want.sum(), **limits)
        assert got.sum().item() == pytest.approx(len(values), rel=1e-4)
        assert (got > 0).all() or name == "top_only"
        assert (got[score.argsort()].diff() >= -1e-5).all(), "a more important token does not weigh less"


def test_what_a_gates_docstring_says():
    distinct, below = torch.randperm(100)[None].float(), torch.tensor([[-0.5, 0.0, 1.0]])
    assert (GATES["top_only"].function(distinct, everywhere(distinct)) > 0).equal(distinct >= 80), "a fifth"
    assert GATES["z_score"].function(below, everywhere(below))[0, :2].unique().numel() == 1, "below 0 counts as 0"


edge = st.sampled_from([0.0, 1.0, 1.0 + 2**-23, 1e30]) | st.floats(0, 2**-40, width=32) | st.floats(0, 10, width=32)


@given(st.lists(edge, min_size=1, max_size=12), st.sampled_from([0.0, 0.4, 1.0]), st.floats(0, 4), st.floats(0.01, 1))
@settings(max_examples=300)
def test_bi_levels_promises_hold_at_the_edges(values, tau, beta, floor):
    """Ties, an outlier, differences of one bit, one to three tokens, both ends of tau."""
    importance = torch.tensor(values)[None]
    weights = bi_level(importance, everywhere(importance), tau, beta, floor)[0]
    assert weights.isfinite().all()
    assert weights.sum().item() == pytest.approx(len(values), rel=1e-4)
    assert (weights > 0).all()
    assert weights.max() / weights.min() <= (1 + beta) / floor * (1 + 1e-4), "the ratio of two weights has a bound"
    for value in set(importance[0].tolist()):
        same = weights[importance[0] == value]
        assert (same == same[0]).all(), "equal importance, equal weight"


@pytest.mark.parametrize("name", PLAIN)
def test_every_gate(name):
    """The order, dtype and strides of the input do not matter; constant scores give weights of 1."""
    named, gate = gate_of(name), GATES[name].function
    assert named is GATES[name]
    given = {"tau": 0.3, "beta": 1.5, "floor": 0.2}
    importance = torch.rand(40, 6).T  # not contiguous
    before, mask, turned = importance.clone(), torch.rand(6, 40) < 0.8, torch.randperm(40)
    taken = {name: given[name] for name in named.settings}
    assert torch.equal(named.weights(importance, mask, **given), gate(importance, mask, **taken))
    weights = gate(importance, mask)
    assert torch.equal(importance, before)
    torch.testing.assert_close(gate(importance.double(), mask), weights)
    torch.testing.assert_close(gate(importance[:, turned], mask[:, turned]), weights[:, turned])
    if named.order_only:
        assert torch.equal(gate(importance * 2**20, mask), weights)
    for tau in (0.0, 0.4, 0.85, 1.0):
        given["tau"] = tau
        for constant in (torch.full((1, 7), 3.0), torch.tensor([[7.0]])):
            assert torch.equal(named.weights(constant, everywhere(constant), **given), torch.ones_like(constant))
        nowhere = torch.zeros(2, 5, dtype=torch.bool)
        assert torch.equal(named.weights(torch.rand(2, 5), nowhere, **given), torch.ones(2, 5))


def test_relative_scores_are_multiples_of_the_mean_over_the_reasoning():
    importance = torch.tensor([[2.0, 4.0, 100.0], [0.0, 0.0, 5.0], [3.0, 1.0, 2.0]])
    got = relative(importance, torch.tensor([[True, True, False], [True, True, False], [False] * 3]))
    assert got[:2, :2].tolist() == [[2 / 3, 4 / 3], [0, 0]]
    assert torch.isfinite(got).all()
    uneven = torch.tensor([[0.25, 100.0, 100.0, 100.0], [0.25, 0.75, 0.5, 0.5]])
    got = relative(uneven, torch.tensor([[True, False, False, False], [True] * 4]))
    assert [got[0, 0].item(), *got[1].tolist()] == [1, 0.5, 1.5, 1, 1]


class Own:
    """A user's gate that returns `weight` and counts its calls."""

    def __init__(self, weight=None):
        self.weight, self.calls = weight, 0

    def __call__(self, importance_BL, reasoning_BL, tau, beta, floor):
        self.calls += 1
        return torch.ones_like(importance_BL) if self.weight is None else self.weight


NOT_WEIGHTS = "its weights [[]B, L] must be finite, average 1 over each response's reasoning tokens, and be 1 elsewhere"
OTHERS = "a response's weights must not depend on other responses or on padding"
FAILED = "a call with (importance_BL, reasoning_BL{}) failed: {}"
WITH_ALL = FAILED.format(", tau, beta, floor", "{}")


@pytest.mark.parametrize(
    ("own", "fault"),
    [
        (Own(), None),
        (3, "it must be a function of (importance_BL, reasoning_BL, tau, beta, floor) or fewer of the last three"),
        (Own(torch.ones(2, 4)), NOT_WEIGHTS),
        (Own([[1.0]]), WITH_ALL.format("*no attribute*")),
        (Own(torch.full((3, 5), 0.5)), NOT_WEIGHTS),
        (lambda importance_BL, reasoning_BL, *_: torch.where(reasoning_BL, 1.0, 0.5), NOT_WEIGHTS),
        (lambda importance_BL, *_: importance_BL / 0, NOT_WEIGHTS),
        (lambda score_BL, keep_BL: bi_level(score_BL / score_BL.max() * 9, keep_BL), OTHERS),
        (lambda score_BL, keep_BL: bi_level(score_BL * score_BL.shape[1], keep_BL), OTHERS),
        (lambda importance_BL: importance_BL, FAILED.format("", "TypeError*")),
        (lambda importance_BL, reasoning_BL, tau, width: importance_BL, FAILED.format(", tau", "TypeError*")),
        (lambda *given: {}["mine"], WITH_ALL.format("KeyError('mine')")),
        # One response has no reasoning tokens.
        (lambda score, keep, *_: score[2, keep[2]].amax(), WITH_ALL.format("*amax*")),
    ],
)
def test_a_gate_of_a_users_own_is_tried(own, fault):
    said = _fault(Gate(own, 0.85))
    assert said is None if fault is None else fnmatchcase(said, fault)


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        *zip((gate.function for gate in GATES.values()), (("tau", "beta"), SETTINGS, ("tau",), ()), strict=True),
        (lambda score, keep, t, b, f: (t, b, f), SETTINGS),
        (lambda score, keep, floor, beta, tau: (floor, beta, tau), SETTINGS),
        (lambda score, keep, *given: given, SETTINGS),
        (lambda score, keep: (), ()),
        (lambda score, keep, beta: (beta,), ("beta",)),
        (lambda score, keep, *, floor, tau: (tau, floor), ("tau", "floor")),
        (lambda score, keep, other=1, beta=2: (beta,), ("beta",)),
        (torch.add, SETTINGS),  # has no signature
    ],
)
def test_a_gate_gets_the_settings_that_its_signature_names_or_all_three_by_position(own, settings):
    gate, given = Gate(own, 0.85), {"tau": 0.3, "beta": 1.5, "floor": 0.2}
    assert gate.settings == settings
    if own.__name__ == "<lambda>":
        importance_BL = torch.ones(1, 1)
        assert gate.weights(importance_BL, importance_BL > 0, **given) == tuple(given[name] for name in settings)


def test_a_users_gate_is_tried_once_and_again_where_it_is_defined_anew(monkeypatch):
    first, second = Own(), Own()
    monkeypatch.setitem(globals(), "kept_gate", first)
    name = f"python:{__name__}:kept_gate"
    gate, calls = gate_of(name), first.calls
    assert gate.tau == 0.85
    assert gate_of(name) is gate
    assert first.calls == calls > 0
    monkeypatch.setitem(globals(), "kept_gate", second)
    assert gate_of(name).function is second
    assert second.calls == calls


def test_kept_total():
    kept = [[0.5, 1.5, 1], [0.5, 1.5015, 1]]
    broken = [[0.5, 1.503, 1], [0.5, 1.6, 1], [0.5, 1.5, 1.1], [torch.nan, 1, 1], [torch.inf, 1, 1], [1, 1, torch.nan]]
    mask = torch.tensor([True, True, False]).expand(8, 3)
    assert kept_total(torch.tensor(kept + broken), mask).tolist() == [True] * 2 + [False] * 6
    alone = torch.tensor([[1.0015, 1.0]])
    assert kept_total(alone, torch.tensor([[True, False]])).tolist() == [False], "0.1 % of one token"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_on_the_right_does_not_change_how_a_sum_is_rounded(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, generator=generator, dtype=dtype) for length in range(1, 300)]
    padded = row_sums(pad_sequence(rows, True))
    assert padded.equal(torch.cat([row_sums(row[None]) for row in rows]))
    torch.testing.assert_close(padded[:, 0], torch.stack([row.sum() for row in rows]), rtol=1e-4, atol=1e-4)
