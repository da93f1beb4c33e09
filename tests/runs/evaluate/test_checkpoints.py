"""What a CHECKPOINT of `oar eval` is."""

import subprocess
from pathlib import Path

import pytest

from oar_plugin.runs.evaluate import checkpoints
from oar_plugin.runs.evaluate.checkpoints import find


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


WEIGHTS = ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("model", "others"),
    [
        (".", []),
        ("huggingface", []),
        ("actor/huggingface", []),
        ("actor/model/huggingface", ["actor/model/dist_ckpt/common.pt"]),
        ("actor/merged", ["actor/huggingface/config.json", "actor/fsdp_config.json"]),  # merged before
    ],
)
def test_the_model_of_a_checkpoint_is_found(model, others, tmp_path):
    touch(tmp_path, *others, *(f"{model}/{name}" for name in WEIGHTS))
    assert find(str(tmp_path), print) == str((tmp_path / model).resolve())


def test_of_a_runs_folder_the_last_complete_checkpoint_is_taken(tmp_path):
    for step in ("global_step_9", "global_step_10", "global_step_11"):
        touch(tmp_path, *(f"{step}/actor/huggingface/{name}" for name in WEIGHTS))

    def found():
        return find(str(tmp_path), print).removeprefix(f"{tmp_path.resolve()}/").partition("/actor")[0]

    assert found() == "global_step_11"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")  # 11 is being written
    assert found() == "global_step_10"


@pytest.mark.parametrize("other_is_first", [False, True])
def test_two_evaluations_may_merge_one_checkpoint(other_is_first, tmp_path, monkeypatch):
    def merge(words, **_):
        touch(Path(words[words.index("--target_dir") + 1]), *WEIGHTS)
        if other_is_first:
            touch(tmp_path / "actor" / "merged", *WEIGHTS, "first")
        return subprocess.CompletedProcess(words, 0, b"", b"")

    monkeypatch.setattr(checkpoints.subprocess, "run", merge)
    touch(tmp_path / "actor", "fsdp_config.json")
    assert find(str(tmp_path), print) == str(tmp_path / "actor" / "merged")
    assert (tmp_path / "actor" / "merged" / "first").exists() == other_is_first
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == ["fsdp_config.json", "merged"]
