"""`oar patch`, on OpenRLHF's released files."""

import os
import resource
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


def files(folder):
    """Content and mode of everything in it."""
    found = {path.relative_to(folder): path for path in folder.rglob("*")}
    return {name: (path.is_file() and path.read_bytes(), path.stat().st_mode) for name, path in found.items()}


@pytest.fixture
def umask():
    kept = os.umask(0o077)
    yield
    os.umask(kept)


def linked(site):
    """The package in another place, as some installers leave it."""
    (site / "openrlhf").rename(site.parent / "elsewhere")
    (site / "openrlhf").symlink_to(site.parent / "elsewhere")


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("prepare", [lambda site: (site / CHANGED).chmod(0o644), linked], ids=["plain", "linked"])
def test_it_is_applied_and_reverted_exactly(site, prepare, capsys):
    prepare(site)
    before, states, said = files(site.parent), [], []
    for options in (["--check"], [], [], ["--check"], ["--revert", "--check"], ["--revert"], ["--revert"]):
        assert main(["patch", "openrlhf", "--path", str(site), *options]) == 0
        now = files(site.parent)
        assert {path: mode for path, (_, mode) in now.items()} == {path: mode for path, (_, mode) in before.items()}
        states.append([path for path, content in now.items() if before[path] != content])
        said.append(capsys.readouterr().out)
    assert [len(state) for state in states] == [0, 4, 4, 4, 4, 0, 0]
    assert files(site.parent) == before
    assert ["nothing to do" in text for text in said] == [False, False, True, True, False, False, True]
    assert ["would be" in text for text in said] == [True, *[False] * 3, True, False, False]


def half_applied(site):
    original = (site / CHANGED).read_bytes()
    patch.patch("openrlhf", site)
    (site / CHANGED).write_bytes(original)


def another_version(site):
    (metadata,) = site.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 0.11.2", "Version: 0.11.1"))


@pytest.mark.parametrize(
    ("spoil", "status", "message"),
    [
        (half_applied, 1, "changed, or patched in part (to apply it: "),
        (half_applied, 1, "reinstall openrlhf==0.11.2 and try again"),
        (lambda site: (site / CHANGED).write_text("# mine\n"), 1, "trainer/ray/ppo_actor.py"),
        (lambda site: (site / CHANGED).unlink(), 1, "trainer/ray/ppo_actor.py"),
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


@pytest.mark.parametrize("option", [[], ["--revert"]], ids=["apply", "revert"])
def test_what_ends_half_way_says_to_reinstall_and_is_noticed_the_next_time(site, capsys, option):
    """git cannot write a file that is longer than this limit, as on a full disk."""
    if option:
        patch.patch("openrlhf", site)
    command, limits = ["patch", "openrlhf", "--path", str(site), *option], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "some files may be changed: reinstall openrlhf==0.11.2" in capsys.readouterr().err
    assert main(command) == 1
    assert "reinstall openrlhf==0.11.2" in capsys.readouterr().err


def test_a_file_that_another_environment_shares_is_not_changed_there(site):
    """Installers link files from their cache."""
    shared = site.parent / "cache.py"
    os.link(site / CHANGED, shared)
    before = shared.read_bytes()
    assert main(["patch", "openrlhf", "--path", str(site)]) == 0
    assert shared.read_bytes() == before != (site / CHANGED).read_bytes()


def test_a_missing_tool_or_host_is_named(site, monkeypatch, capsys):
    monkeypatch.setattr(patch, "find_spec", lambda name: None)
    assert main(["patch", "openrlhf"]) == 1
    assert "openrlhf: not installed here" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["patch", "openrlhf", "--path", str(site)]) == 1
    assert "git: not installed here" in capsys.readouterr().err
