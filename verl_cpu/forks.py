"""The processes of a run of verl as forks of one process that has imported verl and vLLM.

A run has about ten Ray workers, and one of them starts vLLM's engine. Each would import the same modules, which takes a core
up to 20 seconds; a fork has them at once. Ray starts a worker with the Python that its runtime environment names
(`py_executable`), and multiprocessing with the one that it was told. Here both are this file, which runs as

* a client, one for each process: it hands its command line, environment and files to the server; client and fork end together,
  with the same exit status;
* the server, which the first client of a Ray node starts: it imports, and forks for each client.

Only a session has them, because the session ends them (``session.py``). The module imports nothing but the standard library at
its top: that is all a client needs.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "ray",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What verl's workers and vLLM's engine import. Whatever else a process needs, it imports itself."""

PYTHON = "ray_kwargs.ray_init.runtime_env.py_executable"
FOLDER, NODE = "RAY_TMPDIR", "RAY_RAYLET_PID"
"""Environment variables: the folder of a session, which is there for one run, and what Ray tells the workers of a node."""
ABOVE = 1000
"""Files of a client are received above this number, so that none takes the place of another one."""


def start_workers_as_forks(constants_ppo: Any) -> None:
    """Make this file the Python of a session's workers, unless they have one (``verl.trainer.constants_ppo``)."""
    original = constants_ppo.get_ppo_ray_runtime_env

    @wraps(original)
    def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
        from omegaconf import OmegaConf

        from verl_cpu.vllm_worker import SESSION_VARIABLE

        if config is not None and SESSION_VARIABLE in os.environ and OmegaConf.select(config, PYTHON) is None:
            OmegaConf.update(config, PYTHON, str(_executable()), force_add=True)
        if config is None and SESSION_VARIABLE in os.environ:  # verl 0.8 passes none; what the user set replaces this
            return {**original(), "py_executable": str(_executable())}
        environment: dict[str, Any] = original(config)
        return environment

    constants_ppo.get_ppo_ray_runtime_env = get_ppo_ray_runtime_env


def _executable() -> Path:
    """Return a program of the session that runs this file as a client."""
    program = Path(os.environ[FOLDER], "python")
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "$@"\n')
        program.chmod(0o755)
    return program


def client(words: list[str]) -> NoReturn:
    """Have the server run a Python program, and end as the fork ends. Without a server, run the program in this process."""
    path = Path(os.environ[FOLDER], f"forks-{os.environ[NODE]}")
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]  # without the one that listed them
    message = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    data = json.dumps(message).encode()
    try:
        server = _connected(path)
        socket.send_fds(server, [len(data).to_bytes(8, "big")], files)
        server.sendall(data)
        process = server.recv(8)
        if not process:
            raise ConnectionError("the server has ended")
    except OSError as error:
        print(f"verl_cpu: no fork, see {path}.log, but a process that imports by itself: {error}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *words])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(int.from_bytes(process, "big"), signal.SIGTERM))
    code = int.from_bytes(server.recv(2) or b"\1", "big", signed=True)  # nothing comes if the server has ended
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _connected(path: Path) -> socket.socket:
    """Return a connection to the node's server; start it where there is none yet."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with socket.socket(socket.AF_UNIX) as listener, path.with_suffix(".log").open("wb") as log:
                listener.bind(str(path))
                listener.listen(64)
                words = [sys.executable, "-m", "verl_cpu.forks", str(listener.fileno())]
                subprocess.Popen(words, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def serve(listener: socket.socket) -> None:
    """Import, and fork for each client. Does not return; a fork ends with the program that its client asked for."""
    before = dict(os.environ)
    gc.disable()  # what imports make stays
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "verl.trainer.ppo.v1":  # which verl 0.8 lacks
                raise
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    multiprocessing.set_executable(str(_executable()))
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy every page
    gc.enable()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    forks, number = dict[int, socket.socket](), 0
    while True:
        ready, _, _ = select.select([listener.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(forks)
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            number += 1
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, *forks.values()):
                    other.close()
                os.close(woken)
                os.close(wake)
                atexit.register(gc.unfreeze)  # or nanobind reports objects that nobody has freed
                _draw_ids(64 * number)
                _run(connection, imported)
            forks[process] = connection


def _draw_ids(count: int) -> None:
    """Move Ray's random ids on. Every fork would go on where the imports have left them, and two workers that start at the same
    time would make an object of one id, at which Ray ends them ("Seal() called on an object without a reference to it").
    """
    import ray

    for _ in range(count):
        ray.ObjectRef.from_random()


def _report_ended(forks: dict[int, socket.socket]) -> None:
    """Send each ended fork's exit status to its client: negative for a signal, as in `subprocess`."""
    while forks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        if process in forks:
            with forks.pop(process) as connection, contextlib.suppress(OSError):  # the client may have ended first
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(2, "big", signed=True))


def _run(client: socket.socket, imported: dict[str, str]) -> NoReturn:
    """Run the program of a client in this process, with the client's files and environment and what imports added to it."""
    import numpy

    client = socket.socket(fileno=fcntl.fcntl(client.detach(), fcntl.F_DUPFD_CLOEXEC, ABOVE))
    head, received, _, _ = socket.recv_fds(client, 8, 253)
    with client.makefile("rb") as stream:
        message = json.loads(stream.read(int.from_bytes(head, "big")))
    received = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, ABOVE) for file in received]
    for file, place in zip(received, message["files"], strict=True):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(message["environment"] | imported)
    os.chdir(message["folder"])
    numpy.random.seed()  # of its own, as in a new process; Python's `random` does so by itself
    client.sendall(os.getpid().to_bytes(8, "big"))
    # Whoever kills the client means this process: the kernel kills it when the other end of the connection is closed.
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(client, fcntl.F_SETFL, fcntl.fcntl(client, fcntl.F_GETFL) | os.O_ASYNC)
    words = message["words"]
    if "-c" in words:
        place = words.index("-c") + 1
        sys.argv = ["-c", *words[place + 1 :]]
        exec(words[place], {"__name__": "__main__"})  # noqa: S102  multiprocessing's own line
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0].isdecimal():
        serve(socket.socket(fileno=int(words[0])))
    elif words[0].endswith(".py") or "--multiprocessing-fork" in words:
        client(words)
    else:  # such as multiprocessing's resource tracker
        os.execv(sys.executable, [sys.executable, *words])
