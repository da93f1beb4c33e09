"""The batch script, run with an `srun` that runs its command here and notes how it was called."""

import subprocess
from dataclasses import replace

import pytest

from oar_plugin.launch import slurm
from oar_plugin.launch.job import LaunchError
from tests.launch.conftest import STRANGE

ALLOCATION = slurm.Allocation(time="1-00:00:00", partition="gpu", account="me", options=("--qos=high",))


def directives(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def run(text, fake, tmp_path, monkeypatch):
    """Calls of srun, ray and python, one list of words each."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_ON_NODE": "96", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    fake("scontrol", "printf 'n1\\nn2\\nn3\\n'")
    # Locked: head and workers start beside each other, and a call is more than one write.
    note = '{ flock 9; printf \'%s\\0\' "$(basename "$0")" "$@"; printf \'\\n\\0\'; } 9>> lock >> calls'
    fake("srun", f'{note}; while [ "$1" != bash ]; do shift; done; exec "$@"')
    fake("ray", f"{note}; exec sleep 60")  # --block
    fake("python", f'{note}; sleep 0.5; case "$2" in verl*) env > environment;; esac')
    (tmp_path / "job.sh").write_text(text)
    done = subprocess.run(["bash", "job.sh"], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().split("\n\0")
    return [call.split("\0")[:-1] for call in calls if call]


def test_it_asks_for_what_the_recipe_needs(job):
    assert directives(slurm.script(job, ALLOCATION)) == [
        "--job-name=seven-oar",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=1-00:00:00",
        "--partition=gpu",
        "--account=me",
        "--output=%x-%j.log",
        "--exclusive",
        "--open-mode=append",
        "--requeue",
        "--qos=high",
    ]


def test_it_starts_the_head_then_the_workers_and_trains_when_all_are_there(job, fake, tmp_path, monkeypatch):
    calls = run(slurm.script(replace(job, setup=""), ALLOCATION), fake, tmp_path, monkeypatch)
    python = [call for call in calls if call[0] == "python"]
    assert [call[2] for call in python] == ["oar_plugin.launch.wait"] * 2 + ["verl.trainer.main_ppo"]
    assert [call[call.index("--nodes") + 1] for call in python[:2]] == ["1", "3"]
    assert STRANGE in python[2]
    started = [call[1:] for call in calls if call[0] == "ray"]
    assert [word for words in started for word in words if "head" in word or "address" in word] == [
        "--head",
        "--address=n1:6379",
    ]
    steps = [call for call in calls if call[0] == "srun"]
    assert all("--cpus-per-task=96" in step and "--gpus-per-node=8" in step and "--overlap" in step for step in steps)
    workers = next(step for step in steps if "--exclude=n1" in step)
    assert {"--nodes=2", "--ntasks=2"} <= set(workers)
    assert "OAR_DATA=/shared/my data" in (tmp_path / "environment").read_text()


def test_one_node_has_no_workers(job, fake, tmp_path, monkeypatch):
    text = slurm.script(replace(job, setup="", nodes=1, gpus=8), ALLOCATION)
    assert "--exclude" not in text
    assert [call[2] for call in run(text, fake, tmp_path, monkeypatch) if call[0] == "python"] == [
        "oar_plugin.launch.wait",
        "verl.trainer.main_ppo",
    ]


def test_in_a_container_every_step_is_in_it(job, fake, tmp_path, monkeypatch):
    allocation = replace(ALLOCATION, container="/images/verl oar.sqsh", mounts="/shared:/shared", requeue=False)
    text = slurm.script(replace(job, setup=""), allocation)
    assert "--no-requeue" in directives(text)
    for step in (call for call in run(text, fake, tmp_path, monkeypatch) if call[0] == "srun"):
        assert {"--container-image=/images/verl oar.sqsh", "--container-mounts=/shared:/shared"} <= set(step)


def test_setup_is_done_in_every_step(job):
    assert slurm.script(job, ALLOCATION).count(f"\n{job.setup}\n") == 5


def test_it_is_written_and_submitted(job, fake, tmp_path):
    fake("sbatch", f'cp "$1" {tmp_path}/submitted; exit 4')
    text = slurm.script(job, ALLOCATION)
    assert slurm.submit(text, tmp_path / "a b.sbatch") == 4
    assert (tmp_path / "submitted").read_text() == text


def test_a_file_that_cannot_be_written_and_a_machine_without_slurm_are_reported(fake, tmp_path, monkeypatch):
    fake("sbatch", "exit 0")
    with pytest.raises(LaunchError, match="choose another place with --script"):
        slurm.submit("", tmp_path / "no" / "where.sbatch")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch here"):
        slurm.submit("", tmp_path / "x.sbatch")
    assert not (tmp_path / "x.sbatch").exists()
