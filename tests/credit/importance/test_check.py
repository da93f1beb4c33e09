"""An importance and a gate of one's own: they work, or the message says what is missing."""

import sys
from fnmatch import fnmatchcase

import pytest
import torch
from oar_plugin.credit.importance.value import Value

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.gate import gate_of
from oar_plugin.credit.importance import (
    IMPORTANCES,
    Backward,
    Copies,
    Importance,
    importance_of,
    of_engines,
    without_copies,
)
from oar_plugin.credit.importance.check import check
from tests import own_importance
from tests.own_importance import Saliency

HERE = f"python:{__name__}"
EXAMPLE = "python:tests.own_importance:Saliency"


def test_the_example_works():
    assert isinstance(importance_of(EXAMPLE), Saliency)
    config = OarConfig.parse({"importance": EXAMPLE, "gate": "python:tests.own_importance:upper_half"})
    assert config.importance_object is importance_of(EXAMPLE)
    assert (config.backwards, config.extra_forwards, config.copies) == (1, 0, None)
    assert config.gate_object.function is own_importance.upper_half
    assert config.quantile == 0.85


def test_what_a_notebook_defines_anew_is_used(monkeypatch):
    assert importance_of(EXAMPLE) is importance_of(EXAMPLE)
    monkeypatch.setattr(own_importance, "Saliency", again := type("Saliency", (Saliency,), {}))
    assert type(importance_of(EXAMPLE)) is again
    monkeypatch.setattr(own_importance, "upper_half", gate := lambda *given: given[0] * 0 + 1)
    assert gate_of("python:tests.own_importance:upper_half").function is gate


# ---- importances


class Empty(Importance):
    name = help = "nothing"


class Nameless(Importance):
    help = "has no attribute of that name"


def fault_of(kind):
    """Why a class cannot be used; empty if it can."""
    try:
        check(kind)
    except ValueError as fault:
        return str(fault)
    return ""


def own(said="", base=Saliency, **attributes):
    """A class derived from `base` with other attributes, and its faults, with `*` for any text; none if it can be used."""
    return pytest.param(type("Own", (base,), attributes), said, id=", ".join([base.__name__, *attributes]))


def signed(self, gradient, embedding):
    return (gradient * embedding).sum(-1)


def of_every_response_with_reasoning(self, parts):
    """It raises for a response without reasoning tokens."""
    pairs = zip(parts.score_KBL[0], parts.reasoning_BL, strict=True)
    return torch.stack([score / score[keep].max() for score, keep in pairs])


def surprisal(self, parts):
    return -parts.log_prob_BL


def whole_softmax(self, number, rows):
    return -rows.vocabulary.subtract_one_at(rows.logits_NV.softmax(-1), rows.token_N)


def sums_columns(self, number, rows):
    return rows.vocabulary.total(rows.logits_NV)


def one_hot(self, number, rows):
    return torch.nn.functional.one_hot(rows.token_N, rows.logits_NV.shape[-1])


def largest_of_own_columns(self, number, rows):
    return rows.logits_NV - rows.vocabulary.largest(rows.logits_NV.amax(-1, keepdim=True))


def tokens_of_any_shard(self, number, rows):
    """It forgets that a token's column may be on a later process."""
    column_N = (rows.token_N - rows.vocabulary.start).clamp(0, rows.logits_NV.shape[-1] - 1)
    shares_NV = rows.vocabulary.softmax(rows.logits_NV)
    if shares_NV.numel():
        shares_NV[torch.arange(len(column_N)), column_N] -= 1
    return shares_NV


def subtracts_in_place(self, number, rows):
    rows.logits_NV[torch.arange(len(rows.logits_NV)), rows.token_N] -= 1
    return rows.logits_NV


def above_the_mean(self, number, rows):
    count = rows.vocabulary.total(torch.tensor(float(rows.logits_NV.shape[-1])))
    return (rows.logits_NV > rows.vocabulary.total(rows.logits_NV.sum(-1, keepdim=True)) / count).float()


def keeps_its_columns(self, number, rows):
    if not hasattr(self, "columns"):
        self.columns = torch.arange(rows.vocabulary.start, rows.vocabulary.start + rows.logits_NV.shape[-1])
    return rows.vocabulary.softmax(rows.logits_NV) * self.columns


def wants_noise(self, number, rows):
    return rows.clean_NV * 1 if rows.token_N is None else rows.vocabulary.softmax(rows.logits_NV)


def fails_with_tokens(self, number, rows):
    return rows.vocabulary.softmax(rows.logits_NV) if rows.token_N is None else None


SHARED = "where processes share the vocabulary (tensor parallelism), coefficients"
WRITES = "coefficients writes into rows.logits_NV, of which a process may hold some columns or none: coefficients"


def waits_on_one_process(self, number, rows):
    return rows.logits_NV if rows.vocabulary.start else rows.vocabulary.total(rows.logits_NV)


NOT_READ = '*entropy_BL is not computed; write reads = frozenset({"entropy", "log_prob"}) in the class*'
NOT_4 = "combine returned (1, 3, 4), wanted a tensor of shape (3, 4)"
NOT_7 = "coefficients returned (3,), wanted a tensor of shape (3, 7)"
LOG_PROB, ENTROPY = frozenset({"log_prob"}), frozenset({"entropy"})
NO_CLASS = "it must be a class derived from Importance"
NO_TUPLE = "backwards must be a tuple of Backward: (Backward(...),)"
NO_COEFFICIENTS = "*it has backwards and no method coefficients (the factor of each logit)*"
NO_SCORE = "*it has backwards and no method score (one number per token from its gradient)*"


class Learns(Value):
    """It can be used, but what learns is the package's alone."""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (int, NO_CLASS),
        (3, NO_CLASS),
        own("Own() failed*size*", __init__=lambda self, size: None),
        own("it has no name, or no help", name=""),
        own("it has no name, or no help", help=""),
        own("it has no name*", base=Nameless),
        own(NO_SCORE, base=Empty, backwards=(Backward("answer"),), coefficients=Saliency.coefficients),
        own(NO_COEFFICIENTS, base=Empty, backwards=(Backward(),), score=Saliency.score),
        own("*2 backwards and no method combine that makes*", backwards=(Backward("answer"), Backward("reasoning"))),
        own("*0 backwards and no method combine that makes the importance*", base=Empty),
        own("its copies are chosen by gradient, and it has no backwards", base=Empty, copies=Copies(by_gradient=True)),
        own(NO_TUPLE, backwards=Backward("answer")),
        own(NO_TUPLE, backwards=("answer",)),
        own("*entropies*allowed: a set of entropy, log_prob", reads=frozenset({"entropies"})),
        own("reads='entropy'*allowed: a set of entropy, log_prob", reads="entropy"),
        own("copies must be None or Copies(...)", copies=1.0),
        own(NOT_7, coefficients=lambda self, number, rows: rows.logits_NV.sum(-1)),
        # Pooled rows have no tokens.
        own("coefficients failed*NoneType*; rows.token_N is None in pooled rows*", backwards=(Backward("probe"),)),
        # A rank may hold no row of the answer.
        own("coefficients failed*max()*", coefficients=lambda *given: given[2].logits_NV * given[2].logits_NV.max()),
        own("score returned float, wanted a tensor of shape (3,)", score=lambda *_: 1.0),
        own("score returned numbers that are not finite*", score=lambda *pair: signed(*pair).abs() / 0),
        own("score returned negative numbers*", score=signed),
        own(NOT_4, combine=lambda self, parts: parts.score_KBL),
        own("combine returned negative*", reads=LOG_PROB, combine=lambda self, parts: parts.log_prob_BL),
        own("combine failed*max()*", combine=of_every_response_with_reasoning),
        own("combine failed: KeyError('of mine') (test_check.py, line [0-9]*)", combine=lambda *given: {}["of mine"]),
        own(
            "coefficients failed*(test_check.py, line [0-9]*)",
            coefficients=lambda *given: given[2].vocabulary.softmax(3),
        ),
        # What a pass does not give: noise-free logits without noise, entropies of rows that predict no reasoning.
        own("coefficients failed*", backwards=(Backward(),), coefficients=wants_noise),
        own(
            "coefficients failed*", reads=ENTROPY, coefficients=lambda *given: given[2].entropy_N * given[2].logits_NV.T
        ),
        # Rows of the probe have tokens where they are not pooled.
        own("*returned NoneType*", backwards=(Backward(),), coefficients=fails_with_tokens),
        own("score of a token changes*", score=lambda self, gradient, _: gradient.abs().sum(-1) * gradient.dim()),
        # Other numbers on another layout.
        own(f"{SHARED} differ *write rows.vocabulary.softmax(rows.logits_NV) in place*", coefficients=whole_softmax),
        own(f"{SHARED} exchange other tensors*", coefficients=waits_on_one_process),
        own(f"{SHARED} exchange other tensors*", coefficients=sums_columns),
        own(f"{SHARED} failed*Class values*subtract_one_at(x, rows.token_N)*", coefficients=one_hot),
        own("coefficients of a row change*", coefficients=lambda *given: given[2].logits_NV.softmax(0)),
        own("score of a token changes*", score=lambda self, gradient, _: gradient.square().sum(-1) / gradient.norm()),
        own("score differs in bf16*", score=lambda self, gradient, embedding: (1e4 + gradient.sum(-1) ** 2) - 1e4),
        own("combine gives a response*", combine=lambda self, parts: parts.score_KBL[0] / parts.score_KBL[0].max()),
        own(f"{SHARED} failed*a process may hold no column", coefficients=largest_of_own_columns),
        own(f"{SHARED} differ*", coefficients=tokens_of_any_shard),
        own(f"{WRITES} differ*", coefficients=lambda *given: given[2].logits_NV.copy_(given[2].logits_NV.softmax(-1))),
        own(f"{WRITES} failed: IndexError*subtract_one_at*", coefficients=subtracts_in_place),
        own(
            f"{WRITES} failed: IndexError*",
            coefficients=lambda *given: given[2].logits_NV.index_fill_(1, torch.tensor([6]), 0),
        ),
        own("coefficients are all 0*", coefficients=lambda *given: given[2].logits_NV * 0),
        own("score returned 0 for every token*", score=lambda self, gradient, _: gradient.sum(-1) * 0),
        own("combine returned 0 for every token*", combine=lambda self, parts: parts.score_KBL[0] * 0),
        own(f"{SHARED} differ*", coefficients=lambda *given: given[2].logits_NV.softmax(-1) * 1e-8),
        own("coefficients of a row*", coefficients=lambda *given: given[2].logits_NV.sub_(given[2].logits_NV.mean(0))),
        own("combine gives*", combine=lambda self, parts: parts.score_KBL[0].div_(parts.score_KBL[0].max())),
        own("score failed*Half*", score=lambda self, *pair: torch.einsum("...h,...h->...", *pair).abs()),
        # What works on every layout, in place, as a bool, or with a tensor that a process keeps.
        own(coefficients=lambda *given: given[2].vocabulary.softmax(given[2].logits_NV.div_(0.7))),
        own(coefficients=lambda *given: given[2].vocabulary.softmax(given[2].logits_NV) > 0.1),
        own(coefficients=above_the_mean),
        own(coefficients=keeps_its_columns),
        own(score=lambda *given: (given[1] > 0).any(-1), combine=lambda self, parts: parts.score_KBL[0] > 0.3),
        own(score=lambda self, gradient, _: gradient.float().square_().sum(-1)),
        own(reads=frozenset({"entropy"}), combine=lambda _, parts: parts.entropy_BL.neg_().exp_() * parts.score_KBL[0]),
        # A pass computes nothing that `reads` does not name.
        own("combine failed*log_prob_BL is not*reads = frozenset({?log_prob?})*", combine=surprisal),
        own(NOT_READ, reads=LOG_PROB, combine=lambda self, parts: parts.entropy_BL),
        own(reads=LOG_PROB, combine=surprisal),
        # Thresholds and differences give most of the check's tokens 0, not all.
        own(reads=ENTROPY, combine=lambda self, parts: parts.entropy_BL > 1),
        own(reads=LOG_PROB | ENTROPY, combine=lambda self, parts: (parts.entropy_BL + parts.log_prob_BL).abs()),
        own(backwards=2 * (Backward("answer"),), combine=lambda self, parts: parts.score_KBL.diff(dim=0)[0].relu()),
        own(score=lambda *pair: signed(*pair).relu()),
        # Tokens outside of the reasoning are ignored, and scores for `combine` may be negative.
        own(combine=lambda self, parts: parts.score_KBL[0] / parts.reasoning_BL),
        own(score=signed, combine=lambda self, parts: parts.score_KBL[0].abs()),
        own(score=lambda self, gradient, embedding: gradient.sum(-1).clamp_min(0)),
        # Copies are chosen by what `combine` makes of a gradient.
        own(NOT_4, copies=Copies(by_gradient=True), combine=lambda self, parts: parts.score_KBL),
    ],
)
def test_what_an_importance_lacks(kind, said):
    assert fnmatchcase(fault_of(kind), said)


def test_a_backward_starts_from_rows_that_there_are():
    with pytest.raises(ValueError, match=r"rows='awnser'.*allowed: probe, answer, reasoning, later"):
        Backward("awnser")


def test_names_for_messages():
    assert without_copies().split(", ") == [name for name, kind in IMPORTANCES.items() if kind.copies is None]
    assert [IMPORTANCES[name].copies.by_gradient for name in of_engines().split(", ")] == [False, False]


# ---- importances and gates in a configuration; test_gate.py has the faults of gates


def message_of(key, value):
    with pytest.raises(OarConfigError) as error:
        OarConfig.parse({key: value})
    assert str(error.value).startswith(f"algorithm.oar.{key}={value!r}: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "name", "part"),
    [
        ("importance", "Empty", "cannot be used: combine failed"),
        ("importance", "Learns", "learns=True is not supported in a class of your own; allowed: value"),
        ("importance", "Absent", "cannot be imported"),
        ("gate", "HERE", "must be a function of (importance_BL, reasoning_BL, tau, beta, floor)"),
        ("gate", "Saliency", "a call with (importance_BL, reasoning_BL) failed"),
        ("gate", "absent", "cannot be imported"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(key, name, part):
    assert part in message_of(key, f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("importance", ["allowed: fisher, oar_g, decision, oar_p", "python:<module>:<class>"]),
        ("gate", ["allowed: two_level, bi_level", "python:<module>:<function>"]),
    ],
)
@pytest.mark.parametrize("value", ["fihser", "python:", "python:tests.own_importance", "python::Saliency", "regex:a:b"])
def test_a_wrong_name_is_answered_with_what_is_allowed(key, known, value):
    message = message_of(key, value)
    assert all(part in message for part in known)


@pytest.mark.parametrize("key", ["importance", "gate"])
def test_a_module_that_does_not_import_says_why(key, tmp_path, monkeypatch):
    (tmp_path / "module_with_a_fault.py").write_text("raise RuntimeError('of the module')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "RuntimeError('of the module')" in message_of(key, "python:module_with_a_fault:X")
    assert "module_with_a_fault" not in sys.modules
    message = message_of(key, "python:no_such_module:X")
    assert "No module named 'no_such_module'" in message
    assert "on PYTHONPATH in the driver and on every worker" in message


@pytest.mark.parametrize(
    ("fallback", "part"),
    [
        (EXAMPLE, None),
        ("oar_p", "would run masked copies.*fisher"),
        ("hybrid", "would run masked copies.*fisher"),
        ("fihser", "unknown.*fisher"),
        (f"{HERE}:Empty", "no method combine that makes the importance"),
    ],
)
def test_a_fallback_must_be_one_that_needs_no_copies(fallback, part):
    settings = {"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": fallback}}
    if part is None:
        assert OarConfig.parse(settings).perturbation.fallback == fallback
    else:
        with pytest.raises(OarConfigError, match=f"perturbation.fallback={fallback}.*{part}"):
            OarConfig.parse(settings)
