"""What `oar inspect` shows, from where it lies: a run's dump, verl's own dump of rollouts, prompts with responses as JSONL.

A folder's files say their step in their names: `step_000010.jsonl` of `algorithm.oar.dump.dir`, `10.jsonl` of
`trainer.rollout_data_dir` and `trainer.validation_data_dir`. What a line is, its keys say. One that is half-written, or none
of these, is counted and left out.
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
"""So many make a page of a few megabytes. More are shown where steps are named."""
_FILES = (r"step_(\d+)\.jsonl", r"(\d+)\.jsonl")
_VERL = {"input": "prompt", "output": "response", "gts": "truth", "score": "reward", "data_source": "source"}
_TRAJECTORY = re.compile(r"(.+)_\d+_\d+")  # verl's key of one: its prompt, rollout and output
_WORD = re.compile(r"\s*\S+|\s+")
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class SourceError(ValueError):
    """Nothing to show. The message says what to do."""


class NothingYet(SourceError):
    """A run that goes on may still write it."""


@dataclass(frozen=True)
class Text:
    """A response without tokens and credit; the fields are `Response`'s. `chat`: the prompt's messages, if it has some."""

    step: int
    group: str
    uid: str
    source: str
    prompt: str
    chat: list[dict[str, Any]] | None
    response: str
    truth: str | None
    reward: float | None

    def told(self, advantage: float | None, **known: Any) -> Response:
        """Makes a `Response`."""
        same = {name: getattr(self, name) for name in ("step", "group", "uid", "source", "prompt", "truth", "reward")}
        return Response(**{**same, "importance": {}, "advantage": advantage, **known})


Item: TypeAlias = Response | Text


@dataclass
class Loaded:
    """What was read."""

    headers: list[tuple[int, Header]] = field(default_factory=list)  # of a dump's files, once for each step
    items: list[Item] = field(default_factory=list)  # by step
    lines: int = 0  # headers aside
    skipped: int = 0  # of the lines
    left_out: list[int] = field(default_factory=list)  # steps that are not shown
    cut: int = 0  # responses of the steps shown that are not

    @property
    def header(self) -> Header | None:
        """The newest step's, with the importances of all."""
        headers = [header for _, header in sorted(self.headers, key=itemgetter(0))]
        scales = {name: scale for each in headers for name, scale in each.arbitrary_scale.items()}
        return replace(headers[-1], arbitrary_scale=scales) if headers else None

    @property
    def settings_differ(self) -> bool:
        """Whether not all weights were made by the same settings."""
        made = [Weighing.model_validate(header.config) for _, header in self.headers]
        return any(other != made[0] for other in made)

    def notes(self) -> list[str]:
        """What the reader should know of what is not shown."""
        said = {
            f"{self.skipped} of {self.lines} lines skipped: half-written, or of something else": self.skipped,
            f"steps {steps_text(self.left_out)} not shown: --steps N,... shows them": self.left_out,
            f"{self.cut} more responses of these steps not shown: --steps N,... or a larger --limit shows them": self.cut,
            "settings differ between these steps: weights are as recorded": self.settings_differ,
        }
        return [note for note, holds in said.items() if holds]


def read(sources: Sequence[Path], steps: Sequence[int] | None = None, limit: int | None = None) -> Loaded:
    """Responses of these files and folders, in whole groups; a run's folder may stand for the only dump in it.

    Args:
        sources: files and folders.
        steps: None: the newest with `TOKENS` tokens together, and one group at least.
        limit: so many responses of the newest steps, however long they are, and one group at least.

    Raises:
        SourceError: nothing can be shown.
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
    wanted, room = sorted(set(steps or parts), reverse=True), limit or (math.inf if steps else TOKENS)
    for place, step in enumerate(wanted):
        groups: dict[str, list[Item]] = defaultdict(list)
        for part in parts[step]:
            for item in _read(part, step, loaded) if isinstance(part, Path) else [part]:
                groups[item.group].append(item)
        shown: list[Item] = []
        for group in groups.values():
            used = len(group) if limit else sum(map(_size, group))
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
    """Files with the step that their names say. Raises SourceError."""
    if source.is_file():
        return [(None, source)]
    if not source.is_dir():
        raise SourceError(f"{source}: no such file or folder")
    for pattern in _FILES:
        for depth in ("*.jsonl", "*/*.jsonl"):
            dumps = defaultdict[Path, list[tuple[int | None, Path]]](list)
            for path in sorted(source.glob(depth)):
                if match := re.fullmatch(pattern, path.name):
                    dumps[path.parent].append((int(match[1]), path))
            if len(dumps) > 1:
                raise SourceError(f"{source}: name one of its dumps: {', '.join(map(str, dumps))}")
            if dumps:
                return dumps.popitem()[1]
    raise NothingYet(
        f"{source}: no step_N.jsonl (of algorithm.oar.dump.dir) and no N.jsonl (of trainer.rollout_data_dir), there or one "
        "folder below; did the run set one of them? Other files are named one by one"
    )


def advantages(texts: Sequence[Text]) -> list[float | None]:
    """GRPO's, from the rewards of each group; None without siblings, and where a reward of the group is not known."""
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for text in texts:
        groups[text.step, text.group].append(math.nan if text.reward is None else text.reward)
    pairs = ((text.reward, groups[text.step, text.group]) for text in texts)
    return [
        None
        if own is None or len(all_) < 2 or any(map(math.isnan, all_))
        else (own - mean(all_)) / (stdev(all_) + 1e-6)
        for own, all_ in pairs
    ]


def unscored(texts: Sequence[Text]) -> list[Response]:
    """With words for tokens, numbered from -1 down, and no credit."""
    from oar_plugin.config import OarConfig  # brings torch
    from oar_plugin.credit.answer import make_finder, segment_tokens

    finder, numbers, responses = make_finder(OarConfig().answer_patterns), dict[str, int](), []
    for text, advantage in zip(texts, advantages(texts), strict=True):
        words = _WORD.findall(text.response)
        ids = [numbers.setdefault(word, -1 - len(numbers)) for word in words]
        segments_N = segment_tokens([word.encode() for word in words], finder)
        segments = [0] * len(words) if segments_N is None else segments_N.tolist()
        known = {"tokens": words, "token_ids": ids, "segments": segments, "status": "not_scored"}
        responses.append(text.told(advantage, **known))
    return responses


def steps_text(steps: Sequence[int]) -> str:
    """Sorted steps as text: `1, 2, 3`, or `1 to 50 (50 steps)`."""
    return ", ".join(map(str, steps)) if len(steps) <= 10 else f"{steps[0]} to {steps[-1]} ({len(steps)} steps)"


def _read(file: Path, step: int, loaded: Loaded) -> list[Item]:
    """What can be read of a file; of lines with the same step and uid the last. `step`: where a line does not say it."""
    # Not splitlines: verl writes letters as they are, and some of them end a line for Python, not for JSON.
    lines = [line for line in file.read_text(encoding="utf-8-sig", errors="replace").split("\n") if line.strip()]
    head, items = None, dict[tuple[int, str], Item]()
    if lines and re.search(r'"(oar_dump|weights)":', lines[0]):
        try:
            head = parse_header(lines.pop(0))
        except ValueError as error:
            raise SourceError(
                f"{file}: its first line is no header that this version of oar_plugin reads: {error}"
            ) from None
    for number, line in enumerate(lines, start=1):
        try:
            if "\\ud" in line.lower():  # half of a character, which JSON allows and UTF-8 does not
                line = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace").decode()
            item = parse_response(line) if head else _text(json.loads(line), step, f"{file.stem}:{number}")
            items[item.step, item.uid] = item
        except _FAULTS:  # a run may be writing it, or have been killed while it did
            loaded.skipped += 1
    loaded.lines += len(lines)
    if head:
        loaded.headers += [(of, head) for of in {of for of, _ in items}]
    return list(items.values())


def _text(record: Mapping[str, Any], step: int, place: str) -> Text:
    """A line of verl's, or of a file of prompts and responses. Raises one of `_FAULTS`."""
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
    truth = record.get("truth")
    reward = math.nan if record.get("reward") is None else float(record["reward"])
    return Text(
        step=int(record.get("step", step)),
        group=str(
            record.get("group") or (trajectory[1] if trajectory else hashlib.sha256(prompt.encode()).hexdigest()[:8])
        ),
        uid=uid,
        source=str(record.get("source") or ""),
        prompt=prompt,
        chat=chat,
        response=answer,
        truth=None if truth is None else str(truth),
        reward=reward if math.isfinite(reward) else None,
    )


def _size(item: Item) -> int:
    return 1 + len(item.tokens if isinstance(item, Response) else _WORD.findall(item.response))
