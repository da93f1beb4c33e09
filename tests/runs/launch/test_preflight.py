"""What is looked at before a run waits in a queue, and what follows from its plan. Made-up GPUs, files and disks."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import pyarrow
from omegaconf import OmegaConf
from pyarrow import parquet

from oar_plugin.runs.launch import preflight, schedule
from oar_plugin.runs.launch.loggers import examine_loggers
from oar_plugin.runs.plan.hardware import choose_gpu
from oar_plugin.runs.plan.planning import Plan
from oar_plugin.runs.plan.setup import with_overrides
from oar_plugin.runs.recipe import find_recipe
from tests.recipes.test_recipes import composed

RECIPE = find_recipe("qwen2_5_7b_math")
H100 = choose_gpu()
COLUMNS = {"prompt": ["1+1?"], "data_source": ["gsm8k"], "reward_model": [{"ground_truth": "2"}]}
SAVE = "actor_rollout_ref.actor.checkpoint.save_contents"


def changed(changes):
    """The recipe with some keys changed; `composed` is read-only."""
    config = composed(RECIPE).copy()
    OmegaConf.set_readonly(config, False)
    return with_overrides(config, changes)


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Overrides of a run for which everything is in place; `OAR_DATA` names the folder of its data."""
    for name in ("gsm8k/train", "math/train", "gsm8k/test", "math500/test"):
        file = tmp_path / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table(COLUMNS), file)
    monkeypatch.setenv("OAR_DATA", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(preflight, "gpus_here", lambda: (H100,) * 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2e12))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return {"oar_data": str(tmp_path), "trainer.default_local_dir": str(tmp_path / "c"), "trainer.logger": "console"}


def examined(changes, gpu=H100, files_seen=True, local=True):
    """Findings of two such runs, by subject."""
    forecast = preflight.forecast(changed(changes), [], gpu, 24)
    findings = preflight.examine([forecast, forecast], files_seen, local)
    by_subject = {finding.subject: finding for finding in findings}
    assert len(by_subject) == len(findings)
    return by_subject


def test_nothing_is_missing_where_everything_is_in_place(ready):
    found = examined(ready)
    assert {finding.level for finding in found.values()} <= {"ok", "note"}
    assert {"memory", "data", "model", "reward", "disk"} <= found.keys()


REWARD = "reward.custom_reward_function"


@pytest.mark.parametrize(
    ("changes", "subject", "said"),
    [
        (
            {"data.prompt_key": "question"},
            "data",
            "math/train.parquet has no column question (named by data.prompt_key)",
        ),
        ({"data.val_files": ["/no/math/test.parquet"]}, "data", "/no/math/test.parquet is not there; oar data math"),
        ({"data.val_files": ["HERE/bare.parquet"]}, "data", "bare.parquet has no column data_source, reward_model"),
        ({"data.val_files": ["HERE/half.parquet"]}, "data", "half.parquet cannot be read (ArrowInvalid"),
        ({"actor_rollout_ref.model.path": "HERE/gone"}, "model", "model.path=HERE/gone: is not there"),
        ({"actor_rollout_ref.model.path": "HERE/math"}, "model", "math has no config.json"),
        (
            {f"{REWARD}.path": "HERE/reward.py"},
            "reward",
            "reward.py: cannot be imported: ModuleNotFoundError: No module",
        ),
        ({f"{REWARD}.path": "HERE/exits.py"}, "reward", "cannot be imported: SystemExit: 3"),
        ({f"{REWARD}.name": "nope"}, "reward", "nope"),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 100}, "layout", "ppo_mini_batch_size=100: must divide"),
        ({"trainer.n_gpus_per_node": 16}, "GPUs", "the recipe needs 16 GPUs, here are 8"),
        ({"trainer.max_actor_ckpt_to_keep": 12}, "disk", "2,000 GB free in HERE; the checkpoints take 2,376 GB"),
        ({"trainer.max_actor_ckpt_to_keep": 9, SAVE: ["model", "hf_model"]}, "disk", "take 2,437 GB"),
        ({"trainer.logger": ["console", "no_such_logger"]}, "trainer.logger", "no_such_logger is not installed"),
    ],
)
def test_what_would_end_a_run_is_missing(ready, tmp_path, changes, subject, said):
    parquet.write_table(pyarrow.table({"prompt": ["1+1?"]}), tmp_path / "bare.parquet")
    (tmp_path / "half.parquet").write_bytes(b"half a downl")
    (tmp_path / "reward.py").write_text("import no_such_module\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    here = {key: eval(repr(value).replace("HERE", str(tmp_path))) for key, value in changes.items()}
    finding = examined(ready | here)[subject]
    assert finding.level == "missing"
    assert said.replace("HERE", str(tmp_path)) in f"{finding.text}; {finding.advice}"


def test_a_run_that_does_not_fit_is_told_the_margin_and_the_first_change(ready):
    finding = examined(ready, choose_gpu(memory_gib=20))["memory"]
    assert finding.level == "missing"
    assert "for GPUs of 20 GiB: does not fit, " in finding.text
    assert "GiB missing in " in finding.text
    change = dict(word.split("=") for word in finding.advice.split())
    elsewhere = examined(ready, choose_gpu(memory_gib=20), local=False)["memory"]
    assert elsewhere.advice == f"{finding.advice}, or --gpu NAME if the nodes have others"
    relieved = changed({key: OmegaConf.create(f"v: {v}").v for key, v in change.items()})
    assert Plan(relieved, choose_gpu(memory_gib=20)).fits


@pytest.mark.parametrize(
    ("changes", "where", "subject", "said"),
    [
        ({"actor_rollout_ref.model.path": "you/new"}, {}, "memory", "not planned"),
        ({"actor_rollout_ref.model.path": "you/new"}, {}, "disk", "the planner does not know"),
        ({"trainer.device": "cpu"}, {}, "memory", "trainer.device=cpu"),
        ({"trainer.default_local_dir": "/no_such_disk/c"}, {}, "disk", "not on this machine"),
        *(({}, {"files_seen": False}, subject, "on the nodes") for subject in ("data", "model", "reward", "disk")),
    ],
)
def test_what_cannot_be_seen_from_here_is_not_refused(ready, changes, where, subject, said):
    found = examined(ready | changes, **where)
    assert found[subject].level == "not checked"
    assert said in found[subject].text
    assert "missing" not in {finding.level for finding in found.values()}


def test_what_a_run_has_written_already_is_not_asked_for_again(ready, tmp_path):
    assert examined(ready | {"trainer.max_actor_ckpt_to_keep": 12})["disk"].level == "missing"
    (tmp_path / "c" / "global_step_20").mkdir(parents=True)
    with (tmp_path / "c" / "global_step_20" / "model.pt").open("wb") as file:
        file.truncate(300 * 10**9)  # takes no room: nothing was written
    assert examined(ready | {"trainer.max_actor_ckpt_to_keep": 12})["disk"].level == "ok"


def test_links_to_the_best_checkpoint_are_not_counted_again(ready, tmp_path):
    (tmp_path / "c" / "best" / "global_step_20").mkdir(parents=True)
    with (tmp_path / "c" / "best" / "global_step_20" / "model.pt").open("wb") as file:
        file.truncate(300 * 10**9)
    assert examined(ready | {"trainer.max_actor_ckpt_to_keep": 12})["disk"].level == "missing"


def test_the_gpu_of_a_login_node_says_nothing_of_the_cluster(monkeypatch):
    small = choose_gpu(memory_gib=20)
    monkeypatch.setattr(preflight, "gpus_here", lambda: (H100, small))
    assert preflight.gpu_of_run(None, None, local=True) == small
    assert preflight.gpu_of_run(None, None, local=False) == H100


def test_a_ray_that_training_would_join_is_named(ready, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "joins the Ray cluster at 10.0.0.1:6379" in examined(ready)["Ray"].text
    assert "Ray" not in examined(ready, local=False)


def test_loggers(monkeypatch, tmp_path):
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("oar_plugin.runs.launch.loggers.importable", lambda name: name != "tensorboard")
    said = {f.text.split()[0]: f.level for f in examine_loggers(["console", "wandb", "tensorboard", "mlflow"])}
    assert said == {"wandb": "missing", "tensorboard": "missing", "MLFLOW_TRACKING_URI": "note"}
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not list(examine_loggers(["file", "wandb"]))


# ---- what follows from a plan


def test_a_job_asks_for_the_slow_estimate_and_a_longer_run_for_the_longest_job():
    made = Plan(composed(RECIPE))
    short = schedule.schedule(made, limit_h=1000)
    assert made.hours[2] * 1.2 < short.job_h < made.hours[2] * 1.2 + 5
    assert schedule.schedule(made, limit_h=12).job_h == 12
    assert (
        schedule.schedule(made, limit_h=12).restarts > schedule.schedule(made, limit_h=24).restarts > schedule.FAILURES
    )
    assert schedule.schedule(None, 7) == (None, 7, schedule.FAILURES)


def test_checkpoints_are_as_far_apart_as_loses_least_and_every_saved_step_is_validated():
    made = Plan(composed(RECIPE, "grpo"))
    every = schedule.save_freq(made, 24)
    assert schedule.save_freq(Plan(composed(RECIPE)), 24) == every  # a run and its baseline choose among the same steps
    # What a day costs: its saves, and half an interval of steps that are done again.
    cost = {
        n: 86400 / (n * made.step) * schedule.save_seconds(made.setup) + n * made.step / 2 for n in range(10, 500, 10)
    }
    assert every % 10 == 0
    assert min(cost, key=cost.get) - 10 <= every <= min(cost, key=cost.get)
    for tested, slower in ((10, 20), (7, 3), (-1, 1)):
        other = Plan(changed({"trainer.test_freq": tested}))
        other.step *= slower
        found = schedule.save_freq(other, 24)
        assert found >= 1
        assert tested < 0 or found % tested == 0 or tested % found == 0


def test_a_checkpoint_holds_what_verl_writes():
    """FSDP's float32 weights and moments; an adapter's moments only; Megatron's bfloat16 weights and float32 states."""
    seven = Plan(composed(RECIPE)).setup
    assert schedule.checkpoint_bytes(seven) == 12 * seven.model.parameters
    lora = Plan(composed(find_recipe("qwen2_5_7b_lora"))).setup
    assert schedule.checkpoint_bytes(lora) < 4.5 * lora.model.parameters
    megatron = Plan(composed(find_recipe("qwen2_5_32b_megatron"))).setup
    assert schedule.checkpoint_bytes(megatron) == 14 * megatron.model.parameters


def test_a_choice_of_the_user_or_of_the_recipe_stays():
    base = OmegaConf.load(Path(schedule.__file__).parents[2] / "hosts/verl/conf/recipe/base.yaml")
    assert base.trainer.save_freq == schedule.SAVE_FREQ
    both = ["trainer.save_freq=40", f"++trainer.checkpoint_callback_class={schedule.KEEP_BEST}"]
    plain = composed(RECIPE)
    assert schedule.added_overrides(plain, [], 40) == both
    assert schedule.added_overrides(plain, [], None) == both[1:]
    assert schedule.added_overrides(plain, ["trainer.save_freq=20"], 40) == both[1:]
    assert schedule.added_overrides(plain, ["+trainer.checkpoint_callback_class=null"], 40) == both[:1]
    assert schedule.added_overrides(changed({"trainer.save_freq": 5}), [], 40) == both[1:]
    assert schedule.added_overrides(changed({"trainer.save_freq": -1}), [], 40) == []
