"""An importance and a gate of one's own: they work, or the message says what is missing."""

import sys

import pytest
import torch

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.gate import gate_of
from oar_plugin.credit.importance import Backward, Copies, Importance, importance_of
from tests import own_importance
from tests.own_importance import Saliency

HERE = f"python:{__name__}"


def test_the_example_works():
    name = "python:tests.own_importance:Saliency"
    assert isinstance(importance_of(name), Saliency)
    assert importance_of(name) is importance_of(name)
    config = OarConfig.parse({"importance": name, "gate": "python:tests.own_importance:upper_half"})
    assert config.importance_object is importance_of(name)
    assert (config.backwards, config.extra_forwards, config.copies) == (1, 0, None)
    assert config.gate_object.weights is own_importance.upper_half
    assert config.quantile == 0.85


# ---- importances that cannot work


class NoName(Saliency):
    name = ""


class NoHelp(Saliency):
    help = ""


class NoMethods(Importance):
    name = help = "no methods"
    backwards = (Backward(),)


class NoScore(Importance):
    name = help = "no score"
    backwards = (Backward(),)

    def coefficients(self, number, rows):
        return rows.logits_NV


class Two(Saliency):
    backwards = (Backward("answer"), Backward("reasoning"))


class Nothing(Importance):
    name = help = "nothing"


class ChosenByNothing(Importance):
    name = help = "chosen by nothing"
    copies = Copies(by_gradient=True)


class NoTuple(Saliency):
    backwards = Backward("answer")


class NoBackward(Saliency):
    backwards = ("answer",)


class NoSuchRows(Saliency):
    backwards = (Backward("awnser"),)


class NoSuchReading(Saliency):
    reads = frozenset({"entropies"})


class OneReading(Saliency):
    reads = "entropy"


class NoCopies(Saliency):
    copies = 1.0


class NeedsArguments(Saliency):
    def __init__(self, size):
        self.size = size


class WrongShape(Saliency):
    def coefficients(self, number, rows):
        return rows.logits_NV.sum(-1)


class NeedsPooledTokens(Saliency):
    """Tokens are there for single rows only."""

    backwards = (Backward("probe"),)


class NoTensor(Saliency):
    def score(self, gradient, embedding):
        return 1.0


class NotFinite(Saliency):
    def score(self, gradient, embedding):
        return super().score(gradient, embedding) / 0


class Negative(Saliency):
    def score(self, gradient, embedding):
        return (gradient * embedding).sum(-1)


class BadCombine(Saliency):
    def combine(self, parts):
        return parts.score_KBL


class NegativeCombine(Saliency):
    reads = frozenset({"log_prob"})

    def combine(self, parts):
        return parts.log_prob_BL


class NeedsRows(Saliency):
    """A rank may hold no row of the answer."""

    def coefficients(self, number, rows):
        return super().coefficients(number, rows) / rows.logits_NV.max()


class NeedsReasoning(Saliency):
    """A response that is not scored has none."""

    def combine(self, parts):
        pairs = zip(parts.score_KBL[0], parts.reasoning_BL, strict=True)
        return torch.stack([score / score[keep].max() for score, keep in pairs])


class Raises(Saliency):
    def combine(self, parts):
        raise KeyError("of mine")


def no_class():
    pass


class Unrelated:
    name = help = "unrelated"


FAULTS = [
    ("no_class", ["must be a class derived from oar_plugin.credit.importance.Importance"]),
    ("Unrelated", ["must be a class derived from"]),
    ("NoName", ["it has no name"]),
    ("NoHelp", ["it has no help"]),
    ("NoMethods", ["no method coefficients", "no method score", "; "]),
    ("NoScore", ["no method score"]),
    ("Two", ["2 backwards and no method combine"]),
    ("Nothing", ["no backwards, no copies and no method combine", "nothing makes its scores"]),
    ("ChosenByNothing", ["chosen by gradient", "no backwards"]),
    ("NoTuple", ["backwards must be a tuple of Backward"]),
    ("NoBackward", ["backwards must be a tuple of Backward"]),
    ("NoSuchRows", ["'awnser'", "allowed: probe, answer, reasoning"]),
    ("NoSuchReading", ["entropies", "allowed: a set of entropy, log_prob"]),
    ("OneReading", ["reads='entropy'", "allowed: a set of entropy, log_prob"]),
    ("NoCopies", ["copies must be None or Copies(...)"]),
    ("NeedsArguments", ["NeedsArguments() failed", "size"]),
    ("WrongShape", ["coefficients returned (3,), wanted a tensor of shape (3, 7)"]),
    ("NeedsPooledTokens", ["coefficients failed", "NoneType"]),
    ("NoTensor", ["score returned float, wanted a tensor of shape (2,)"]),
    ("NotFinite", ["score returned numbers that are not finite"]),
    ("Negative", ["score returned negative numbers"]),
    ("BadCombine", ["combine returned (1, 3, 4), wanted a tensor of shape (3, 4)"]),
    ("NegativeCombine", ["combine returned negative numbers"]),
    ("NeedsRows", ["coefficients failed", "max()"]),
    ("NeedsReasoning", ["combine failed", "max()"]),
    ("Raises", ["combine failed: KeyError('of mine')"]),
    ("Absent", ["cannot be imported", "Absent", "PYTHONPATH"]),
]


def message_of(key, value):
    with pytest.raises(OarConfigError) as error:
        OarConfig.parse({key: value})
    assert str(error.value).startswith(f"algorithm.oar.{key}={value!r}: ")
    return str(error.value)


@pytest.mark.parametrize(("kind", "parts"), FAULTS, ids=[kind for kind, _ in FAULTS])
def test_an_importance_that_cannot_work_is_refused_at_the_start_with_what_is_missing(kind, parts):
    message = message_of("importance", f"{HERE}:{kind}")
    for part in parts:
        assert part in message
    with pytest.raises(ValueError, match="cannot be"):
        importance_of(f"{HERE}:{kind}")


class NanElsewhere(Saliency):
    """What is no reasoning is not read."""

    def combine(self, parts):
        return parts.score_KBL[0] / parts.reasoning_BL


class SignedBefore(Saliency):
    """What `combine` is given may have a sign."""

    def score(self, gradient, embedding):
        return (gradient * embedding).sum(-1)

    def combine(self, parts):
        return parts.score_KBL[0].abs()


@pytest.mark.parametrize("kind", ["NanElsewhere", "SignedBefore"])
def test_what_does_no_harm_is_not_refused(kind):
    assert isinstance(importance_of(f"{HERE}:{kind}"), Saliency)


# ---- gates that cannot work


def of_one_argument(importance_BL):
    return importance_BL


def of_another_shape(importance_BL, reasoning_BL, tau, beta, floor):
    return torch.ones(2, 4)


def of_every_response(importance_BL, reasoning_BL, tau, beta, floor):
    for scores, keep in zip(importance_BL, reasoning_BL, strict=True):
        scores[keep].quantile(tau)
    return torch.ones_like(importance_BL)


def without_mass(importance_BL, reasoning_BL, tau, beta, floor):
    return 2 * torch.ones_like(importance_BL)


def on_others(importance_BL, reasoning_BL, tau, beta, floor):
    return torch.where(reasoning_BL, 1.0, 0.5)


def not_finite(importance_BL, reasoning_BL, tau, beta, floor):
    return importance_BL / 0


NOT_WEIGHTS = "must be finite, average 1 over each response's reasoning tokens, and be 1 elsewhere"
A_NUMBER = 3


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("A_NUMBER", "must be a function of (importance_BL, reasoning_BL, tau, beta, floor)"),
        ("of_one_argument", "failed: TypeError"),
        ("of_every_response", "quantile"),
        ("of_another_shape", "of the shape of importance_BL"),
        ("without_mass", NOT_WEIGHTS),
        ("on_others", NOT_WEIGHTS),
        ("not_finite", NOT_WEIGHTS),
        ("absent", "cannot be imported"),
    ],
)
def test_a_gate_that_cannot_work_is_refused_at_the_start(function, part):
    assert part in message_of("gate", f"{HERE}:{function}")
    with pytest.raises(ValueError, match="cannot be"):
        gate_of(f"{HERE}:{function}")


# ---- what is no name at all


@pytest.mark.parametrize(("key", "known"), [("importance", "fisher, oar_g"), ("gate", "two_level, bi_level")])
@pytest.mark.parametrize("value", ["fihser", "python:", "python:tests.own_importance", "python::Saliency", "regex:a:b"])
def test_a_wrong_name_is_answered_with_what_is_allowed(key, known, value):
    message = message_of(key, value)
    assert f"allowed: {known}" in message
    assert "python:<module>:<" in message


def test_a_module_that_does_not_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "module_with_a_fault.py").write_text("raise RuntimeError('of the module')")
    monkeypatch.syspath_prepend(tmp_path)
    for key in ("importance", "gate"):
        assert "RuntimeError('of the module')" in message_of(key, "python:module_with_a_fault:X")
        message = message_of(key, "python:no_such_module:X")
        assert "No module named 'no_such_module'" in message
        assert "on PYTHONPATH in the driver and on every worker" in message
    assert "module_with_a_fault" not in sys.modules


def test_a_fallback_must_be_one_that_needs_no_copies():
    def parsed(fallback):
        return OarConfig.parse({"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": fallback}})

    assert parsed("python:tests.own_importance:Saliency").perturbation.fallback.endswith("Saliency")
    for fallback, part in (("oar_p", "would run masked copies"), ("fihser", "unknown"), (f"{HERE}:NoName", "no name")):
        with pytest.raises(OarConfigError, match=f"perturbation.fallback={fallback}.*{part}"):
            parsed(fallback)
