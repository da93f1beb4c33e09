"""Keys, defaults, examples and commands in documents are those of the code. `python -m docs.site` checks links."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from oar_plugin.cli.main import COMMANDS, make_parser
from oar_plugin.config import GROUPS, OarConfig
from oar_plugin.credit.gate import GATES
from oar_plugin.credit.importance import IMPORTANCES, Parts, Rows
from oar_plugin.credit.importance.check import check
from tests.default_yaml import FILE, MADE, shown
from tests.own_importance import Saliency
from tests.tracked import tracked

ROOT = Path(__file__).parents[1]
GLOBS = "*.md docs/**/*.md benchmarks/**/*.md patches/*.md recipes/*.md recipes/*/README.md verl_cpu/*.md"
PATHS = sorted(path for glob in GLOBS.split() for path in ROOT.glob(glob))
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
SETTINGS = DOCUMENTS["docs/settings.md"]


def table(document, header):
    """Key -> default as YAML, of each row of a table."""
    rows = {}
    for line in DOCUMENTS[document].split(f"{header}\n|---|---|---|\n")[1].split("\n\n")[0].splitlines():
        first, default = (cell.strip() for cell in line.split("|")[1:3])
        keys = re.findall(r"`([^`]+)`", first)
        rows |= dict(zip(keys, [default] if len(keys) == 1 else default.split(", "), strict=True))
    return {key: default.strip("`") for key, default in rows.items()}


def test_the_code_is_no_longer_than_contributing_allows():
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|$", DOCUMENTS["CONTRIBUTING.md"], re.MULTILINE)
    assert [folder for folder, _ in rows] == ["oar_plugin", "tests", "benchmarks"]
    lines = {
        folder: sum(len(path.read_text().splitlines()) for path in tracked(f"{folder}/*.py")) for folder, _ in rows
    }
    assert {folder: n for folder, n in lines.items() if n > int(dict(rows)[folder].replace(",", ""))} == {}


def test_default_yaml_is_made_from_the_configuration():
    assert FILE.read_text() == MADE, "python -m tests.default_yaml"


def test_tables_of_settings_have_every_key_with_its_default_and_name_every_importance_and_gate():
    own = {name: shown(field.default) for name, field in OarConfig.model_fields.items() if name not in GROUPS}
    assert table("docs/settings.md", "| key | default | meaning |") == own | {f"{name}.*": "" for name in GROUPS}
    for name, group in GROUPS.items():
        nested = {name: shown(field.default) for name, field in group.model_fields.items()}
        assert table("docs/settings.md", f"| `algorithm.oar.{name}.` | default | meaning |") == nested
    four = table("README.md", "| key | default | |")
    assert four
    assert four.items() <= own.items()
    rows = {line.split("`")[1]: line for line in SETTINGS.splitlines() if line.startswith("| `")}
    for key, names in (("importance", IMPORTANCES), ("gate", GATES)):
        assert [name for name in names if f"`{name}`" not in rows[key]] == []


def test_the_example_of_an_importance_is_the_one_that_is_tested():
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENTS["docs/your-own-importance.md"], re.DOTALL)
    assert inspect.getsource(Saliency) in block
    names: dict[str, type] = {}
    exec(block, names)
    check(names["Saliency"])


def test_what_can_be_called_without_a_configuration_has_its_defaults():
    """Gates by themselves, and what the method's own objects take where nobody says otherwise."""
    config = OarConfig()
    for gate in GATES.values():
        defaults = {name: p.default for name, p in inspect.signature(gate.function).parameters.items()}
        known = {"tau": gate.tau, "beta": config.beta, "floor": config.floor}
        assert list(defaults.items())[2:] == [(name, known[name]) for name in gate.settings]
    assert Rows.sigma == Parts.sigma == config.sigma


def test_settings_in_examples_can_be_set():
    blocks = [block for text in DOCUMENTS.values() for block in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL)]
    lines = [re.findall(r"algorithm\.oar\.([\w.]+=[\w.]+)(?!\S)", line) for line in "".join(blocks).splitlines()]
    assert len([line for line in lines if line]) > 5
    for line in lines:
        OarConfig.parse(OmegaConf.to_container(OmegaConf.from_dotlist(line)), "algorithm.oar")


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands_in_documents_exist(command):
    (commands,) = (action.choices for action in make_parser({command})._actions if action.dest == "command")
    texts = [text for document, text in DOCUMENTS.items() if document != "CHANGELOG.md"]  # it names removed options
    lines = [line for text in texts for line in re.findall(rf"\boar {command}\b([^`\n]*)", text)]
    named = {option for line in lines for option in re.findall(r"(?<=\s)--[\w-]+", line)}
    assert named <= set(re.findall(r"--[\w-]+", commands[command].format_help()))


def test_messages_name_no_file_that_a_wheel_lacks():
    """Docstrings are for those who read the code."""
    for path in tracked("oar_plugin/*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        read = {node.value for node in nodes if isinstance(node, ast.Expr)}
        said = [str(node.value) for node in nodes if isinstance(node, ast.Constant) and node not in read]
        assert not [text for text in said if re.search(r"\b(docs|recipes|patches)/[\w.]+\.(md|sh|txt|patch)", text)], (
            path
        )
