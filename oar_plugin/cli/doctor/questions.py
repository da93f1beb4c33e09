"""Asks a process of its own: what is asked imports packages that may be broken, hang, crash or change the process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

LIMIT_S = 300.0
"""Against a process that hangs. Most of an answer is imports: ten seconds, minutes from a slow network disk."""
MARK = "oar_doctor "  # of a line that carries an answer, among whatever packages print


class Answer(NamedTuple):
    """What the process told, by key, and why it ended before it had told everything; None where it had."""

    told: dict[str, Any]
    fault: str | None = None


def ask(question: str, *arguments: str) -> Answer:
    """Put one of the questions of `answers` to a process with the search path of `python -m verl.trainer.main_ppo`."""
    words = [sys.executable, "-m", f"{__package__}.answers", question, *arguments]
    # Files, not pipes: a process that the asked one leaves behind would hold a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:  # no memory, no more processes
            return Answer({}, f"no process could be started: {error}")
        try:
            status: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    told = dict(json.loads(line[len(MARK) :]) for line in texts[0].splitlines() if line.startswith(MARK))
    doing = f" ({told.pop('doing')})" if "doing" in told else ""
    if told.pop("done", False):
        return Answer(told)
    if status is None:
        return Answer(told, f"no answer within {LIMIT_S:g} s{doing}")
    if status < 0:
        return Answer(told, f"crashed with {signal.Signals(-status).name}{doing}")
    said = [line.strip() for line in texts[1].splitlines() if line.strip()] or [f"exit status {status}"]
    return Answer(told, f"{said[-1]}{doing}")
