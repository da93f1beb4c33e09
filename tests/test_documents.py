"""What documents say of keys, importances and gates is what the code says."""

import inspect
import re
from pathlib import Path

from oar_plugin.config import OarConfig, PerturbationConfig
from oar_plugin.credit.gate import GATES
from oar_plugin.credit.importance import IMPORTANCES, Parts, Rows
from oar_plugin.credit.importance.check import problems
from oar_plugin.passes.request import Request
from tests.default_yaml import FILE, made, shown
from tests.own_importance import Saliency

README = (Path(__file__).parents[1] / "README.md").read_text()


def key_table(header):
    """Key -> default, as a table of README.md shows them; the default as YAML, in backticks or not."""
    table = README.split(f"| {header} | default | meaning |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = {}
    for line in table.splitlines():
        first, default = (cell.strip() for cell in line.split("|")[1:3])
        keys = re.findall(r"`([^`]+)`", first)
        rows |= dict(zip(keys, [default] if len(keys) == 1 else default.split(", "), strict=True))
    return {key: default.strip("`") for key, default in rows.items()}


def test_default_yaml_is_made_from_the_configuration():
    assert FILE.read_text() == made(), "python -m tests.default_yaml"


def test_the_readme_has_every_key_with_its_default():
    own = {name: shown(field.default) for name, field in OarConfig.model_fields.items() if name != "perturbation"}
    nested = {name: shown(field.default) for name, field in PerturbationConfig.model_fields.items()}
    assert key_table("key") == own | {"perturbation.*": ""}
    assert key_table("`algorithm.oar.perturbation.`") == nested


def test_the_readme_names_every_importance_and_gate():
    rows = {line.split("`")[1]: line for line in README.splitlines() if line.startswith("| `")}
    for key, names in (("importance", IMPORTANCES), ("gate", GATES)):
        assert [name for name in names if f"`{name}`" not in rows[key]] == []


def test_the_example_in_the_readme_is_the_one_that_is_tested():
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Saliency" in b)
    assert inspect.getsource(Saliency) in block
    assert len(block.splitlines()) <= 30
    names: dict[str, type] = {}
    exec(block, names)
    assert problems(names["Saliency"]) == []


def test_what_can_be_called_without_a_configuration_has_its_defaults():
    """Gates by themselves, and what the method's own objects take where nobody says otherwise."""
    config = OarConfig()
    for name, gate in GATES.items():
        defaults = {
            k: p.default for k, p in inspect.signature(gate.weights).parameters.items() if p.default is not p.empty
        }
        assert defaults == {"tau": gate.tau, "beta": config.beta, "floor": config.floor}, name
    request = Request(config.importance)
    assert (request.probe, request.sigma, request.num_draws) == (config.probe, config.sigma, config.num_draws)
    for kind in (Rows, Parts):
        assert kind.__dataclass_fields__["sigma"].default == config.sigma
