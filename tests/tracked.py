"""The project's own files: demo, tests and runs leave environments, run folders and dumps beside them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks and that match one of git's patterns, such as `recipes/*.py`, in folders too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]  # one that was deleted is tracked until the commit
