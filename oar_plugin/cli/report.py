"""`oar report`: a page about runs, from the logs that verl wrote."""

import argparse
import sys
from pathlib import Path

from oar_plugin.cli.arguments import missing_package
from oar_plugin.output import printable, say

_EXAMPLES = """\
examples:
  oar report RUN                                     a run's folder; the page goes to RUN/report
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


def run(args: argparse.Namespace) -> int:
    """Return 1 if a package or a browser is missing, 2 for wrong input."""
    try:
        from oar_plugin.cli.tables import console, open_page, table
        from oar_plugin.runs.report.logs import NoLogs, read_run
        from oar_plugin.runs.report.page import Side, write_report

        out = args.out or (args.runs[0] if (args.runs[0] / "run.yaml").is_file() else Path()) / "report"
        try:
            ours, theirs = ([read_run(path) for path in paths] for paths in (args.runs, args.baseline))
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
