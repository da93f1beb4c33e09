"""`oar patch`: put a hook into an installed host that offers none, or take it out again."""

import argparse
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import oar_plugin
from oar_plugin.output import say

TOOLS = {"git": ["git", "apply"], "patch": ["patch", "-p1", "--forward", "--fuzz=0", "--silent"]}
"""What applies a patch from its standard input: the first that is here."""


class PatchError(Exception):
    """The message says what to do."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hosts = {file.name.rpartition("-")[0] for file in patches_folder().glob("*.patch")}
    parser.add_argument("host", choices=sorted(hosts))
    parser.add_argument("--check", action="store_true", help="say what would be done, and change nothing")
    parser.add_argument("--revert", action="store_true", help="take the patch out again")
    parser.add_argument("--path", type=Path, metavar="DIR", help="site-packages or checkout with the host's package")
    parser.epilog = "Run it on every node. Reinstalling the host takes the patch out as well."


def run(args: argparse.Namespace) -> int:
    try:
        said = patch(args.host, args.path, args.check, args.revert)
    except (PatchError, OSError) as error:
        hint = "" if isinstance(error, PatchError) else "; may this user write there, and is there room?"
        say(f"oar patch: {error}{hint}", sys.stderr)
        return getattr(error, "status", 1)
    say(said)
    return 0


def patches_folder() -> Path:
    """Where the patches are: in the installed package, or beside it in a checkout."""
    package = Path(oar_plugin.__file__).parent
    return package / "patches" if (package / "patches").is_dir() else package.parent / "patches"


def patch(host: str, path: Path | None = None, check: bool = False, revert: bool = False) -> str:
    """Apply the patch for the version of `host` in the folder `path` (None: where Python finds it), or take it out. Returns
    what was done, or with `check` would be. PatchError, OSError: nothing was; the message says why.
    """
    folder, version = _found(host, path)
    file = patches_folder() / f"{host}-{version}.patch"
    if not file.is_file():
        known = ", ".join(sorted(other.stem for other in patches_folder().glob(f"{host}-*.patch")))
        raise PatchError(f"{host}={version}: there is no patch for this version; install one of: {known}")
    new, fault = _patched(file, folder)
    state = "not patched" if new else "patched"
    if not new:
        new, other = _patched(file, folder, "-R")
        if not new:
            why = f"were changed, or patched in part (to apply it: {fault}; to revert it: {other})"
            raise PatchError(f"{folder}: files of {host} {version} {why}; reinstall {host}=={version} and try again")
    if (state == "patched") != revert:
        return f"{folder}: {host} {version} is {state}, nothing to do"
    _put({} if check else new)
    return f"{folder}: {file.name} {'would be ' if check else ''}{'reverted' if revert else 'applied'}"


def _found(host: str, path: Path | None) -> tuple[Path, str]:
    """The folder with the host's package, and its version."""
    if path is None:
        spec = find_spec(host)
        if spec is None or not spec.submodule_search_locations:
            raise PatchError(f"{host}: not installed here; install it, or name its folder with --path")
        folder = Path(spec.submodule_search_locations[0]).parent
        installed = next(iter(distributions(name=host)), None)
    else:
        folder = path.resolve()
        if not (folder / host / "__init__.py").is_file():
            raise PatchError(f"--path={path}: no folder {host}/ in it; name the one that holds the package", 2)
        installed = next(iter(distributions(name=host, path=[str(folder)])), None)
    stated = folder / "version.txt"  # of a checkout
    if installed is None and not stated.is_file():
        raise PatchError(f"{folder}: nothing says which version of {host} this is; install it with pip")
    return folder, installed.version if installed is not None else stated.read_text(encoding="utf-8").strip()


def _patched(file: Path, folder: Path, *options: str) -> tuple[dict[Path, bytes], str]:
    """What the patch makes of the files that it is about, tried on copies. Nothing, and why, if it does not fit."""
    tool = next((TOOLS[name] for name in TOOLS if shutil.which(name)), None)
    if tool is None:
        raise PatchError(f"{' or '.join(TOOLS)}: not installed here; install one of them")
    names = [line[6:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("+++ b/")]
    with TemporaryDirectory() as temporary:
        copies = Path(temporary).resolve()
        for name in names:
            (copies / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, copies / name)
        # git must not take a repository around the folder for what the patch is about.
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(copies.parent)}
        done = subprocess.run([*tool, *options], cwd=copies, env=env, input=file.read_bytes(), capture_output=True)
        if done.returncode:
            return {}, (done.stdout + done.stderr).decode(errors="replace").strip().rpartition("\n")[2]
        return {folder / name: (copies / name).read_bytes() for name in names}, ""


def _put(new: dict[Path, bytes]) -> None:
    """Replace all of these files or, when that fails, none; their modes stay. Moving on a file's own disk takes no room."""
    with ExitStack() as stack:
        rooms = {}
        for path, content in new.items():
            room = Path(stack.enter_context(TemporaryDirectory(dir=path.parent, prefix=".oar_patch_")))
            shutil.copy2(path, room / "old")
            (room / "new").write_bytes(content)
            shutil.copymode(path, room / "new")
            rooms[path] = room
        try:
            for path, room in rooms.items():
                os.replace(room / "new", path)
        except BaseException:
            for path, room in rooms.items():
                os.replace(room / "old", path)
            raise
