"""`oar inspect`: responses token by token, with what each token was paid."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oar_plugin.cli.arguments import listed, positive
from oar_plugin.cli.browser import open_page
from oar_plugin.cli.tables import console, table
from oar_plugin.output import say, write_whole
from oar_plugin.page.record import Header, Response
from oar_plugin.page.sources import TOKENS, NothingYet, SourceError, Text, files, read, steps_text, unscored

if TYPE_CHECKING:
    from oar_plugin.config import OarConfig

LOOK_AGAIN_S = 3.0
_HELP = """\
Show responses token by token, with what each token was paid: one page that needs no network.

A SOURCE is a folder that a run dumped into (algorithm.oar.dump.dir), or the run's folder around it; a folder of verl's own dump
(trainer.rollout_data_dir, trainer.validation_data_dir); or a file of JSON lines with prompt (a text, or the messages of a chat)
and response, and if you like truth, reward, source, group and step. The last two have credit only with --model. verl's dump
lacks special tokens: what a model says of it is near what the run saw, not equal.
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
    add("--limit", type=positive, metavar="N", help="at most so many responses of the newest steps, in whole groups")
    text = "what to write (default: inspect.html in the folder or beside the file; json and text: the terminal)"
    add("--out", type=Path, metavar="FILE", help=text)
    add("--format", choices=("html", "json", "text"), default="html", help="default: %(default)s")
    add("--open", action="store_true", help="open the page in a browser")
    add("--follow", action="store_true", help="write the page again when a step is dumped; reload it to see it")
    add("--model", metavar="NAME", help="folder in HuggingFace's format, checkpoint of verl, or name on the hub")
    text = "with --model (default: that of algorithm.oar); the first makes the weights"
    add("--importance", type=listed, metavar="NAME,...", help=text)
    add("--device", metavar="NAME", help="of the model: cpu, cuda, cuda:1 (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> int:
    """2 for wrong input and where nothing is to show, 1 when a model cannot be had; the message says what to do."""
    words = [*args.words, *args.overrides]
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    places = [Path(word) for word in words if word not in settings]
    of_models = [*settings, *(f"--{name}" for name in ("importance", "device") if getattr(args, name))]
    of_pages = [f"--{name}" for name in ("open", "follow") if getattr(args, name)]
    problem = None
    if not places:
        problem = "SOURCE is missing: a folder or a file with responses"
    elif of_models and not args.model:
        problem = f"{of_models[0]}: is for scoring; add --model"
    elif args.follow and args.model:
        problem = "--follow: is for a run's dump, which is scored already; leave out --model"
    elif of_pages and args.format != "html":
        problem = f"{of_pages[0]}: is for pages; leave out --format {args.format}"
    elif args.out and args.out.is_dir():
        problem = f"--out={args.out}: a folder; name a file"
    try:
        if problem:
            raise SourceError(problem)
        configs = _configs(args.importance, settings) if args.model else {}
        return _follow(args, places) if args.follow else _show(args, places, configs)
    except SourceError as error:
        say(f"oar inspect: {error}", sys.stderr)
        return 2


def _configs(names: list[str] | None, settings: list[str]) -> dict[str, OarConfig]:
    """The settings of each importance. Raises SourceError."""
    import yaml

    from oar_plugin.config import OarConfig, OarConfigError

    given: dict[str, Any] = {}
    for key, _, text in (word.partition("=") for word in settings):
        group, _, name = key.removeprefix("algorithm.oar.").rpartition(".")
        try:
            (given.setdefault(group, {}) if group else given)[name] = yaml.safe_load(text)
        except (yaml.YAMLError, TypeError):
            raise SourceError(f"{key}={text}: not a value as on verl's command line") from None
    names = names or [str(given.get("importance", OarConfig().importance))]
    try:
        configs = [OarConfig.parse({**given, "importance": name}) for name in names]
    except OarConfigError as error:
        raise SourceError(str(error)) from None
    return {config.importance_object.name: config for config in configs}


def _show(args: argparse.Namespace, places: list[Path], configs: dict[str, OarConfig]) -> int:
    loaded = read(places, args.steps, args.limit)
    responses = [item for item in loaded.items if isinstance(item, Response)]
    texts, header = [item for item in loaded.items if isinstance(item, Text)], loaded.header
    if responses and configs:
        raise SourceError(f"--model={args.model}: a run's dump is scored already; leave it out")
    if texts:
        from oar_plugin.cli import score
        from oar_plugin.runs.evaluate.problems import EvaluationError

        texts = score.graded(texts)
        try:
            responses += score.scored(args.model, args.device, texts, configs) if configs else unscored(texts)
        except EvaluationError as error:
            say(f"oar inspect: --model={args.model}: {error}", sys.stderr)
            return 1
        header = header or score.header_of(configs)
    assert header is not None
    for note in loaded.notes():
        say(f"oar inspect: {note}", sys.stderr)
    steps = steps_text(sorted({response.step for response in responses}))
    if args.format == "html":
        from oar_plugin.page.inspector import inspector_page

        target = args.out or (places[0] / "inspect.html" if places[0].is_dir() else places[0].with_suffix(".html"))
        title = ", ".join(place.resolve().name for place in places)
        write_whole(target, inspector_page(responses, header, title, loaded.settings_differ))
        say(f"{len(responses)} responses of steps {steps}: {target} ({target.stat().st_size / 1e6:.1f} MB)")
        return open_page(target, "inspect") if args.open else 0
    text = (
        _json(header, responses)
        if args.format == "json"
        else _text(responses, None if args.out is None else io.StringIO())
    )
    if args.out:
        write_whole(args.out, text)
    else:
        print(text, end="")
    return 0


def _json(header: Header, responses: list[Response]) -> str:
    document = {"header": vars(header), "responses": list(map(vars, responses))}
    # JSON has no word for what is no number.
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None)) + "\n"


def _text(responses: list[Response], file: io.StringIO | None) -> str:
    from oar_plugin.page.terminal import print_responses

    shown = console(file=file)
    with shown.capture() as capture:
        print_responses(responses, shown, table())
    return capture.get()


def _follow(args: argparse.Namespace, places: list[Path]) -> int:
    """Until the reader ends it, or the run has ended."""
    said: object = None
    try:
        while True:
            ended = _ended(places)  # before the files are looked for: the last step is shown as well
            try:
                now: object = [(file, file.stat().st_mtime_ns) for place in places for _, file in files(place)]
                if now != said:
                    _show(args, places, {})
                    args.open = False
            except NothingYet as nothing:
                now = f"oar inspect: {nothing}; waiting for more"
                if now != said:
                    say(now, sys.stderr)
            said = now
            if ended:
                say("the run has ended")
                return 0
            time.sleep(LOOK_AGAIN_S)
    except KeyboardInterrupt:
        return 0


def _ended(places: list[Path]) -> bool:
    """Whether the records of these runs say so; false where there is none."""
    from oar_plugin.runs.run_folder import is_begun, state

    folders = [folder for place in places for folder in (place.resolve(), place.resolve().parent) if is_begun(folder)]
    return bool(folders) and all(state(folder) in ("failed", "finished") for folder in folders)
