"""Run verl in a process of its own and leave nothing behind.

A run of verl is a driver, Ray's daemons, a dozen actors and vLLM's engine. When the driver dies of an exception or of
Ctrl-C, some of them stay: those that another process started, and those that were given to init when their parent
ended. :func:`run_verl` marks every process that descends from the driver with an environment variable and, however the
run ends, ends whatever carries the mark, and nothing else.

Two runs side by side do not meet: each has an own Ray cluster on free ports, an own Ray directory and an own socket for
the weights (see ``vllm_worker.py``).
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

TIMED_OUT = 124  # exit status of a run that was ended because its time was up, as the `timeout` command has it
GRACE_S = 3.0  # that the driver may take to shut Ray down by itself before everything is ended

RAY_DID_NOT_START = "The current node timed out during startup"
"""What Ray says when its daemons did not find each other within 30 s, which is fixed in its code: a busy machine."""

ATTEMPTS = 3  # to start a run when Ray did not start
LONGEST_RAY_DIRECTORY = 40  # Ray binds Unix sockets about 60 characters below it; their paths must stay below 108
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


class Session:
    """The processes and files of one run, found by its tag and in its directory."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex[:12]
        self._token = secrets.token_hex(32)
        parent = tempfile.gettempdir()
        if len(parent) >= LONGEST_RAY_DIRECTORY - 12:
            parent = "/tmp"  # noqa: S108  mkdtemp makes a name that nobody has, for this user alone
        self.directory = Path(tempfile.mkdtemp(prefix="oar-", dir=parent))

    def environment(self) -> dict[str, str]:
        """What marks a process as one of this session, and where Ray and everybody else put what is temporary.

        Ray's cluster asks for a token. Given one here, it does not leave one in the user's home directory. What torch compiled
        stays, for the next run.
        """
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        return {
            SESSION_VARIABLE: self.tag,
            "RAY_TMPDIR": str(self.directory),
            # Processes that are killed, as Ray's are at the end of every run, do not remove their own: sockets of vLLM's,
            # locks of verl's, folders of wandb's.
            "TMPDIR": str(self.directory),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
            "RAY_AUTH_TOKEN": self._token,
        }

    def processes(self) -> list[psutil.Process]:
        """Every living process with the tag in its environment, except this one."""
        return [
            process
            for process in psutil.process_iter()
            if process.pid != os.getpid() and _environment(process).get(SESSION_VARIABLE) == self.tag
        ]

    def memory(self) -> int:
        """Memory of all processes in bytes, with what they share counted once (PSS)."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def end(self) -> None:
        """End every process of the session and remove its files. Safe to call twice.

        Python's resource trackers go last: they remove the shared memory of the processes that they watched.
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
    """The environment of a process; empty when it has gone or belongs to somebody else."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


@contextmanager
def _handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals so. Main thread only: no other can."""
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


def _undisturbed() -> AbstractContextManager[None]:
    """For as long as cleaning up takes."""
    return _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)


@contextmanager
def session() -> Iterator[Session]:
    """A session that is ended on every way out: return, exception, Ctrl-C, SIGTERM."""
    with _handling(_unwind, signal.SIGTERM):  # as SIGINT does, so that `finally` blocks run
        opened = Session()
        try:
            yield opened
        finally:
            with _undisturbed():
                opened.end()


def run_verl(
    args: Sequence[str],
    env: Mapping[str, str] | None = None,
    log_path: str | os.PathLike[str] = "verl.log",
    timeout_s: float = 600.0,
    on_line: Callable[[str], None] | None = None,
    on_start: Callable[[Session], None] | None = None,
) -> int:
    """Run ``python -m verl.trainer.main_ppo`` with these Hydra overrides and wait for it.

    When Ray itself did not start, because the machine was too busy for its limit of 30 s, the run is started again.
    Ctrl-C and SIGTERM end the run and are then passed on to the caller as ``KeyboardInterrupt`` and ``SystemExit``.

    Args:
        args: overrides; usually ``cpu_overrides()`` and then your own.
        env: variables on top of this process's; usually ``cpu_environment()``.
        log_path: where standard output and error of all processes go.
        timeout_s: after this many seconds, over all attempts, the run is ended.
        on_line: called with each line of output, without its newline, as it arrives.
        on_start: called with the session, when a driver has been started.

    Returns:
        The exit status of verl, or 124 when its time was up.
    """
    log_path, deadline = Path(log_path), time.monotonic() + timeout_s
    for attempt in range(1, ATTEMPTS + 1):
        with session() as opened, log_path.open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, "-m", "verl.trainer.main_ppo", *args],
                env={**os.environ, **(env or {}), **opened.environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the run in order
            )
            try:
                if on_start is not None:
                    on_start(opened)
                status = _follow(driver, log, deadline, on_line)
            finally:
                with _undisturbed():
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
    """Copy the output of the driver until it ends or its time is up."""
    assert driver.stdout is not None
    output = driver.stdout.fileno()
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            ended = driver.poll() is not None  # asked before reading: what comes after is still read
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
    """Give the driver a chance to shut Ray down."""
    if driver.poll() is None:
        driver.terminate()
        try:
            driver.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()
