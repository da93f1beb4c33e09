"""Runs verl in a process of its own and ends every process that the run started.

A run of verl is a driver, Ray's daemons, a dozen actors and vLLM's engine. When an exception or Ctrl-C ends the driver, some
processes stay: those that another process started, and those whose parent has ended. :func:`run_verl` marks every descendant
of the driver with an environment variable. However the run ends, it then ends all processes with the mark, and no others.

Two runs on one machine do not interfere: each has a Ray cluster on free ports, a Ray directory and a socket for the weights
(``vllm_worker.py``) of its own.
"""

import logging
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from verl_cpu.vllm_worker import SESSION_VARIABLE

logger = logging.getLogger(__name__)

TIMED_OUT = 124  # exit status of a run that took too long, as of the command `timeout`
GRACE_S = 3.0  # seconds in which the driver may shut Ray down by itself

RAY_DID_NOT_START = "The current node timed out during startup"
"""Ray's message when its daemons did not find each other within 30 s, a constant in its code: the machine is busy."""

ATTEMPTS = 3  # starts of a run, when Ray did not start
LONGEST_RAY_DIRECTORY = (
    40  # the paths of Ray's Unix sockets are about 60 characters longer and must be shorter than 108
)
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


class Session:
    """The processes and files of one run: processes carry its tag, files are in its directory."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex[:12]
        self._token = secrets.token_hex(32)
        parent = tempfile.gettempdir()
        if len(parent) >= LONGEST_RAY_DIRECTORY - 12:
            parent = "/tmp"  # noqa: S108  mkdtemp makes a new name, for this user alone
        self.directory = Path(tempfile.mkdtemp(prefix="oar-", dir=parent))

    def environment(self) -> dict[str, str]:
        """Return variables that mark a process as one of this session and name its folder for temporary files.

        Ray's cluster needs a token; without this one Ray would write one into the user's home directory. Code that torch
        compiled stays for the next run.
        """
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        return {
            SESSION_VARIABLE: self.tag,
            "RAY_TMPDIR": str(self.directory),
            # Killed processes do not remove their temporary files (sockets of vLLM, locks of verl, folders of wandb), and Ray
            # kills its processes at the end of every run.
            "TMPDIR": str(self.directory),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
            "RAY_AUTH_TOKEN": self._token,
            # vLLM renames a process by overwriting its environment, where `processes` looks for the tag.
            "SPT_NOENV": "1",
        }

    def processes(self) -> list[psutil.Process]:
        """Return every living process with the tag in its environment, except this one."""
        return [
            process
            for process in psutil.process_iter()
            if process.pid != os.getpid() and _environment(process).get(SESSION_VARIABLE) == self.tag
        ]

    def memory(self) -> int:
        """Return the memory of all processes in bytes; shared memory counts once (PSS)."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def end(self) -> None:
        """End every process of the session and remove its files. The second call does nothing.

        Python's resource trackers end last, because they remove the shared memory of the processes that they watched.
        """
        for spare_trackers in (True, False):
            deadline = time.monotonic() + (2 if spare_trackers else 10)
            while time.monotonic() < deadline:
                living = self.processes()
                if not living:
                    break
                for process in living:
                    with suppress(psutil.Error):
                        if not (spare_trackers and any(RESOURCE_TRACKER in word for word in process.cmdline())):
                            process.kill()
                time.sleep(0.1)
        shutil.rmtree(self.directory, ignore_errors=True)
        for socket in Path("/tmp").glob(f"rl-colocate-zmq-*-{self.tag}.sock"):  # noqa: S108  where verl makes them
            socket.unlink(missing_ok=True)


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; empty when the process has ended or belongs to another user."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


@contextmanager
def _handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals with `handler`; does nothing outside the main thread, which alone can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def undisturbed() -> AbstractContextManager[None]:
    """Ignore Ctrl-C and SIGTERM during a clean-up."""
    return _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)


@contextmanager
def session() -> Iterator[Session]:
    """Open a session, and end it in any case: return, exception, Ctrl-C, SIGTERM."""
    with _handling(_unwind, signal.SIGTERM):  # SIGTERM then runs `finally` blocks, as SIGINT does
        opened = Session()
        try:
            yield opened
        finally:
            with undisturbed():
                opened.end()


def run_verl(
    args: Sequence[str],
    env: Mapping[str, str] | None = None,
    log_path: str | os.PathLike[str] = "verl.log",
    timeout_s: float = 600.0,
    on_line: Callable[[str], None] | None = None,
    on_start: Callable[[Session], None] | None = None,
    module: str = "verl.trainer.main_ppo",
) -> int:
    """Run ``python -m verl.trainer.main_ppo`` with these Hydra overrides and wait for it.

    When Ray did not start within its limit of 30 s, because the machine was busy, the run is started again. Ctrl-C and SIGTERM
    end the run and then reach the caller as ``KeyboardInterrupt`` and ``SystemExit``.

    Args:
        args: overrides; usually ``cpu_overrides()`` and then your own.
        env: variables to add to this process's; usually ``cpu_environment()``.
        log_path: file for standard output and error of all processes.
        timeout_s: seconds for all attempts together, after which the run is ended.
        on_line: called with each line of output, without its newline, as it arrives.
        on_start: called with the session after the driver was started.
        module: another of verl's programs.

    Returns:
        The exit status of verl, or 124 when its time was up.
    """
    log_path, deadline = Path(log_path), time.monotonic() + timeout_s
    for attempt in range(1, ATTEMPTS + 1):
        with session() as opened, log_path.open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                env={**os.environ, **(env or {}), **opened.environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the run
            )
            try:
                if on_start is not None:
                    on_start(opened)
                status = _follow(driver, log, deadline, on_line)
            finally:
                with undisturbed():
                    _ask_to_end(driver)
        if attempt == ATTEMPTS or status in (0, TIMED_OUT):
            break
        if RAY_DID_NOT_START not in log_path.read_text(encoding="utf-8", errors="replace"):
            break
        logger.warning(
            "Ray did not start within 30 s: is the machine busy? Starting again (%d of %d)", attempt, ATTEMPTS
        )
    return status


def _follow(
    driver: "subprocess.Popen[bytes]", log: IO[bytes], deadline: float, on_line: Callable[[str], None] | None
) -> int:
    """Copy the output of the driver until it ends or its time is up, and return its exit status."""
    assert driver.stdout is not None
    output = driver.stdout.fileno()
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            ended = driver.poll() is not None  # asked before reading, so that the last output is read
            chunk = os.read(output, 1 << 16) if selector.select(timeout=0.2) else b""
            if not chunk and not ended:
                time.sleep(0.05)  # a closed pipe is always ready to be read
            log.write(chunk)
            log.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            if ended and not chunk and rest:
                lines, rest = [rest], b""
            if on_line is not None:
                for line in lines:
                    on_line(line.decode(errors="replace"))
            if ended and not chunk:
                return driver.returncode
            if time.monotonic() > deadline:
                return TIMED_OUT


def _ask_to_end(driver: "subprocess.Popen[bytes]") -> None:
    """Let the driver shut Ray down, and end it after `GRACE_S`."""
    if driver.poll() is None:
        driver.terminate()
        try:
            driver.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()
