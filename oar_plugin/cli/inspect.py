"""`oar inspect`: a page that shows the responses a run dumped (`algorithm.oar.dump_dir`), shaded by weight."""

import argparse
import json
import re
import sys
from pathlib import Path

from oar_plugin.cli.arguments import listed
from oar_plugin.page.tokens import TokenRow, token_row, tokens_page


def _steps(text: str) -> list[int]:
    return [int(word) for word in listed(text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="algorithm.oar.dump_dir; a run's log says where that is")
    text = "training steps to show (default: the last five dumped)"
    parser.add_argument("--steps", type=_steps, metavar="N,...", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write (default: FOLDER/tokens.html)")
    parser.epilog = "A run writes them with algorithm.oar.dump_dir=DIR, algorithm.oar.dump_responses=N a step."


def run(args: argparse.Namespace) -> int:
    """Returns 2 when there is nothing to show."""
    found = ((re.fullmatch(r"step_(\d+)", path.stem), path) for path in args.folder.glob("step_*.jsonl"))
    files = {int(match[1]): path for match, path in found if match}
    steps = args.steps or sorted(files)[-5:]
    lines = [line for step in steps if step in files for line in _lines(files[step])]
    rows = [row for row in map(_row, lines) if row is not None]
    skipped = f"{len(lines) - len(rows)} of {len(lines)} lines skipped: half-written, or not of a dump"
    problem = None
    if not files:
        problem = f"no step_*.jsonl in {args.folder}; did the run set algorithm.oar.dump_dir?"
    elif unknown := [step for step in steps if step not in files]:
        problem = f"--steps: no dump of step {unknown}; there are {sorted(files)}"
    elif not rows:
        problem = f"{args.folder}: {skipped}"
    if problem:
        print(f"oar inspect: {problem}", file=sys.stderr)
        return 2
    if len(rows) < len(lines):
        print(f"oar inspect: {skipped}", file=sys.stderr)
    shown, target = ", ".join(map(str, steps)), args.out or args.folder / "tokens.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(tokens_page(rows, f"Token weights, steps {shown}"), encoding="utf-8")
    print(f"{len(rows)} responses of steps {shown}: {target}")
    return 0


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _row(line: str) -> TokenRow | None:
    try:
        return token_row(json.loads(line))
    except (ValueError, KeyError, TypeError):  # a run may be writing it, or have been killed while it did
        return None
