"""The rooms are apart: arrows between them, read from the imports, point down only, and no file reaches itself."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = [
    {"credit"},
    {"config"},
    {"passes", "math", "page"},
    {"estimator"},
    {"front_door"},
    {"hosts.vllm", "hosts.verl.cpu"},
    {"hosts.verl"},
    {"plan", "launch"},
    {"cli"},
]
"""A room imports from itself and from lower floors."""

STAND_INS = "hosts.verl.cpu"
MAY_USE_STAND_INS = {"oar_plugin.hosts.verl.plugin", "oar_plugin.cli.doctor"}


def modules(package):
    """Dotted name to file."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imported(source):
    """Dotted names of what import statements bring, in functions too: modules, or what stands in one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(files):
    """The modules that each file imports: of `files`, or those of others."""
    found = {}
    for name, path in files.items():
        others = (
            other if other in files else other.rpartition(".")[0] or other for other in imported(path.read_text())
        )
        found[name] = {other for other in others if other != name}
    return found


def room(module):
    """`hosts.verl` of `oar_plugin.hosts.verl.trainer`; None of the package itself, which only exports."""
    inside = module.removeprefix("oar_plugin").removeprefix(".")
    named = [name for floor in FLOORS for name in floor if f"{inside}.".startswith(f"{name}.")]
    return max(named, key=len, default=None)


def up(graph):
    """Arrows of `graph` that do not point down."""
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    for module, others in graph.items():
        for other in others:
            here, there = room(module), room(other)
            if here is not None and there is not None and here != there and floor[there] >= floor[here]:
                yield module, other


FILES = modules("oar_plugin")
GRAPH = arrows(FILES)


def test_every_file_is_in_a_room():
    assert {name for name in FILES if room(name) is None} <= {"oar_plugin", "oar_plugin.hosts"}


def test_arrows_between_rooms_point_down():
    ours = {module: others & FILES.keys() for module, others in GRAPH.items()}
    assert list(up(ours)) == []


def test_an_arrow_that_runs_back_up_would_be_found():
    assert list(up({"oar_plugin.credit.gate": {"oar_plugin.config"}}))
    assert list(up({"oar_plugin.plan.memory": {"oar_plugin.launch"}}))
    assert not list(up({"oar_plugin.cli.main": {"oar_plugin.credit.gate"}}))


@pytest.mark.parametrize("package", ["oar_plugin", "benchmarks", "recipes"])
def test_no_file_imports_itself_through_others(package):
    files = modules(package)
    graph = {module: others & files.keys() for module, others in arrows(files).items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_only_the_entry_point_reaches_the_stand_ins():
    users = {module for module, others in GRAPH.items() for other in others if room(other) == STAND_INS}
    assert {module for module in users if room(module) != STAND_INS} <= MAY_USE_STAND_INS


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("oar_plugin", ("benchmarks", "recipes", "tests")),
        ("benchmarks", ("recipes", "tests")),
        ("recipes", ("tests",)),
    ],
)
def test_a_package_imports_nothing_that_stands_on_it(package, never):
    for module, others in arrows(modules(package)).items():
        assert not [other for other in others if other.split(".")[0] in never], module
