"""What a recipe needs, read from its configuration."""

import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from oar_plugin.launch.job import LaunchError, needs, read_job
from tests.launch.conftest import STRANGE

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def config(trainer, rollout=None, reward=None):
    pools = {"trainer": trainer, "rollout": rollout or (0, 8), "reward": reward or (0, 8)}
    nodes = {name: {"nnodes": n, "n_gpus_per_node": gpus} for name, (n, gpus) in pools.items()}
    mode = "separate_async" if rollout else "sync"
    return OmegaConf.create(
        {
            "trainer": {**nodes["trainer"], "v1": {"trainer_mode": mode}},
            "actor_rollout_ref": {"rollout": nodes["rollout"]},
            "reward": {"reward_model": {**nodes["reward"], "enable_resource_pool": reward is not None}},
        }
    )


@pytest.mark.parametrize(
    ("pools", "gpus_of_a_node", "expected"),
    [
        ({"trainer": (4, 8)}, None, (4, 8, 32)),
        ({"trainer": (2, 4)}, 8, (1, 8, 8)),  # two parts on one machine
        ({"trainer": (1, 4), "rollout": (1, 4)}, None, (1, 8, 8)),  # one machine, split
        ({"trainer": (2, 8), "rollout": (1, 8)}, None, (3, 8, 24)),
        ({"trainer": (1, 8), "rollout": (2, 4)}, None, (2, 8, 16)),
        ({"trainer": (1, 4), "rollout": (1, 4), "reward": (1, 2)}, None, (3, 4, 10)),
        ({"trainer": (1, 4), "rollout": (1, 4), "reward": (1, 2)}, 8, (2, 8, 10)),
    ],
)
def test_nodes_and_gpus_are_those_of_all_pools(pools, gpus_of_a_node, expected):
    assert needs(config(**pools), gpus_of_a_node) == expected


def test_a_pool_that_does_not_fit_on_a_node_is_refused():
    with pytest.raises(LaunchError, match=r"trainer.n_gpus_per_node=8 does not fit"):
        needs(config((2, 8)), 4)


def test_the_command_survives_a_shell(job):
    words = shlex.split(job.train(on_cluster=True))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert words[words.index("--config-path") + 1] == "/shared/my recipes/seven"
    assert STRANGE in words
    assert "+ray_kwargs.ray_init.address=auto" in words
    assert "+ray_kwargs.ray_init.address=auto" not in shlex.split(job.train(on_cluster=False))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=False", "data.train_batch_size=7"],
            "verl refuses this configuration",
        ),
        (["trainer.use_v1=False"], "trainer.use_v1=False: the legacy trainer"),
        (["trainer.nnodes=2"], "set OAR_CHECKPOINTS to a folder on shared storage"),
    ],
)
def test_what_verl_or_oar_would_refuse_later_is_refused_before_anything_starts(overrides, message, monkeypatch, capsys):
    monkeypatch.delenv("OAR_CHECKPOINTS", raising=False)
    with pytest.raises(LaunchError, match=message):
        read_job(RECIPES / "qwen2_5_7b_math", "oar", overrides, {}, "", None, None, 60)
    assert capsys.readouterr().out == ""


def test_a_recipe_becomes_a_job(monkeypatch):
    monkeypatch.setenv("OAR_CHECKPOINTS", "/shared/c")
    job = read_job(RECIPES / "qwen2_5_32b_megatron", "grpo", [], {}, "", Path("/there/recipe"), None, 60)
    assert (job.nodes, job.gpus_per_node, job.gpus) == (4, 8, 32)
    assert job.checkpoints == "/shared/c/oar/qwen2_5_32b_megatron_grpo"
    assert "/there/recipe" in shlex.split(job.train(on_cluster=True))
    assert job.name == "recipe-grpo"
