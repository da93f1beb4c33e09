"""What a run's folder keeps, and whom it lets in. In a real run: tests/hosts/test_verl_run.py."""

import errno
import fcntl
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from oar_plugin.runs.run_folder import (
    LOCK,
    RECORD,
    TRACKER,
    KeepRun,
    RunRefused,
    begin,
    check,
    end,
    has_finished,
    state,
)


def config(folder, **changes):
    """Of a run with a few settings: some count, some do not."""
    settings = {
        "data": {"train_files": ["${oc.env:OAR_DATA,/home}/train.parquet"], "seed": 1},
        "actor_rollout_ref": {"rollout": {"seed": "${data.seed}", "n": 8}},
        "trainer": {
            **{"default_local_dir": str(folder), "logger": ["console"], "save_freq": 20},
            **{"total_epochs": 1, "resume_mode": "auto"},
        },
        "ray_kwargs": {"ray_init": {"runtime_env": {"py_executable": None}}},
        "hydra": {"job": {"num": "???"}, "sweep": {"subdir": "${hydra.job.num}"}},  # as there is no sweep of Hydra's
    }
    made = OmegaConf.create(settings)
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value)
    return made


@pytest.fixture
def folder(tmp_path):
    """Of a run that was started once."""
    begin(config(tmp_path / "run"))
    (tmp_path / "run" / "global_step_20").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__logger": ["wandb"], "trainer__save_freq": 1},
        {"ray_kwargs": {"ray_init": {"address": "auto"}}},
        {"actor_rollout_ref__actor": {"profiler": {"enable": True}}},
        {"actor_rollout_ref__rollout__seed": 1},  # what the interpolation says
    ],
)
def test_the_same_settings_resume(folder, changes, monkeypatch):
    monkeypatch.setenv("OAR_DATA", "/elsewhere")  # the same files
    assert begin(config(folder, **changes)) == folder
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


def test_other_settings_are_refused_with_both_values_and_what_to_do(folder):
    other = config(folder, data__seed=2, trainer__total_epochs=3, algorithm={"oar": {"tau": 0.5}})
    other.trainer.resume_mode = "resume_path"
    with pytest.raises(RunRefused) as refused:
        begin(other)
    lines = str(refused.value).splitlines()
    assert lines[1:-1] == [
        "  actor_rollout_ref.rollout.seed: 1 there, 2 now",
        "  algorithm.oar.tau: null there, 0.5 now",
        "  data.seed: 1 there, 2 now",
        '  trainer.resume_mode: "auto" there, "resume_path" now',
        "  trainer.total_epochs: 1 there, 3 now",
    ]
    assert all(word in lines[-1] for word in ("--resume", "--fresh", "OAR_START"))
    with pytest.raises(RunRefused) as refused:
        check(config(folder, many={f"key{i}": i for i in range(30)}))
    assert len(str(refused.value).splitlines()) == 15
    assert "and 18 more" in str(refused.value)


def test_resume_goes_on_with_other_settings_and_keeps_the_old_ones(folder):
    longer = config(folder, trainer__total_epochs=3)
    assert begin(longer, "resume") == folder
    assert begin(longer) == folder  # and so does a requeue, with whatever it says
    assert (folder / "global_step_20").is_dir()
    assert "trainer.total_epochs: 1\n" in (folder / "run.1.yaml").read_text()


def test_fresh_moves_the_folder_aside_once_and_not_at_a_requeue(folder):
    other = config(folder, data__seed=2)
    for _ in range(2):
        assert begin(other, "fresh:1") == folder
        (folder / "global_step_1").mkdir(exist_ok=True)
    assert (folder.parent / "run.1" / "global_step_20").is_dir()
    begin(other)
    begin(other, "fresh:1")  # the old script, submitted again
    assert (folder / "global_step_1").exists()
    begin(other, "fresh:2")
    assert not (folder / "global_step_1").exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run", "run.1", "run.2"]


def test_a_run_that_has_finished_has_nothing_left_to_do(folder):
    assert not has_finished(config(folder))
    end(folder, "finished")
    assert has_finished(config(folder))
    assert begin(config(folder)) is None
    assert not has_finished(config(folder), "fresh:1")
    assert begin(config(folder, trainer__total_epochs=2), "resume") == folder
    assert state(folder) == "unfinished"


def test_where_a_process_trains_no_other_one_enters_or_moves_the_folder(tmp_path, monkeypatch):
    """Stand-in for the other process: another open file of this one, which is as much another to flock."""
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / LOCK).open("w") as other:
        print("host n1, pid 7", end="", file=other, flush=True)
        fcntl.flock(other, fcntl.LOCK_EX)
        for start in ("", "resume", "fresh:1"):
            with pytest.raises(RunRefused, match="another process trains there: host n1, pid 7"):
                begin(config(folder), start)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    take = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    for start in ("", "fresh:1"):  # the folder that was moved is free
        begin(config(folder), start)
        held = subprocess.run([sys.executable, "-c", take, folder / LOCK], stderr=subprocess.PIPE, check=False)
        assert b"BlockingIOError" in held.stderr

    def without(*_):
        raise OSError(errno.ENOLCK, "")

    monkeypatch.setattr(fcntl, "flock", without)
    assert begin(config(folder)) == folder


def test_checkpoints_that_nothing_is_known_of_are_not_trained_further_unasked(tmp_path, capsys):
    folder = tmp_path / "run"
    assert begin(config(tmp_path / "new"), "resume")
    assert "OAR_START=resume, but the folder holds no run" in capsys.readouterr().err
    folder.mkdir()
    (folder / TRACKER).write_text("20")
    with pytest.raises(RunRefused, match=r"holds checkpoints but no run\.yaml") as refused:
        begin(config(folder))
    assert "--resume" in str(refused.value)
    check(config(folder, trainer__resume_mode="resume_path"))
    check(config(folder), "fresh:1")
    assert begin(config(folder), "resume") == folder
    assert capsys.readouterr().err == ""


def test_a_key_that_another_version_has_added_is_noted_and_one_that_changed_refused(folder, capsys):
    added = {"data": {**config(folder).data, "new": 1}}
    end(folder, "finished")
    with pytest.raises(RunRefused, match=r"data\.new: null there, 1 now"):
        check(config(folder, **added))
    record = (folder / RECORD).read_text()
    (folder / RECORD).write_text(record.replace("versions: verl ", "versions: verl 0.0."))
    assert has_finished(config(folder, **added))
    check(config(folder, **added))
    said = capsys.readouterr().err
    assert "started with verl 0.0." in said
    assert said.endswith(": data.new\n")
    with pytest.raises(RunRefused, match=r"data\.seed: 1 there, 2 now"):
        check(config(folder, data__seed=2))


REWARD = "reward__custom_reward_function__path"


def test_a_run_that_was_begun_with_old_module_names_goes_on(tmp_path, capsys):
    run, old, new = tmp_path / "run", "pkg://oar_plugin.hosts.verl.reward", "pkg://oar_plugin.runs.reward"
    assert begin(config(run, **{REWARD: old})) == run
    record = (run / RECORD).read_text().replace(new, old)  # as it was written
    assert old in record
    for path in (new, old):  # today's recipe, and a copy of an old one
        (run / RECORD).write_text(record)
        assert begin(config(run, **{REWARD: path})) == run
    assert [path.name for path in run.glob("run*.yaml")] == [RECORD]
    assert capsys.readouterr().err == ""
    (run / RECORD).write_text(record)
    with pytest.raises(RunRefused, match=r"reward\.custom_reward_function\.path: .* there, .*/mine\.py.* now"):
        check(config(run, **{REWARD: "/mine.py"}))


def test_a_record_that_is_not_valid_is_refused(folder):
    (folder / RECORD).write_text("state: [")
    with pytest.raises(RunRefused, match="move it away"):
        begin(config(folder))


def test_the_driver_opens_the_folder_before_ray_starts_and_notes_how_the_run_ended(folder, monkeypatch, capsys):
    for name in ("VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "OAR_START"):
        monkeypatch.delenv(name, raising=False)
    run = config(folder)
    OmegaConf.set_struct(run, True)  # as Hydra has it
    KeepRun().on_run_start(run)
    places = {"VERL_FILE_LOGGER_PATH": f"{folder}/metrics/start.jsonl", "TENSORBOARD_DIR": f"{folder}/tensorboard"}
    assert run.ray_kwargs.ray_init.runtime_env.env_vars == places
    run.ray_kwargs.ray_init.runtime_env["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"  # as verl 0.9.0 does
    for status, ended in ((JobStatus.FAILED, "failed"), (JobStatus.COMPLETED, "finished")):
        KeepRun().on_job_end(run, SimpleNamespace(status=status))
        assert state(folder) == ended
    for other, status in ((config(folder), 0), (config(folder, data__seed=2), 2)):
        with pytest.raises(SystemExit) as ended:
            KeepRun().on_run_start(other)
        assert ended.value.code == status
    assert "data.seed: 1 there, 2 now" in capsys.readouterr().err
    monkeypatch.setenv("OAR_START", "fresh")
    KeepRun().on_run_start(config(folder, data__seed=2))
