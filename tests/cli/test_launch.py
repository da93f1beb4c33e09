"""`oar launch`: from the command line to what is run."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from oar_plugin.cli.main import main
from oar_plugin.launch.job import for_nodes

pytest.importorskip("verl")

ONE, FOUR = "qwen2_5_7b_math", "qwen2_5_32b_megatron"
PODS = ["--on", "kubernetes", "--image", "i:1", "--claim", "disk"]


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


@pytest.mark.parametrize("where", [["--on", "slurm"], ["--on", "ray", "--hosts", "a,b,c,d"]])
def test_a_dry_run_prints_a_script_and_needs_no_cluster(where, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/bin")
    assert main(["launch", FOUR, *where, "--dry-run", "trainer.experiment_name='a b'", "--env", "A=it's"]) == 0
    said = capsys.readouterr()
    assert subprocess.run(["bash", "-n"], input=said.out, text=True, timeout=30).returncode == 0
    assert "export A='it'\"'\"'s'" in said.out
    assert "--nodes 4 --gpus 32 --timeout 900" in said.out
    assert "bin/activate" in said.out
    assert "4 nodes with 8 GPUs, checkpoints in /shared/c/oar/a b" in said.err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_on_kubernetes_prints_a_manifest_with_folders_on_the_volume(capsys, monkeypatch):
    monkeypatch.setenv("OAR_DATA", "/home/me/data")
    monkeypatch.setenv("WANDB_API_KEY", "of mine")
    assert main(["launch", FOUR, *PODS, "--mount", "/disk", "--dry-run", "--recipe-on-nodes", "/workspace/r"]) == 0
    said = capsys.readouterr()
    head = yaml.safe_load(said.out)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry["value"] for entry in head["env"]}
    assert variables["OAR_DATA"] == "/disk/data/oar"
    assert variables["OAR_CHECKPOINTS"] == "/disk/checkpoints"
    assert "--config-path /workspace/r" in variables["OAR_LAUNCH_SCRIPT"]
    assert "bin/activate" not in variables["OAR_LAUNCH_SCRIPT"]
    assert "of mine" not in said.out
    assert "--secret NAME" in said.err


def test_a_template_of_ones_own(capsys, tmp_path):
    (tmp_path / "mine.j2").write_text("{{ nodes }} nodes\n")
    assert main(["launch", FOUR, *PODS, "--template", "mine.j2", "--dry-run"]) == 0
    assert capsys.readouterr().out == "4 nodes\n"


def test_on_this_machine_it_becomes_the_training_process(monkeypatch, capsys):
    became = []

    def execv(*arguments):
        became.extend([*arguments, os.environ["NCCL_DEBUG"]])
        raise SystemExit  # it does not return

    monkeypatch.setattr(os, "execv", execv)
    arguments = ["launch", ONE, "--variant", "grpo", "--env", "NCCL_DEBUG=INFO", "trainer.total_epochs=1"]
    with pytest.raises(SystemExit):
        main(arguments)
    program, words, variable = became
    assert words[:3] == [program, "-m", "verl.trainer.main_ppo"]
    assert words[-1] == "trainer.total_epochs=1"
    assert words[words.index("--config-name") + 1] == "grpo"
    assert variable == "INFO"
    assert main([*arguments, "--dry-run"]) == 0
    assert shlex.split(capsys.readouterr().out) == ["env", "NCCL_DEBUG=INFO", "OAR_CHECKPOINTS=/shared/c", *words]


@pytest.mark.parametrize(
    ("program", "where", "called"),
    [("sbatch", ["--on", "slurm"], "qwen2-5-32b-megatron-oar.sbatch"), ("kubectl", PODS, "create -f -")],
)
def test_it_is_submitted(program, where, called, tmp_path, monkeypatch):
    there = f'printf "%s" "$*" > {tmp_path}/called; cat *.sbatch - > {tmp_path}/submitted; exit 4'
    file = tmp_path / "bin" / program
    file.parent.mkdir()
    file.write_text(f"#!/bin/bash\n{there}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    where = [*where, "--env", "OAR_CHECKPOINTS=/shared/checkpoints"]
    assert main(["launch", FOUR, *where]) == 4
    assert (tmp_path / "called").read_text() == called
    assert "main_ppo" in (tmp_path / "submitted").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([FOUR], "--on local: the recipe needs 4 nodes with 8 GPUs; allowed: ray, slurm, kubernetes"),
        ([FOUR, "--on", "ray"], "--on ray needs --hosts"),
        ([FOUR, "--on", "ray", "--hosts", "a,b,c,c"], "--hosts a,b,c,c: 3 different hosts, the recipe needs 4 nodes"),
        ([FOUR, "--on", "ray", "--hosts", "a,b,c,d"], "there is no ssh here"),
        ([FOUR, "--on", "kubernetes", "--image", "i"], "--on kubernetes needs --claim"),
        (
            [FOUR, *PODS, "--env", "OAR_CHECKPOINTS=/sharedx/c"],
            "/sharedx/c/oar/qwen2_5_32b_megatron_oar: not on the volume",
        ),
        ([FOUR, "--on", "slurm", "--gpus-per-node", "4"], "trainer.n_gpus_per_node=8 does not fit on a node"),
        ([FOUR, "--on", "slurm", "--env", "OAR_CHECKPOINTS=c"], "set OAR_CHECKPOINTS to a folder on shared storage"),
        ([FOUR, "--on", "slurm", "--template", "no.j2"], "no.j2"),
        ([ONE, "--srun=-x"], "--srun belongs to --on slurm, this is --on local"),
        ([str(Path(__file__).parent)], "has no oar.yaml"),
        (["seven"], "seven: neither a folder nor a recipe; recipes: qwen2_5_14b_deepmath,"),
        ([ONE, "trainer.no_such_key=1"], "does not compose"),
        ([ONE, "algorithm.oar.tau=2"], "algorithm.oar.tau"),
        ([ONE, "--env", "NOPE"], "--env NOPE: not set here"),
        ([ONE, "--env", "HF_TOKEN"], "--env HF_TOKEN: a secret"),
        ([ONE, "--env", "a b=1"], "--env a b=1: not a name"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    assert main(["launch", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


@pytest.mark.parametrize(("option", "value"), [("--partitoin", "gpu"), ("--wait", "0"), ("--ssh", "'")])
def test_an_option_that_is_wrong_is_named_and_not_taken_for_an_override(option, value, capsys):
    with pytest.raises(SystemExit):
        main(["launch", ONE, "--dry-run", option, value])
    assert option in capsys.readouterr().err


def test_folders_hubs_and_libraries_reach_every_node_and_secrets_are_kept_apart():
    here = {"OAR_DATA": "/d", "NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k", "EDITOR": "vi", "WANDB_MODE": "offline"}
    assert for_nodes(here, []) == {"OAR_DATA": "/d", "NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    assert for_nodes(here, ["EDITOR", "OAR_DATA=/e=f"]).items() >= {"EDITOR": "vi", "OAR_DATA": "/e=f"}.items()
    assert for_nodes(here, [], volume="/v")["OAR_DATA"] == "/v/data/oar"
