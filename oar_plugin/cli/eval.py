"""`oar eval`: checkpoints on benchmarks, as one table with standard errors."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from oar_plugin.cli.arguments import listed, missing_package, positive, share, whole
from oar_plugin.output import say, write_whole
from oar_plugin.runs.evaluate import EvaluationError
from oar_plugin.runs.evaluate.checkpoints import find
from oar_plugin.runs.math.sources import data_folder

MANY = 0.05  # if more responses have no answer than this share, accuracy may measure format and length
_HELP = """\
Generate K responses to every problem with vLLM on all visible GPUs, grade them with the recipes' reward, and print avg@K (mean
accuracy), pass@K (is any right) and maj@K (is the most frequent answer right) with standard errors, and the paired differences
from the baseline with 95 % intervals. The same command continues where it was stopped; finished sets are not repeated.

A CHECKPOINT is a folder in HuggingFace's format, a name on the hub, a checkpoint of verl (global_step_N, or its actor; shards
are merged once, into a folder `merged` beside them), or a run's folder, whose last checkpoint is used. NAME=CHECKPOINT names a
line of the table; NAME=A,B,C are the seeds of one method, and the table shows their mean.
"""
_EXAMPLES = """\
examples:
  oar eval grpo=G1,G2,G3 oar=O1,O2,O3 --out results           run folders, three seeds each; results/table.md
  oar eval RUN --data my/problems.parquet --temperature 0 --k 1        a file of your own in verl's columns; greedy

oar data math500 aime24 amc23 minerva olympiadbench makes the default sets. docs/evaluation.md explains the intervals.
exit status: 0 done, 1 something is missing or failed, 2 wrong input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    add, default = parser.add_argument, "default: %(default)s"
    add("checkpoints", nargs="+", metavar="[NAME=]CHECKPOINT", help="see above; commas separate seeds of one method")
    five, text = "math500,aime24,amc23,minerva,olympiadbench", "sets in OAR_DATA (or ~/data/oar), or parquet files"
    add("--data", type=listed, default=five, metavar="NAME,...", help=f"{text} in verl's columns ({default})")
    add("--k", type=positive, default=32, metavar="K", help=f"responses to each problem ({default})")
    add("--baseline", metavar="NAME", help="the line with which the others are compared (default: the first)")
    add("--best", action="store_true", help="use the checkpoint `best` of a run's folder instead of the last")
    text = f"{default}, as in the recipes' validation; 0 is greedy"
    add("--temperature", type=float, default=0.6, metavar="T", help=text)
    add("--top-p", type=share, default=0.95, metavar="P", help=default)
    text = f"per response ({default}); use the training's data.max_response_length if that is larger"
    add("--max-tokens", type=positive, default=3072, metavar="N", help=text)
    add("--seed", type=whole, default=0, metavar="N", help=f"seed of sampling ({default})")
    add("--tp", type=positive, default=1, metavar="N", help="GPUs per engine, for a model that does not fit on one")
    add("--limit", type=positive, metavar="N", help="the first N problems of each set")
    text = f"for responses, results.json and table.md ({default})"
    add("--out", type=Path, default=Path("evaluation"), metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Return 0; 1 if something is missing or fails; 2 for wrong input. The message says what to do."""
    try:
        methods = parse(args.checkpoints)
        args.baseline = args.baseline or next(iter(methods))
        if args.baseline not in methods:
            raise ValueError(f"--baseline={args.baseline}: no line has this name; allowed: {', '.join(methods)}")
        if not 0 <= args.temperature < float("inf") or (args.temperature == 0 and args.k > 1):
            raise ValueError(f"--temperature={args.temperature}: must be at least 0; 0 is greedy and needs --k 1")
    except ValueError as error:
        _tell(error)
        return 2
    needed = ("vllm", "math_verify", "pebble", "pyarrow", "scipy")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        return missing_package("eval", *missing)
    try:
        say(f"{_evaluate(args, methods)}written to {args.out}: results.json, table.md and the responses")
        return 0
    except (EvaluationError, OSError) as error:
        _tell(error)
        return 1


def _tell(text: object) -> None:
    say(f"oar eval: {text}", sys.stderr)


def parse(words: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> paths from arguments `[NAME=]PATH[,PATH...]`. ValueError: one is empty, or two names are equal."""
    methods: dict[str, list[str]] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        paths = (rest if equals else word).split(",")
        if not equals:
            parts = [part for part in Path(paths[0]).absolute().parts if part != "actor"]
            name = "/".join(parts[-2:]) if parts[-1].startswith("global_step_") else parts[-1]
        if not all(paths) or not name or name in methods:
            raise ValueError(f"{word}: must be CHECKPOINT or NAME=CHECKPOINT with another NAME; commas separate seeds")
        methods[name] = paths
    return methods


def _evaluate(args: argparse.Namespace, methods: dict[str, list[str]]) -> str:
    """Write results.json and table.md, and return the table."""
    from oar_plugin.runs.evaluate.responses import read_problems, responses_of
    from oar_plugin.runs.evaluate.table import Graded, as_markdown, grade, tables_of

    sets = [read_problems(name, data_folder(), args.limit) for name in dict.fromkeys(args.data)]
    sizes = {each.name: len(each.problems) for each in sets}
    if len(sizes) < len(sets):
        raise EvaluationError(f"--data={','.join(args.data)}: two sets have the same name; rename a file")
    models = {method: [find(path, args.best, _tell) for path in paths] for method, paths in methods.items()}
    sampling = {key: getattr(args, key) for key in ("temperature", "top_p", "max_tokens", "seed")}
    results: dict[str, dict[str, list[Graded]]] = {method: {name: [] for name in sizes} for method in models}
    for method, of_method in models.items():
        for model in of_method:
            for each in sets:
                graded = grade(each, responses_of(model, each, sampling, args.k, args.tp, args.out / "responses"))
                results[method][each.name].append(graded)
                if graded.no_answer > MANY:
                    without = f"{graded.no_answer:.0%} of the responses give no answer"
                    _tell(
                        f"{method}, {each.name}: {without}; those that reach --max-tokens {args.max_tokens} rarely do"
                    )
    tables = tables_of(results, args.baseline)
    text = as_markdown(tables, results, sizes)
    content = {"k": args.k, **sampling, "sizes": sizes, "models": models, "mean, error and 95 % interval": tables}
    write_whole(args.out / "results.json", json.dumps(content, indent=1) + "\n")
    write_whole(args.out / "table.md", text)
    return text
