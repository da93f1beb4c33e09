"""The table of importances: what it holds, what each makes a host do, and that nobody else compares their names."""

import re
from pathlib import Path

import pytest

import oar_plugin
from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.credit.importance.check import problems

PACKAGE = Path(oar_plugin.__file__).parent
# name: backward and draw of each forward of one draw, those of the second draw, what is true of it
PLANS = {
    "fisher": ([(0, 0)], [(0, 1)], {"arbitrary_scale"}),
    "oar_g": ([(None, 0), (0, 0)], [(0, 1)], {"noisy"}),
    "onward": ([(0, 0), (1, 0)], [(0, 1), (1, 1)], {"reasoning_rows"}),
    "oar_p": ([], [], set()),
    "hybrid": ([(0, 0)], [(0, 1)], set()),
    "entropy": ([(None, 0)], [], {"reasoning_rows"}),
    "random": ([], [], set()),
}


def test_every_importance_of_the_table_passes_the_check_that_a_users_own_must_pass():
    assert list(IMPORTANCES) == list(PLANS)
    for name, importance in IMPORTANCES.items():
        assert importance_of(name) is importance
        assert importance.name == name
        assert problems(type(importance)) == []


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("draws", [1, 2])
def test_the_plan_of_forwards_and_what_engines_read(name, draws):
    first, second, true = PLANS[name]
    want = first if draws == 1 else first + second
    for log_probs in (False, True):
        plan = importance_of(name).forwards(draws, log_probs)
        assert [(forward.backward, forward.draw) for forward in plan] == want
        assert [forward.log_probs for forward in plan] == [log_probs and place == 0 for place in range(len(plan))]
    config = OarConfig(importance=name, num_draws=draws)
    assert config.backwards == sum(backward is not None for backward, _ in want)
    assert config.extra_forwards == max(0, len(want) - 1)
    attributes = ("noisy", "reasoning_rows", "arbitrary_scale")
    assert {attribute for attribute in attributes if getattr(importance_of(name), attribute)} == true


# ---- nobody else compares names

NAME = f"(?:{'|'.join(IMPORTANCES)})"
QUOTED = f"[\"']{NAME}[\"']"
COMPARED = re.compile(
    rf"(?:==|!=|\bin|\bcase|\|)[\s(\[{{]*{QUOTED}"
    rf"|{QUOTED}\s*(?:==|!=|(?:not )?in\b(?! [\w.]*reads))"  # `"entropy" in ...reads` asks what it reads, not which it is
    rf"|{QUOTED}[^\"']{{0,40}}{QUOTED}|\b{NAME}=[^()]{{0,40}}\b{NAME}="  # two in a list or a table
)


@pytest.mark.parametrize(
    "source",
    [
        "x = oar.importance == 'onward'",
        "if 'oar_p' != name: pass",
        "y = name in ('fisher', other)",
        "y = name in {'fisher', 'oar_g'}",
        "match name:\n    case 'oar_g' | 'oar_p': pass",
        "NAMES = ['grpo', 'fisher', 'onward']",
        "COLORS = {\n    'fisher': 1,\n    'onward': 2,\n}",
        "COLORS = dict(fisher=1, onward=2)",
        "y = 'entropy' in names",
    ],
)
def test_a_comparison_would_be_noticed(source):
    assert COMPARED.search(source)


def test_no_other_file_compares_names_of_importances():
    files = [path for folder in (PACKAGE, PACKAGE.parent / "benchmarks") for path in folder.rglob("*.py")]
    others = [path for path in files if PACKAGE / "credit" / "importance" not in path.parents]
    assert 50 < len(others) < len(files)
    assert {str(path): found[0] for path in others if (found := COMPARED.search(path.read_text()))} == {}
