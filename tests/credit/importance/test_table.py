"""The table of importances: what it holds, what each makes a host do, and that nobody else compares their names."""

import ast
from pathlib import Path

import pytest
import torch

import oar_plugin
from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import IMPORTANCES, Parts, importance_of
from oar_plugin.credit.importance.check import problems

PACKAGE = Path(oar_plugin.__file__).parent
HOME = PACKAGE / "credit" / "importance"
# backward and draw of each forward of one draw and of two
PLANS = {
    "fisher": ([(0, 0)], [(0, 0), (0, 1)]),
    "oar_g": ([(None, 0), (0, 0)], [(None, 0), (0, 0), (0, 1)]),
    "onward": ([(0, 0), (1, 0)], [(0, 0), (1, 0), (0, 1), (1, 1)]),
    "oar_p": ([], []),
    "hybrid": ([(0, 0)], [(0, 0), (0, 1)]),
    "entropy": ([(None, 0)], [(None, 0)]),
    "random": ([], []),
}


def test_every_importance_of_the_table_passes_the_check_that_a_users_own_must_pass():
    assert list(IMPORTANCES) == list(PLANS)
    for name, importance in IMPORTANCES.items():
        assert importance_of(name) is importance
        assert importance.name == name
        assert problems(type(importance)) == []


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("draws", [1, 2])
def test_the_plan_of_forwards(name, draws):
    want = PLANS[name][draws - 1]
    for log_probs in (False, True):
        plan = importance_of(name).forwards(draws, log_probs)
        assert [(forward.backward, forward.draw) for forward in plan] == want
        assert [forward.log_probs for forward in plan] == [log_probs and place == 0 for place in range(len(plan))]
    config = OarConfig(importance=name, num_draws=draws)
    assert config.backwards == sum(backward is not None for backward, _ in want)
    assert config.extra_forwards == max(0, len(want) - 1)


@pytest.mark.parametrize(
    ("name", "noisy", "reasoning_rows", "nats"),
    [
        ("fisher", False, False, False),
        ("oar_g", True, False, True),
        ("onward", False, True, True),
        ("oar_p", False, False, True),
        ("hybrid", False, False, True),
        ("entropy", False, True, True),
        ("random", False, False, True),
    ],
)
def test_what_engines_read(name, noisy, reasoning_rows, nats):
    importance = importance_of(name)
    assert importance.noisy == noisy
    assert importance.reasoning_rows == reasoning_rows
    assert importance.arbitrary_scale != nats


def test_entropy_and_random_combine_what_they_are_given():
    reasoning = torch.tensor([[True, True, False], [True, False, False]])
    entropy, seed = torch.rand(2, 3), torch.arange(6).view(2, 3)
    parts = Parts(torch.zeros(0, 2, 3), reasoning, entropy, torch.zeros(2, 3), seed)
    assert torch.equal(importance_of("entropy").combine(parts), entropy)
    drawn = importance_of("random").combine(parts)
    assert drawn.shape == (2, 3)
    assert len(drawn.unique()) == 6


# ---- nobody else compares names


def comparisons(source: str) -> list[tuple[int, str]]:
    """Lines that compare a string with a name of the table, or list two of them.

    `"entropy" in ...reads` asks what an importance reads, not which it is.
    """

    def names(nodes):
        values = {node.value for node in nodes if isinstance(node, ast.Constant)}
        return {value for value in values if isinstance(value, str) and value in IMPORTANCES}

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            of_reads = isinstance(node.comparators[0], ast.Attribute) and node.comparators[0].attr == "reads"
            operands = [node.left, *node.comparators]
            inner = [element for operand in operands for element in getattr(operand, "elts", ())]
            caught = bool(names(operands + inner)) and not of_reads
        elif isinstance(node, ast.MatchValue):
            caught = bool(names([node.value]))
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            caught = len(names(node.elts)) > 1
        elif isinstance(node, ast.Dict):
            caught = len(names(node.keys)) > 1
        elif isinstance(node, ast.Call):
            caught = len({keyword.arg for keyword in node.keywords} & set(IMPORTANCES)) > 1
        else:
            caught = False
        if caught:
            found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "x = oar.importance == 'onward'",
        "if 'oar_p' != name: pass",
        "y = name in ('fisher', other)",
        "y = name in {'fisher', 'oar_g'}",
        "match name:\n    case 'oar_g': pass",
        "match name:\n    case 'oar_g' | 'oar_p': pass",
        "NAMES = ('grpo', 'fisher', 'onward')",
        "NAMES = ['fisher', 'onward']",
        "COLORS = {'fisher': 1, 'onward': 2}",
        "COLORS = dict(fisher=1, onward=2)",
        "Name = Literal['fisher', 'oar_g']",
        "y = 'entropy' in names",
    ],
)
def test_a_comparison_is_noticed(source):
    assert comparisons(source)


@pytest.mark.parametrize(
    "source",
    [
        "Request('fisher')",
        "settings['importance'] = 'oar_p'",
        "y = 'entropy' in self.importance.reads",
        "FIELDS = ('log_probs', 'entropy')",
        "call(importance='fisher', temperature=1)",
    ],
)
def test_naming_one_is_not_comparing(source):
    assert not comparisons(source)


def test_no_other_file_compares_names_of_importances():
    files = [p for folder in (PACKAGE, PACKAGE.parent / "benchmarks") for p in sorted(folder.rglob("*.py"))]
    others = [path for path in files if HOME not in path.parents]
    assert 50 < len(others) < len(files)
    offenders = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {text[:100]}"
        for path in others
        for line, text in comparisons(path.read_text(encoding="utf-8"))
    ]
    assert not offenders, "\n" + "\n".join(offenders)
