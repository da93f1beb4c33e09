"""Bare nodes, with an `ssh` that runs the script here in a folder for each host, and a `ray` that notes how it was called."""

import os
import signal
import subprocess
import time

import pytest

from tests.launch.conftest import STRANGE
from tests.limits import PROCESS_S

HOSTS = ["me@a", "b", "c"]
OPTIONS = {"hosts": HOSTS, "ssh": [], "head_address": ""}


@pytest.fixture
def nodes(fake, tmp_path):
    for host in HOSTS:
        (tmp_path / host).mkdir()
    # The host is the argument before the last; what ssh was told is noted beside what it ran.
    fake("ssh", f'host="${{@: -2:1}}"; cd "{tmp_path}/$host"; printf "%s\\n" "$*" >> ssh; exec bash -s')
    fake("ray", 'printf "ray %s\\n" "$*" >> done; [ ! -e broken ] || { echo "no disk" >&2; exit 1; }')
    fake("pgrep", "[ -e busy ]")
    train = "[ ! -e endless ] || sleep 600; exit $(cat status 2>/dev/null || echo 0)"
    fake("python", f'printf "%s\\n" "$@" >> done; env > environment; case "$2" in verl*) {train};; esac')


def notes(tmp_path, host, name="done"):
    file = tmp_path / host / name
    return file.read_text().splitlines() if file.exists() else []


def run(text):
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=PROCESS_S)


def test_ray_starts_everywhere_training_runs_on_the_head_and_ray_stops(nodes, script, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "se $word")
    text = script("ray.j2", **{**OPTIONS, "ssh": ["-p", "2222"]}, setup="export SET=up")
    assert "$word" not in text
    done = run(text)
    assert done.returncode == 0, done.stderr
    common = "--num-gpus=8 --disable-usage-stats"
    head = notes(tmp_path, "me@a")
    assert (head[0], head[-1]) == (f"ray start --head --port=6379 {common}", "ray stop")
    assert head.index("oar_plugin.launch.wait") < head.index("verl.trainer.main_ppo")
    assert head[head.index("--gpus") + 1] == "24"
    assert STRANGE in head
    for host in ("b", "c"):
        assert notes(tmp_path, host) == [f"ray start --address=a:6379 {common}", "ray stop"]
    environment = notes(tmp_path, "me@a", "environment")
    assert {"WANDB_API_KEY=se $word", "OAR_DATA=/shared/my data", "NCCL_DEBUG=it's $x", "SET=up"} <= set(environment)
    assert not any("$word" in line for line in notes(tmp_path, "me@a", "ssh"))
    assert all("-p 2222" in line for line in notes(tmp_path, "b", "ssh"))


def test_training_that_fails_fails_the_launch_and_ray_is_stopped(nodes, script, tmp_path):
    (tmp_path / "me@a" / "status").write_text("7")
    assert run(script("ray.j2", **{**OPTIONS, "head_address": "10.0.0.1"})).returncode == 7
    common = "--num-gpus=8 --disable-usage-stats"
    assert f"ray start --head --port=6379 --node-ip-address=10.0.0.1 {common}" in notes(tmp_path, "me@a")
    assert f"ray start --address=10.0.0.1:6379 {common}" in notes(tmp_path, "b")
    assert all("ray stop" in notes(tmp_path, host) for host in HOSTS)


def test_a_node_where_ray_does_not_start_is_named_and_nothing_is_trained(nodes, script, tmp_path):
    (tmp_path / "b" / "broken").touch()
    done = run(script("ray.j2", **OPTIONS))
    assert done.returncode == 1
    assert "oar launch: b: Ray did not start (exit status 1): no disk" in done.stderr
    assert "verl.trainer.main_ppo" not in notes(tmp_path, "me@a")
    assert all("ray stop" in notes(tmp_path, host) for host in HOSTS)


def test_somebody_elses_ray_is_neither_joined_nor_stopped(nodes, script, tmp_path):
    (tmp_path / "c" / "busy").touch()
    done = run(script("ray.j2", **OPTIONS))
    assert done.returncode == 1
    assert "c: Ray did not start (exit status 3): Ray already runs here" in done.stderr
    assert notes(tmp_path, "c") == []
    assert "ray stop" in notes(tmp_path, "b")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_ray_on_every_node(nodes, script, tmp_path, number):
    (tmp_path / "me@a" / "endless").touch()
    process = subprocess.Popen(["bash", "-c", script("ray.j2", **OPTIONS)], start_new_session=True)
    try:
        until = time.monotonic() + 60
        while "verl.trainer.main_ppo" not in notes(tmp_path, "me@a") and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(process.pid, number)  # what a terminal does
        time.sleep(0.05)
        os.killpg(process.pid, number)  # and an impatient user
        assert process.wait(60) == 128 + number
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert all("ray stop" in notes(tmp_path, host) for host in HOSTS)
