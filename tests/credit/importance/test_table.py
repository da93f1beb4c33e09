"""The table of importances: its entries, their plans of forwards, and that no other file compares their names."""

import ast
from pathlib import Path

import pytest

import oar_plugin
from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.credit.importance.check import check

PACKAGE = Path(oar_plugin.__file__).parent
# name: (backward, draw) of each forward of the first draw, of the second draw, attributes that are true
PLANS = {
    "fisher": ([(0, 0)], [(0, 1)], {"arbitrary_scale"}),
    "oar_g": ([(None, 0), (0, 0)], [(0, 1)], {"noisy"}),
    "oar_p": ([], [], set()),
    "grail": ([(0, 0)], [(0, 1)], set()),
    "entropy": ([(None, 0)], [], {"reasoning_rows"}),
    "random": ([], [], set()),
}


def test_every_importance_of_the_table_passes_the_check_that_a_users_own_must_pass():
    assert list(IMPORTANCES) == list(PLANS)
    for name, importance in IMPORTANCES.items():
        assert importance_of(name) is importance
        assert importance.name == name
        check(type(importance))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("draws", [1, 2])
def test_the_plan_of_forwards_and_what_engines_read(name, draws):
    first, second, true = PLANS[name]
    want = first if draws == 1 else first + second
    plan = importance_of(name).forwards(draws)
    assert [(forward.backward, forward.draw) for forward in plan] == want
    assert not any(forward.log_probs for forward in plan)
    config = OarConfig(importance=name, num_draws=draws)
    assert config.backwards == sum(backward is not None for backward, _ in want)
    assert config.forwards == len(want) * bool(config.backwards)
    attributes = ("noisy", "reasoning_rows", "arbitrary_scale")
    assert {attribute for attribute in attributes if getattr(importance_of(name), attribute)} == true


# ---- nobody else compares names


def comparisons(source):
    """Expressions that compare a string with a name of the table; not `"entropy" in ...reads`."""
    compared = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare | ast.MatchValue)]
    others = [node for node in compared if not ast.unparse(node).endswith(".reads")]
    words = {node: {getattr(part, "value", None) for part in ast.walk(node)} for node in others}
    return [ast.unparse(node) for node in others if any(name in words[node] for name in IMPORTANCES)]


def test_no_other_file_compares_names_of_importances():
    files = [path for folder in (PACKAGE, PACKAGE.parent / "benchmarks") for path in folder.rglob("*.py")]
    others = [path for path in files if PACKAGE / "credit" / "importance" not in path.parents]
    assert 50 < len(others) < len(files)
    assert {str(path): found for path in others if (found := comparisons(path.read_text()))} == {}
