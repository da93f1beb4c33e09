"""What a trainer asks for: from the settings of a run to plain values and back."""

import json

import pytest

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.noise import step_seed
from oar_plugin.passes.request import Perturbation, Request, replacement_token


class Tokenizer:
    def __init__(self, pad_token_id):
        self.pad_token_id = pad_token_id


def test_a_request_carries_the_steps_seed_and_the_temperature_of_the_rollout():
    config = OarConfig(seed=3, num_draws=2, sigma=0.01)
    first, second = (Request.from_config(config, step, 100, temperature=0.6) for step in (1, 2))
    assert (first.seed, second.seed) == (step_seed(3, 1), step_seed(3, 2))
    assert first.seed != second.seed
    assert Request.from_config(config, 1, 100, temperature=0.6) == first
    assert (first.temperature, first.sigma, first.num_draws, first.max_response_length) == (0.6, 0.01, 2, 100)
    assert first.perturbation is None
    assert first.importance_object is config.importance_object


def test_the_probe_is_that_of_the_step():
    config = OarConfig(warmup_steps=2, probe="answer_joint")
    assert [Request.from_config(config, step, 1).probe for step in (1, 2, 3)] == ["last", "last", "answer_joint"]


@pytest.mark.parametrize(
    ("settings", "importance", "perturbation"),
    [
        ({"importance": "oar_p"}, "oar_p", Perturbation(1.0, 1, 7)),
        ({"importance": "hybrid", "perturbation": {"span": 4}}, "hybrid", Perturbation(0.3, 4, 7)),
        ({"importance": "oar_p", "perturbation": {"budget": 9}}, "oar_p", Perturbation(9, 1, 7)),
        ({"importance": "oar_p", "perturbation": {"backend": "rollout"}}, "fisher", None),
        ({"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": "onward"}}, "onward", None),
    ],
)
def test_copies_go_to_the_actor_unless_the_rollout_engines_run_them(settings, importance, perturbation):
    request = Request.from_config(OarConfig.parse(settings), 1, 100, replacement_token=7)
    assert (request.importance, request.perturbation) == (importance, perturbation)


@pytest.mark.parametrize(
    "settings", [{}, {"importance": "oar_p"}, {"importance": "python:tests.own_importance:Saliency"}]
)
def test_it_travels_as_plain_values(settings):
    request = Request.from_config(OarConfig.parse(settings), 5, 100, True, 7, 0.9)
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request


def test_what_stands_in_for_a_token():
    assert replacement_token(OarConfig(), Tokenizer(0)) == 0
    sampled = OarConfig.parse({"perturbation": {"replacement": "sampled"}})
    assert replacement_token(sampled, Tokenizer(None)) is None
    with pytest.raises(OarConfigError, match=r"replacement=pad.*no padding token.*sampled"):
        replacement_token(OarConfig(), Tokenizer(None))
