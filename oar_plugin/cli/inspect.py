"""`oar inspect`: responses token by token, with the weight of each token."""

import argparse
import sys
import webbrowser
from pathlib import Path

from jinja2 import TemplateError
from yaml import YAMLError

from oar_plugin.cli.arguments import listed
from oar_plugin.output import say, write_whole
from oar_plugin.page.record import header_for
from oar_plugin.page.sources import TOKENS, read, steps_text

_HELP = """\
Show responses token by token, with the weight of each token: one page that needs no network.

A SOURCE is the folder of a run's dump (algorithm.oar.dump.dir) or the run's folder. With --model it is a file of JSON lines
with prompt, response and, optionally, truth, reward, source, group and step, or of verl's own dump.
"""
_EXAMPLES = f"""\
examples:
  oar inspect RUN --open                                      the newest steps that a run dumped
  oar inspect mine.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --importance fisher,oar_g tau=0.9

key=value are settings below algorithm.oar, all of them in {Path(__file__).parents[1]}/hosts/verl/conf/oar/default.yaml
exit status: 0 done, 1 something is missing, 2 wrong input
"""


def _steps(text: str) -> list[int]:
    return [int(word) for word in listed(text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description, parser.epilog = argparse.RawDescriptionHelpFormatter, _HELP, _EXAMPLES
    parser.set_defaults(overrides=[])
    add = parser.add_argument
    add("words", nargs="+", metavar="SOURCE | key=value", help="see above")
    add("--steps", type=_steps, metavar="N,...", help=f"training steps (default: the newest, up to {TOKENS:,} tokens)")
    add("--out", type=Path, metavar="FILE", help="the page (default: inspect.html in the folder or beside the file)")
    add("--format", choices=("html", "text"), default="html", help="default: %(default)s")
    add("--open", action="store_true", help="open the page in a browser")
    add("--model", metavar="NAME", help="folder in HuggingFace's format, checkpoint of verl, or name on the hub")
    text = "importances to compute with --model (default: that of algorithm.oar); the first one gives the weights"
    add("--importance", type=listed, metavar="NAME,...", help=text)


def run(args: argparse.Namespace) -> int:
    words = [*args.words, *args.overrides]
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    places = [Path(word) for word in words if word not in settings]
    try:
        _check(args, places, settings)
        return _show(args, places, settings)
    except (ValueError, YAMLError, TemplateError) as error:  # of a setting and of a model's chat template
        say(f"oar inspect: {error}", sys.stderr)
        return 2


def _check(args: argparse.Namespace, places: list[Path], settings: list[str]) -> None:
    for_models = settings or (["--importance"] if args.importance else [])
    for_pages = [f"--{name}" for name in ("open", "out") if getattr(args, name)]
    if not places:
        raise ValueError("SOURCE is missing: a folder or a file with responses")
    if for_models and not args.model:
        raise ValueError(f"{for_models[0]}: is for scoring; add --model")
    if args.steps and args.model:
        raise ValueError("--steps: is for a run's dump, which is scored already; leave out --model")
    if for_pages and args.format != "html":
        raise ValueError(f"{for_pages[0]}: is for pages; leave out --format {args.format}")
    if args.out and args.out.is_dir():
        raise ValueError(f"--out={args.out}: a folder; name a file")


def _show(args: argparse.Namespace, places: list[Path], settings: list[str]) -> int:
    if args.model:
        from torch import OutOfMemoryError

        from oar_plugin.cli import score
        from oar_plugin.runs.evaluate.checkpoints import EvaluationError

        configs, as_recorded = score.configs_of(args.importance, settings), False
        header = header_for(configs, model=args.model)
        try:
            responses = list(score.scored(places, args.model, configs))
        except (EvaluationError, ImportError, OutOfMemoryError) as error:
            say(f"oar inspect: --model={args.model}: {error}", sys.stderr)
            return 1
    else:
        loaded = read(places, args.steps)
        responses, header, as_recorded = loaded.items, loaded.header, loaded.settings_differ
        for note in loaded.notes:
            say(f"oar inspect: {note}", sys.stderr)
    if args.format != "html":
        from oar_plugin.page.terminal import text_of

        print(text_of(responses), end="")
        return 0
    from oar_plugin.page.inspector import inspector_page

    page = args.out or (places[0] / "inspect.html" if places[0].is_dir() else places[0].with_suffix(".html"))
    run = (header.run if len(places) == 1 else "") or ", ".join(place.resolve().name for place in places)
    write_whole(page, inspector_page(responses, header, run, as_recorded))
    steps = steps_text(sorted({response.step for response in responses}))
    say(f"{len(responses)} responses of steps {steps}: {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if args.open and not webbrowser.open(page.resolve().as_uri()):
        say(f"oar inspect: --open: no browser here; open {page} yourself", sys.stderr)
        return 1
    return 0
