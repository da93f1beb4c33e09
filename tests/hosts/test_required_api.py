"""What our modules use of a host is read from them, and what the host lacks of it is named: on the installed hosts, on the same
without each thing that is used, and on a host of two files."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import oar_plugin
from oar_plugin.hosts import required_api
from oar_plugin.hosts.required_api import Feature, requirements, tree
from oar_plugin.hosts.verl.capabilities import FEATURES
from oar_plugin.hosts.vllm.versions import SCORING
from tests.limits import PROCESS_S

ALL = {**FEATURES, "scoring": SCORING}
NEEDS = {"megatron": ("verl", "megatron"), "offload": ("verl", "vllm"), "scoring": ("vllm",)}
features = pytest.mark.parametrize(
    "feature",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not all(map(find_spec, NEEDS.get(name, ("verl",)))), reason="without its hosts"),
        )
        for name in ALL
    ],
)


def faults(feature):
    return requirements.__wrapped__(ALL[feature]).faults


@features
def test_the_installed_hosts_have_all_of_it(feature):
    assert faults(feature) == []


def test_every_module_of_ours_that_imports_a_host_makes_a_feature():
    folder = Path(oar_plugin.__file__).parent
    looked_at = {f"oar_plugin.{module}" for feature in ALL.values() for module in feature.modules}
    for file in [*folder.glob("hosts/v*/*.py"), *folder.glob("passes/*.py")]:
        module = ".".join(["oar_plugin", *file.relative_to(folder).with_suffix("").parts])
        imports = [node for node in ast.walk(tree(module)) if isinstance(node, ast.ImportFrom)]
        packages = {(node.module or "").split(".")[0] for node in imports}
        assert module in looked_at or packages.isdisjoint(required_api.HOSTS)


@features
def test_whatever_is_taken_away_is_named(feature, monkeypatch):
    """From a class and its bases, or from the module that defines it."""
    read_names, read_members = required_api._names, required_api._members
    uses = {(use.module, use.name): use for use in requirements(ALL[feature]).uses if use.name and use.node}
    assert len(uses) > 15
    for (module, name), use in uses.items():
        last = name.split(".")[-1]

        def names(wanted, module=module, last=last, member=bool(use.owner)):
            there = read_names(wanted)
            return there if member or wanted != module else {n: node for n, node in there.items() if n != last}

        def members(cls, last=last):
            there = read_members(cls)
            return {n: node for n, node in there.items() if n != last} if cls.of_host and last in there else there

        monkeypatch.setattr(required_api, "_names", names)
        monkeypatch.setattr(required_api, "_members", members)
        if not hasattr(object, last):
            assert any(last in fault and fault.endswith(" is not there") for fault in faults(feature)), (module, name)


# Called with whatever the host passes, or handed on without a call.
PASSED_ON = {
    "megatron": {
        "MegatronEngineWithLMHead._lm_head_logits_processor",
        "DistributedDataParallel.enable_forward_pre_hook",
    },
    "offload": {
        *(
            "AgentLoopManagerTQ.__init__",
            "AgentLoopWorkerTQ.__init__",
            "vLLMHttpServer.__init__",
            "vLLMReplica.__init__",
        ),
        *("vLLMHttpServer.abort_all_requests", "vLLMHttpServer.generate"),
    },
}


@features
def test_a_function_that_takes_other_arguments_is_named(feature, monkeypatch):
    other = ast.parse("lambda self=None, *, renamed: None", mode="eval").body.args
    unseen = set()
    for use in set(requirements(ALL[feature]).uses):
        if use.signature is not None:
            with monkeypatch.context() as changed:
                changed.setattr(use.node, "args", other)
                if not any(f"{use.module}: {use.name} takes (" in fault for fault in faults(feature)):
                    unseen.add(use.name)
    assert unseen == PASSED_ON.get(feature, set())


HOST = {
    "__init__": "from .machine import Machine, run as go\nfrom absent_package import other",
    "machine": """
class Base:
    def __init__(self, size, *, kind=0):
        self.parts = []
        self.kind = kind
class Machine(Base):
    speed: int
    @property
    def heat(self): ...
    @staticmethod
    def of(name): ...
    @classmethod
    def made(cls, name): ...
    def step(self, a, b=1): ...
@ray.remote
class Remote: ...
if True:
    def run(machine, *items, fast=False, **more): ...
""",
}


@pytest.mark.parametrize(
    ("ours", "named"),
    [
        ("from host import Machine, go, other", None),
        ("from host import Gone", "host: Gone is not there"),
        ("from host.gone import X", "host.gone is not there"),
        ("from absent_package import X", None),
        ("import host\nhost.machine.Machine(1).parts", None),
        ("import host\nhost.machine.Gone", "host.machine: Gone is not there"),
        ("from host import Machine\ndef f(m: 'Machine | None'): m.parts; m.speed; m.heat.x; m.kind.y", None),
        ("from host import Machine\ndef f(m: 'Machine | None'): m.gone", "host.machine: Machine.gone is not there"),
        ("from host import Machine\ndef f(m: int): m.gone", None),
        ("from host import Machine\ndef f(m: Machine):\n if hasattr(m, 'gone'): m.gone", None),
        ("from host import Machine\ndef f(m: Machine): return getattr(m, 'gone', None)", None),
        ("from host.machine import Remote\nRemote.__ray_metadata__.modified_class", None),
        ("from host.machine import Remote\nRemote(gone=1)", "Remote.gone is not there"),
        ("from host import Machine\nMachine.__ray_metadata__", "Machine.__ray_metadata__ is not there"),
        ("from host import Machine\ndef f(): return Machine(1, kind=2)", None),
        ("from host import Machine\ndef f(): return Machine(1, sort=2)", "unexpected keyword argument 'sort'"),
        ("from host import Machine\ndef f(): return Machine()", "missing a required argument: 'size'"),
        ("from host import Machine\ndef f(*a, **k): return Machine(*a, **k), Machine(1, **k)", None),
        ("from host import Machine\ndef f(m: Machine): m.step(1, 2); m.of('x'); Machine.made('x')", None),
        ("from host import Machine\ndef f(m: Machine): m.step(1, 2, 3)", "too many positional arguments"),
        ("from host import Machine\ndef f(m):\n own: Machine = m\n own.gone", "Machine.gone is not there"),
        ("from host import go\ngo(1, 2, 3, fast=True, other=1)", None),
        ("from host import Machine\ndef f(m: Machine): ' nor '.join('host.gone'); (m + [m]).gone; 'Machine'.gone", None),
        ("from host import Machine\nclass Ours(Machine):\n def step(self, a, b=2): super().step(a, b)", None),
        ("from host import Machine\nclass Ours(Machine):\n def step(self, *a, **k): super().step(*a, **k)", None),
        ("from host import Machine\nclass Ours(Machine):\n def step(self, b, a): super().step(a, b)", "own takes (b, a)"),
        ("from host import Machine\nclass Ours(Machine):\n def stop(self): super().stop()", "Machine.stop is not there"),
        ("from host import Machine\nclass Ours(Machine):\n @override\n def stop(self): ...", "Machine.stop is not there"),
        ("from host import Machine\nclass Ours(Machine):\n def stop(self): return self.gone", "Machine.gone is not there"),
        ("from host import Machine\nclass Ours(Machine):\n def stop(self): self.ours = self.kind; self.ours", None),
        ("from host import Machine\nclass Ours(Machine):\n gone: int\n _ours: int\n x: ClassVar[int]", "Machine.gone is"),
        ("class Mixin:\n speed: int\n gone: int\n def step(self, a, b): super().step(a, b)", "Machine.gone is not there"),
        ("class Mixin:\n def step(self, a): super().step(a)", "step takes (a, b); OAR's own takes (a)"),
        ("class Other:\n gone: int\n def step(self, a): super().gone(a)", None),
        ("from host import Machine\ndef f(m: Machine):\n def ours(a): ...\n m.step = ours", "OAR's own takes (a)"),
        ("from host import Machine\ndef f(m: Machine):\n def ours(b, *a): ...\n m.step = ours", "own takes (b, *)"),
        ("from host import Machine\ndef f(m: Machine):\n def ours(a, b): ...\n m.step = ours", None),
        ("from host import Machine\ndef f(m: Machine):\n def ours(a): ...\n m.stop = ours", "Machine.stop is not there"),
    ],
)  # fmt: skip
def test_each_kind_of_use_is_read(ours, named, monkeypatch, tmp_path):
    for package, files in {"host": HOST, "ours": {"__init__": "", "module": ours}}.items():
        (tmp_path / package).mkdir()
        for name, text in files.items():
            (tmp_path / package / f"{name}.py").write_text(text)
    monkeypatch.setattr(required_api, "folders", lambda name: (tmp_path / name,) if name in ("host", "ours") else ())
    monkeypatch.setattr(required_api, "HOSTS", ("host", "absent_package"))
    monkeypatch.setattr(required_api, "OURS", "ours")
    for name in ("path_of", "tree", "_names", "_members", "requirements"):  # without what they remember
        monkeypatch.setattr(required_api, name, getattr(required_api, name).__wrapped__)
    of_mixin = ("host.machine.Machine", ("Mixin",)) if "Mixin" in ours else ()
    told = required_api.requirements(Feature(("module",), *of_mixin)).faults
    assert (len(told) == 1 and named in told[0]) if named else told == [], told


def test_no_host_is_imported():
    """Drivers ask, and trainers import the package of vLLM's part, where no engine is."""
    script = """
import sys
from oar_plugin.hosts.vllm import extension, scorer, throttle, versions
versions.unsupported(versions.installed())
assert "vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROCESS_S)
