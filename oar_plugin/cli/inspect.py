"""`oar inspect`: a page that shows the responses a run dumped (`algorithm.oar.dump_dir`), shaded by weight."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from recipes.cpu_demo.report import token_row, tokens_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `oar inspect`."""
    parser.add_argument("folder", type=Path, help="the folder given as algorithm.oar.dump_dir")
    parser.add_argument("--steps", type=int, nargs="*", help="training steps to show (default: the last five dumped)")
    parser.add_argument("--out", type=Path, help="the page to write (default: FOLDER/tokens.html)")
    parser.epilog = (
        "Make a run write them with algorithm.oar.dump_dir=DIR (and algorithm.oar.dump_responses=N a step); "
        "the folder is on the machine of the driver."
    )


def run(args: argparse.Namespace) -> int:
    """Write the page; returns 2 when there is nothing to show."""
    files = {int(path.stem.removeprefix("step_")): path for path in sorted(args.folder.glob("step_*.jsonl"))}
    if not files:
        print(
            f"oar inspect: no step_*.jsonl in {args.folder}; did the run set algorithm.oar.dump_dir?", file=sys.stderr
        )
        return 2
    steps = args.steps or sorted(files)[-5:]
    unknown = [step for step in steps if step not in files]
    if unknown:
        print(f"oar inspect: no dump of step {unknown}; there are {sorted(files)}", file=sys.stderr)
        return 2
    rows = [token_row(json.loads(line)) for step in steps for line in files[step].read_text().splitlines()]
    target = args.out or args.folder / "tokens.html"
    target.write_text(tokens_page(rows, f"Token weights, steps {', '.join(map(str, steps))}"))
    print(f"{len(rows)} responses of steps {', '.join(map(str, steps))}: {target}")
    return 0
