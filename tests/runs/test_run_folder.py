"""What a run's folder keeps, and whom it lets in. In a real run: tests/hosts/test_verl_run.py."""

import errno
import fcntl
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from oar_plugin.config import LEFT_DEFAULTS, OarConfig
from oar_plugin.runs.run_folder import LOCK, RECORD, KeepRun, RunRefused, begin, end, record_of


def config(folder, **changes):
    """Of a run with a few settings: some count, some do not."""
    settings = {
        "data": {"train_files": ["${oc.env:OAR_DATA,/home}/train.parquet"], "seed": 1},
        "actor_rollout_ref": {"model": {"path": "you/base"}, "rollout": {"seed": "${data.seed}", "n": 8}},
        "trainer": {
            **{"default_local_dir": str(folder), "logger": ["console"], "save_freq": 20},
            **{"total_epochs": 1, "resume_mode": "auto", "val_only": False, "val_before_train": True},
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
    begin(config(tmp_path / "run"))
    (tmp_path / "run" / "global_step_20").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__logger": ["wandb"], "trainer__save_freq": 1},
        {"actor_rollout_ref__rollout__seed": 1},  # what the interpolation says
    ],
)
def test_the_same_settings_resume(folder, changes, monkeypatch):
    monkeypatch.setenv("OAR_DATA", "/elsewhere")  # the same files
    with (folder / RECORD).open("a") as record:
        record.write("  trainer.val_only: false\n")  # as an older version has recorded
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
    assert all(word in lines[-1] for word in ("--resume", "--name", "OAR_START"))


def recorded(folder, **of_oar):
    """Add keys of `algorithm.oar` to the record, as another version had them."""
    record = yaml.safe_load((folder / RECORD).read_text())
    record["settings"] |= {f"algorithm.oar.{key.replace('__', '.')}": value for key, value in of_oar.items()}
    (folder / RECORD).write_text(yaml.safe_dump(record))


@pytest.mark.parametrize("new", [{}, {"tau": None, "amortize": {"share": "auto", "units": "auto"}}])
def test_a_missing_key_of_oar_is_its_default(folder, new):
    left = {"perturbation__budget": None, "context__template": LEFT_DEFAULTS["context.template"]}
    recorded(folder, **left, probe=OarConfig().probe, dump__folder="/old", amortize={})
    run = config(folder, algorithm={"oar": new}, trainer__max_actor_ckpt_to_keep=1)
    assert begin(run) == folder
    assert not (folder / "run.1.yaml").exists()
    recorded(folder, **left)
    end(folder, "finished")
    assert begin(run) is None, "finished with the same settings"
    recorded(folder, perturbation__budget=0.3, probe=None, amortize__share=0.25)
    with pytest.raises(RunRefused) as refused:
        begin(run)
    assert str(refused.value).splitlines()[1:-1] == [
        '  algorithm.oar.amortize.share: 0.25 there, "auto" now',
        "  algorithm.oar.perturbation.budget: 0.3 there, null now",
        f"  algorithm.oar.probe: null there, {json.dumps(OarConfig().probe)} now",
    ]


NOW = {
    "importance": "oar_p",
    "amortize": {"share": "auto", "units": "auto"},
    "perturbation": {"replacement": "sampled"},
}


@pytest.mark.parametrize(
    ("old", "asked", "importance"),
    [
        ({"importance": "fisher", "perturbation__replacement": "pad"}, {}, "fisher"),
        ({"importance": "oar_g"}, {}, "oar_g"),
        ({"importance": "oar_g"}, {"importance": "oar_g"}, "oar_g"),
        ({"importance": "fisher"}, {"amortize": {"share": 0.025, "units": "auto"}}, None),  # asks for another one
        ({"importance": "fisher", "amortize__units": "auto"}, {}, None),  # recorded by this version
    ],
)
def test_a_run_of_an_older_version_goes_on_with_the_default_that_it_recorded(folder, capsys, old, asked, importance):
    recorded(folder, **old)
    if importance is None:
        with pytest.raises(RunRefused, match="importance"):
            begin(config(folder, algorithm={"oar": NOW | asked}))
        return
    for start in ("", "", "resume"):  # as often as it is started
        run = config(folder, algorithm={"oar": NOW | asked})
        assert begin(run, start) == folder
        assert (run.algorithm.oar.importance, run.algorithm.oar.amortize.share) == (importance, None)
        assert run.algorithm.oar.perturbation.replacement == old.get("perturbation__replacement", "pad")
        assert "goes on with it: " in capsys.readouterr().err


def test_the_callback_that_left_is_named(folder):
    with pytest.raises(RunRefused, match=r"leave it out: trainer\.max_actor_ckpt_to_keep"):
        begin(config(folder, trainer__checkpoint_callback_class="oar_plugin.runs.best_checkpoint.KeepBest"))


def test_resume_goes_on_with_other_settings_and_keeps_the_old_ones(folder):
    longer = config(folder, trainer__total_epochs=3)
    assert begin(longer, "resume") == folder
    assert begin(longer) == folder  # and so does a requeue, with whatever it says
    assert (folder / "global_step_20").is_dir()
    assert "trainer.total_epochs: 1\n" in (folder / "run.1.yaml").read_text()


@pytest.mark.parametrize("state", ["unfinished", "failed", "finished", None])
def test_validation_leaves_a_run_as_it_is_and_says_what_it_validates(tmp_path, state, capsys):
    run = config(tmp_path / "run")
    if state:
        end(begin(run), state)
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20\n")
    before = record_of(tmp_path / "run")
    only = config(tmp_path / "run", trainer__val_only=True, actor_rollout_ref__rollout__val_kwargs={"n": 32})
    KeepRun().on_run_start(only)
    KeepRun().on_job_end(only, SimpleNamespace(status=JobStatus.COMPLETED))
    what = (
        f"the checkpoint {tmp_path}/run/global_step_20\n" if state else "the untrained model you/base, without a checkp"
    )
    assert f"oar: validates {what}" in capsys.readouterr().err
    assert record_of(tmp_path / "run") == before
    assert begin(run) == (None if state == "finished" else tmp_path / "run"), "the original command goes on"


def test_where_a_process_trains_no_other_one_enters(tmp_path, monkeypatch):
    """Stand-in for the other process: another open file of this one, which is as much another to flock."""
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for start in ("", "resume"):
            with pytest.raises(RunRefused, match="another process trains there"):
                begin(config(folder), start)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    take = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    begin(config(folder))
    held = subprocess.run([sys.executable, "-c", take, folder / LOCK], stderr=subprocess.PIPE, check=False)
    assert b"BlockingIOError" in held.stderr

    def without(*_):
        raise OSError(errno.ENOLCK, "")

    monkeypatch.setattr(fcntl, "flock", without)
    assert begin(config(folder)) == folder


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
        assert record_of(folder)["state"] == ended
    for other, status in ((config(folder), 0), (config(folder, data__seed=2), 2)):
        with pytest.raises(SystemExit) as ended:
            KeepRun().on_run_start(other)
        assert ended.value.code == status
    assert "data.seed: 1 there, 2 now" in capsys.readouterr().err
    monkeypatch.setenv("OAR_START", "resume")
    KeepRun().on_run_start(config(folder, data__seed=2))
