"""Bare nodes: Ray started by ssh on each, training on the first, and Ray stopped again."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from oar_plugin.launch.job import RAY_PORT, Job, LaunchError

# No questions, and a connection that is lost is noticed within five minutes.
_SSH = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=10")
_START_TIMEOUT_S = 180
_BUSY = 3


@dataclass(frozen=True)
class Step:
    """A script that runs on one node. It goes through standard input: a command line can be seen by every user of the node."""

    host: str
    lines: tuple[str, ...]
    ssh_options: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The ssh command."""
        return ["ssh", *_SSH, *self.ssh_options, self.host, "bash -s"]

    def text(self, secrets: Mapping[str, str]) -> str:
        """The script."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in secrets.items()]
        return "\n".join(["set -eo pipefail", *exports, *self.lines]) + "\n"  # no -u: environments do not bear it


@dataclass(frozen=True)
class Steps:
    """All that is done, in this order; the workers at the same time."""

    head: Step
    workers: tuple[Step, ...]
    train: Step
    stop: tuple[Step, ...] = field(default=())


def plan(job: Job, hosts: Sequence[str], ssh_options: Sequence[str], head_address: str | None, keep: bool) -> Steps:
    """What is done on which node.

    Args:
        job: the run.
        hosts: as ssh knows them; the first is the head.
        ssh_options: for each ssh.
        head_address: under which the workers reach the head; the name in `hosts` if None.
        keep: leave Ray running at the end.

    Raises:
        LaunchError: not as many hosts as the recipe needs, or one twice.
    """
    if len(hosts) != job.nodes or len(set(hosts)) != len(hosts):
        raise LaunchError(
            f"--hosts {','.join(hosts)}: {len(set(hosts))} different hosts, the recipe needs {job.nodes} with "
            f"{job.gpus_per_node} GPUs each"
        )
    address = head_address or hosts[0].rpartition("@")[2]
    options = tuple(ssh_options)
    # Ray of somebody else would be joined, and stopped at the end.
    vacant = (
        'if pgrep -u "$(id -u)" -x raylet >/dev/null; then echo "Ray already runs here: stop it first (ray stop)" >&2; '
        f"exit {_BUSY}; fi"
    )
    common = f"--num-gpus={job.gpus_per_node} --disable-usage-stats"

    def step(host: str, *lines: str) -> Step:
        return Step(host, (*job.exports(), *([job.setup] if job.setup else []), *lines), options)

    return Steps(
        head=step(hosts[0], vacant, f"ray start --head --port={RAY_PORT} {common}"),
        workers=tuple(
            step(host, vacant, f"ray start --address={shlex.quote(f'{address}:{RAY_PORT}')} {common}")
            for host in hosts[1:]
        ),
        train=step(hosts[0], job.wait(), job.train(on_cluster=True)),
        stop=() if keep else tuple(step(host, "ray stop") for host in hosts),
    )


def script(steps: Steps, secrets: Mapping[str, str]) -> str:
    """What `run` does, as a script to read; secrets are not shown."""

    def here(step: Step, suffix: str = "") -> str:
        text = step.text(dict.fromkeys(secrets, "***"))
        return f"{shlex.join(step.command)} <<'OAR_NODE'{suffix}\n{text}OAR_NODE"

    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    if steps.stop:
        lines += ["stop() {", *(here(step, " || true") for step in steps.stop), "}", "trap stop EXIT"]
    lines += [here(steps.head), *(here(step, " &") for step in steps.workers), *(["wait"] if steps.workers else [])]
    return "\n".join([*lines, here(steps.train)]) + "\n"


def run(steps: Steps, secrets: Mapping[str, str]) -> int:
    """Start Ray, train, stop Ray on the nodes on which it was started here, also after Ctrl-C.

    Returns:
        the exit status of training.

    Raises:
        LaunchError: there is no ssh, or Ray did not start on a node.
    """
    if shutil.which("ssh") is None:
        raise LaunchError("--on ray: there is no ssh here; install an ssh client, or run this where there is one")
    started: list[str] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        _start_all([steps.head], secrets, started)
        _start_all(steps.workers, secrets, started)
        print(f"oar launch: training on {steps.train.host}", flush=True)
        return _ssh(steps.train, secrets).returncode
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing keeps Ray from being stopped everywhere
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _stop([step for step in steps.stop if step.host in started], secrets)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def _ssh(step: Step, secrets: Mapping[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a step. In a session of its own: Ctrl-C is for this process, which ends things in order."""
    return subprocess.run(
        step.command, input=step.text(secrets), text=True, check=False, start_new_session=True, **options
    )


def _start_all(steps: Sequence[Step], secrets: Mapping[str, str], started: list[str]) -> None:
    # In threads, which Ctrl-C does not reach: where Ray was started is known when this is left.
    with ThreadPoolExecutor(max(1, len(steps))) as threads:
        for outcome in [threads.submit(_start, step, secrets, started) for step in steps]:
            outcome.result()


def _start(step: Step, secrets: Mapping[str, str], started: list[str]) -> None:
    print(f"oar launch: start Ray on {step.host}", flush=True)
    try:
        done = _ssh(step, secrets, capture_output=True, timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        started.append(step.host)  # perhaps; stopping what does not run does no harm
        raise LaunchError(f"{step.host}: Ray did not start within {_START_TIMEOUT_S} s") from error
    if done.returncode != _BUSY:
        started.append(step.host)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LaunchError(f"{step.host}: Ray did not start (exit status {done.returncode}): {' | '.join(said[-3:])}")


def _stop(steps: Sequence[Step], secrets: Mapping[str, str]) -> None:
    def stop(step: Step) -> None:
        print(f"oar launch: stop Ray on {step.host}", flush=True)
        try:
            code = _ssh(step, secrets, capture_output=True, timeout=_START_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code != 0:
            print(f"oar launch: {step.host}: could not stop Ray; run `ray stop` there", file=sys.stderr)

    with ThreadPoolExecutor(max(1, len(steps))) as threads:
        list(threads.map(stop, steps))
