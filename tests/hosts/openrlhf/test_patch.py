"""`oar patch`, on OpenRLHF's released files."""

import shutil

import pytest

from oar_plugin.cli import patch
from oar_plugin.cli.main import main
from tests.hosts.openrlhf import host

CHANGED = "openrlhf/trainer/ray/ppo_actor.py"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return host.unpack(tmp_path_factory.mktemp("released"))


@pytest.fixture
def site(released, tmp_path):
    shutil.copytree(released, tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture(params=patch.TOOLS)
def tool(request, monkeypatch):
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(patch, "TOOLS", {request.param: patch.TOOLS[request.param]})


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("tool")
def test_it_is_applied_and_reverted_exactly(site, capsys):
    before, states, said = files(site), [], []
    for options in (["--check"], [], [], ["--check"], ["--revert", "--check"], ["--revert"], ["--revert"]):
        assert main(["patch", "openrlhf", "--path", str(site), *options]) == 0
        states.append({path for path, content in files(site).items() if before.get(path) != content})
        said.append(capsys.readouterr().out.removeprefix(f"{site}: openrlhf").strip())
    assert [len(state) for state in states] == [0, 4, 4, 4, 4, 0, 0]
    assert files(site) == before
    name = "-0.11.2.patch"
    assert said == [
        f"{name} would be applied",
        f"{name} applied",
        "0.11.2 is patched, nothing to do",
        "0.11.2 is patched, nothing to do",
        f"{name} would be reverted",
        f"{name} reverted",
        "0.11.2 is not patched, nothing to do",
    ]


def half_applied(site):
    original = (site / CHANGED).read_bytes()
    patch.patch("openrlhf", site)
    (site / CHANGED).write_bytes(original)


def another_version(site):
    (metadata,) = site.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 0.11.2", "Version: 0.11.1"))


@pytest.mark.usefixtures("tool")
@pytest.mark.parametrize(
    ("spoil", "status", "message"),
    [
        (half_applied, 1, "changed, or patched in part; reinstall openrlhf==0.11.2"),
        (lambda site: (site / CHANGED).write_text("# mine\n"), 1, "changed, or patched in part"),
        (another_version, 1, "openrlhf=0.11.1: there is no patch for this version; install one of: openrlhf-0.11.2"),
        (lambda site: shutil.rmtree(next(site.glob("*.dist-info"))), 1, "nothing says which version"),
        (lambda site: shutil.rmtree(site / "openrlhf"), 2, "no folder openrlhf/ in it"),
    ],
)
@pytest.mark.parametrize("option", [[], ["--check"], ["--revert"]], ids=" ".join)
def test_what_is_not_as_released_is_left_alone(site, spoil, status, message, option, capsys):
    spoil(site)
    before = files(site)
    assert main(["patch", "openrlhf", "--path", str(site), *option]) == status
    assert files(site) == before
    said = capsys.readouterr().err
    assert said.startswith("oar patch: ")
    assert message in said


def test_a_missing_tool_or_host_is_named(site, monkeypatch, capsys):
    monkeypatch.setattr(patch, "find_spec", lambda name: None)
    assert main(["patch", "openrlhf"]) == 1
    assert "openrlhf: not installed here" in capsys.readouterr().err
    monkeypatch.setattr(patch, "TOOLS", {"no_such_program": ([], "")})
    assert main(["patch", "openrlhf", "--path", str(site)]) == 1
    assert "no_such_program: not installed here" in capsys.readouterr().err


def test_it_is_as_small_as_a_maintainer_is_asked_to_read():
    lines = (patch.patches_folder() / "openrlhf-0.11.2.patch").read_text().splitlines()
    assert len(lines) <= 80
    assert sum(line.startswith("+++ ") for line in lines) <= 4
    assert "oar" not in " ".join(lines).lower().split()
