"""Runs of a command line; templates filled, and run with programs that stand in for those of a cluster."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from oar_plugin.runs.launch.job import Run, fill, template_values
from tests.limits import PROCESS_S

# Everything that a shell or Kubernetes could take for something else.
STRANGE = r"""trainer.experiment_name='it is $HOME $(OAR_DATA) `a` "b" \; & *'"""
ON_CLUSTER = "+ray_kwargs.ray_init.address=auto"


def script(template, nodes=3, **changes):
    trainer = {"nnodes": nodes, "n_gpus_per_node": 8, "default_local_dir": "/shared/checkpoints/x"}
    values = template_values(OmegaConf.create({"trainer": trainer}), Path("/shared/my recipes/seven"), "oar", [STRANGE])
    values |= {
        "environment": {"OAR_DATA": "/shared/my data", "NCCL_DEBUG": "it's $x"},
        "setup": "",
        "name": "seven-oar",
    }
    return fill(template, values | changes)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts programs of a name and a bash body in front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name, body):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)

    return make


# ---- runs


def test_names_of_jobs_fit_every_scheduler():
    names = ["x_" + "long" * 30 + str(seed) for seed in (1, 2)] + ["Qwen/é 'x'"]
    jobs = [Run("oar", (), OmegaConf.create({"trainer": {"experiment_name": name}})).job for name in names]
    assert len(set(jobs)) == 3
    assert all(len(job) <= 46 and set(job) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for job in jobs)


# ---- bare nodes: an `ssh` that runs the script here in a folder for each host, and a `ray` that notes how it was called

HOSTS = ["me@a", "b", "c"]
NODE = "--num-gpus=8 --disable-usage-stats"


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

    def notes(host, name="done"):
        file = tmp_path / host / name
        return file.read_text().splitlines() if file.exists() else []

    return notes


def on_nodes(**changes):
    return ["bash", "-c", script("ray.j2", **{"hosts": HOSTS} | changes)]


def run(words):
    return subprocess.run(words, capture_output=True, text=True, timeout=PROCESS_S)


def test_ray_starts_everywhere_training_runs_on_the_head_and_ray_stops(nodes, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "se $word")
    words = on_nodes(setup="export SET=up")
    assert "$word" not in words[-1]
    (tmp_path / "me@a" / "status").write_text("7")
    done = run(words)
    assert done.returncode == 7, done.stderr
    head = nodes("me@a")
    assert (head[0], head[-1]) == (f"ray start --head --port=6379 {NODE}", "ray stop")
    assert {"verl.trainer.main_ppo", STRANGE, ON_CLUSTER} <= set(head)
    for host in ("b", "c"):
        assert nodes(host) == [f"ray start --address=a:6379 {NODE}", "ray stop"]
    wanted = {"WANDB_API_KEY=se $word", "OAR_DATA=/shared/my data", "NCCL_DEBUG=it's $x", "SET=up"}
    assert wanted <= set(nodes("me@a", "environment"))
    assert not any("$word" in line for line in nodes("me@a", "ssh"))


@pytest.mark.parametrize(
    ("host", "fault", "said", "stopped"),
    [
        ("b", "broken", "oar launch: b: Ray did not start (exit status 1): no disk", {"me@a", "b", "c"}),
        ("c", "busy", "c: Ray did not start (exit status 3): Ray already runs here", {"me@a", "b"}),
    ],
)
def test_a_node_without_ray_is_named_and_somebody_elses_ray_left_alone(nodes, tmp_path, host, fault, said, stopped):
    (tmp_path / host / fault).touch()
    done = run(on_nodes())
    assert done.returncode == 1
    assert said in done.stderr
    assert "verl.trainer.main_ppo" not in nodes("me@a")
    assert {host for host in HOSTS if "ray stop" in nodes(host)} == stopped
    assert fault == "broken" or nodes(host) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_ray_on_every_node(nodes, tmp_path, number):
    (tmp_path / "me@a" / "endless").touch()
    process = subprocess.Popen(on_nodes(), start_new_session=True)
    try:
        until = time.monotonic() + 60
        while "verl.trainer.main_ppo" not in nodes("me@a") and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(process.pid, number)  # what a terminal does
        time.sleep(0.05)
        os.killpg(process.pid, number)  # and an impatient user
        assert process.wait(60) == 128 + number
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert all("ray stop" in nodes(host) for host in HOSTS)


# ---- SLURM: an `srun` that runs its command here and notes how it was called

SLURM = {"sbatch": ["--partition=gpu", "--comment=a b; rm *"], "srun": ["--container-image=/my images/verl.sqsh"]}


@pytest.fixture
def job(fake, tmp_path, monkeypatch):
    """Calls of srun, ray and python, each a list of words; `ray symmetric-run` runs what stands behind `--`, as on the head."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "96")
    note = '{ printf \'%s\\0\' "$(basename "$0")" "$@"; printf \'\\n\\0\'; } >> calls'
    fake("hostname", "[ \"$1\" = -I ] && echo '10.0.0.1 192.168.0.1 fe80::1 '")
    fake("srun", f'{note}; while [ "$1" != bash ]; do shift; done; exec "$@"')
    fake("ray", f'{note}; while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    fake("python", f'{note}; case "$2" in verl*) env > environment; exit "$(cat status 2>/dev/null || echo 0)";; esac')

    def make(**changes):
        done = run(["bash", "-c", script("slurm.j2", **SLURM, **changes)])
        calls = (tmp_path / "calls").read_text().split("\n\0")
        return done.returncode, [call.split("\0")[:-1] for call in calls if call]

    return make


def test_a_job_asks_for_what_the_recipe_needs_and_the_users_options_come_last():
    lines = script("slurm.j2", **SLURM).splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    wanted = {"--job-name=seven-oar", "--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=24:00:00"}
    assert wanted | {"--exclusive", "--requeue", "--dependency=singleton"} <= set(directives)
    assert directives[-2:] == ["--partition=gpu", "'--comment=a b; rm *'"]
    with pytest.raises(ValueError, match="cannot hold a line break"):
        script("slurm.j2", sbatch=["--comment=a\nrm *"], srun=[])


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_starts_ray_on_every_node_trains_on_the_first_and_fails_with_training(job, tmp_path, nodes):
    (tmp_path / "status").write_text("7")
    status, (srun, *ray, train) = job(nodes=nodes, setup="export SET=up")
    assert status == 7
    asked = {f"--nodes={nodes}", f"--ntasks={nodes}", "--gpus-per-node=8", "--cpus-per-task=96"}
    assert asked | set(SLURM["srun"]) <= set(srun)
    ours = ["symmetric-run", "--address", "10.0.0.1:6379", "--min-nodes", "3", "--num-gpus=8"]
    assert [call[1:7] for call in ray] == ([ours] if nodes > 1 else []), "verl starts Ray on one node"
    assert train[2] == "verl.trainer.main_ppo"
    assert STRANGE in train
    assert (ON_CLUSTER in train) == (nodes > 1)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"OAR_DATA=/shared/my data", "SET=up"} <= set(environment)


# A checkpoint, and then what the test says: this try ends by itself, or goes on until it is told to end.
ENDS = '[ "$ENDS" = no ] || exit "$ENDS"; trap "exit 143" TERM; sleep 600 & wait'


@pytest.mark.parametrize(
    ("before", "made", "ends", "restarts", "state", "status", "again"),
    [
        ("", 20, "no", 0, "RUNNING", 0, True),  # cut off
        (20, 40, "no", 9, "RUNNING", 0, True),  # however often
        (20, 20, "no", 0, "RUNNING", 1, False),  # it would be cut off at the same place for ever
        (20, 40, 0, 1, "RUNNING", 0, False),  # done
        (20, 40, 7, 1, "RUNNING", 0, True),  # failed, and got further
        (40, 40, 7, 1, "RUNNING", 7, False),  # failed at the same place
        (20, 40, 7, 10, "RUNNING", 7, False),  # failed too often
        (20, 40, 7, 1, "COMPLETING", 7, False),  # cancelled
        # A container has the folder at another place.
        (None, 20, "no", 9, "RUNNING", 0, True),
        (None, 20, "no", 10, "RUNNING", 1, False),
    ],
)
def test_a_job_that_is_cut_off_or_fails_goes_on_by_itself_as_long_as_it_gets_further(
    fake, tmp_path, monkeypatch, before, made, ends, restarts, state, status, again
):
    """Stand-ins: an srun that hands on TERM, as SLURM's does, and USR1 sent by the test in place of SLURM."""
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text(f"{before}\n")
    checkpoints = tracker.parent if before is not None else "/not/on/this/machine"
    monkeypatch.chdir(tmp_path)
    variables = {"SLURM_JOB_ID": 5, "SLURM_CPUS_ON_NODE": 8, "SLURM_RESTART_COUNT": restarts}
    variables |= {"MADE": made, "ENDS": ends, "TRACKER": tracker}
    fake("hostname", "echo 10.0.0.1")
    fake("srun", 'while [ "$1" != bash ]; do shift; done; "$@" & trap "kill -TERM $!; wait $!; exit 143" TERM; wait $!')
    fake("python", f'echo "$MADE" > "$TRACKER"; touch training; {ENDS}')
    fake("squeue", f"echo {state}")
    fake("scontrol", 'echo "$@" >> requeued')
    text = script("slurm.j2", nodes=1, **SLURM, checkpoints=str(checkpoints))
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    process = subprocess.Popen(["bash", "-c", text], env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "training").exists() and time.monotonic() < until:
            time.sleep(0.02)
        if ends == "no":
            process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == status
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 5\n" if again else "")


# ---- Kubernetes

POD = {"image": "registry/verl-oar:1", "claim": "disk", "volume": "/shared"}
ASKED = {"secret": "keys", "cpus": "64", "memory": "900Gi"}


def rayjob(**changes):
    """The manifest, the containers of its groups (head, workers) with their variables."""
    made = yaml.safe_load(script("kubernetes.j2", **POD | ASKED | changes))
    cluster = made["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    containers = [container for group in groups for container in group["template"]["spec"]["containers"]]
    return made, groups, containers


def variables(container):
    return {entry["name"]: entry["value"] for entry in container["env"]}


def test_it_has_the_recipes_nodes_gpus_volume_and_shared_memory():
    made, groups, containers = rayjob()
    assert (made["apiVersion"], made["kind"], made["metadata"]) == ("ray.io/v1", "RayJob", {"name": "seven-oar"})
    assert made["spec"]["backoffLimit"] == 3  # each try has a cluster of its own
    assert [groups[1][key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]  # the head makes three
    for group, container in zip(groups, containers, strict=True):
        assert group["rayStartParams"]["num-gpus"] == "8"  # KubeRay takes strings only
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "disk"}
        assert volumes["dshm"]["emptyDir"] == {"medium": "Memory"}
        wanted = {"nvidia.com/gpu": 8, "cpu": "64", "memory": "900Gi"}
        assert container["resources"] == {"limits": wanted, "requests": wanted}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.items() >= {"shared": "/shared", "dshm": "/dev/shm"}.items()
        assert variables(container)["OAR_DATA"] == "/shared/my data"
    # One node is the head alone, and nothing is asked for that no option names.
    _, _, (container,) = rayjob(nodes=1, **dict.fromkeys(ASKED, ""))
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "envFrom" not in container


def test_the_head_runs_what_the_recipe_says_and_no_value_is_taken_for_anything_else(fake, tmp_path):
    strange = {"NO": "1", "ON": "yes", "DOLLARS": "$$(A) $(B) $C $"}
    made, (head, _), containers = rayjob(setup="export SET=up; : $$", environment=strange)
    for container in containers:
        # Kubernetes makes one dollar of two, and a variable of $( ... ) behind a single one.
        assert {name: value.replace("$$", "$") for name, value in variables(container).items()} == strange
        assert all("$" not in value.replace("$$", "") for value in variables(container).values())
    (volume,) = [volume for volume in head["template"]["spec"]["volumes"] if volume["name"] == "script"]
    (item,) = volume["downwardAPI"]["items"]
    (mount,) = [mount for mount in containers[0]["volumeMounts"] if mount["name"] == "script"]
    assert made["spec"]["entrypoint"] == f"bash {mount['mountPath']}/{item['path']}"  # no shell finds a quote in it
    (annotation,) = head["template"]["metadata"]["annotations"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{annotation}']"
    fake("python", f'printf "%s\\n" "$SET" "$@" >> "{tmp_path}/done"')
    script = tmp_path / "train.sh"
    script.write_text(head["template"]["metadata"]["annotations"][annotation])
    subprocess.run(["bash", script], check=True, timeout=60)
    assert {"up", "verl.trainer.main_ppo", STRANGE} <= set((tmp_path / "done").read_text().splitlines())
