"""A configuration that cannot work is refused with the key, its value and what is allowed."""

import pytest
import yaml

from oar_plugin.config import AmortizeConfig, DumpConfig, OarConfig, OarConfigError
from oar_plugin.credit.importance import IMPORTANCES
from tests.asked import GONE
from tests.default_yaml import FILE


@pytest.mark.parametrize(
    ("given", "values"),
    [
        # The defaults are the measured estimator and gate.
        (None, {"gate": "two_level", "quantile": 0.85, "beta": 2.0, "floor": 0.1, "sigma": 1e-3}),
        (None, {"importance": "oar_p", "probe": "answer_mean", "base_estimator": "grpo"}),
        # `auto`: predicted where the actor runs copies; where an importance is named too.
        *((given, {"amortize": AmortizeConfig(share=0.025, units=8)}) for given in (None, {"importance": "oar_p"})),
        ({"amortize": {"share": 0.1, "units": "auto"}}, {"amortize": AmortizeConfig(share=0.1, units=8)}),
        ({"amortize.share": "auto", "amortize.units": 4}, {"amortize": AmortizeConfig(share=0.025, units=4)}),
        *(
            (given, {"amortize": AmortizeConfig(share=None, units=None)})
            for given in ({"importance": "fisher"}, {"amortize.share": None}, {"perturbation.backend": "rollout"})
        ),
        # The quantile is the gate's unless tau is set.
        ({"gate": "bi_level"}, {"quantile": 0.4}),
        ({"gate": "bi_level", "tau": 0.0}, {"quantile": 0.0}),
        # The probe `last` needs no pattern.
        ({"answer_patterns": [], "probe": "last"}, {"answer_patterns": ()}),
        # A dot is a level. Where both forms are given, the one with a dot counts.
        ({"dump": {"dir": "x", "every": 5}, "dump.every": 3}, {"dump": DumpConfig(dir="x", every=3)}),
        ({"dump.dir": "y", "dump": DumpConfig(dir="x", groups=1)}, {"dump": DumpConfig(dir="y", groups=1)}),
        *(({"importance": "oar_p", "amortize": one}, {}) for one in ({"share": 1, "units": 2}, {"share": 0.5})),
        *(({"importance": name}, {"importance_object": IMPORTANCES[name]}) for name in IMPORTANCES),
    ],
)
def test_what_a_configuration_says(given, values):
    config = OarConfig.parse(given)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    "given",
    [
        *(*GONE, {"context": {"truth": "answer"}}, {"context.template": "x"}, {"perturbation": {"budget": 0.3}}),
        {"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": "decision"}},
    ],
)
def test_who_uses_what_left_reads_what_to_write_instead(given):
    with pytest.raises(
        OarConfigError, match=r"^algorithm\.oar[.:].*: was removed in oar_plugin 0\.4\.0: .*(write|leave|set)"
    ):
        OarConfig.parse(given)


def test_a_preset_outside_verl_is_refused_with_its_settings():
    with pytest.raises(OarConfigError, match=r"presets are for verl's command line; .* write here ") as error:
        OarConfig.parse({"oar": "published"})
    settings = dict(pair.split("=") for pair in str(error.value).partition("write here ")[2].split(", "))
    preset = yaml.safe_load(FILE.with_name("published.yaml").read_text())
    del preset["defaults"]
    assert OarConfig.parse(settings | {"tau": 0.4}) == OarConfig.parse(preset)


# Faults of the names of importances, gates and fallbacks: credit/importance/test_check.py.
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"tau": 1.5}, ["algorithm.oar.tau=1.5", "less than or equal to 1"]),
        ({"tau": "high"}, ["algorithm.oar.tau='high'", "number"]),
        ({"beta": -1}, ["algorithm.oar.beta=-1", "greater than or equal to 0"]),
        ({"floor": 0}, ["algorithm.oar.floor=0", "greater than 0"]),
        ({"sigma": 0}, ["algorithm.oar.sigma=0"]),
        ({"num_draws": 0}, ["algorithm.oar.num_draws=0"]),
        ({"warmup_steps": -1}, ["algorithm.oar.warmup_steps=-1"]),
        ({"perturbation": {"span": "lines"}}, ["algorithm.oar.perturbation.span='lines'", "integer"]),
        ({"perturbation": {"replacement": "mean"}}, ["algorithm.oar.perturbation.replacement='mean'", "'pad'"]),
        ({"dump_dir": "x"}, ["algorithm.oar.dump_dir='x'", "did you mean algorithm.oar.dump.dir?"]),
        ({"dump_responses": 4}, ["algorithm.oar.dump_responses=4", "dump.every, dump.groups"]),
        ({"dump": {"every": 0}}, ["algorithm.oar.dump.every=0", "greater than or equal to 1"]),
        ({"dump": {"evry": 2}}, ["algorithm.oar.dump.evry=2", "did you mean algorithm.oar.dump.every?"]),
        ({"dump.evry": 2}, ["algorithm.oar.dump.evry=2", "did you mean algorithm.oar.dump.every?"]),
        ({"dmp.dir": "x"}, ["algorithm.oar.dmp.dir='x'", "did you mean algorithm.oar.dump.dir?"]),
        ({"dump.dir.x": 1}, ["algorithm.oar.dump.dir.x=1", "unknown key"]),
        ({"perturbation.timeout_s": "all"}, ["algorithm.oar.perturbation.timeout_s='all'", "number"]),
        ({"dump": 3, "dump.dir": "x"}, ["algorithm.oar.dump=3", "dictionary"]),
        ({"probe": "mean"}, ["algorithm.oar.probe='mean'", "'answer_mean'"]),
        ({"base_estimator": "ppo"}, ["algorithm.oar.base_estimator='ppo'", "'rloo'"]),
        ({"max_weight": 1}, ["algorithm.oar.max_weight=1", "unknown key"]),
        ({"teu": 0.3}, ["algorithm.oar.teu=0.3", "unknown key", "did you mean algorithm.oar.tau", "allowed keys"]),
        ({"answer_patterns": []}, ["probe=answer_mean", "answer_patterns", "probe=last"]),
        ({"importance": "entropy", "amortize.share": 0.5}, ["amortize.share=0.5", "importance=entropy", "null"]),
        ({"amortize": {"share": 1, "units": None}}, ["amortize.share=1", "allowed: null"]),
        ({"amortize": {"share": None, "units": 4}}, ["amortize.units=4", "share=null", "allowed: null, or"]),
        (
            {"importance": "fisher", "amortize.units": 4},
            ["amortize.units=4", "importance=fisher", "importance=oar_p with"],
        ),
        ({"amortize.share": 3}, ["amortize.share=3", "less than or equal to 1"]),
        ({"amortize": 5}, ["algorithm.oar.amortize=5", "dictionary"]),
        ({"importance": "oar_p", "amortize.units": 1}, ["amortize.units=1", "equal to 2"]),
        ({"answer_patterns": ["boxed", "hash", "x"]}, ["algorithm.oar.answer_patterns[2]='x': ", "the_answer_is"]),
        ({"answer_patterns": ["regex:(", "boxed"]}, ["algorithm.oar.answer_patterns[0]='regex:(': ", "regular"]),
        ({"answer_patterns": ["boxed", 3]}, ["algorithm.oar.answer_patterns[1]=3: ", "string"]),
        ({"answer_patterns": "boxed"}, ["algorithm.oar.answer_patterns='boxed': ", "list"]),
        ({"tau": 2, "beta": -1, "nonsense": 1}, ["oar.tau=2", "oar.beta=-1", "oar.nonsense=1"]),
    ],
)
def test_every_fault_is_explained_on_a_line_of_its_own(settings, parts):
    with pytest.raises(OarConfigError) as error:
        OarConfig.parse(settings)
    assert [part for part in parts if part not in str(error.value)] == []
    assert len(str(error.value).splitlines()) == (3 if len(settings) == 3 else 1)
