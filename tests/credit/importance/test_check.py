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
EXAMPLE = "python:tests.own_importance:Saliency"


def test_the_example_works():
    assert isinstance(importance_of(EXAMPLE), Saliency)
    assert importance_of(EXAMPLE) is importance_of(EXAMPLE)
    config = OarConfig.parse({"importance": EXAMPLE, "gate": "python:tests.own_importance:upper_half"})
    assert config.importance_object is importance_of(EXAMPLE)
    assert (config.backwards, config.extra_forwards, config.copies) == (1, 0, None)
    assert config.gate_object.weights is own_importance.upper_half
    assert config.quantile == 0.85


def message_of(key, value):
    with pytest.raises(OarConfigError) as error:
        OarConfig.parse({key: value})
    assert str(error.value).startswith(f"algorithm.oar.{key}={value!r}: ")
    return str(error.value)


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


# What it is but for some attributes, those attributes, and what the message says; nothing where it is not refused.
NO_TUPLE, READINGS = "backwards must be a tuple of Backward", "allowed: a set of entropy, log_prob"
ONE, TWO = (Backward(),), (Backward("answer"), Backward("reasoning"))
OWN = [
    (Saliency, {"name": ""}, ["it has no name"]),
    (Saliency, {"help": ""}, ["it has no help"]),
    (Empty, {"backwards": ONE}, ["no method coefficients", "no method score", "; "]),
    (Empty, {"backwards": ONE, "coefficients": lambda self, number, rows: rows.logits_NV}, ["no method score"]),
    (Saliency, {"backwards": TWO}, ["2 backwards and no method combine"]),
    (Empty, {}, ["no backwards, no copies and no method combine", "nothing makes its scores"]),
    (Empty, {"copies": Copies(by_gradient=True)}, ["chosen by gradient", "no backwards"]),
    (Saliency, {"backwards": Backward("answer")}, [NO_TUPLE]),
    (Saliency, {"backwards": ("answer",)}, [NO_TUPLE]),
    (Saliency, {"backwards": (Backward("awnser"),)}, ["'awnser'", "allowed: probe, answer, reasoning"]),
    (Saliency, {"reads": frozenset({"entropies"})}, ["entropies", READINGS]),
    (Saliency, {"reads": "entropy"}, ["reads='entropy'", READINGS]),
    (Saliency, {"copies": 1.0}, ["copies must be None or Copies(...)"]),
    (
        Saliency,
        {"coefficients": lambda self, number, rows: rows.logits_NV.sum(-1)},
        ["coefficients returned (3,), wanted a tensor of shape (3, 7)"],
    ),
    # Tokens are there for single rows only.
    (Saliency, {"backwards": (Backward("probe"),)}, ["coefficients failed", "NoneType"]),
    (Saliency, {"score": lambda *_: 1.0}, ["score returned float, wanted a tensor of shape (2,)"]),
    (Saliency, {"score": lambda *pair: signed(*pair).abs() / 0}, ["score returned numbers that are not finite"]),
    (Saliency, {"score": signed}, ["score returned negative numbers"]),
    (
        Saliency,
        {"combine": lambda self, parts: parts.score_KBL},
        ["combine returned (1, 3, 4), wanted a tensor of shape (3, 4)"],
    ),
    (
        Saliency,
        {"reads": frozenset({"log_prob"}), "combine": lambda self, parts: parts.log_prob_BL},
        ["combine returned negative numbers"],
    ),
    (Saliency, {"coefficients": of_every_row}, ["coefficients failed", "max()"]),
    (Saliency, {"combine": of_every_response_with_reasoning}, ["combine failed", "max()"]),
    (Saliency, {"combine": fails}, ["combine failed: KeyError('of mine')"]),
    # What is no reasoning is not read.
    (Saliency, {"combine": lambda self, parts: parts.score_KBL[0] / parts.reasoning_BL}, []),
    # What `combine` is given may have a sign.
    (Saliency, {"score": signed, "combine": lambda self, parts: parts.score_KBL[0].abs()}, []),
]
globals().update({f"Own{number}": type(f"Own{number}", (one[0],), one[1]) for number, one in enumerate(OWN)})
MESSAGES = {f"Own{number}": parts for number, (_, _, parts) in enumerate(OWN)} | {
    "no_class": ["cannot be used", "must be a class derived from oar_plugin.credit.importance.Importance"],
    "Unrelated": ["must be a class derived from"],
    "NeedsArguments": ["NeedsArguments() failed", "size"],
    "Absent": ["cannot be imported", "Absent", "PYTHONPATH"],
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_an_importance_that_cannot_work_is_refused_at_the_start_with_what_is_missing(kind):
    name = f"{HERE}:{kind}"
    if not MESSAGES[kind]:
        assert isinstance(importance_of(name), Saliency)
        return
    message = message_of("importance", name)
    for part in MESSAGES[kind]:
        assert part in message
    with pytest.raises(ValueError, match="cannot be"):
        importance_of(name)


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
        ("Saliency", "(importance_BL, reasoning_BL, tau, beta, floor)"),
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


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("importance", ["allowed: fisher, oar_g", "python:<module>:<class>"]),
        ("gate", ["allowed: two_level, bi_level", "python:<module>:<function>"]),
    ],
)
@pytest.mark.parametrize("value", ["fihser", "python:", "python:tests.own_importance", "python::Saliency", "regex:a:b"])
def test_a_wrong_name_is_answered_with_what_is_allowed(key, known, value):
    message = message_of(key, value)
    assert all(part in message for part in known)


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

    assert parsed(EXAMPLE).perturbation.fallback == EXAMPLE
    for fallback, part in (("oar_p", "would run masked copies"), ("fihser", "unknown"), (f"{HERE}:Own0", "no name")):
        with pytest.raises(OarConfigError, match=f"perturbation.fallback={fallback}.*{part}"):
            parsed(fallback)
