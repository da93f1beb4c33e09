"""`oar patch` adds a hook to an installed host without one, or removes it. It needs git, which checks a patch first."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from oar_plugin.output import say
from oar_plugin.runs.recipe import recipes_folder

PATCHES = recipes_folder().with_name("patches")


class PatchError(Exception):
    """The message says why the patch failed and what to do, and if files were changed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hosts = {file.name.rpartition("-")[0] for file in PATCHES.glob("*.patch")}
    parser.add_argument("host", choices=sorted(hosts))
    parser.add_argument("--check", action="store_true", help="say what would be done, and change nothing")
    parser.add_argument("--revert", action="store_true", help="remove the patch again")
    parser.add_argument("--path", type=Path, metavar="DIR", help="site-packages or checkout with the host's package")
    parser.epilog = "Run this on every node. Reinstalling the host also removes a patch, or a part of a patch."


def run(args: argparse.Namespace) -> int:
    if args.path and not (args.path / args.host / "__init__.py").is_file():
        fault = f"no folder {args.host}/ in it; name the folder with the package"
        say(f"oar patch: --path={args.path}: {fault}", sys.stderr)
        return 2
    try:
        say(patch(args.host, args.path, args.check, args.revert))
        return 0
    except PatchError as error:
        say(f"oar patch: {error}", sys.stderr)
        return 1


def patch(host: str, path: Path | None = None, check: bool = False, revert: bool = False) -> str:
    """Apply or revert the patch for a host in `path` (None: where Python finds it). Return what was, or would be, done."""
    if shutil.which("git") is None:
        raise PatchError("git: not installed here; install it")
    if path is None:
        if (spec := find_spec(host)) is None or spec.origin is None:
            raise PatchError(f"{host}: not installed here; install it, or name its folder with --path")
        path = Path(spec.origin).parents[1]
    folder = path.resolve()
    installed, stated = next(iter(distributions(name=host, path=[str(folder)])), None), folder / "version.txt"
    if installed is None and not stated.is_file():  # a checkout has that file
        raise PatchError(f"{folder}: nothing says which version of {host} this is; install it with pip")
    version = installed.version if installed is not None else stated.read_text(encoding="utf-8").strip()
    file = PATCHES / f"{host}-{version}.patch"
    if not file.is_file():
        known = ", ".join(sorted(other.stem for other in PATCHES.glob(f"{host}-*.patch")))
        raise PatchError(f"{host}={version}: there is no patch for this version; install one of: {known}")
    package = (folder / host).resolve()  # git follows no link inside of a path
    cannot_apply, cannot_revert = _git_apply(package, file, "--check"), _git_apply(package, file, "--check", "-R")
    if cannot_apply and cannot_revert:
        why = f"were changed, or patched in part (to apply it: {cannot_apply}; to revert it: {cannot_revert})"
        raise PatchError(f"{folder}: files of {host} {version} {why}; reinstall {host}=={version} and try again")
    if cannot_revert if revert else cannot_apply:
        return f"{folder}: {host} {version} is {'not patched' if revert else 'patched'}, nothing to do"
    if not check:
        _write(package, file, ["-R"] if revert else [], f"reinstall {host}=={version}")
    return f"{folder}: {file.name} {'would be ' if check else ''}{'reverted' if revert else 'applied'}"


def _write(package: Path, file: Path, options: list[str], advice: str) -> None:
    """Let git replace the files, not change them in place: installers hard-link them into several environments."""
    names = re.findall(r"^\+\+\+ b/[^/]+/(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    modes = {package / name: (package / name).stat().st_mode for name in names}
    if locked := [name.parent for name in modes if not os.access(name.parent, os.W_OK)]:
        raise PatchError(f"{locked[0]}: this user may not write there")
    if fault := _git_apply(package, file, *options):
        raise PatchError(f"{package}: {fault}; some files may be changed: {advice}")
    for name, mode in modes.items():
        name.chmod(mode)


def _git_apply(package: Path, file: Path, *options: str) -> str:
    """Run `git apply` in a host's package. Return why the patch does not fit, or an empty string."""
    # git must not use a repository that contains the package's folder, and must ignore the user's settings.
    own = {"GIT_CEILING_DIRECTORIES": str(package.parent), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    words = ["git", "apply", "-p2", *options, str(file)]
    done = subprocess.run(words, cwd=package, env=os.environ | own, capture_output=True, text=True, errors="replace")
    fault = done.stderr.strip().rpartition("\n")[2] or f"git apply: exit status {done.returncode}"
    return fault if done.returncode else ""
