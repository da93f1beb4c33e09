"""Calls functions in a child process, for `oar doctor`: what they import may raise, crash or hang.

One child serves many calls, so that what packages share is imported once. After a call that failed a new child follows: what
a broken import leaves in its process would hide or change the faults of later ones.
"""

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from signal import Signals
from subprocess import DEVNULL, Popen
from typing import Any

from oar_plugin.output import cause

LIMIT_S = 300.0  # seconds of one call: an import takes ten, or minutes from a slow network disk


class Child:
    _process: Popen[bytes] | None = None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
        """Return what a function returns, or None and why it does not return. What is sent must be picklable."""
        if self._process is None:
            self._pipe, theirs = Pipe()
            # With -m the working directory is on the search path, as for `python -m verl.trainer.main_ppo`.
            words = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = Popen(words, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=[theirs.fileno()])
            theirs.close()
        try:
            self._pipe.send((function, arguments))
            in_time = self._pipe.poll(LIMIT_S)
            result, fault = self._pipe.recv() if in_time else (None, f"no answer within {LIMIT_S:g} s")
        except (EOFError, ConnectionError):
            status = self._process.wait()
            result, fault = None, f"crashed with {Signals(-status).name}" if status < 0 else f"exit status {status}"
        if fault:
            self.close()
        return result, fault

    def close(self) -> None:
        """End the process. The next call starts another one."""
        if self._process is not None:
            self._process.kill()  # a normal exit would run the packages' exit code, which may hang
            self._process.wait()
            self._pipe.close()
            self._process = None


if __name__ == "__main__":
    gc.disable()  # imports make many objects and drop few: looking for those takes a fifth of the time
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError):  # the parent has ended
        while True:
            called, given = pipe.recv()
            try:
                pipe.send((called(*given), None))
            except (Exception, SystemExit) as error:
                pipe.send((None, cause(error)))
    os._exit(0)
