"""The checks before a run waits in a queue. Made-up GPUs and files."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import pyarrow
from pyarrow import parquet

from oar_plugin.runs.launch import preflight
from oar_plugin.runs.plan.known import GIB, choose_gpu
from oar_plugin.runs.recipe import find_recipe
from tests.recipes.test_recipes import composed, with_overrides

RECIPE = find_recipe("qwen2_5_7b_math")
H100 = choose_gpu()
COLUMNS = {"prompt": ["1+1?"], "data_source": ["gsm8k"], "reward_model": [{"ground_truth": "2"}]}


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Overrides of a run for which everything is in place; `OAR_DATA` names the folder of its data."""
    for name in ("gsm8k/train", "math/train", "gsm8k/test", "math500/test"):
        file = tmp_path / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table(COLUMNS), file)
    monkeypatch.setenv("OAR_DATA", str(tmp_path))
    monkeypatch.setattr(preflight, "cached", lambda name: None)
    return {"oar_data": str(tmp_path)}


def examined(changes, gpu=H100, files_seen=True, local=True):
    config = with_overrides(composed(RECIPE), changes)
    _, findings = preflight.examine(config, gpu, files_seen=files_seen, local=local)
    by_subject = {finding.subject: finding for finding in findings}
    assert len(by_subject) == len(findings)
    return by_subject


def test_nothing_is_missing_where_everything_is_in_place(ready):
    found = examined(ready)
    assert {finding.level for finding in found.values()} <= {"ok", "note"}
    assert {"memory", "data", "model", "reward"} <= found.keys()


REWARD = "reward.custom_reward_function"


@pytest.mark.parametrize(
    ("changes", "subject", "said"),
    [
        ({"data.prompt_key": "question"}, "data", "train.parquet has no column question"),
        ({"data.val_files": ["/no/math/test.parquet"]}, "data", "/no/math/test.parquet is not there; `oar data`"),
        ({"data.val_files": ["HERE/bare.parquet"]}, "data", "bare.parquet has no column data_source, reward_model"),
        ({"data.val_files": ["HERE/half.parquet"]}, "data", "half.parquet cannot be read (ArrowInvalid"),
        ({"actor_rollout_ref.model.path": "HERE/gone"}, "model", "model.path=HERE/gone: no config.json there"),
        ({"actor_rollout_ref.model.path": "HERE/math"}, "model", "model.path=HERE/math: no config.json there"),
        ({f"{REWARD}.path": "HERE/reward.py"}, "reward", "reward.py: cannot be imported: ModuleNotFoundError: No"),
        ({f"{REWARD}.path": "HERE/exits.py"}, "reward", "cannot be imported: SystemExit: 3"),
        ({f"{REWARD}.name": "nope"}, "reward", "nope"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 16}, "layout", "parallel_size=16: must divide the 8"),
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


def test_a_run_that_does_not_fit_is_told_the_margin_and_what_to_try(ready):
    memory = examined(ready, choose_gpu(memory_gib=20))["memory"]
    assert memory.level == "missing"
    assert "for GPUs of 20 GiB: does not fit, " in memory.text
    assert "of 20 GiB in update" in memory.text
    assert "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True" in memory.advice


@pytest.mark.parametrize(
    ("changes", "where", "subject", "said"),
    [
        ({"actor_rollout_ref.model.path": "you/new"}, {}, "memory", "not planned"),
        ({"trainer.device": "cpu"}, {}, "memory", "trainer.device=cpu"),
        *(({}, {"files_seen": False}, subject, "on the nodes") for subject in ("data", "model", "reward")),
    ],
)
def test_what_cannot_be_seen_from_here_is_not_refused(ready, changes, where, subject, said):
    found = examined(ready | changes, **where)
    assert found[subject].level == "not checked"
    assert said in found[subject].text
    assert "missing" not in {finding.level for finding in found.values()}


def test_a_local_run_is_planned_for_the_smallest_gpu_of_this_machine(monkeypatch):
    seen = [SimpleNamespace(total_memory=size * GIB) for size in (141, 44)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(seen))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: seen[index])
    gpu = preflight.gpu_of_run(None, local=True)
    assert (gpu.name, gpu.memory_gib) == ("NVIDIA L40S 48 GB", 44)
    assert preflight.gpu_of_run(None, local=False) == H100, "a login node says nothing of the cluster"
