"""Writes what `algorithm.oar.dump` asks for: files of responses for `oar inspect`. No fault in it stops the run."""

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from oar_plugin.config import PREFIX, DumpConfig, OarConfigError
from oar_plugin.credit.diagnostics import Status
from oar_plugin.output import logger, times, write_whole
from oar_plugin.page.record import Header, Response, is_right
from oar_plugin.page.sources import step_of

DUMP_FAILED = "oar/dump_failed"  # a metric of every step, where dumps are asked for


class Sibling(NamedTuple):
    group: str  # the prompt's id
    uid: str  # the response's own id
    reward: float  # NaN: it has none
    status: int  # a `Status`


def choose(siblings: Iterable[Sibling], groups: int) -> list[list[Sibling]]:
    """Returns at most `groups` groups, with all their siblings in the order given.

    First come groups with right and wrong responses, at least one of them scored; then others with a scored response; then
    those in which a response falls back to GRPO.
    """

    def comes_later(group: Sequence[Sibling]) -> tuple[bool, bool]:
        scored = any(one.status == Status.SCORED for one in group)
        return not (scored and {is_right(one.reward) for one in group} >= {True, False}), not scored

    members = dict[str, list[Sibling]]()
    for one in siblings:
        members.setdefault(one.group, []).append(one)
    shown = [group for group in members.values() if any(one.status != Status.NOT_NEEDED for one in group)]
    return sorted(shown, key=comes_later)[:groups]


class Dumps:
    """The folder of a run's dumps: `folder`, which exists; None if the settings ask for no files. `run` names the run.

    A relative `dump.dir` is below `home`. Messages call the settings `prefix`. OarConfigError: the folder cannot be made.
    """

    def __init__(self, config: DumpConfig, home: str | Path, prefix: str = PREFIX) -> None:
        self._every, self._seen, self._due, self._begun = config.every, 0, False, False
        self.run = Path(home).absolute().name
        self.folder = None if config.dir is None else Path(home, Path(config.dir).expanduser()).absolute()
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fault = f"{prefix}.dump.dir={config.dir}: {error}"
                raise OarConfigError(f"{fault}; allowed: a folder to write in") from error
            print(f"{prefix}.dump.dir: {self.folder}, as node {socket.gethostname()} sees it")

    def due(self, step: int) -> bool:
        """Returns whether to show responses of this step: each `dump.every`-th, or the first later one that was asked about."""
        if step != self._seen:
            passed = 0 < self._seen < step // self._every * self._every
            self._seen, self._due = step, step == 1 or step % self._every == 0 or passed
        return self._due

    def write(self, header: Header, step: int, responses: Sequence[Response]) -> None:
        """Writes a step's file completely or not at all, in place of an older one. OSError: the disk refuses it."""
        assert self.folder is not None
        lines = [header.line(), *(response.line() for response in responses)]
        write_whole(self.folder / f"step_{step:06d}.jsonl", "".join(lines))
        if not self._begun:  # after a resume the run does later steps again
            self._begun = True
            later = [file for file in self.folder.glob("step_*.jsonl") if step_of(file) > step]
            for file in later:
                file.replace(f"{file}.discarded")
            if later:
                logger.warning("%s: %d files of steps after %d are now *.discarded", self.folder, len(later), step)

    @contextmanager
    def counted(self, step: int, metrics: dict[str, float], what: str, *names: str) -> Iterator[None]:
        """Catches what the block raises: sets the metrics `names` to 1, and logs the first fault of each `what`."""
        try:
            yield
        except Exception as error:
            metrics.update(dict.fromkeys(names, 1.0))
            if times(self.folder, what, *names) == 1:
                text = "step %d: %s failed: %r. Training goes on; %s counts it, and this is not said again"
                logger.warning(text, step, what, error, ", ".join(names), exc_info=not isinstance(error, OSError))
