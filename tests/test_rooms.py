"""The rooms are apart: arrows between them, read from the imports, point down only, and no file reaches itself."""

import ast
from graphlib import TopologicalSorter

import pytest

from tests.tracked import ROOT, tracked

FLOORS = [
    {"credit", "output"},
    {"config"},
    {"passes", "page"},
    {"estimator"},
    {"token_credit"},
    {"front_door"},
    {"hosts.vllm"},
    {"hosts.accelerated"},
    {"hosts.verl", "hosts.trl", "hosts.swift", "hosts.openrlhf"},
    {"runs"},
    {"cli"},
]
"""A room imports from itself and from lower floors."""
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}


def imported(source):
    """Dotted names of what import statements bring, in functions too: modules, or what stands in one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(package):
    """Each module of a package -> the modules that it imports, of the package and of others."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in tracked(f"{package}/*.py", ":!verl_cpu/tests")
    }
    files = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found = {}
    for name, path in files.items():
        others = (x if x in files else x.rpartition(".")[0] or x for x in imported(path.read_text()))
        found[name] = set(others) - {name}
    return found


def room(module):
    """`hosts.verl` of `oar_plugin.hosts.verl.trainer`; None of the package itself, which only exports."""
    inside = module.removeprefix("oar_plugin").removeprefix(".")
    return max((name for name in FLOOR if f"{inside}.".startswith(f"{name}.")), key=len, default=None)


def test_every_file_is_in_a_room_and_arrows_between_rooms_point_down():
    graph = arrows("oar_plugin")
    assert {name for name in graph if room(name) is None} <= {"oar_plugin", "oar_plugin.hosts"}
    pairs = [(module, other) for module, others in graph.items() for other in others & graph.keys()]
    rooms = {pair: (room(pair[0]), room(pair[1])) for pair in pairs}
    assert [pair for pair, (a, b) in rooms.items() if a and b and a != b and FLOOR[b] >= FLOOR[a]] == []


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("oar_plugin", {"verl_cpu", "benchmarks", "recipes", "tests"}),
        ("verl_cpu", {"oar_plugin", "benchmarks", "recipes", "tests"}),
        ("benchmarks", {"recipes", "tests"}),
        ("recipes", {"tests"}),
    ],
)
def test_a_package_imports_nothing_that_stands_on_it_and_no_file_itself_through_others(package, never):
    graph = arrows(package)
    assert {module for module, others in graph.items() if never & {other.split(".")[0] for other in others}} == set()
    list(TopologicalSorter({module: others & graph.keys() for module, others in graph.items()}).static_order())
