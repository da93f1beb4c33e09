"""Bare nodes, with an `ssh` that runs the script here in a folder for each host, and a `ray` that notes how it was called."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from oar_plugin.launch import ray_nodes
from oar_plugin.launch.job import LaunchError
from tests.launch.conftest import STRANGE

HOSTS = ["me@a", "b", "c"]


@pytest.fixture
def nodes(fake, tmp_path, job):
    """Folders of the nodes by name; the job they run."""
    for host in HOSTS:
        (tmp_path / host).mkdir()
    # The host is the argument before the last; what ssh was told is noted beside what it ran.
    fake("ssh", f'host="${{@: -2:1}}"; cd "{tmp_path}/$host"; printf "%s\\n" "$*" >> ssh; exec bash -s')
    fake("ray", 'printf "ray %s\\n" "$*" >> done; [ ! -e broken ] || { echo "no disk" >&2; exit 1; }')
    fake("pgrep", "[ -e busy ]")
    fake(
        "python",
        'printf "%s\\n" "$@" >> done; env > environment; case "$2" in verl*) exit "$(cat status 2>/dev/null || echo 0)";; esac',
    )
    return replace(job, setup="")


def notes(tmp_path, host, name="done"):
    file = tmp_path / host / name
    return file.read_text().splitlines() if file.exists() else []


def started(tmp_path, host):
    return [line for line in notes(tmp_path, host) if line.startswith("ray ")]


def test_ray_starts_everywhere_training_runs_on_the_head_and_ray_stops(nodes, tmp_path):
    steps = ray_nodes.plan(nodes, HOSTS, ["-p", "2222"], None, keep=False)
    assert ray_nodes.run(steps, {"WANDB_API_KEY": "se cret"}) == 0
    common = "--num-gpus=8 --disable-usage-stats"
    assert started(tmp_path, "me@a") == [f"ray start --head --port=6379 {common}", "ray stop"]
    for host in ("b", "c"):
        assert notes(tmp_path, host) == [f"ray start --address=a:6379 {common}", "ray stop"]
    words = notes(tmp_path, "me@a")
    assert words.index("oar_plugin.launch.wait") < words.index("verl.trainer.main_ppo")
    assert words[words.index("--gpus") + 1] == "24"
    assert STRANGE in words
    environment = notes(tmp_path, "me@a", "environment")
    for line in ("WANDB_API_KEY=se cret", "OAR_DATA=/shared/my data", "NCCL_DEBUG=it's $x"):
        assert line in environment
    assert not any("se cret" in line for line in notes(tmp_path, "me@a", "ssh"))
    assert all("-p 2222" in line for line in notes(tmp_path, "b", "ssh"))


def test_training_that_fails_fails_the_launch_and_ray_is_stopped(nodes, tmp_path):
    (tmp_path / "me@a" / "status").write_text("7")
    assert ray_nodes.run(ray_nodes.plan(nodes, HOSTS, [], "10.0.0.1", keep=False), {}) == 7
    assert "ray start --address=10.0.0.1:6379 --num-gpus=8 --disable-usage-stats" in notes(tmp_path, "b")
    assert all("ray stop" in notes(tmp_path, host) for host in HOSTS)


def test_a_node_where_ray_does_not_start_is_named_and_nothing_is_trained(nodes, tmp_path):
    (tmp_path / "b" / "broken").touch()
    with pytest.raises(LaunchError, match=r"b: Ray did not start \(exit status 1\): no disk"):
        ray_nodes.run(ray_nodes.plan(nodes, HOSTS, [], None, keep=False), {})
    assert "verl.trainer.main_ppo" not in notes(tmp_path, "me@a")
    assert all("ray stop" in notes(tmp_path, host) for host in HOSTS)


def test_somebody_elses_ray_is_neither_joined_nor_stopped(nodes, tmp_path):
    (tmp_path / "c" / "busy").touch()
    with pytest.raises(LaunchError, match=r"c: Ray did not start .*already runs here"):
        ray_nodes.run(ray_nodes.plan(nodes, HOSTS, [], None, keep=False), {})
    assert notes(tmp_path, "c") == []
    assert "ray stop" in notes(tmp_path, "b")


def test_ray_is_kept_on_request(nodes, tmp_path):
    assert ray_nodes.run(ray_nodes.plan(nodes, HOSTS, [], None, keep=True), {}) == 0
    assert not any("ray stop" in notes(tmp_path, host) for host in HOSTS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_ray_on_every_node(nodes, tmp_path, fake, number):
    ends = 'exit "$(cat status 2>/dev/null || echo 0)"'
    fake("python", f'printf "%s\\n" "$@" >> done; env > environment; case "$2" in verl*) {ends};; esac')
    program = f"""
        from pathlib import Path
        from oar_plugin.launch import ray_nodes
        from oar_plugin.launch.job import Job
        job = Job(Path("/r"), "oar", (), 3, 8, 24, "/c")
        ray_nodes.run(ray_nodes.plan(job, {HOSTS!r}, [], None, keep=False), {{}})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], start_new_session=True)
    try:
        until = time.monotonic() + 60
        while "verl.trainer.main_ppo" not in notes(tmp_path, "me@a") and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(process.pid, number)  # what a terminal does
        time.sleep(0.05)
        os.killpg(process.pid, number)  # and an impatient user
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert all("ray stop" in notes(tmp_path, host) for host in HOSTS)


def test_the_dry_run_is_a_script_that_does_the_same(nodes, tmp_path):
    text = ray_nodes.script(ray_nodes.plan(nodes, HOSTS, [], None, keep=False), {"WANDB_API_KEY": "se cret"})
    assert "se cret" not in text
    file = tmp_path / "dry.sh"
    file.write_text(text)
    subprocess.run(["bash", str(file)], check=True, timeout=60)
    assert STRANGE in notes(tmp_path, "me@a")
    assert all("ray stop" in notes(tmp_path, host) for host in HOSTS)


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "b"]])
def test_as_many_different_hosts_as_the_recipe_needs(job, hosts):
    with pytest.raises(LaunchError, match="2 different hosts, the recipe needs 3"):
        ray_nodes.plan(job, hosts, [], None, keep=False)


def test_without_ssh_it_says_so(job, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no ssh here"):
        ray_nodes.run(ray_nodes.plan(job, HOSTS, [], None, keep=False), {})
