"""`oar patch`: add a hook to an installed host that has none, or remove it again."""

import argparse
import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import oar_plugin
from oar_plugin.output import say, write_whole

TOOLS = {"git": ["git", "apply"], "patch": ["patch", "-p1", "--forward", "--fuzz=0", "--silent"]}
"""Programs that apply a patch from standard input; the first one that is installed is used."""


class PatchError(Exception):
    """Nothing was changed. The message says why, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hosts = {file.name.rpartition("-")[0] for file in patches_folder().glob("*.patch")}
    parser.add_argument("host", choices=sorted(hosts))
    parser.add_argument("--check", action="store_true", help="say what would be done, and change nothing")
    parser.add_argument("--revert", action="store_true", help="remove the patch again")
    parser.add_argument("--path", type=Path, metavar="DIR", help="site-packages or checkout with the host's package")
    parser.epilog = (
        "Run it on every node. Reinstalling the host removes the patch as well, also one that is there in part."
    )


def run(args: argparse.Namespace) -> int:
    if args.path and not (args.path / args.host / "__init__.py").is_file():
        say(
            f"oar patch: --path={args.path}: no folder {args.host}/ in it; name the folder with the package", sys.stderr
        )
        return 2
    try:
        say(patch(args.host, args.path, args.check, args.revert))
        return 0
    except (PatchError, OSError) as error:
        hint = "" if isinstance(error, PatchError) else f"; some files may be changed: reinstall {args.host}"
        say(f"oar patch: {error}{hint}", sys.stderr)
        return 1


def patches_folder() -> Path:
    """Return the folder with the patches: in the installed package, or beside it in a checkout."""
    package = Path(oar_plugin.__file__).parent
    return package / "patches" if (package / "patches").is_dir() else package.parent / "patches"


def patch(host: str, path: Path | None = None, check: bool = False, revert: bool = False) -> str:
    """Apply or revert the patch for a host, found by Python or in the folder `path`; return what was, or would be, done.

    Raises:
        PatchError: there is no patch for this host, or its files are not as released; nothing was changed.
        OSError: a file could not be written; others may be changed.
    """
    spec = find_spec(host) if path is None else None
    if path is None and (spec is None or spec.origin is None):
        raise PatchError(f"{host}: not installed here; install it, or name its folder with --path")
    folder = path.resolve() if path else Path((spec and spec.origin) or "").parents[1]
    installed, stated = next(iter(distributions(name=host, path=[str(folder)])), None), folder / "version.txt"
    if installed is None and not stated.is_file():  # a checkout has that file
        raise PatchError(f"{folder}: nothing says which version of {host} this is; install it with pip")
    version = installed.version if installed is not None else stated.read_text(encoding="utf-8").strip()
    file = patches_folder() / f"{host}-{version}.patch"
    if not file.is_file():
        known = ", ".join(sorted(other.stem for other in patches_folder().glob(f"{host}-*.patch")))
        raise PatchError(f"{host}={version}: there is no patch for this version; install one of: {known}")
    (ahead, fault), (back, other) = _patched(file, folder), _patched(file, folder, "-R")
    if not ahead and not back:
        why = f"were changed, or patched in part (to apply it: {fault}; to revert it: {other})"
        raise PatchError(f"{folder}: files of {host} {version} {why}; reinstall {host}=={version} and try again")
    new = back if revert else ahead
    if not new:
        return f"{folder}: {host} {version} is {'not patched' if revert else 'patched'}, nothing to do"
    locked = [str(name.parent) for name in new if not os.access(name.parent, os.W_OK)]
    if locked and not check:
        raise PatchError(f"{locked[0]}: this user may not write there")
    for name, content in ({} if check else new).items():
        mode = name.stat().st_mode
        write_whole(name, content)  # a new file: installers share files between environments by hard links
        name.chmod(mode)
    return f"{folder}: {file.name} {'would be ' if check else ''}{'reverted' if revert else 'applied'}"


def _patched(file: Path, folder: Path, *options: str) -> tuple[dict[Path, bytes], str]:
    """Return the new content of each file, made on copies; or nothing and the reason why the patch does not fit."""
    tool = next((TOOLS[name] for name in TOOLS if shutil.which(name)), None)
    if tool is None:
        raise PatchError(f"{' or '.join(TOOLS)}: not installed here; install one of them")
    names = [line[6:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("+++ b/")]
    with TemporaryDirectory() as temporary:
        copies = Path(temporary).resolve()
        for name in names:
            if not (folder / name).is_file():
                return {}, f"{name} is not there"
            (copies / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, copies / name)
        # git must not take a repository around the folder for the one that is patched.
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(copies.parent)}
        done = subprocess.run([*tool, *options], cwd=copies, env=env, input=file.read_bytes(), capture_output=True)
        if done.returncode:
            return {}, (done.stdout + done.stderr).decode(errors="replace").strip().rpartition("\n")[2]
        return {folder / name: (copies / name).read_bytes() for name in names}, ""
