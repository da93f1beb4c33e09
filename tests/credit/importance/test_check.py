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


class Empty(Importance):
    name = help = "nothing"


class NeedsArguments(Saliency):
    def __init__(self, size):
        self.size = size


class Unrelated:
    name = help = "unrelated"


def no_class():
    pass


def signed(self, gradient, embedding):
    return (gradient * embedding).sum(-1)


def fails(self, parts):
    raise KeyError("of mine")


def of_every_row(self, number, rows):
    """A rank may hold no row of the answer."""
    return Saliency.coefficients(self, number, rows) / rows.logits_NV.max()


def of_every_response_with_reasoning(self, parts):
    """A response that is not scored has none."""
    pairs = zip(parts.score_KBL[0], parts.reasoning_BL, strict=True)
    return torch.stack([score / score[keep].max() for score, keep in pairs])


FAULTS = {
    # name: (what it is but for these attributes, those attributes, what the message says)
    "NoName": (Saliency, {"name": ""}, ["it has no name"]),
    "NoHelp": (Saliency, {"help": ""}, ["it has no help"]),
    "NoMethods": (Empty, {"backwards": (Backward(),)}, ["no method coefficients", "no method score", "; "]),
    "NoScore": (
        Empty,
        {"backwards": (Backward(),), "coefficients": lambda self, number, rows: rows.logits_NV},
        ["no method score"],
    ),
    "Two": (
        Saliency,
        {"backwards": (Backward("answer"), Backward("reasoning"))},
        ["2 backwards and no method combine"],
    ),
    "Nothing": (Empty, {}, ["no backwards, no copies and no method combine", "nothing makes its scores"]),
    "ChosenByNothing": (Empty, {"copies": Copies(by_gradient=True)}, ["chosen by gradient", "no backwards"]),
    "NoTuple": (Saliency, {"backwards": Backward("answer")}, ["backwards must be a tuple of Backward"]),
    "NoBackward": (Saliency, {"backwards": ("answer",)}, ["backwards must be a tuple of Backward"]),
    "NoSuchRows": (Saliency, {"backwards": (Backward("awnser"),)}, ["'awnser'", "allowed: probe, answer, reasoning"]),
    "NoSuchReading": (
        Saliency,
        {"reads": frozenset({"entropies"})},
        ["entropies", "allowed: a set of entropy, log_prob"],
    ),
    "OneReading": (Saliency, {"reads": "entropy"}, ["reads='entropy'", "allowed: a set of entropy, log_prob"]),
    "NoCopies": (Saliency, {"copies": 1.0}, ["copies must be None or Copies(...)"]),
    "WrongShape": (
        Saliency,
        {"coefficients": lambda self, number, rows: rows.logits_NV.sum(-1)},
        ["coefficients returned (3,), wanted a tensor of shape (3, 7)"],
    ),
    # Tokens are there for single rows only.
    "NeedsPooledTokens": (Saliency, {"backwards": (Backward("probe"),)}, ["coefficients failed", "NoneType"]),
    "NoTensor": (
        Saliency,
        {"score": lambda self, gradient, embedding: 1.0},
        ["score returned float, wanted a tensor of shape (2,)"],
    ),
    "NotFinite": (
        Saliency,
        {"score": lambda self, gradient, embedding: signed(self, gradient, embedding).abs() / 0},
        ["score returned numbers that are not finite"],
    ),
    "Negative": (Saliency, {"score": signed}, ["score returned negative numbers"]),
    "BadCombine": (
        Saliency,
        {"combine": lambda self, parts: parts.score_KBL},
        ["combine returned (1, 3, 4), wanted a tensor of shape (3, 4)"],
    ),
    "NegativeCombine": (
        Saliency,
        {"reads": frozenset({"log_prob"}), "combine": lambda self, parts: parts.log_prob_BL},
        ["combine returned negative numbers"],
    ),
    "NeedsRows": (Saliency, {"coefficients": of_every_row}, ["coefficients failed", "max()"]),
    "NeedsReasoning": (Saliency, {"combine": of_every_response_with_reasoning}, ["combine failed", "max()"]),
    "Raises": (Saliency, {"combine": fails}, ["combine failed: KeyError('of mine')"]),
}
HARMLESS = {
    # What is no reasoning is not read.
    "NanElsewhere": {"combine": lambda self, parts: parts.score_KBL[0] / parts.reasoning_BL},
    # What `combine` is given may have a sign.
    "SignedBefore": {"score": signed, "combine": lambda self, parts: parts.score_KBL[0].abs()},
}
globals().update({name: type(name, (base,), attributes) for name, (base, attributes, _) in FAULTS.items()})
globals().update({name: type(name, (Saliency,), attributes) for name, attributes in HARMLESS.items()})
MESSAGES = {name: parts for name, (_, _, parts) in FAULTS.items()} | {
    "no_class": ["must be a class derived from oar_plugin.credit.importance.Importance"],
    "Unrelated": ["must be a class derived from"],
    "NeedsArguments": ["NeedsArguments() failed", "size"],
    "Absent": ["cannot be imported", "Absent", "PYTHONPATH"],
}


def message_of(key, value):
    with pytest.raises(OarConfigError) as error:
        OarConfig.parse({key: value})
    assert str(error.value).startswith(f"algorithm.oar.{key}={value!r}: ")
    return str(error.value)


@pytest.mark.parametrize("kind", MESSAGES)
def test_an_importance_that_cannot_work_is_refused_at_the_start_with_what_is_missing(kind):
    message = message_of("importance", f"{HERE}:{kind}")
    for part in MESSAGES[kind]:
        assert part in message
    with pytest.raises(ValueError, match="cannot be"):
        importance_of(f"{HERE}:{kind}")


@pytest.mark.parametrize("kind", HARMLESS)
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
