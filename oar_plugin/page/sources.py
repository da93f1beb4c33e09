"""Reads the responses for `oar inspect`: files `step_000010.jsonl` of a run's dump (`algorithm.oar.dump.dir`)."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oar_plugin.page.record import Header, Response, Weighing, fault_in, parse_header, parse_response

TOKENS = 400_000  # default limit, for a page of a few megabytes; steps that the user names have no limit


@dataclass(frozen=True)
class Loaded:
    header: Header  # of the newest step, with the importances of all steps
    items: list[Response]  # ordered by step
    settings_differ: bool  # whether the steps' weights were made with different settings
    notes: list[str]  # messages about what is not shown


def read(sources: Sequence[Path], steps: Sequence[int] | None = None) -> Loaded:
    """Reads the responses of files, of dump folders, and of folders with a single dump folder below.

    By default these are the newest steps, up to `TOKENS` tokens, at least one step. ValueError: there is nothing to show.
    """
    dumped = sorted(((step_of(file), file) for source in sources for file in files(source)), reverse=True)
    known = sorted({step for step, _ in dumped})
    if unknown := sorted(set(steps or ()) - set(known)):
        raise ValueError(f"--steps: nothing of step {steps_text(unknown)}; there are {steps_text(known)}")
    headers, items, skipped, used, left_out = list[Header](), list[Response](), list[str](), 0, list[int]()
    for step, file in [pair for pair in dumped if not steps or pair[0] in steps]:
        header, responses, broken = _read(file)
        used += sum(len(response.tokens) for response in responses)
        if items and used > TOKENS and not steps:
            left_out = [other for other in known if other <= step]
            break
        items, skipped = responses + items, broken + skipped
        headers += [header] if responses else []
    notes = [f"{len(skipped)} of {len(skipped) + len(items)} lines skipped, the first: {skipped[0]}"] if skipped else []
    if not items:
        raise ValueError(f"{', '.join(map(str, sources))}: nothing to show: {'; '.join(notes) or 'no responses'}")
    scales = {name: scale for header in headers for name, scale in header.arbitrary_scale.items()}
    settings = [Weighing.model_validate(header.config) for header in headers]
    differ = any(other != settings[0] for other in settings)
    notes += [f"steps {steps_text(left_out)} not shown: --steps N,... shows them"] if left_out else []
    notes += ["settings differ between these steps: weights are as recorded"] if differ else []
    return Loaded(replace(headers[0], arbitrary_scale=scales), items, differ, notes)


def files(source: Path) -> list[Path]:
    """Returns the files of a source. ValueError: there are none, or those of several dumps."""
    if not source.is_dir():
        return [source]
    found = [file for file in source.rglob("step_*.jsonl") if step_of(file)]
    found = [file for file in found if file.parent == source] or found
    if not found:
        raise ValueError(f"{source}: no step_N.jsonl below it; did the run set algorithm.oar.dump.dir?")
    if len(dumps := sorted({str(file.parent) for file in found})) > 1:
        raise ValueError(f"{source}: name one of its dumps: {', '.join(dumps)}")
    return found


def steps_text(steps: Sequence[int]) -> str:
    """Sorted steps as text: `1, 2, 3`, or `1 to 50 (50 steps)`."""
    return ", ".join(map(str, steps)) if len(steps) <= 10 else f"{steps[0]} to {steps[-1]} ({len(steps)} steps)"


def step_of(file: Path) -> int:
    """Returns the step in a file's name; 0 if there is none."""
    match = re.fullmatch(r"step_(\d+)\.jsonl", file.name)
    return int(match[1]) if match else 0


def _read(file: Path) -> tuple[Header, list[Response], list[str]]:
    """Returns the header of a file, its responses, and what is wrong with each line that is neither."""
    first, *lines = file.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    try:
        header = parse_header(first)
    except ValueError as error:
        raise ValueError(f"{file}, line 1: no header: {error}; a file of prompts and responses needs --model") from None
    responses, faults = list[Response](), list[str]()
    for number, line in [pair for pair in enumerate(lines, start=2) if pair[1].strip()]:
        try:
            if "\\ud" in line.lower():  # half of a character, which JSON allows and UTF-8 does not
                line = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace").decode()
            responses.append(parse_response(line))
        except (ValueError, RecursionError) as error:  # a disk that was full, or another program's line
            faults.append(f"{file}, line {number}: {fault_in(error)}")
    return header, responses, faults
