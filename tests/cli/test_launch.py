"""`oar launch`: from the command line to what is run."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from oar_plugin.cli.main import main

pytest.importorskip("verl")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ONE, FOUR = str(RECIPES / "qwen2_5_7b_math"), str(RECIPES / "qwen2_5_32b_megatron")


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OAR_", "NCCL_", "VLLM_", "VERL_", "HF_", "WANDB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OAR_CHECKPOINTS", "/shared/c")
    monkeypatch.chdir(tmp_path)
    before = os.environ.copy()
    yield
    for name in set(os.environ) - set(before):  # what the command set
        del os.environ[name]
    os.environ.update(before)


def parses(text):
    return subprocess.run(["bash", "-n"], input=text, text=True, timeout=30).returncode == 0


@pytest.mark.parametrize("where", [["--on", "slurm"], ["--on", "ray", "--hosts", "a,b,c,d"]])
def test_a_dry_run_prints_a_script_and_needs_no_cluster(where, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/bin")
    assert main(["launch", FOUR, *where, "--dry-run", "trainer.experiment_name='a b'", "--env", "A=it's"]) == 0
    said = capsys.readouterr()
    assert parses(said.out)
    assert "export A='it'\"'\"'s'" in said.out
    assert "--nodes 4 --gpus 32" in said.out
    assert "4 nodes with 8 GPUs, checkpoints in /shared/c/oar/a b" in said.err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_on_kubernetes_prints_a_manifest_with_folders_on_the_volume(capsys, monkeypatch):
    monkeypatch.setenv("OAR_DATA", "/home/me/data")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    arguments = ["--on", "kubernetes", "--image", "i:1", "--claim", "disk", "--mount", "/disk"]
    assert main(["launch", FOUR, *arguments, "--dry-run", "--recipe-on-nodes", "/workspace/r"]) == 0
    said = capsys.readouterr()
    head = yaml.safe_load(said.out)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry["value"] for entry in head["env"]}
    assert variables["OAR_DATA"] == "/disk/data/oar"
    assert variables["OAR_CHECKPOINTS"] == "/disk/checkpoints"
    assert "--config-path /workspace/r" in variables["OAR_LAUNCH_SCRIPT"]
    assert "secret" not in said.out
    assert "--secret NAME" in said.err


def test_on_this_machine_it_becomes_the_training_process(monkeypatch):
    became = []

    def execve(*arguments):
        became.extend(arguments)
        raise SystemExit  # it does not return

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        main(["launch", ONE, "--variant", "grpo", "--env", "NCCL_DEBUG=INFO", "trainer.total_epochs=1"])
    program, words, environment = became
    assert words[:3] == [program, "-m", "verl.trainer.main_ppo"]
    assert words[-1] == "trainer.total_epochs=1"
    assert words[words.index("--config-name") + 1] == "grpo"
    assert environment["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([FOUR], "the recipe needs 4 nodes; allowed here"),
        ([FOUR, "--on", "ray"], "--on ray needs --hosts"),
        ([FOUR, "--on", "kubernetes", "--image", "i"], "--on kubernetes needs --claim"),
        ([ONE, "--partition", "gpu"], "--partition belongs to --on slurm"),
        ([str(RECIPES)], "has no oar.yaml"),
        ([ONE, "trainer.no_such_key=1"], "does not compose"),
        ([ONE, "algorithm.oar.tau=2"], "algorithm.oar.tau"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    assert main(["launch", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_an_unknown_option_is_refused_and_not_taken_for_an_override(capsys):
    with pytest.raises(SystemExit):
        main(["launch", ONE, "--dry", "--partitoin", "gpu"])
    assert "--partitoin" in capsys.readouterr().err
