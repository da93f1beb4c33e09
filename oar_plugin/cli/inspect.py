"""`oar inspect`: responses token by token, with the weight of each token."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path

from oar_plugin.cli.arguments import listed
from oar_plugin.cli.tables import console, open_page, table
from oar_plugin.output import say, write_whole
from oar_plugin.page.record import Header, Response
from oar_plugin.page.sources import TOKENS, NothingYet, SourceError, Text, files, read, steps_text, unscored

LOOK_AGAIN_S = 3.0
_HELP = """\
Show responses token by token, with the weight of each token: one page that needs no network.

A SOURCE is the folder of a run's dump (algorithm.oar.dump.dir) or the run's folder; a folder of verl's own dump
(trainer.rollout_data_dir, trainer.validation_data_dir); or a file of JSON lines with prompt (a text or the messages of a chat),
response and, optionally, truth, reward, source, group and step. The last two have credit only with --model. verl's dump lacks
special tokens, so a model's numbers for it are close to those of the run, not equal.
"""
_EXAMPLES = """\
examples:
  oar inspect RUN --open                                      the newest steps that a run dumped
  oar inspect rollouts --steps 10,200                         verl's own dump: right and wrong side by side, without credit
  oar inspect mine.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --importance fisher,oar_g tau=0.9

key=value are settings below algorithm.oar (docs/settings.md). Exit status: 0 done, 1 something is missing or failed, 2 wrong
input; --follow ends with Ctrl-C, or with the run.
"""


def _steps(text: str) -> list[int]:
    return [int(word) for word in listed(text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    parser.set_defaults(overrides=[])
    add = parser.add_argument
    add("words", nargs="+", metavar="SOURCE | key=value", help="see above")
    text = f"training steps to show (default: the newest, up to {TOKENS:,} tokens)"
    add("--steps", type=_steps, metavar="N,...", help=text)
    text = "output (default: inspect.html in the folder or beside the file; json and text: the terminal)"
    add("--out", type=Path, metavar="FILE", help=text)
    add("--format", choices=("html", "json", "text"), default="html", help="default: %(default)s")
    add("--open", action="store_true", help="open the page in a browser")
    add("--follow", action="store_true", help="write the page again after each dumped step; reload it to see the step")
    add("--model", metavar="NAME", help="folder in HuggingFace's format, checkpoint of verl, or name on the hub")
    text = "importances to compute with --model (default: that of algorithm.oar); the first one gives the weights"
    add("--importance", type=listed, metavar="NAME,...", help=text)
    add("--device", metavar="NAME", help="device of the model: cpu, cuda, cuda:1 (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> int:
    words = [*args.words, *args.overrides]
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    places = [Path(word) for word in words if word not in settings]
    try:
        if problem := _problem(args, places, settings):
            raise SourceError(problem)
        return _follow(args, places) if args.follow else _show(args, places, settings)
    except SourceError as error:
        say(f"oar inspect: {error}", sys.stderr)
        return 2


def _problem(args: argparse.Namespace, places: list[Path], settings: list[str]) -> str | None:
    """Return what is wrong with the arguments; None if nothing is."""
    for_models = [*settings, *(f"--{name}" for name in ("importance", "device") if getattr(args, name))]
    for_pages = [f"--{name}" for name in ("open", "follow") if getattr(args, name)]
    if not places:
        return "SOURCE is missing: a folder or a file with responses"
    if for_models and not args.model:
        return f"{for_models[0]}: is for scoring; add --model"
    if args.follow and args.model:
        return "--follow: is for a run's dump, which is scored already; leave out --model"
    if for_pages and args.format != "html":
        return f"{for_pages[0]}: is for pages; leave out --format {args.format}"
    return f"--out={args.out}: a folder; name a file" if args.out and args.out.is_dir() else None


def _show(args: argparse.Namespace, places: list[Path], settings: list[str]) -> int:
    configs = {}
    if args.model:
        from oar_plugin.cli import score

        configs = score.configs_of(args.importance, settings)
    loaded = read(places, args.steps)
    responses = [item for item in loaded.items if isinstance(item, Response)]
    texts, header = [item for item in loaded.items if isinstance(item, Text)], loaded.header
    if responses and args.model:
        raise SourceError(f"--model={args.model}: a run's dump is scored already; leave it out")
    if texts:
        from oar_plugin.cli import score
        from oar_plugin.runs.evaluate import EvaluationError

        texts = score.graded(texts)
        try:
            responses += score.scored(args.model, args.device, texts, configs) if configs else unscored(texts)
        except EvaluationError as error:
            say(f"oar inspect: --model={args.model}: {error}", sys.stderr)
            return 1
        header = header or score.header_of(configs, args.model or "")
    assert header is not None
    for note in loaded.notes():
        say(f"oar inspect: {note}", sys.stderr)
    if args.format != "html":
        text = _json(header, responses) if args.format == "json" else _text(responses, to_file=args.out is not None)
        if args.out:
            write_whole(args.out, text)
        else:
            print(text, end="")
        return 0
    from oar_plugin.page.inspector import inspector_page

    page = args.out or (places[0] / "inspect.html" if places[0].is_dir() else places[0].with_suffix(".html"))
    run = (header.run if len(places) == 1 else "") or ", ".join(place.resolve().name for place in places)
    write_whole(page, inspector_page(responses, header, run, loaded.settings_differ))
    steps = steps_text(sorted({response.step for response in responses}))
    say(f"{len(responses)} responses of steps {steps}: {page} ({page.stat().st_size / 1e6:.1f} MB)")
    return open_page(page, "inspect") if args.open else 0


def _json(header: Header, responses: list[Response]) -> str:
    document = {"header": vars(header), "responses": list(map(vars, responses))}
    # JSON has no NaN and no infinity.
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None)) + "\n"


def _text(responses: list[Response], to_file: bool) -> str:
    from oar_plugin.page.terminal import print_responses

    shown = console(file=io.StringIO() if to_file else None)
    with shown.capture() as capture:
        print_responses(responses, shown, table())
    return capture.get()


def _follow(args: argparse.Namespace, places: list[Path]) -> int:
    """Write the page after each dumped step, until Ctrl-C or the end of the run."""
    seen: object = None
    try:
        while True:
            ended = _ended(places)  # before the search for files, so that the last step is shown as well
            try:
                state: object = [(file, file.stat().st_mtime_ns) for place in places for _, file in files(place)]
                if state != seen:
                    _show(args, places, [])
                    args.open = False
            except NothingYet as nothing:
                state = f"oar inspect: {nothing}; waiting for more"
                if state != seen:
                    say(state, sys.stderr)
            seen = state
            if ended:
                say("the run has ended")
                return 0
            time.sleep(LOOK_AGAIN_S)
    except KeyboardInterrupt:
        return 0


def _ended(places: list[Path]) -> bool:
    """Return whether the records of all these runs say that they ended; False without a record."""
    from oar_plugin.runs.run_folder import record_of

    records = [record_of(folder) for place in places for folder in (place.resolve(), place.resolve().parent)]
    states = [record["state"] for record in records if record]
    return bool(states) and set(states) <= {"failed", "finished"}
