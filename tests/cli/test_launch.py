"""`oar launch`: from the command line to what is run."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
import yaml

from oar_plugin.cli.main import main
from oar_plugin.hosts.verl import capabilities
from oar_plugin.runs import recipe, run_folder
from oar_plugin.runs.launch import job, preflight
from oar_plugin.runs.launch.job import for_nodes
from verl_cpu.launch import cpu_environment

pytest.importorskip("verl")

from tests.limits import PROCESS_S
from tests.recipes.test_recipes import composed

ONE, FOUR = "qwen2_5_7b_math", "qwen2_5_32b_megatron"
PODS = "--on kubernetes --image i:1 --claim disk"


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """That of a user who has set one variable; what the command sets is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "compose_recipe", lambda folder, variant, words: composed(folder, variant, *words))
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(("OAR_", "NCCL_", "VLLM_", "VERL_", "HF_", "WANDB_")) or name in cpu_environment():
                del os.environ[name]
        os.environ["OAR_CHECKPOINTS"] = "/shared/c"
        yield os.environ


@pytest.mark.parametrize("where", [["--on", "slurm"], ["--on", "ray", "--hosts", "a,b,c,d"]])
def test_a_dry_run_prints_a_script_and_needs_no_cluster(where, capsys, environment, monkeypatch, tmp_path):
    """Nodes of a verl that does not look for plugins import ours."""
    monkeypatch.setattr(capabilities, "external_modules", lambda: {capabilities.EXTERNAL_MODULES: "mine,ours"})
    environment |= {"PATH": "/bin", "NCCL_DEBUG": "it's"}
    assert main(["launch", FOUR, *where, "--dry-run", "trainer.experiment_name='a b'", "--resume"]) == 0
    said = capsys.readouterr()
    parts = ["export NCCL_DEBUG='it'\"'\"'s'", "bin/activate", "export OAR_START=resume"]
    parts.append(f"export {capabilities.EXTERNAL_MODULES}=mine,ours")
    assert [part for part in parts if part not in said.out] == []
    assert "4 nodes with 8 GPUs, checkpoints in /shared/c/oar/a b" in said.err
    assert not list(tmp_path.iterdir())


def test_on_kubernetes_folders_are_on_the_volume_and_pods_run_their_own_recipe(capsys, environment, tmp_path):
    environment |= {"OAR_DATA": "/home/me/data", "WANDB_API_KEY": "of mine"}
    words = [*PODS.split(), "--dry-run"]
    assert main(["launch", FOUR, *words, "--recipe-on-nodes", "/workspace/r"]) == 0
    said = capsys.readouterr()
    head = yaml.safe_load(said.out)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    variables = {entry["name"]: entry["value"] for entry in head["spec"]["containers"][0]["env"]}
    assert {"OAR_DATA": "/shared/data/oar", "OAR_CHECKPOINTS": "/shared/checkpoints"}.items() <= variables.items()
    (script,) = head["metadata"]["annotations"].values()
    assert "--config-path /workspace/r" in script
    assert "bin/activate" not in script
    assert "of mine" not in said.out
    assert main(["launch", FOUR, *words]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    (script,) = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["annotations"].values()
    assert str(recipe.find_recipe(FOUR)) not in script
    told = f'python() {{ [ "$1" = -m ] && echo "$4" || {shlex.quote(sys.executable)} "$@"; }}\n{script}'
    found = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True, timeout=PROCESS_S)
    assert found.stdout.strip() == str(recipe.find_recipe(FOUR))
    shutil.copytree(recipe.find_recipe(FOUR), tmp_path / "mine")
    assert main(["launch", str(tmp_path / "mine"), *words]) == 2
    assert f"{tmp_path}/mine: a folder of this machine" in capsys.readouterr().err


def levels(said):
    """Subject and level of the findings on standard error."""
    lines = [line.split(": ") for line in said.splitlines() if line.startswith("oar launch: ")]
    return {(words[1], words[2]) for words in lines if len(words) > 3}


@pytest.fixture
def child(monkeypatch, environment, tmp_path):
    """What runs in place of verl: a line of Python, which sees the run's overrides."""
    environment["OAR_CHECKPOINTS"] = str(tmp_path)

    def make(code):
        name = "'s' + [word for word in sys.argv if word.startswith('data.seed')][0].split('=')[1]"
        code = f"import os, sys, time, signal; name = {name}; {code}"
        monkeypatch.setattr(job, "command", lambda folder, variant, words: ["python", "-c", code, *words])

    return make


def test_what_is_missing_stops_a_run_and_not_a_dry_one(child, capfd, environment):
    environment["NCCL_DEBUG"] = "INFO"
    child("print(name, os.environ['NCCL_DEBUG'])")
    arguments = ["launch", ONE, "--variant", "grpo", "--seed", "7", "--gpu", "L4"]
    assert main(arguments) == 1
    said = capfd.readouterr()
    assert {("memory", "missing"), ("data", "missing")} <= levels(said.err)
    assert "`oar data`" in said.err
    assert "--no-check" in said.err.splitlines()[-1]
    assert said.out == ""
    assert main([*arguments, "--no-check"]) == 0
    assert capfd.readouterr().out == "s7 INFO\n"


def test_verl_is_imported_last_and_a_dry_run_does_without_it(monkeypatch, capsys):
    def check(config):
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr(recipe, "check_config", check)
    assert main(["launch", ONE]) == 1, "data are missing"
    assert "ray" not in capsys.readouterr().err
    for words, level, status in ((["--dry-run"], "not checked", 0), ([], "missing", 1)):
        assert main(["launch", ONE, *words]) == status
        said = capsys.readouterr().err
        assert (
            f"verl: {level}: cannot be imported here: ModuleNotFoundError: No module named 'ray'; to train, use" in said
        )
        assert "which wants transformers" in said
        monkeypatch.setattr(preflight, "examine", lambda *_, **__: (None, [preflight.Finding("memory", "note", "?")]))


def test_files_of_a_container_are_not_looked_for(capsys):
    assert main(["launch", FOUR, "--on", "slurm", "--dry-run", "--srun=--container-image=i.sqsh"]) == 0
    said = capsys.readouterr()
    assert "bin/activate" not in said.out
    assert {subject for subject, level in levels(said.err) if level == "not checked"} == {"data", "model", "reward"}


def test_keys_of_oar_that_another_estimator_leaves_unused_are_told(capsys):
    for words, told in ([], True), (["--variant", "grpo"], False), (["--variant", "grpo", "oar=default"], True):
        assert main(["launch", ONE, "algorithm.adv_estimator=rloo", *words, "--dry-run"]) == 0
        assert (("estimator", "note") in levels(capsys.readouterr().err)) is told


@pytest.mark.parametrize(("where", "alone"), [("", True), ("--on slurm", False)])
def test_a_run_on_the_cpus_of_one_machine_listens_on_its_loopback(where, alone, environment, capsys):
    environment["OAR_SMOKE"] = "/smoke"
    assert main(["launch", ONE, "+cpu_smoke=dp", *where.split(), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert [name in said for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0", "GLOO_SOCKET_IFNAME=lo")] == [alone] * 2
    assert "RAY_USAGE_STATS_ENABLED=0" in said


@pytest.mark.parametrize(
    ("program", "where", "called"), [("sbatch", ["--on", "slurm"], ""), ("kubectl", PODS.split(), "create -f -")]
)
def test_it_is_submitted(program, where, called, tmp_path, environment):
    file = tmp_path / "bin" / program
    file.parent.mkdir()
    file.write_text(f'#!/bin/bash\nprintf "%s" "$*" > {tmp_path}/called; cat > {tmp_path}/submitted; exit 4\n')
    file.chmod(0o755)
    environment["PATH"] = f"{file.parent}:{environment['PATH']}"
    assert main(["launch", FOUR, *where, "--no-check"]) == 1
    assert (tmp_path / "called").read_text() == called
    assert "main_ppo" in (tmp_path / "submitted").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (FOUR, "--on local: the recipe needs 4 nodes with 8 GPUs; allowed: ray, slurm, kubernetes"),
        (f"{FOUR} --on ray", "--on ray needs --hosts"),
        (f"{FOUR} --on ray --hosts a,b,c,c", "--hosts a,b,c,c: 3 different hosts, the recipe needs 4 nodes"),
        (f"{FOUR} --on slurm --no-check", "sbatch"),
        (f"{FOUR} --on kubernetes --image i", "--on kubernetes needs --claim"),
        (f"{FOUR} --on slurm trainer.default_local_dir=c", "set OAR_CHECKPOINTS to a folder on shared storage"),
        (f"{FOUR} --on slurm --template no.j2", "no.j2"),
        (f"{ONE} --srun=-x", "--srun belongs to --on slurm, this is --on local"),
        ("seven", "seven: neither a folder nor a recipe; recipes: qwen2_5_0_5b_gsm8k,"),
        (f"{ONE} --dry-run actor_rollout_ref.actor.use_dynamic_bsz=False data.train_batch_size=7", "verl refuses this"),
        (f"{ONE} algorithm.oar.tau=2", "algorithm.oar.tau"),
        (f"{ONE} --dry-run algorithm.adv_estimator=gae", "gae, critic.enable=None verl trains a critic: set one"),
        (f"{ONE} --dry-run +actor_rollout_ref.rollout.nope=1", "verl refuses this"),
        (f"{ONE} --dry-run actor_rollout_ref.actor.loss_agg_mode=token_mean", "Invalid loss_agg_mode: token_mean"),
        (f"{ONE} --dry-run +actor_rollout_ref.model.nope=1", "no such key: actor_rollout_ref.model.nope"),
        (f"{ONE} trainer.val_only=True trainer.val_before_train=False", "trainer.val_before_train=False with"),
        (f"{ONE} --gpu H1", "--gpu H1"),
        (f"{ONE} --seeds 2 trainer.experiment_name=x", "two of these runs would write there; use --name"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_status_2(words, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", *shlex.split(words)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_folders_hubs_and_libraries_reach_every_node_and_secrets_are_kept_apart():
    here = {"OAR_DATA": "/d", "NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k", "EDITOR": "vi", "WANDB_MODE": "offline"}
    assert for_nodes(here) == {"OAR_DATA": "/d", "NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    pods = for_nodes(here | {"HF_HUB_CACHE": "/home/me"}, in_pods=True)
    assert (pods["OAR_DATA"], pods["WANDB_MODE"], "HF_HUB_CACHE" in pods) == ("/shared/data/oar", "offline", False)


# ---- several runs


def test_each_seed_and_variant_is_a_run_with_a_folder(capsys):
    words = ["--seeds", "2", "--variant", "oar,grpo", "--name", "tau 0.5", "oar=published", "algorithm.oar.tau=0.5"]
    assert main(["launch", ONE, *words, "data.shuffle=False", "--dry-run"]) == 0
    said = capsys.readouterr()
    commands = [shlex.split(line) for line in said.out.splitlines()]
    for words, variant, seed in zip(commands, ["oar", "oar", "grpo", "grpo"], [1, 2, 1, 2], strict=True):
        run = f"tau 0.5-{variant}-s{seed}"
        assert words[:2] == ["env", "OAR_CHECKPOINTS=/shared/c"]
        assert f"{run}: 1 node with 8 GPUs, checkpoints in /shared/c/oar/{run}. " in said.err
        seeds = [f"{key}={seed}" for key in (*job.SEEDS, *(["algorithm.oar.seed"] if variant == "oar" else []))]
        given = ["oar=published", "algorithm.oar.tau=0.5"] if variant == "oar" else []  # a baseline has no tau
        assert words[words.index("--config-name") + 1 : -1] == [variant, *seeds, *given, "data.shuffle=False"]
    assert [subject for subject, _ in levels(said.err)].count("data") == 1


def test_a_folder_of_a_run_with_other_settings_is_refused_or_resumed(tmp_path, environment, capsys):
    environment["OAR_CHECKPOINTS"] = str(tmp_path)
    other = recipe.compose_recipe(recipe.find_recipe(ONE), "oar", ["actor_rollout_ref.actor.optim.lr=5.0"])
    folder, words = run_folder.begin(other), ["launch", ONE, "--dry-run"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{folder} holds a run with other settings" in said
    for more in (["--seed", "2"], ["--name", "mine"], ["--resume"], ["trainer.val_only=True"]):
        assert main([*words, *more]) == 0
    assert "Validates the untrained model Qwen/Qwen2.5-7B, without a checkpoint of" in capsys.readouterr().err


def test_a_run_that_fails_is_reported_and_the_next_one_starts(child, capfd):
    (done,) = job.plan_runs(recipe.find_recipe(ONE), ["oar"], [2], [])
    run_folder.begin(done.config)
    run_folder.end(done.folder, "finished")
    child("print(name); sys.exit(3 if name.endswith('s1') else 0)")
    assert main(["launch", ONE, "--seeds", "3", "--no-check", "trainer.total_training_steps=9"]) == 2, "others"
    assert main(["launch", ONE, "--seeds", "3", "--no-check"]) == 1
    said = capfd.readouterr()
    assert said.out.split() == ["s1", "s3"]
    assert f"{ONE}-oar-s1: failed, exit status 3" in said.err
    assert f"{ONE}-oar-s2 has finished" in said.err


def test_ctrl_c_ends_the_run_and_starts_no_other(child, tmp_path):
    ends = "signal.signal(2, lambda *_: (open(f'{name}.ended', 'w'), sys.exit(130)))"
    child(ends + "; open(f'{name}.up', 'w'); time.sleep(60)")

    def press():
        while not list(tmp_path.glob("*.up")):
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert main(["launch", ONE, "--seeds", "2", "--no-check"]) == 130
    assert sorted(file.name for file in tmp_path.glob("s*.*")) == ["s1.ended", "s1.up"]
