"""The batch script, run with an `srun` that runs its command here and notes how it was called."""

import subprocess

import pytest

from tests.launch.conftest import STRANGE
from tests.limits import PROCESS_S

OPTIONS = {"sbatch": ["--partition=gpu", "--comment=a b; rm *"], "srun": ["--container-image=/my images/verl.sqsh"]}


@pytest.fixture
def run(script, fake, tmp_path, monkeypatch):
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
        done = subprocess.run(["bash", "-c", script("slurm.j2", **OPTIONS, **changes)], timeout=PROCESS_S)
        calls = (tmp_path / "calls").read_text().split("\n\0")
        return done.returncode, [call.split("\0")[:-1] for call in calls if call]

    return make


def test_it_asks_for_what_the_recipe_needs_and_the_users_options_come_last(script):
    lines = script("slurm.j2", **OPTIONS).splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    wanted = {
        "--job-name=seven-oar",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--exclusive",
        "--requeue",
    }
    assert wanted <= set(directives)
    assert directives[-2:] == ["--partition=gpu", "'--comment=a b; rm *'"]


def test_ray_starts_on_every_node_and_training_waits_for_all_of_them(run, tmp_path):
    status, (srun, ray, wait, train) = run(setup="export SET=up")
    assert status == 0
    assert {"--nodes=3", "--ntasks=3", "--gpus-per-node=8", "--cpus-per-task=96"} <= set(srun)
    assert "--container-image=/my images/verl.sqsh" in srun
    assert ray[1:5] == ["symmetric-run", "--address", "10.0.0.1:6379", "--num-gpus=8"]
    assert wait[2:7] == ["oar_plugin.launch.wait", "--nodes", "3", "--gpus", "24"]
    assert train[2] == "verl.trainer.main_ppo"
    assert {STRANGE, "+on=cluster"} <= set(train)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"OAR_DATA=/shared/my data", "SET=up", "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=60"} <= set(environment)


def test_one_node_leaves_ray_to_verl(run):
    status, (srun, train) = run(nodes=1, gpus=8)
    assert status == 0
    assert "--nodes=1" in srun
    assert STRANGE in train
    assert "+on=cluster" not in train


@pytest.mark.parametrize("nodes", [1, 3])
def test_training_that_fails_fails_the_job(run, tmp_path, nodes):
    (tmp_path / "status").write_text("7")
    assert run(nodes=nodes)[0] == 7


def test_a_line_break_does_not_leave_its_directive(script):
    with pytest.raises(ValueError, match="cannot hold a line break"):
        script("slurm.j2", sbatch=["--comment=a\nrm *"], srun=[])
