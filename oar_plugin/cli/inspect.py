"""`oar inspect`: a page that shows the responses a run dumped (`algorithm.oar.dump_dir`), shaded by weight."""

import argparse
import json
import sys
from pathlib import Path

from oar_plugin.page.tokens import token_row, tokens_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="algorithm.oar.dump_dir; a run's log says where that is")
    parser.add_argument("--steps", type=int, nargs="*", help="training steps to show (default: the last five dumped)")
    parser.add_argument("--out", type=Path, help="the page to write (default: FOLDER/tokens.html)")
    parser.epilog = "A run writes them with algorithm.oar.dump_dir=DIR, algorithm.oar.dump_responses=N a step."


def run(args: argparse.Namespace) -> int:
    """Returns 2 when there is nothing to show."""
    files = {int(path.stem.removeprefix("step_")): path for path in args.folder.glob("step_*.jsonl")}
    steps = args.steps or sorted(files)[-5:]
    problem = None
    if not files:
        problem = f"no step_*.jsonl in {args.folder}; did the run set algorithm.oar.dump_dir?"
    elif unknown := [step for step in steps if step not in files]:
        problem = f"--steps: no dump of step {unknown}; there are {sorted(files)}"
    if problem:
        print(f"oar inspect: {problem}", file=sys.stderr)
        return 2
    rows = [token_row(json.loads(line)) for step in steps for line in files[step].read_text().splitlines()]
    shown, target = ", ".join(map(str, steps)), args.out or args.folder / "tokens.html"
    target.write_text(tokens_page(rows, f"Token weights, steps {shown}"))
    print(f"{len(rows)} responses of steps {shown}: {target}")
    return 0
