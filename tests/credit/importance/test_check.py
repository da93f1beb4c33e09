"""An importance and a gate of one's own: they work, or the message says what is missing."""

import sys
from fnmatch import fnmatchcase

import pytest
import torch

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.importance import Backward, Importance, importance_of
from oar_plugin.credit.importance.check import check
from tests import own_importance
from tests.own_importance import Saliency

HERE = f"python:{__name__}"
EXAMPLE = "python:tests.own_importance:Saliency"


def test_the_example_works():
    assert isinstance(importance_of(EXAMPLE), Saliency)
    config = OarConfig.parse({"importance": EXAMPLE, "gate": "python:tests.own_importance:upper_half"})
    assert config.importance_object is importance_of(EXAMPLE)
    assert (config.backwards, config.forwards) == (1, 1)
    assert config.gate_object.function is own_importance.upper_half
    assert config.quantile == 0.85


def test_what_a_notebook_defines_anew_is_used(monkeypatch):
    assert importance_of(EXAMPLE) is importance_of(EXAMPLE)
    monkeypatch.setattr(own_importance, "Saliency", again := type("Saliency", (Saliency,), {}))
    assert type(importance_of(EXAMPLE)) is again


# ---- importances


class Empty(Importance):
    name = help = "nothing"


def own(said="", base=Saliency, **attributes):
    """A class derived from `base` with other attributes, and its faults, with `*` for any text; none if it can be used."""
    return pytest.param(type("Own", (base,), attributes), said, id=", ".join([base.__name__, *attributes]))


def rows(said, function):
    """The same for a class whose coefficients are a function of the logits and the shard of the vocabulary."""
    return own(said, coefficients=lambda self, number, rows: function(rows.logits_NV, rows.vocabulary))


def signed(self, gradient, embedding):
    return (gradient * embedding).sum(-1)


def of_every_response_with_reasoning(self, parts):
    """It raises for a response without reasoning tokens."""
    pairs = zip(parts.score_KBL[0], parts.reasoning_BL, strict=True)
    return torch.stack([score / score[keep].max() for score, keep in pairs])


def one_hot(self, number, rows):
    return torch.nn.functional.one_hot(rows.token_N, rows.logits_NV.shape[-1])


def tokens_of_any_shard(self, number, rows):
    """It forgets that a token's column may be on a later process."""
    column_N = (rows.token_N - rows.vocabulary.start).clamp(0, rows.logits_NV.shape[-1] - 1)
    shares_NV = rows.vocabulary.softmax(rows.logits_NV)
    if shares_NV.numel():
        shares_NV[torch.arange(len(column_N)), column_N] -= 1
    return shares_NV


def above_the_mean(logits_NV, shard):
    count = shard.total(torch.tensor(float(logits_NV.shape[-1])))
    return (logits_NV > shard.total(logits_NV.sum(-1, keepdim=True)) / count).float()


def keeps_its_columns(self, number, rows):
    if not hasattr(self, "columns"):
        self.columns = torch.arange(rows.vocabulary.start, rows.vocabulary.start + rows.logits_NV.shape[-1])
    return rows.vocabulary.softmax(rows.logits_NV) * self.columns


def wants_noise(self, number, rows):
    return rows.clean_NV * 1 if rows.token_N is None else rows.vocabulary.softmax(rows.logits_NV)


def fails_with_tokens(self, number, rows):
    return rows.vocabulary.softmax(rows.logits_NV) if rows.token_N is None else None


SHARED = "coefficients where processes share the vocabulary (see rows.vocabulary)"
DIFFER, EXCHANGE = f"{SHARED} returned other numbers*", f"{SHARED} failed*other tensors are exchanged*"
NOT_READ = '*entropy_BL is not computed; write reads = frozenset({"entropy", "log_prob"}) in the class*'
NOT_VALID = "* returned numbers not finite, negative, or all 0"
LOG_PROB, ENTROPY = frozenset({"log_prob"}), frozenset({"entropy"})
NO_TUPLE = "backwards must be a tuple of Backward: (Backward(...),)"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (int, "it must be a class derived from Importance"),
        (3, "it must be a class derived from Importance"),
        own("coefficients failed*size*", __init__=lambda self, size: None),
        own("it has no name, or no help", name=""),
        own("it has no name, or no help", help=""),
        own("score failed*it has backwards and no method score (one number*", score=Importance.score),
        own("*it has backwards and no method coefficients (the factor*", coefficients=Importance.coefficients),
        own("*2 backwards and no method combine that makes*", backwards=(Backward("answer"), Backward("reasoning"))),
        own("*0 backwards and no method combine that makes the importance*", base=Empty),
        own(NO_TUPLE, backwards=Backward("answer")),
        own(NO_TUPLE, backwards=("answer",)),
        own("*entropies*allowed: a set of entropy, log_prob", reads=frozenset({"entropies"})),
        own("reads='entropy'*allowed: a set of entropy, log_prob", reads="entropy"),
        own("copies=True excludes*", copies=1.0),
        own("copies=True excludes*", copies=True),
        # What a method returns.
        rows("coefficients must return a tensor of shape (3, 7)", lambda x, shard: x.sum(-1)),
        own("score must return a tensor of shape (3,)", score=lambda *_: 1.0),
        own("combine must return a tensor of shape (3, 4)", combine=lambda self, parts: parts.score_KBL),
        own(NOT_VALID, score=lambda *pair: signed(*pair).abs() / 0),
        own(NOT_VALID, score=signed),
        own(NOT_VALID, reads=LOG_PROB, combine=lambda self, parts: parts.log_prob_BL),
        rows(NOT_VALID, lambda x, shard: x * 0),
        own(NOT_VALID, score=lambda self, gradient, _: gradient.sum(-1) * 0),
        own(NOT_VALID, combine=lambda self, parts: parts.score_KBL[0] * 0),
        # What it raises, with file and line.
        rows("coefficients failed*(test_check.py, line *)", lambda x, shard: shard.softmax(3)),
        # What a pass does not give: tokens of pooled rows, noise-free logits without noise, entropies of rows that predict
        # no reasoning, readings that `reads` does not name.
        own("coefficients of pooled rows (no token_N; *) failed*NoneType*", backwards=(Backward("probe"),)),
        own("coefficients of pooled rows * failed*", backwards=(Backward(),), coefficients=wants_noise),
        own("coefficients failed*", reads=ENTROPY, coefficients=lambda *given: given[2].entropy_N * given[2].logits_NV),
        own(NOT_READ, reads=LOG_PROB, combine=lambda self, parts: parts.entropy_BL),
        # Rows of the probe have tokens where they are not pooled, and a rank may hold no row of the answer.
        own("*must return a tensor*", backwards=(Backward(),), coefficients=fails_with_tokens),
        rows("coefficients * failed*amax()*", lambda x, _: x + 0 * x.amax(0)),
        # Other numbers in a batch than alone, in place or not, or in another shape or type.
        rows("coefficients of a row alone returned other*", lambda x, shard: x.softmax(0)),
        own(
            "score of one row*returned other*",
            score=lambda self, gradient, _: gradient.square().sum(-1) / gradient.norm(),
        ),
        own("score*[[]B, T, H] returned other*", score=lambda *pair: pair[1].abs().sum(-1) * pair[1].dim()),
        own(
            "combine of a response alone returned other*",
            combine=lambda _, parts: parts.score_KBL[0].div_(parts.score_KBL.max()),
        ),
        own("combine*alone*", combine=lambda self, parts: parts.score_KBL[0] / parts.score_KBL.shape[-1]),
        own("combine failed*max()*", combine=of_every_response_with_reasoning),
        own("score in half precision*float()) returned other*", score=lambda *pair: (1e4 + pair[1].sum(-1) ** 2) - 1e4),
        own("score in half*failed*Half*", score=lambda self, *pair: torch.einsum("...h,...h->...", *pair).abs()),
        # Other numbers where processes share the vocabulary.
        rows(DIFFER, lambda x, _: x.softmax(-1)),
        rows(DIFFER, lambda x, shard: x.softmax(-1) * 1e-8),
        own(DIFFER, coefficients=tokens_of_any_shard),
        rows(DIFFER, lambda x, shard: x * shard.total(torch.ones(()))),
        own(f"{SHARED} failed*Class values*", coefficients=one_hot),
        rows(f"{SHARED} failed*IndexError*", lambda x, shard: x - shard.largest(x.amax(-1, keepdim=True))),
        rows(f"{SHARED} failed*IndexError*", lambda x, shard: x.index_fill_(1, torch.tensor([6]), 0)),
        rows(EXCHANGE, lambda x, shard: x + shard.total(0 * x)),
        rows(EXCHANGE, lambda x, shard: shard.softmax(x) if x.numel() else x),
        # What works on every layout, in place, as a bool, or with a tensor that a process keeps.
        rows("", lambda x, shard: shard.softmax(x.div_(0.7))),
        rows("", lambda x, shard: shard.softmax(x) > 0.1),
        rows("", above_the_mean),
        rows("", lambda x, shard: shard.total(torch.ones(1)) / shard.total(torch.ones(1)) * shard.softmax(x)),
        own(coefficients=keeps_its_columns),
        own(score=lambda *given: (given[1] > 0).any(-1), combine=lambda self, parts: parts.score_KBL[0] > 0.3),
        own(score=lambda self, gradient, _: gradient.float().square_().sum(-1)),
        own(reads=ENTROPY, combine=lambda _, parts: parts.entropy_BL.neg_().exp_() * parts.score_KBL[0]),
        own(reads=LOG_PROB, combine=lambda self, parts: -parts.log_prob_BL),
        # Thresholds and differences give most of the check's tokens 0, not all.
        own(reads=ENTROPY, combine=lambda self, parts: parts.entropy_BL > 1),
        own(reads=LOG_PROB | ENTROPY, combine=lambda self, parts: (parts.entropy_BL + parts.log_prob_BL).abs()),
        own(backwards=2 * (Backward("answer"),), combine=lambda self, parts: parts.score_KBL.diff(dim=0)[0].relu()),
        own(score=lambda *pair: signed(*pair).relu()),
        # Tokens outside of the reasoning are ignored, and scores for `combine` may be negative.
        own(combine=lambda self, parts: parts.score_KBL[0] / parts.reasoning_BL),
        own(score=signed, combine=lambda self, parts: parts.score_KBL[0].abs()),
    ],
)
def test_what_an_importance_lacks(kind, said):
    fault = ""
    try:
        check(kind)
    except ValueError as error:
        fault = str(error)
    assert fnmatchcase(fault, said)


def test_a_backward_starts_from_rows_that_there_are():
    with pytest.raises(ValueError, match=r"rows='awnser'.*allowed: probe, answer, reasoning"):
        Backward("awnser")


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
        ("importance", "Absent", "cannot be imported"),
        ("gate", "HERE", "must be a function of (importance_BL, reasoning_BL, tau, beta, floor)"),
        ("gate", "Saliency", "a call with (importance_BL, reasoning_BL) failed"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(key, name, part):
    assert part in message_of(key, f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("importance", ["allowed: fisher, oar_g, ", "python:<module>:<class>"]),
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
