"""Templates filled, and run with programs that stand in for those of a cluster; and waiting until all nodes are there."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from oar_plugin.runs.launch import wait
from oar_plugin.runs.launch.job import by_name, fill, patched, template_values
from oar_plugin.runs.recipe import command, find_recipe
from tests.limits import PROCESS_S

# Everything that a shell or Kubernetes could take for something else.
STRANGE = r"""trainer.experiment_name='it is $HOME $(OAR_DATA) `a` "b" \; & *'"""
ON_CLUSTER = "+ray_kwargs.ray_init.address=auto"


def script(template, nodes=3, **changes):
    """A template, filled for a run on nodes with eight GPUs each."""
    trainer = {"nnodes": nodes, "n_gpus_per_node": 8, "default_local_dir": "/shared/checkpoints/x"}
    values = template_values(OmegaConf.create({"trainer": trainer}), Path("/shared/my recipes/seven"), "oar", [STRANGE])
    values |= {"environment": {"OAR_DATA": "/shared/my data", "NCCL_DEBUG": "it's $x"}, "setup": "", "wait_s": 60}
    values |= {"name": "seven-oar", "job_h": 9, "restarts": 2}
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
    """The words that run on bare nodes."""
    return ["bash", "-c", script("ray.j2", **{"hosts": HOSTS, "ssh": [], "head_address": ""} | changes)]


def run(words):
    return subprocess.run(words, capture_output=True, text=True, timeout=PROCESS_S)


def test_ray_starts_everywhere_training_runs_on_the_head_and_ray_stops(nodes, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "se $word")
    words = on_nodes(ssh=["-p", "2222"], setup="export SET=up")
    assert "$word" not in words[-1]
    done = run(words)
    assert done.returncode == 0, done.stderr
    head = nodes("me@a")
    assert (head[0], head[-1]) == (f"ray start --head --port=6379 {NODE}", "ray stop")
    assert head.index("oar_plugin.runs.launch.wait") < head.index("verl.trainer.main_ppo")
    assert head[head.index("--gpus") + 1] == "24"
    assert STRANGE in head
    for host in ("b", "c"):
        assert nodes(host) == [f"ray start --address=a:6379 {NODE}", "ray stop"]
    wanted = {"WANDB_API_KEY=se $word", "OAR_DATA=/shared/my data", "NCCL_DEBUG=it's $x", "SET=up"}
    assert wanted <= set(nodes("me@a", "environment"))
    assert not any("$word" in line for line in nodes("me@a", "ssh"))
    assert all("-p 2222" in line for line in nodes("b", "ssh"))


def test_training_that_fails_fails_the_launch_and_ray_is_stopped(nodes, tmp_path):
    (tmp_path / "me@a" / "status").write_text("7")
    assert run(on_nodes(head_address="10.0.0.1")).returncode == 7
    assert f"ray start --head --port=6379 --node-ip-address=10.0.0.1 {NODE}" in nodes("me@a")
    assert f"ray start --address=10.0.0.1:6379 {NODE}" in nodes("b")
    assert all("ray stop" in nodes(host) for host in HOSTS)


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
    wanted = {"--job-name=seven-oar", "--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=9:00:00"}
    assert wanted | {"--exclusive", "--requeue", "--dependency=singleton"} <= set(directives)
    assert directives[-2:] == ["--partition=gpu", "'--comment=a b; rm *'"]
    with pytest.raises(ValueError, match="cannot hold a line break"):
        script("slurm.j2", sbatch=["--comment=a\nrm *"], srun=[])


def test_ray_starts_on_every_node_of_a_job_and_training_waits_for_all_of_them(job, tmp_path):
    status, (srun, ray, wait, train) = job(setup="export SET=up")
    assert status == 0
    assert {"--nodes=3", "--ntasks=3", "--gpus-per-node=8", "--cpus-per-task=96", *SLURM["srun"]} <= set(srun)
    assert ray[1:5] == ["symmetric-run", "--address", "10.0.0.1:6379", "--num-gpus=8"]
    assert wait[2:7] == ["oar_plugin.runs.launch.wait", "--nodes", "3", "--gpus", "24"]
    assert train[2] == "verl.trainer.main_ppo"
    assert {STRANGE, ON_CLUSTER} <= set(train)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"OAR_DATA=/shared/my data", "SET=up", "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=60"} <= set(environment)


@pytest.mark.parametrize(("nodes", "called"), [(1, ["srun", "python"]), (3, ["srun", "ray", "python", "python"])])
def test_training_that_fails_fails_the_job_and_one_node_leaves_ray_to_verl(job, tmp_path, nodes, called):
    (tmp_path / "status").write_text("7")
    status, calls = job(nodes=nodes)
    assert status == 7
    assert [call[0] for call in calls] == called
    assert f"--nodes={nodes}" in calls[0]
    assert STRANGE in calls[-1]
    assert (ON_CLUSTER in calls[-1]) == (nodes > 1)


# A checkpoint, and then what the test says: this try ends by itself, or goes on until it is told to end.
TRAIN = (
    'echo "$OAR_START" > start; echo "$MADE" > "$TRACKER"; touch training; '
    '[ "$ENDS" = no ] || exit "$ENDS"; trap "exit 143" TERM; sleep 600 & wait'
)


@pytest.mark.parametrize(
    ("before", "made", "ends", "restarts", "state", "status", "again", "start"),
    [
        ("", 20, "no", 0, "RUNNING", 0, True, ""),  # cut off
        (20, 40, "no", 9, "RUNNING", 0, True, ""),  # however often
        (20, 20, "no", 0, "RUNNING", 1, False, ""),  # it would be cut off at the same place for ever
        (20, 40, 0, 1, "RUNNING", 0, False, ""),  # done
        (20, 40, 7, 1, "RUNNING", 0, True, ""),  # failed, and got further
        (40, 40, 7, 1, "RUNNING", 7, False, ""),  # failed at the same place
        (20, 40, 7, 2, "RUNNING", 7, False, ""),  # failed too often
        (20, 40, 7, 1, "COMPLETING", 7, False, ""),  # cancelled
        # Begun again: at step 40 it is as far as the run that was moved aside; but not at its second start.
        (40, 40, "no", 0, "RUNNING", 0, True, "fresh"),
        (40, 40, "no", 1, "RUNNING", 1, False, "fresh"),
        # A container has the folder at another place.
        (None, 20, "no", 1, "RUNNING", 0, True, ""),
        (None, 20, "no", 2, "RUNNING", 1, False, ""),
    ],
)
def test_a_job_that_is_cut_off_or_fails_goes_on_by_itself_as_long_as_it_gets_further(
    fake, tmp_path, monkeypatch, before, made, ends, restarts, state, status, again, start
):
    """Stand-ins: an srun that hands on TERM, as SLURM's does, and USR1 sent by the test in place of SLURM."""
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text(f"{before}\n")
    checkpoints = tracker.parent if before is not None else "/not/on/this/machine"
    monkeypatch.chdir(tmp_path)
    variables = {"SLURM_JOB_ID": 5, "SLURM_CPUS_ON_NODE": 8, "SLURM_RESTART_COUNT": restarts}
    variables |= {"MADE": made, "ENDS": ends, "TRACKER": tracker, "OAR_START": start}
    fake("hostname", "echo 10.0.0.1")
    fake("srun", 'while [ "$1" != bash ]; do shift; done; "$@" & trap "kill -TERM $!; wait $!; exit 143" TERM; wait $!')
    fake("python", TRAIN)
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
    assert (tmp_path / "start").read_text().strip() == (start and "fresh:5")
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 5\n" if again else "")


# ---- Kubernetes

POD = {"image": "registry/verl-oar:1", "claim": "disk", "mount": "/shared"}
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
    assert made["spec"]["shutdownAfterJobFinishes"] is True
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
        assert mounts == {"shared": "/shared", "dshm": "/dev/shm"}
        assert variables(container)["OAR_DATA"] == "/shared/my data"
    # One node is the head alone, and nothing is asked for that no option names.
    _, _, (container,) = rayjob(nodes=1, **dict.fromkeys(ASKED, ""))
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "envFrom" not in container


def test_the_head_runs_what_the_recipe_says_and_no_value_is_taken_for_anything_else(fake, tmp_path):
    strange = {"NO": "1", "ON": "yes", "DOLLARS": "$$(A) $(B) $C $"}
    made, _, (head, worker) = rayjob(setup="export SET=up; : $$", environment=strange)
    written, entrypoint = variables(head), made["spec"]["entrypoint"]
    # Kubernetes makes one dollar of two, and a variable of $( ... ) behind a single one.
    assert {name: value.replace("$$", "$") for name, value in variables(worker).items()} == strange
    assert all("$" not in value.replace("$$", "") for value in written.values())
    assert "$$(OAR_DATA)" in written["OAR_LAUNCH_SCRIPT"]
    assert set(entrypoint) <= set("abcdefghijklmnopqrstuvwxyzOARLUNCHSIPT_.- 0123456789")  # no shell reads it
    assert entrypoint.split()[:3] == ["python", "-m", "oar_plugin.runs.launch.wait"]
    assert entrypoint.split()[-2:] == ["--then", "OAR_LAUNCH_SCRIPT"]
    fake("python", f'printf "%s\\n" "$SET" "$@" >> "{tmp_path}/done"')
    environment = os.environ | {name: value.replace("$$", "$") for name, value in written.items()}
    subprocess.run(["bash", "-c", environment["OAR_LAUNCH_SCRIPT"]], env=environment, check=True, timeout=60)
    assert {"up", "verl.trainer.main_ppo", STRANGE} <= set((tmp_path / "done").read_text().splitlines())


PATCH = """
rayjob: {metadata: {labels: {queue: gpus}}}
pod: {spec: {nodeSelector: {net: rdma}, tolerations: [{key: gpu}], volumes: [{name: more}]}}
container: {resources: {limits: {rdma/ib: 8}}, securityContext: {capabilities: {add: [IPC_LOCK]}}}
"""


def test_a_patch_reaches_the_job_every_pod_and_every_container(tmp_path):
    (tmp_path / "patch.yaml").write_text(PATCH)
    made = yaml.safe_load(patched(script("kubernetes.j2", **POD | ASKED), tmp_path / "patch.yaml"))
    assert made["metadata"] == {"name": "seven-oar", "labels": {"queue": "gpus"}}
    cluster = made["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert (spec["nodeSelector"], spec["tolerations"]) == ({"net": "rdma"}, [{"key": "gpu"}])
        assert [volume["name"] for volume in spec["volumes"]] == ["shared", "dshm", "more"]
        (container,) = spec["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": "64", "memory": "900Gi", "rdma/ib": 8}
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert variables(container)["NCCL_DEBUG"] == "it's $$x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pods: {}", "pods: not a section; allowed: rayjob, pod, container"),
        ("pod: [1]", r"pod: \[1\]: the RayJob has a map there"),
        ("a: b: c", "not a yaml file"),
        ("7", "not a yaml file"),
    ],
)
def test_a_patch_that_cannot_be_merged_is_refused(tmp_path, text, said):
    (tmp_path / "patch.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        patched(script("kubernetes.j2", **POD | ASKED), tmp_path / "patch.yaml")


def test_pods_find_a_recipe_that_comes_with_the_package_by_its_name():
    recipe = find_recipe("qwen2_5_7b_math")
    train = by_name(shlex.join(command(recipe, "oar")), recipe)
    told = f'python() {{ {sys.executable} "$@"; }}; {train.replace("python -m", "echo")}'
    said = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.split() == ["verl.trainer.main_ppo", "--config-path", str(recipe), "--config-name", "oar"]


# ---- waiting


def test_it_returns_when_nodes_and_gpus_are_there_and_says_what_it_sees(capsys, monkeypatch):
    looks = iter([[], [("10.0.0.1", 8)], [("10.0.0.1", 8)], [("10.0.0.1", 8), ("10.0.0.2", 8)]])
    monkeypatch.setattr(wait, "cluster", lambda: next(looks))
    monkeypatch.setattr(wait, "LOOK_AGAIN_S", 0)
    wait.main(["--nodes", "2", "--gpus", "16"])
    assert capsys.readouterr().out.splitlines() == [
        "oar launch: 0 of 2 nodes, 0 of 16 GPUs: nothing yet",
        "oar launch: 1 of 2 nodes, 8 of 16 GPUs: 10.0.0.1 (8)",
        "oar launch: 2 of 2 nodes, 16 of 16 GPUs: 10.0.0.1 (8), 10.0.0.2 (8)",
    ]


def test_it_gives_up_in_time_when_gpus_are_missing_and_does_not_train(capsys, monkeypatch):
    monkeypatch.setattr(wait, "cluster", lambda: [("10.0.0.1", 4)])
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("trained"))
    with pytest.raises(SystemExit, match="not complete after 0 s"):
        wait.main(["--nodes", "1", "--gpus", "8", "--timeout", "0", "--then", "SCRIPT"])
    assert "1 of 1 nodes, 4 of 8 GPUs: 10.0.0.1 (4)" in capsys.readouterr().out


@pytest.mark.slow
def test_it_sees_the_nodes_of_a_real_cluster_and_then_trains():
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2})
    command = f"{sys.executable} -m oar_plugin.runs.launch.wait --nodes 2 --gpus 4 --timeout 60 --then SCRIPT".split()
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "SCRIPT": "echo 'trained'"}
    try:
        cluster.add_node(num_cpus=1, num_gpus=2)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
        assert done.returncode == 0, done.stderr
        assert "2 of 2 nodes, 4 of 4 GPUs" in done.stdout
        assert done.stdout.splitlines()[-1] == "trained"
    finally:
        cluster.shutdown()
