"""`oar launch`: from the command line to what is run."""

import json
import os
import re
import shlex
import shutil
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import yaml

from oar_plugin.cli.main import main
from oar_plugin.hosts.verl import capabilities
from oar_plugin.runs import recipe, run_folder
from oar_plugin.runs.launch import job, runs
from oar_plugin.runs.launch.job import for_nodes
from verl_cpu.launch import cpu_environment

pytest.importorskip("verl")

from tests.runs.launch.test_runs import compose

ONE, FOUR = "qwen2_5_7b_math", "qwen2_5_32b_megatron"
PODS = "--on kubernetes --image i:1 --claim disk"


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """That of a user who has set one variable; what the command sets is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "compose_recipe", compose)
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(("OAR_", "NCCL_", "VLLM_", "VERL_", "HF_", "WANDB_")) or name in cpu_environment():
                del os.environ[name]
        os.environ["OAR_CHECKPOINTS"] = "/shared/c"
        yield os.environ


@pytest.mark.parametrize("where", [["--on", "slurm"], ["--on", "ray", "--hosts", "a,b,c,d"]])
def test_a_dry_run_prints_a_script_and_needs_no_cluster(where, capsys, environment, tmp_path):
    environment["PATH"] = "/bin"
    words = ["--dry-run", "trainer.experiment_name='a b'", "--env", "A=it's", "--fresh"]
    assert main(["launch", FOUR, *where, *words]) == 0
    said = capsys.readouterr()
    parts = ("export A='it'\"'\"'s'", "--nodes 4 --gpus 32 --timeout 900", "bin/activate", "export OAR_START=fresh:")
    assert [part for part in parts if part not in said.out] == []
    assert "4 nodes with 8 GPUs, checkpoints in /shared/c/oar/a b" in said.err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_marks_what_is_unset_and_prints(capsys, environment, tmp_path):
    shutil.copytree(recipe.find_recipe(FOUR), tmp_path / "mine")
    file = tmp_path / "mine" / "recipe.yaml"
    file.write_text(file.read_text().replace("Qwen/Qwen2.5-32B", "${oc.env:MODELS}/32b"))
    del environment["OAR_CHECKPOINTS"]
    words = ["launch", str(tmp_path / "mine"), "--on", "ray", "--env", "NOPE"]
    with mock.patch.dict(os.environ):
        assert main([*words, "--dry-run"]) == 1
    said = capsys.readouterr()
    assert [mark for mark in ("--hosts", "NOPE", "OAR_CHECKPOINTS") if f"({mark} is unset)" not in said.out] == []
    assert "(MODELS is unset)/32b" in said.err
    assert main([*words, "--cfg", "job"]) == 1
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["adv_estimator"] == "oar"
    assert main(["launch", ONE, "actor_rollout_ref.model.path='~/none'", "--dry-run"]) == 0
    assert ("model", "missing") in levels(capsys.readouterr().err)


def test_on_kubernetes_folders_are_on_the_volume_and_pods_run_their_own_recipe(capsys, environment, tmp_path):
    environment |= {"OAR_DATA": "/home/me/data", "WANDB_API_KEY": "of mine"}
    patch = tmp_path / "patch.yaml"
    patch.write_text("rayjob: {metadata: {labels: {queue: gpus}}}")
    words = [*PODS.split(), "--mount", "/disk", "--dry-run", "--resume", "--patch", str(patch)]
    assert main(["launch", FOUR, *words, "--recipe-on-nodes", "/workspace/r"]) == 0
    said = capsys.readouterr()
    job = yaml.safe_load(said.out)
    assert job["metadata"]["labels"] == {"queue": "gpus"}
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry["value"] for entry in head["env"]}
    wanted = {"OAR_DATA": "/disk/data/oar", "OAR_CHECKPOINTS": "/disk/checkpoints", "OAR_START": "resume"}
    assert wanted.items() <= variables.items()
    assert "--config-path /workspace/r" in variables["OAR_LAUNCH_SCRIPT"]
    assert "bin/activate" not in variables["OAR_LAUNCH_SCRIPT"]
    assert "of mine" not in said.out
    assert "--secret NAME" in said.err
    assert main(["launch", FOUR, *words]) == 0
    said = capsys.readouterr()
    assert '--config-path "$$recipe"' in said.out
    assert str(recipe.find_recipe(FOUR)) not in said.out
    shutil.copytree(recipe.find_recipe(FOUR), tmp_path / "mine")
    assert main(["launch", str(tmp_path / "mine"), *words]) == 2
    assert f"{tmp_path}/mine: a folder of this machine" in capsys.readouterr().err


def levels(said):
    """Subject and level of the findings on standard error."""
    lines = [line.split(": ") for line in said.splitlines() if line.startswith("oar launch: ")]
    return {(words[1], words[2]) for words in lines if len(words) > 3}


def test_what_is_missing_stops_a_run_and_not_a_dry_one(capsys, monkeypatch):
    became = []

    def execvp(program, words):
        became.append((program, words, os.environ["NCCL_DEBUG"]))
        raise SystemExit  # it does not return

    monkeypatch.setattr(os, "execvp", execvp)
    arguments = ["launch", ONE, "--variant", "grpo", "--env", "NCCL_DEBUG=INFO", "trainer.total_epochs=1"]
    assert main([*arguments, "--gpu", "H100", "--gpu-memory", "20"]) == 1
    said = capsys.readouterr()
    assert {("memory", "missing"), ("data", "missing")} <= levels(said.err)
    assert "GPUs of 20 GiB" in said.err
    assert "oar data gsm8k math math500" in said.err
    assert "--no-check" in said.err.splitlines()[-1]
    assert (said.out, became) == ("", [])
    with pytest.raises(SystemExit):
        main([*arguments, "--no-check"])
    ((program, words, variable),) = became
    assert words[:3] == [program, "-m", "verl.trainer.main_ppo"]
    assert words[6:] == ["grpo", "trainer.total_epochs=1", f"trainer.experiment_name={ONE}-grpo-s1"]
    assert variable == "INFO"
    capsys.readouterr()
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert ("data", "missing") in levels(said.err)
    assert shlex.split(said.out) == ["env", "NCCL_DEBUG=INFO", "OAR_CHECKPOINTS=/shared/c", *words]


def test_a_job_asks_for_the_time_that_is_given_and_files_of_a_container_are_not_looked_for(capsys):
    words = ["--max-time", "7", "--sbatch=--time=1", "--srun=--container-image=i.sqsh"]
    assert main(["launch", FOUR, "--on", "slurm", "--dry-run", *words]) == 0
    said = capsys.readouterr()
    times = [line for line in said.out.splitlines() if line.startswith("#SBATCH --time=")]
    assert times == ["#SBATCH --time=7:00:00", "#SBATCH --time=1"]
    assert "GPU-hours on 32 GPUs" in said.err
    assert {subject for subject, level in levels(said.err) if level == "not checked"} == {"data", "model", "reward"}


def test_a_template_of_ones_own(capsys, tmp_path):
    (tmp_path / "mine.j2").write_text("{{ nodes }} nodes\npython -m oar_plugin.launch.wait\n")
    assert main(["launch", FOUR, *PODS.split(), "--template", "mine.j2", "--dry-run"]) == 0
    assert capsys.readouterr().out == "4 nodes\npython -m oar_plugin.runs.launch.wait\n"


@pytest.mark.parametrize(("where", "alone"), [("", True), ("--on slurm", False), ("--on ray --hosts a", False)])
def test_a_run_on_the_cpus_of_one_machine_listens_on_its_loopback(where, alone, environment, capsys):
    environment["OAR_SMOKE"] = "/smoke"
    assert main(["launch", ONE, "+cpu_smoke=dp", *where.split(), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert [name in said for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0", "GLOO_SOCKET_IFNAME=lo")] == [alone] * 2
    assert "RAY_USAGE_STATS_ENABLED=0" in said


def test_nodes_of_a_verl_that_does_not_look_for_plugins_import_ours(capsys, monkeypatch):
    monkeypatch.setattr(capabilities, "external_modules", lambda: {capabilities.EXTERNAL_MODULES: "mine,ours"})
    assert main(["launch", FOUR, "--on", "slurm", "--dry-run"]) == 0
    assert f"export {capabilities.EXTERNAL_MODULES}=mine,ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "where", "called"),
    [("sbatch", ["--on", "slurm"], "qwen2-5-32b-megatron-oar-s1.sbatch"), ("kubectl", PODS.split(), "create -f -")],
)
def test_it_is_submitted(program, where, called, tmp_path, environment):
    file = tmp_path / "bin" / program
    file.parent.mkdir()
    noted = f'printf "%s" "$*" > {tmp_path}/called; cat *.sbatch - > {tmp_path}/submitted'
    file.write_text(f"#!/bin/bash\n{noted}; exit 4\n")
    file.chmod(0o755)
    environment["PATH"] = f"{file.parent}:{environment['PATH']}"
    assert main(["launch", FOUR, *where, "--env", "OAR_CHECKPOINTS=/shared/checkpoints", "--no-check"]) == 1
    assert (tmp_path / "called").read_text() == called
    assert "main_ppo" in (tmp_path / "submitted").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (FOUR, "--on local: the recipe needs 4 nodes with 8 GPUs; allowed: ray, slurm, kubernetes"),
        (f"{FOUR} --on ray", "--on ray needs --hosts"),
        (f"{FOUR} --on ray --hosts a,b,c,c", "--hosts a,b,c,c: 3 different hosts, the recipe needs 4 nodes"),
        (f"{FOUR} --on ray --hosts a,b,c,d", "there is no ssh here"),
        (f"{FOUR} --on kubernetes --image i", "--on kubernetes needs --claim"),
        (f"{FOUR} {PODS} --env OAR_CHECKPOINTS=/sharedx", "/sharedx/oar/qwen2_5_32b_megatron-oar-s1: not on the"),
        (f"{FOUR} --on slurm --env OAR_CHECKPOINTS=c", "set OAR_CHECKPOINTS to a folder on shared storage"),
        (f"{FOUR} --on slurm --template no.j2", "no.j2"),
        (f"{ONE} --srun=-x", "--srun belongs to --on slurm, this is --on local"),
        (f"{Path(__file__).parent}", "has no oar.yaml"),
        ("seven", "seven: neither a folder nor a recipe; recipes: qwen2_5_0_5b_gsm8k,"),
        (f"{ONE} data.no_such_key=1", "data.no_such_key=1: verl's schema has no such key; to add one, write +data"),
        (f"{ONE} --sweep algorithm.oar.tauu=1,2", "did you mean algorithm.oar.tau?"),
        (f"{ONE} +oar=decision", "write oar=decision"),
        (f"{ONE} actor_rollout_ref.actor.use_dynamic_bsz=False data.train_batch_size=7", "verl refuses this"),
        (f"{ONE} algorithm.oar.tau=2", "algorithm.oar.tau"),
        (f"{ONE} --env NOPE", "--env NOPE: not set here"),
        (f"{ONE} --env HF_TOKEN", "--env HF_TOKEN: a secret"),
        (f"{ONE} --env 'a b=1'", "--env a b=1: not a name"),
        (f"{ONE} --gpu H1", "--gpu H1"),
        (f"{ONE} --max-time 9", "--max-time belongs to --on slurm"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_status_2(words, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("started"))
    assert main(["launch", *shlex.split(words)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_folders_hubs_and_libraries_reach_every_node_and_secrets_are_kept_apart():
    here = {"OAR_DATA": "/d", "NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k", "EDITOR": "vi", "WANDB_MODE": "offline"}
    assert for_nodes(here, []) == {"OAR_DATA": "/d", "NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    assert for_nodes(here, ["EDITOR", "OAR_DATA=/e=f"]).items() >= {"EDITOR": "vi", "OAR_DATA": "/e=f"}.items()
    assert for_nodes(here, [], volume="/v")["OAR_DATA"] == "/v/data/oar"


# ---- several runs


def test_each_seed_variant_and_swept_value_is_a_run_with_a_folder(capsys):
    words = "--seeds 2 --variant oar,grpo --sweep algorithm.oar.importance=fisher,oar_g"
    assert main(["launch", ONE, *words.split(), "--dry-run"]) == 0
    said = capsys.readouterr()
    names = re.findall(r"trainer\.experiment_name=(\S+)", said.out)
    assert len(set(names)) == len(said.out.splitlines()) == 6
    assert [name for name in names if f"checkpoints in /shared/c/oar/{name}." not in said.err] == []


def test_a_folder_of_a_run_with_other_settings_is_refused_resumed_or_moved_aside(tmp_path, environment, capsys):
    environment["OAR_CHECKPOINTS"] = str(tmp_path)
    other = compose(recipe.find_recipe(ONE), "oar", ())
    other.trainer.experiment_name = f"{ONE}-oar-s1"
    other.actor_rollout_ref.actor.optim.lr = 5.0
    folder, words = run_folder.begin(other), ["launch", ONE, "--dry-run"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{folder} holds a run with other settings" in said
    assert "actor_rollout_ref.actor.optim.lr: 5.0 there, 1e-06 now" in said
    for option, variable in (("--resume", "OAR_START=resume"), ("--fresh", "OAR_START=fresh:")):
        assert main([*words, option]) == 0
        assert variable in capsys.readouterr().out
    assert main([*words, "--seed", "2"]) == 0
    # A run that ran out of memory is found again; one that was never started is not.
    assert main([*words, "--resume", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"]) == 0
    assert f"checkpoints in {folder}" in capsys.readouterr().err
    assert main([*words, "--resume", "data.train_batch_size=64"]) == 2
    assert "batch_size64" in (said := capsys.readouterr().err)
    assert "no run there; name it with trainer.experiment_name=..." in said


@pytest.fixture
def child(monkeypatch, environment, tmp_path):
    """What runs in place of verl: a line of Python, which sees the run's overrides."""
    environment["OAR_CHECKPOINTS"] = str(tmp_path)

    def make(code):
        name = "[word for word in sys.argv if 'experiment_name' in word][0].split('=')[1]"
        code = f"import sys, time, signal; name = {name}; {code}"
        monkeypatch.setattr(job, "command", lambda folder, variant, words: ["python", "-c", code, *words])

    return make


def test_a_run_that_fails_is_reported_and_the_next_one_starts(child, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a library that another test imports may have set a narrow terminal
    (done,) = runs.plan_runs(recipe.find_recipe(ONE), ["oar"], [2])
    folder = run_folder.begin(done.config)
    run_folder.end(folder, "finished")
    (folder / "metrics").mkdir()
    for name, steps in (("start", {10: 0.4, 20: 0.6, 30: 0.9}), ("start.1", {21: 0.1, 30: 0.5})):  # from step 20
        lines = [{"step": n, "data": {"loss": 1, "val-core/a/acc/mean@4": value}} for n, value in steps.items()]
        (folder / "metrics" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    child("print(name); sys.exit(3 if name.endswith('s1') else 0)")
    assert main(["launch", ONE, "--seeds", "3", "--no-check", "trainer.total_training_steps=9"]) == 2, "others"
    assert main(["launch", ONE, "--seeds", "3", "--no-check"]) == 1
    said = capfd.readouterr()
    assert [line for line in said.out.splitlines() if line.startswith(ONE)] == [f"{ONE}-oar-s1", f"{ONE}-oar-s3"]
    assert f"{ONE}-oar-s1: failed, exit status 3" in said.err
    rows = [line.split() for line in said.out.splitlines() if line.startswith(" ") and ONE in line]
    states = ["not", "started"], ["finished", "30"], ["not", "started"]
    assert [row[:3] for row in rows] == [[f"{ONE}-oar-s{seed}", *state] for seed, state in enumerate(states, start=1)]
    assert " ".join(rows[1][5:]) == "0.500 (step 30) 0.600 (step 20)"
    assert main(["launch", ONE, "--seeds", "3", "--status"]) == 0
    assert "finished" in capfd.readouterr().out


def test_ctrl_c_ends_the_run_and_starts_no_other(child, tmp_path):
    ends = "signal.signal(2, lambda *_: (open(f'{name}.ended', 'w'), sys.exit(130)))"
    child(ends + "; open(f'{name}.up', 'w'); time.sleep(60)")

    def press():
        while not list(tmp_path.glob("*.up")):
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert main(["launch", ONE, "--seeds", "2", "--no-check"]) == 130
    assert sorted(file.name for file in tmp_path.glob("*.*e*d")) == [f"{ONE}-oar-s1.ended"]
    assert not (tmp_path / f"{ONE}-oar-s2.up").exists()
