"""`oar report`: a page about runs, from the logs that verl wrote."""

import argparse
import re
import sys
from pathlib import Path

from oar_plugin.cli.arguments import missing_package
from oar_plugin.output import printable, say

_EXAMPLES = """\
examples:
  oar report RUN                                     a run's folder, or a folder of runs; the page goes to RUN/report
  oar report O1 O2 O3 --baseline G1 G2 G3            three seeds each, compared in every chart
  oar report metrics.jsonl --baseline tensorboard/   what verl's loggers wrote: file, tensorboard, wandb (offline)

exit status: 0 done, 1 a package is missing, 2 wrong input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, _EXAMPLES
    add = parser.add_argument
    text = "folders of runs that differ in their seeds, or what a logger of verl wrote"
    add("runs", nargs="+", type=Path, metavar="RUN", help=text)
    add("--baseline", nargs="+", type=Path, default=[], metavar="RUN", help="runs to compare with")
    text = "folder for report.html (default: report/ in the first run's folder, or in . without a run.yaml)"
    add("--out", type=Path, metavar="DIR", help=text)
    add("--open", action="store_true", help="show the page in a browser")


def _runs(place: Path, depth: int = 2) -> list[Path]:
    """Return the runs of one method in a folder, up to `depth` folders below; the place itself if there is none below."""
    from oar_plugin.runs.report.logs import PLACES, NoLogs

    def has_logs(folder: Path) -> bool:
        return any(any(folder.glob(pattern)) for patterns in PLACES.values() for pattern in patterns)

    folders = [place] if place.is_dir() else []
    for _ in range(depth + 1):
        if runs := [folder for folder in folders if has_logs(folder)]:
            methods = sorted({re.sub(r"-s\d+(?=-|$)", "", run.name) for run in runs})  # a run's name, without its seed
            if len(methods) > 1:
                names = ", ".join(map(str, runs))
                raise NoLogs(f"{place}: runs of {', '.join(methods)}; name those of one, or use --baseline: {names}")
            return runs
        folders = [below for folder in folders for below in sorted(folder.iterdir()) if below.is_dir()]
    return [place]


def run(args: argparse.Namespace) -> int:
    """Return 1 if a package or a browser is missing, 2 for wrong input."""
    try:
        from oar_plugin.cli.tables import console, open_page, table
        from oar_plugin.runs.report.logs import NoLogs, read_run
        from oar_plugin.runs.report.page import Side, write_report

        try:
            found, baseline = ([run for path in paths for run in _runs(path)] for paths in (args.runs, args.baseline))
            out = args.out or (found[0] if (found[0] / "run.yaml").is_file() else Path()) / "report"
            ours, theirs = ([read_run(path) for path in paths] for paths in (found, baseline))
            names = [str(log.settings.get("algorithm.adv_estimator", log.name)) for log in (ours[0], *theirs[:1])]
            names[1:] = ["baseline" if name == names[0] else name for name in names[1:]]
            sides = [Side(printable(name), runs) for name, runs in zip(names, (ours, theirs), strict=False)]
            report = write_report(sides, out)
        except NoLogs as error:
            say(f"oar report: {error}", sys.stderr)
            return 2
    except ModuleNotFoundError as error:
        return missing_package("report", error.name)
    titles, *rows = report.comparison
    shown = table(*titles)
    for row in rows:
        shown.add_row(*row)
    console().print(shown)
    say(f"What went wrong, and when: {len(report.findings) - 1} findings\n{report.page}")
    return open_page(report.page, "report") if args.open else 0
