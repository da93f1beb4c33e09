"""A configuration that cannot work is refused with the key, its value and what is allowed."""

import pytest

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.gate import GATES
from oar_plugin.credit.importance import IMPORTANCES


def offloaded(fallback):
    return {"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": fallback}}


def test_defaults_are_the_measured_estimator_and_gate():
    config = OarConfig.parse(None)
    assert (config.gate, config.quantile, config.beta, config.floor, config.sigma) == (
        "two_level",
        0.85,
        2.0,
        0.1,
        1e-3,
    )
    assert (config.importance, config.probe, config.base_estimator) == ("fisher", "answer_mean", "grpo")


@pytest.mark.parametrize(
    ("settings", "quantile"), [({"gate": "bi_level"}, 0.4), ({"gate": "bi_level", "tau": 0.0}, 0.0)]
)
def test_the_quantile_follows_the_gate_unless_it_is_said(settings, quantile):
    assert OarConfig.parse(settings).quantile == quantile


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"tau": 1.5}, ["algorithm.oar.tau=1.5", "less than or equal to 1"]),
        ({"tau": "high"}, ["algorithm.oar.tau='high'", "number"]),
        ({"beta": -1}, ["algorithm.oar.beta=-1", "greater than or equal to 0"]),
        ({"floor": 0}, ["algorithm.oar.floor=0", "greater than 0"]),
        ({"max_weight": 1}, ["algorithm.oar.max_weight=1", "unknown key"]),
        ({"sigma": 0}, ["algorithm.oar.sigma=0"]),
        ({"num_draws": 0}, ["algorithm.oar.num_draws=0"]),
        ({"warmup_steps": -1}, ["algorithm.oar.warmup_steps=-1"]),
        (
            {"importance": "attention"},
            ["algorithm.oar.importance='attention'", *IMPORTANCES, "python:<module>:<class>"],
        ),
        ({"importance": "python:tests.own_importance:upper_half"}, ["upper_half cannot be used", "class derived from"]),
        ({"importance": "python:tests.no_such_module:Mine"}, ["tests.no_such_module"]),
        ({"gate": "steps"}, ["algorithm.oar.gate='steps'", *GATES, "python:<module>:<function>"]),
        ({"gate": "python:tests.own_importance:Saliency"}, ["Saliency cannot be used", "importance_BL"]),
        ({"importance": "hybrid", "perturbation": {"budget": 1}}, ["importance=hybrid", "perturbation.budget=1"]),
        ({"perturbation": {"span": "lines"}}, ["algorithm.oar.perturbation.span='lines'", "integer"]),
        ({"perturbation": {"replacement": "mean"}}, ["algorithm.oar.perturbation.replacement='mean'", "'pad'"]),
        (offloaded("hybrid"), ["fallback=hybrid", "fisher"]),
        (offloaded("fischer"), ["fallback=fischer", "fisher"]),
        ({"probe": "mean"}, ["algorithm.oar.probe='mean'", "'answer_mean'"]),
        ({"base_estimator": "ppo"}, ["algorithm.oar.base_estimator='ppo'", "'rloo'"]),
        ({"teu": 0.3}, ["algorithm.oar.teu=0.3", "unknown key", "did you mean algorithm.oar.tau", "allowed keys"]),
        ({"answer_patterns": []}, ["probe=answer_mean", "answer_patterns", "probe=last"]),
        ({"answer_patterns": ["bxed"]}, ["bxed", "boxed"]),
        ({"answer_patterns": ["regex:no group"]}, ["regex:no group", "group"]),
    ],
)
def test_faults_are_explained(settings, parts):
    with pytest.raises(OarConfigError) as error:
        OarConfig.parse(settings)
    for part in parts:
        assert part in str(error.value)


def test_a_users_own_importance_and_gate_are_taken():
    own = "python:tests.own_importance:"
    config = OarConfig.parse({"importance": own + "Saliency", "gate": own + "upper_half"})
    assert (config.importance_object.name, config.backwards, config.copies) == ("saliency", 1, None)
    assert config.gate_object.weights.__name__ == "upper_half"


@pytest.mark.parametrize("name", IMPORTANCES)
def test_every_importance_works_with_the_defaults(name):
    config = OarConfig.parse({"importance": name})
    assert config.importance_object is IMPORTANCES[name]
    assert config.extra_forwards >= 0


def test_every_fault_is_listed():
    with pytest.raises(OarConfigError) as error:
        OarConfig.parse({"tau": 2, "beta": -1, "nonsense": 1})
    assert len(str(error.value).splitlines()) == 3


def test_no_pattern_is_fine_with_the_last_probe():
    assert OarConfig.parse({"answer_patterns": [], "probe": "last"}).answer_patterns == ()


def test_warm_up_goes_from_last_to_the_probe():
    config = OarConfig.parse({"warmup_steps": 2, "probe": "answer_joint"})
    assert [config.probe_at(step) for step in (1, 2, 3)] == ["last", "last", "answer_joint"]
