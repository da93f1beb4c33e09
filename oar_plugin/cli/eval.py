"""`oar eval`: checkpoints on benchmarks, as one table with standard errors."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from oar_plugin.cli.arguments import listed, missing_package, positive, share, whole
from oar_plugin.output import say, write_whole
from oar_plugin.runs.evaluate.checkpoints import EvaluationError, find
from oar_plugin.runs.math.sources import DataError, data_folder

_HELP = """\
Generate K responses to every problem with vLLM on all visible GPUs, grade them with the recipes' reward, and print avg@K (mean
accuracy), pass@K (is any right) and maj@K (is the most frequent answer right) with standard errors, and paired differences from
the baseline with 95 % intervals. The same command goes on where it was stopped, and repeats no finished set.

A CHECKPOINT is a folder in HuggingFace's format, a name on the hub, a checkpoint of verl (global_step_N, or its actor; shards
are merged once, into a folder `merged` beside them), or a run's folder, whose last checkpoint is used. NAME=CHECKPOINT names a
line of the table; NAME=A,B,C are the seeds of one method, and the table shows their mean.
"""
_EXAMPLES = """\
oar data math500 aime24 amc23 minerva olympiadbench         makes the default sets
oar eval grpo=G1,G2,G3 oar=O1,O2,O3 --out results           run folders, three seeds each; results/table.md
oar eval RUN --data my/problems.parquet --k 1 --temperature 0        a file of your own in verl's columns; greedy
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description, parser.epilog = argparse.RawDescriptionHelpFormatter, _HELP, _EXAMPLES
    add, default = parser.add_argument, "default: %(default)s"
    add("checkpoints", nargs="+", type=_method, metavar="[NAME=]CHECKPOINT", help="commas separate seeds of one method")
    sets = f"sets in OAR_DATA (or ~/data/oar), or .parquet or .jsonl files in verl's columns ({default})"
    add("--data", type=listed, default="math500,aime24,amc23,minerva,olympiadbench", metavar="NAME,...", help=sets)
    add("--k", type=positive, default=32, metavar="K", help=f"responses to each problem ({default})")
    add("--baseline", metavar="NAME", help="the line with which the others are compared (default: the first)")
    add("--temperature", type=float, default=0.6, metavar="T", help=f"{default}; 0 is greedy, for --k 1")
    add("--top-p", type=share, default=0.95, metavar="P", help=default)
    longest = f"per response ({default}); use the training's data.max_response_length if that is larger"
    add("--max-tokens", type=positive, default=3072, metavar="N", help=longest)
    add("--seed", type=whole, default=0, metavar="N", help=f"seed of sampling ({default})")
    add("--tp", type=positive, default=1, metavar="N", help="GPUs per engine, for a model that does not fit on one")
    add("--limit", type=positive, metavar="N", help="the first N problems of each set")
    written = f"for responses, results.json and table.md ({default})"
    add("--out", type=Path, default=Path("evaluation"), metavar="DIR", help=written)


def _method(text: str) -> tuple[str, list[str]]:
    """Return the name and the paths of `[NAME=]PATH[,PATH...]`; the default name is that of the folder."""
    name, equals, rest = text.partition("=")
    paths = (rest if equals else text).split(",")
    if not name or not all(paths):
        raise argparse.ArgumentTypeError(f"{text}: must be CHECKPOINT or NAME=CHECKPOINT, or NAME=A,B for seeds")
    return name if equals else Path(paths[0]).absolute().name, paths


def run(args: argparse.Namespace) -> int:
    methods, baseline = dict(args.checkpoints), args.baseline or args.checkpoints[0][0]
    if len(methods) < len(args.checkpoints) or baseline not in methods or (args.k > 1 and args.temperature == 0):
        rules = "NAMEs must differ, --baseline must be one of them, and --temperature 0 needs --k 1"
        _tell(f"{rules}; names: {', '.join(name for name, _ in args.checkpoints)}")
        return 2
    if missing := [name for name in ("vllm", "math_verify", "pebble", "pyarrow", "scipy") if find_spec(name) is None]:
        return missing_package("eval", *missing)
    try:
        say(f"{_evaluate(args, methods, baseline)}written to {args.out}: results.json, table.md and the responses")
        return 0
    except (EvaluationError, DataError, ImportError, OSError) as error:
        _tell(error)
        return 1


def _tell(text: object) -> None:
    say(f"oar eval: {text}", sys.stderr)


def _evaluate(args: argparse.Namespace, methods: dict[str, list[str]], baseline: str) -> str:
    from oar_plugin.runs.evaluate.responses import read_problems, responses_of
    from oar_plugin.runs.evaluate.table import Metrics, as_markdown, grade, tables_of

    sets = [read_problems(name, data_folder(), args.limit) for name in dict.fromkeys(args.data)]
    sizes = {each.name: len(each.problems) for each in sets}
    if len(sizes) < len(sets):
        raise EvaluationError(f"--data={','.join(args.data)}: two sets have the same name; rename a file")
    models = {method: [find(path, _tell) for path in paths] for method, paths in methods.items()}
    sampling = {key: getattr(args, key) for key in ("temperature", "top_p", "max_tokens", "seed")}

    results: dict[str, dict[str, list[Metrics]]] = {method: {name: [] for name in sizes} for method in models}
    for method, model in ((method, model) for method, seeds in models.items() for model in seeds):
        for each in sets:
            metrics, without = grade(each, responses_of(model, each, sampling, args.k, args.tp, args.out / "responses"))
            results[method][each.name].append(metrics)
            _tell(f"{method}, {each.name}: {without:.0%} of the responses give no answer")
    tables = tables_of(results, baseline)
    text = as_markdown(tables, results, sizes)
    content = {"k": args.k, **sampling, "sizes": sizes, "models": models, "mean, error and 95 % interval": tables}
    write_whole(args.out / "results.json", json.dumps(content, indent=1) + "\n")
    write_whole(args.out / "table.md", text)
    return text
