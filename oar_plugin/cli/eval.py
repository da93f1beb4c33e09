"""`oar eval`: checkpoints on benchmarks, as one table with standard errors."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oar_plugin.cli.arguments import listed, missing_package, positive, share, whole
from oar_plugin.output import say, write_whole
from oar_plugin.runs.evaluate import EvaluationError
from oar_plugin.runs.evaluate.checkpoints import find, parse
from oar_plugin.runs.math.sources import data_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oar_plugin.runs.evaluate.grade import ProblemSet
    from oar_plugin.runs.evaluate.table import Line

FIVE = "math500,aime24,amc23,minerva,olympiadbench"
MANY = 0.05  # if more responses have no answer than this share, accuracy may measure format and length
_HELP = """\
Generate K responses to every problem with vLLM, grade them with the recipes' reward, and print avg@K (mean accuracy), pass@K
(is any right) and maj@K (is the most frequent answer right) with standard errors, and the differences from the baseline, paired
over problems, with 95 % intervals.

A CHECKPOINT is a folder in HuggingFace's format, a name on the hub, a checkpoint of verl (global_step_N, or its actor; shards
are merged once, into a folder `merged` beside them), or a run's folder, whose last checkpoint is used. NAME=CHECKPOINT names a
line of the table; NAME=A,B,C are the seeds of one method, and the table shows their mean.

Each response is written as soon as it is ready: the same command continues where it was stopped, and a larger --k adds
responses. All visible GPUs are used; each engine runs on --tp GPUs.
"""
_EXAMPLES = """\
examples:
  oar eval RUN                                                the last checkpoint of a run's folder, on five benchmarks
  oar eval base=Qwen/Qwen2.5-7B grpo=RUN1 oar=RUN2 --data aime24,aime25 --k 64
  oar eval grpo=G1,G2,G3 oar=O1,O2,O3 --out results           three seeds each; results/table.md
  oar eval RUN --temperature 0 --k 1                          greedy
  oar eval RUN --data my/problems.parquet --limit 20          a file of your own in verl's columns

oar data math500 aime24 amc23 minerva olympiadbench makes the five sets. docs/evaluation.md explains the intervals, and
which difference a set can show.

exit status: 0 done, 1 something is missing or failed, 2 wrong input, 130 interrupted (what was generated is kept)
"""


def _temperature(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0; 0 is greedy")
    return float(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="[NAME=]CHECKPOINT", help="see above; commas separate seeds of one method")
    text = "sets in OAR_DATA (or ~/data/oar), or parquet files in verl's columns (default: %(default)s)"
    add("--data", type=listed, default=FIVE, metavar="NAME,...", help=text)
    add("--k", type=positive, default=32, metavar="K", help="responses to each problem (default: %(default)s)")
    add("--baseline", metavar="NAME", help="the line with which the others are compared (default: the first)")
    add("--best", action="store_true", help="use the checkpoint `best` of a run's folder instead of the last")
    text = "default: %(default)s, as in the recipes' validation; 0 is greedy"
    add("--temperature", type=_temperature, default=0.6, metavar="T", help=text)
    add("--top-p", type=share, default=0.95, metavar="P", help="default: %(default)s")
    text = "per response (default: %(default)s); use the training's data.max_response_length if that is larger"
    add("--max-tokens", type=positive, default=3072, metavar="N", help=text)
    add("--seed", type=whole, default=0, metavar="N", help="seed of sampling (default: %(default)s)")
    add("--tp", type=positive, default=1, metavar="N", help="GPUs per engine, for a model that does not fit on one")
    add("--limit", type=positive, metavar="N", help="the first N problems of each set")
    text = "for responses, results.json and table.md (default: ./%(default)s)"
    add("--out", type=Path, default=Path("evaluation"), metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Return 0; 1 if something is missing or fails; 2 for wrong input. The message says what to do."""
    try:
        rows = parse(args.checkpoints)
        baseline = args.baseline or next(iter(rows))
        if baseline not in rows:
            raise ValueError(f"--baseline={baseline}: no line has this name; allowed: {', '.join(rows)}")
        if args.temperature == 0 and args.k > 1:
            raise ValueError(f"--k={args.k}: with --temperature 0 all responses to a problem are the same; --k 1")
    except ValueError as error:
        _tell(error)
        return 2
    needed = ("vllm", "math_verify", "pebble", "pyarrow", "scipy")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        return missing_package("eval", *missing)

    from oar_plugin.cli.tables import console, table
    from oar_plugin.runs.evaluate.grade import read
    from oar_plugin.runs.evaluate.table import as_markdown, as_rows, explained

    try:
        sets = [read(name, data_folder(), args.limit) for name in dict.fromkeys(args.data)]
        names = [each.name for each in sets]
        if twice := next((name for name in names if names.count(name) > 1), None):
            _tell(f"--data={','.join(args.data)}: two sets are called {twice}; rename a file")
            return 2
        methods = {name: [find(path, args.best, _tell) for path in paths] for name, paths in rows.items()}
        lines = _evaluate(args, methods, sets, baseline)
    except EvaluationError as error:
        _tell(error)
        return 1
    keys = ("data", "k", "temperature", "top_p", "max_tokens", "seed", "limit")
    settings = {key: getattr(args, key) for key in keys}
    content = {"settings": settings, "models": methods, "baseline": baseline, "lines": [asdict(line) for line in lines]}
    _set_aside(args.out, content)
    write_whole(args.out / "results.json", json.dumps(content, indent=1) + "\n")
    tables = as_rows(lines, baseline, args.k)
    write_whole(args.out / "table.md", as_markdown(tables, lines))
    for metric, (titles, *methods_rows) in tables.items():
        shown = table(metric, *titles[1:])
        for row in methods_rows:
            shown.add_row(*row)
        console().print(shown, "")
    say(f"{explained(lines)}\nwritten to {args.out}: results.json, table.md and the responses")
    return 0


def _tell(text: object) -> None:
    say(f"oar eval: {text}", sys.stderr)


def _evaluate(
    args: argparse.Namespace, methods: dict[str, list[str]], sets: Sequence[ProblemSet], baseline: str
) -> list[Line]:
    from oar_plugin.cli.tables import progress_bar
    from oar_plugin.runs.evaluate.generate import ResponseFile, Sampling, generate
    from oar_plugin.runs.evaluate.grade import Graded, grade
    from oar_plugin.runs.evaluate.table import lines_of

    sampling = Sampling(args.temperature, args.top_p, args.max_tokens, args.seed)
    results: dict[str, dict[str, list[Graded]]] = {name: {each.name: [] for each in sets} for name in methods}
    with progress_bar() as progress:
        for name, model in ((name, model) for name, models in methods.items() for model in models):
            files = [ResponseFile(args.out / "responses", model, sampling, each) for each in sets]
            generate(model, sets, files, sampling, args.k, args.tp, partial(progress, f"{name}: responses"), _tell)
            for each, file in zip(sets, files, strict=True):
                graded = grade(each, file.responses, args.k, partial(progress, f"{name}: answers, {each.name}"))
                results[name][each.name].append(graded)
                if graded.no_answer > MANY:
                    shares = f"{graded.no_answer:.0%} of the responses give no answer, {graded.cut:.0%} reached"
                    _tell(f"{name}, {each.name}: {shares} --max-tokens {args.max_tokens}")
                if graded.failed:
                    why = "because comparing them with the ground truth took too long or crashed"
                    _tell(f"{name}, {each.name}: {graded.failed:.2%} of the responses count as wrong {why}")
    return lines_of(results, baseline, args.k)


def _set_aside(out: Path, content: dict[str, Any]) -> None:
    """Rename results of other settings or models to results.1.json and table.1.md, or the next free number."""
    old = out / "results.json"
    if not old.is_file():
        return
    with suppress(ValueError, TypeError):  # oar eval did not write it
        if {**json.loads(old.read_text(encoding="utf-8")), "lines": None} == {**content, "lines": None}:
            return
    number = next(n for n in itertools.count(1) if not (out / f"results.{n}.json").exists())
    for stem, end in (("results", "json"), ("table", "md")):
        with suppress(FileNotFoundError):
            (out / f"{stem}.{end}").rename(out / f"{stem}.{number}.{end}")
    _tell(f"{out} held results of other settings or models: now results.{number}.json, table.{number}.md")
