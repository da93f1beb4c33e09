"""`oar patch`: put a hook into an installed host that offers none, or take it out again."""

import argparse
import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import oar_plugin

TOOLS = {
    "git": (["git", "apply"], "--check"),
    "patch": (["patch", "-p1", "--forward", "--fuzz=0", "--reject-file=-", "--no-backup-if-mismatch"], "--dry-run"),
}
"""What applies a patch from its standard input, and its option that only asks whether it would: the first that is here."""


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
        print(patch(args.host, args.path, args.check, args.revert))
    except PatchError as error:
        print(f"oar patch: {error}", file=sys.stderr)
        return error.status
    return 0


def patches_folder() -> Path:
    """Where the patches are: in the installed package, or beside it in a checkout."""
    package = Path(oar_plugin.__file__).parent
    return package / "patches" if (package / "patches").is_dir() else package.parent / "patches"


def patch(host: str, path: Path | None = None, check: bool = False, revert: bool = False) -> str:
    """Apply the patch for the version of `host` in the folder `path` (None: where Python finds it), or take it out; all of it
    or nothing. Returns what was done, or with `check` would be.

    Raises:
        PatchError: there is no such host, no patch for its version, or its files are others than the patch knows.
    """
    folder, version = _found(host, path)
    file = patches_folder() / f"{host}-{version}.patch"
    if not file.is_file():
        known = ", ".join(sorted(other.stem for other in patches_folder().glob(f"{host}-*.patch")))
        raise PatchError(f"{host}={version}: there is no patch for this version; install one of: {known}")
    state = "not patched" if _apply(file, folder, check=True) else "patched"
    if state == "patched" and not _apply(file, folder, check=True, revert=True):
        raise PatchError(
            f"{folder}: files of {host} {version} were changed, or patched in part; reinstall {host}=={version} and try again"
        )
    if (state == "patched") != revert:
        return f"{folder}: {host} {version} is {state}, nothing to do"
    done = "reverted" if revert else "applied"
    if not check and not _apply(file, folder, check=False, revert=revert):
        raise PatchError(f"{folder}: {file.name} fits, but was not {done}; may this user write there?")
    return f"{folder}: {file.name} {'would be ' if check else ''}{done}"


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
    return folder, installed.version if installed is not None else stated.read_text().strip()


def _apply(file: Path, folder: Path, *, check: bool, revert: bool = False) -> bool:
    """Whether the patch fits, or was applied."""
    words, only_ask = next((TOOLS[name] for name in TOOLS if shutil.which(name)), ([], ""))
    if not words:
        raise PatchError(f"{' or '.join(TOOLS)}: not installed here; install one of them")
    command = [*words, *([only_ask] if check else []), *(["-R"] if revert else [])]
    # git must not take a repository around the folder for what the patch is about.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, input=file.read_bytes(), capture_output=True)
    return done.returncode == 0
