"""What a trainer asks for: from the settings of a run to plain values and back."""

import json
from types import SimpleNamespace

import pytest

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.noise import step_seed
from oar_plugin.passes.request import Request, replacement_token


def test_a_request_carries_the_probe_and_seed_of_the_step_and_the_temperature_of_the_rollout():
    config = OarConfig(
        importance="fisher", seed=3, num_draws=2, sigma=0.01, warmup_steps=2, probe="answer_joint", max_answer_tokens=50
    )
    requests = [Request.of_step(config, step, max_response_length=100, temperature=0.6) for step in (1, 2, 3)]
    assert [one.seed for one in requests] == [step_seed(3, step) for step in (1, 2, 3)]
    assert len({one.seed for one in requests}) == 3
    assert [one.probe for one in requests] == ["last", "last", "answer_joint"]
    first = requests[0]
    assert Request.of_step(config, 1, max_response_length=100, temperature=0.6) == first
    assert (first.temperature, first.config, first.max_response_length) == (0.6, config, 100)
    assert [forward.draw for forward in first.forwards()] == [0, 1]
    assert first.importance_object is config.importance_object


@pytest.mark.parametrize(
    ("settings", "importance", "copies"),
    [
        ({}, "oar_p", True),
        ({"importance": "python:tests.own_importance:Saliency"}, "python:tests.own_importance:Saliency", False),
        ({"importance": "oar_p", "perturbation": {"span": 4}}, "oar_p", True),
        ({"importance": "oar_p", "perturbation": {"backend": "rollout"}}, "fisher", False),
        ({"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": "grail"}}, "grail", False),
    ],
)
def test_copies_go_to_the_actor_unless_engines_run_them_and_all_travels_as_plain_values(settings, importance, copies):
    request = Request.of_step(OarConfig.parse(settings), 5, importance_only=True, replacement_token=7)
    assert request.importance == importance
    assert request.importance_object.copies == copies
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request


def test_without_a_fallback_nothing_is_asked_of_the_actor():
    perturbation = {"backend": "rollout", "fallback": "none"}
    config = OarConfig.parse({"importance": "oar_p", "perturbation": perturbation})
    assert config.actor_importance is None
    with pytest.raises(AssertionError):
        Request.of_step(config, 5).forwards()


def test_what_stands_in_for_a_token():
    padded, unpadded = SimpleNamespace(pad_token_id=0), SimpleNamespace(pad_token_id=None)
    copies = OarConfig.parse({"perturbation.replacement": "pad"})
    assert replacement_token(copies, padded) == 0
    assert replacement_token(OarConfig(importance="fisher"), padded) is None, "no copies"
    sampled = OarConfig.parse({"importance": "oar_p", "perturbation": {"replacement": "sampled"}})
    assert replacement_token(sampled, unpadded) is None
    with pytest.raises(OarConfigError, match=r"replacement=pad.*no padding token.*sampled"):
        replacement_token(copies, unpadded)
