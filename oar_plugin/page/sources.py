"""Reads the responses for `oar inspect`: a run's dump, verl's own dump of rollouts, or JSON lines of prompts and responses.

Names of files in a folder have the step: `step_000010.jsonl` in `algorithm.oar.dump.dir`, `10.jsonl` in
`trainer.rollout_data_dir` and `trainer.validation_data_dir`. The keys of a line tell its kind. A line that is incomplete or of
another kind is counted and skipped.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

from oar_plugin.page.record import Header, Response, Weighing, parse_header, parse_response

TOKENS = 400_000
"""Default limit, for a page of a few megabytes. Steps that the user names have no limit."""
_FILES = (r"step_(\d+)\.jsonl", r"(\d+)\.jsonl")
# The dump's folder, a run's, a project's, that of all projects (OAR_CHECKPOINTS).
_DEPTHS = ("", "*/", "*/*/", "*/*/*/")
_VERL = {"input": "prompt", "output": "response", "gts": "truth", "score": "reward", "data_source": "source"}
_TRAJECTORY = re.compile(r"(.+)_\d+_\d+")  # verl's uid of a response: prompt, rollout, output
_WORD = re.compile(r"\s*\S+|\s+")
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class SourceError(ValueError):
    """There is nothing to show. The message says what to do."""


class NothingYet(SourceError):
    """There is nothing to show yet; a run may still write it."""


@dataclass(frozen=True)
class Text:
    """A response without tokens and credit. The fields are those of `Response`; `chat` has the prompt's messages, if any."""

    step: int
    group: str
    uid: str
    source: str
    prompt: str
    chat: list[dict[str, Any]] | None
    response: str
    truth: str | None
    reward: float | None

    def to_response(self, advantage: float | None, **known: Any) -> Response:
        same = {name: getattr(self, name) for name in ("step", "group", "uid", "source", "prompt", "truth", "reward")}
        return Response(**{**same, "importance": {}, "advantage": advantage, **known})


Item: TypeAlias = Response | Text


@dataclass
class Loaded:
    """The responses to show, and what is not shown."""

    headers: list[tuple[int, Header]] = field(default_factory=list)  # step and header of each file of a dump
    items: list[Item] = field(default_factory=list)  # ordered by step
    lines: int = 0  # read lines, without headers
    skipped: int = 0  # lines that could not be read
    left_out: list[int] = field(default_factory=list)  # steps that are not shown
    cut: int = 0  # responses that are not shown, of steps that are

    @property
    def header(self) -> Header | None:
        """The header of the newest step, with the importances of all steps; None without a dump."""
        headers = [header for _, header in sorted(self.headers, key=itemgetter(0))]
        scales = {name: scale for each in headers for name, scale in each.arbitrary_scale.items()}
        return replace(headers[-1], arbitrary_scale=scales) if headers else None

    @property
    def settings_differ(self) -> bool:
        """Whether the steps' weights were made with different settings."""
        made = [Weighing.model_validate(header.config) for _, header in self.headers]
        return any(other != made[0] for other in made)

    def notes(self) -> list[str]:
        """Return messages about what is not shown."""
        notes = {
            f"{self.skipped} of {self.lines} lines skipped: half-written, or of something else": self.skipped,
            f"steps {steps_text(self.left_out)} not shown: --steps N,... shows them": self.left_out,
            f"{self.cut} more responses of these steps not shown: --steps N,... shows them": self.cut,
            "settings differ between these steps: weights are as recorded": self.settings_differ,
        }
        return [note for note, holds in notes.items() if holds]


def read(sources: Sequence[Path], steps: Sequence[int] | None = None) -> Loaded:
    """Read responses of files, of dump folders, and of folders with a single dump folder below, in whole groups.

    By default these are the newest steps, up to `TOKENS` tokens, at least one group. SourceError: there is nothing to show.
    """
    loaded, parts = Loaded(), defaultdict[int, list[Path | Item]](list)
    for step, file in (pair for source in sources for pair in files(source)):
        if step is not None:
            parts[step].append(file)
            continue
        for item in _read(file, 0, loaded):
            parts[item.step].append(item)
    if unknown := sorted(set(steps or ()) - parts.keys()):
        raise NothingYet(f"--steps: nothing of step {steps_text(unknown)}; there are {steps_text(sorted(parts))}")
    wanted, room = sorted(set(steps or parts), reverse=True), math.inf if steps else TOKENS
    for place, step in enumerate(wanted):
        groups: dict[str, list[Item]] = defaultdict(list)
        for part in parts[step]:
            for item in _read(part, step, loaded) if isinstance(part, Path) else [part]:
                groups[item.group].append(item)
        shown: list[Item] = []
        for group in groups.values():
            used = sum(map(_size, group))
            if used > room and (loaded.items or shown):
                room = 0
                break
            shown += group
            room -= used
        if groups and not shown:
            loaded.left_out = sorted(wanted[place:])
            break
        loaded.items[:0] = shown
        loaded.cut += sum(map(len, groups.values())) - len(shown)
    shown_steps = {item.step for item in loaded.items}
    loaded.headers = [(step, header) for step, header in loaded.headers if step in shown_steps]
    if not loaded.items:
        names, skipped = ", ".join(map(str, sources)), f"{loaded.skipped} of {loaded.lines} lines skipped"
        raise NothingYet(f"{names}: nothing to show: {skipped}: neither of a dump nor with prompt and response")
    return loaded


def files(source: Path) -> list[tuple[int | None, Path]]:
    """Return the files of a source, each with the step in its name. Raises SourceError."""
    if source.is_file():
        return [(None, source)]
    if not source.is_dir():
        raise SourceError(f"{source}: no such file or folder")
    for pattern in _FILES:
        for depth in _DEPTHS:
            dumps = defaultdict[Path, list[tuple[int | None, Path]]](list)
            for path in sorted(source.glob(f"{depth}*.jsonl")):
                if match := re.fullmatch(pattern, path.name):
                    dumps[path.parent].append((int(match[1]), path))
            if len(dumps) > 1:
                raise SourceError(f"{source}: name one of its dumps: {', '.join(map(str, dumps))}")
            if dumps:
                return dumps.popitem()[1]
    raise NothingYet(
        f"{source}: no step_N.jsonl (of algorithm.oar.dump.dir) and no N.jsonl (of trainer.rollout_data_dir), there or up to "
        "three folders below; did the run set one of them? Other files are named one by one"
    )


def advantages(texts: Sequence[Text]) -> list[float | None]:
    """Return GRPO's advantages; None in a group of one, and in a group in which a reward is unknown."""
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for text in texts:
        groups[text.step, text.group].append(math.nan if text.reward is None else text.reward)

    def advantage(text: Text) -> float | None:
        group = groups[text.step, text.group]
        if text.reward is None or len(group) == 1 or any(map(math.isnan, group)):
            return None
        return (text.reward - mean(group)) / (stdev(group) + 1e-6)

    return list(map(advantage, texts))


def unscored(texts: Sequence[Text]) -> list[Response]:
    """Return responses without credit. Their tokens are words, with the ids -1, -2, ..."""
    from oar_plugin.config import OarConfig  # imports torch
    from oar_plugin.credit.answer import make_finder, segment_tokens

    finder, numbers, responses = make_finder(OarConfig().answer_patterns), dict[str, int](), []
    for text, advantage in zip(texts, advantages(texts), strict=True):
        words = _WORD.findall(text.response)
        ids = [numbers.setdefault(word, -1 - len(numbers)) for word in words]
        segments_N = segment_tokens([word.encode() for word in words], finder)
        segments = [0] * len(words) if segments_N is None else segments_N.tolist()
        known: dict[str, Any] = {"token_ids": ids, "tokens": words, "segments": segments, "status": "not_scored"}
        responses.append(text.to_response(advantage, **known))
    return responses


def steps_text(steps: Sequence[int]) -> str:
    """Sorted steps as text: `1, 2, 3`, or `1 to 50 (50 steps)`."""
    return ", ".join(map(str, steps)) if len(steps) <= 10 else f"{steps[0]} to {steps[-1]} ({len(steps)} steps)"


def _read(file: Path, step: int, loaded: Loaded) -> list[Item]:
    """Return the responses of a file; of lines with one step and uid the last one counts. `step`: for lines without a step."""
    # Not splitlines: verl does not escape characters, and some of them end a line for Python but not for JSON.
    lines = [line for line in file.read_text(encoding="utf-8-sig", errors="replace").split("\n") if line.strip()]
    head, items = None, dict[tuple[int, str], Item]()
    if lines and re.search(r'"(oar_dump|weights)":', lines[0]):
        try:
            head = parse_header(lines.pop(0))
        except ValueError as error:
            text = f"its first line is no header that this version of oar_plugin reads: {error}"
            raise SourceError(f"{file}: {text}") from None
    for number, line in enumerate(lines, start=1):
        try:
            if "\\ud" in line.lower():  # half of a character, which JSON allows and UTF-8 does not
                line = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace").decode()
            item = parse_response(line) if head else _text(json.loads(line), step, f"{file.stem}:{number}")
            items[item.step, item.uid] = item
        except _FAULTS:  # a run may be writing the line, or was killed while it wrote
            loaded.skipped += 1
    loaded.lines += len(lines)
    if head:
        loaded.headers += [(of, head) for of in {of for of, _ in items}]
    return list(items.values())


def _text(record: Mapping[str, Any], step: int, place: str) -> Text:
    """A line of verl's dump, or of a file of prompts and responses. Raises one of `_FAULTS`."""
    uid, trajectory = place, None
    if "input" in record:
        record = {_VERL.get(key, key): value for key, value in record.items()}
        uid = str(record.get("uid") or place)
        trajectory = _TRAJECTORY.fullmatch(uid)
    prompt, answer = record["prompt"], record["response"]
    chat = None
    if isinstance(prompt, list):
        chat, prompt = prompt, "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    if not prompt or not isinstance(prompt, str) or not isinstance(answer, str):
        raise ValueError("a prompt is a text or the messages of a chat, a response is a text")
    group = record.get("group") or (trajectory[1] if trajectory else hashlib.sha256(prompt.encode()).hexdigest()[:8])
    source, step = str(record.get("source") or ""), int(record.get("step", step))
    truth = None if record.get("truth") is None else str(record["truth"])
    reward = None if record.get("reward") is None else float(record["reward"])
    reward = reward if reward is not None and math.isfinite(reward) else None
    return Text(step, str(group), uid, source, prompt, chat, answer, truth, reward)


def _size(item: Item) -> int:
    return 1 + len(item.tokens if isinstance(item, Response) else _WORD.findall(item.response))
