"""Names of runs, and what a sweep is made of."""

import copy
from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from oar_plugin.runs.launch import runs
from oar_plugin.runs.launch.runs import name_of, plan_runs
from oar_plugin.runs.recipe import RecipeError, find_recipe
from tests.recipes.test_recipes import composed

RECIPE = "qwen2_5_7b_math"


def compose(folder, variant, words):
    config = copy.deepcopy(composed(folder, variant, *words))
    OmegaConf.set_readonly(config, False)
    return config


@pytest.fixture
def without_hydra(monkeypatch):
    """Composes nothing: the words are looked at, and the folder follows the name as in recipes."""

    def compose(folder, variant, words):
        assert variant != "grpo" or not any("oar" in word for word in words)
        trainer = {"experiment_name": "x", "default_local_dir": "c/${trainer.experiment_name}"}
        return OmegaConf.create({"data": {"seed": 1}, "trainer": trainer})

    monkeypatch.setattr(runs, "compose_recipe", compose)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "r-oar-s1"),
        (["trainer.save_freq=1", "trainer.logger=[wandb]", "+ray_kwargs.ray_init.address=auto"], "r-oar-s1"),
        (["trainer.total_epochs=9", "trainer.total_training_steps=9", "data.seed=1"], "r-oar-s1"),
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "critic.megatron.param_offload=True"], "r-oar-s1"),
        (["actor_rollout_ref.actor.profiler.enable=True", "critic.ppo_micro_batch_size_per_gpu=1"], "r-oar-s1"),
        (["trainer.resume_from_path=c/global_step_9"], "r-oar-s1-global_step_9-af24cd"),
        (["algorithm.oar.tau=0.5"], "r-oar-s1-tau0.5-edc5da"),
        (["algorithm.oar.tau=0.3", "algorithm.oar.tau=0.5"], "r-oar-s1-tau0.5-edc5da"),
        (["algorithm.oar.importance=oar_g", "algorithm.oar.beta=1"], None),
        (["algorithm.oar.beta=1", "algorithm.oar.importance=oar_g"], None),
        (["actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-7B", "algorithm.use_kl_in_reward=True"], None),
    ],
)
def test_a_name_is_readable_and_follows_from_what_is_learned(overrides, name):
    made = name_of("r", "oar", 1, overrides)
    if name is not None:
        assert made == name
    elif "Qwen" in overrides[0]:
        assert made.startswith("r-oar-s1-Qwen2.5-Math-7B-use_kl_in_rewardTrue-")
    else:
        assert made.rpartition("-")[0] == "r-oar-s1-beta1-oar_g"
        assert made == name_of("r", "oar", 1, overrides[::-1]), "whatever their order"


def test_values_with_one_label_and_long_ones_have_names_of_their_own():
    paths = [[f"actor_rollout_ref.model.path=/{user}/{'long' * 30}"] for user in ("a", "b")]
    names = [name_of("r", "oar", 1, words) for words in (*paths, ["data.x='a b/é'"], ["~data.x"], ["+data.x=1"])]
    assert len(set(names)) == 5
    assert all(len(name) < 100 and name.isascii() and not set(name) & set(" /'~+=") for name in names)


def test_seeds_and_variants_are_runs_of_their_own_with_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(runs, "compose_recipe", compose)
    made = plan_runs(find_recipe(RECIPE), ["oar", "grpo"], [None, 2])
    assert [run.name for run in made] == [f"{RECIPE}-{end}" for end in ("oar-s1", "oar-s2", "grpo-s1", "grpo-s2")]
    assert len({run.folder for run in made}) == 4
    keys = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
    for run, seed in zip(made, [1, 2, 1, 2], strict=True):
        assert {OmegaConf.select(run.config, key) for key in keys} == {seed}
        assert run.folder.name == run.config.trainer.experiment_name == run.name
        assert run.variant == "grpo" or run.config.algorithm.oar.seed == seed
    assert composed(find_recipe(RECIPE), "oar", *made[1].overrides) == made[1].config, "the command line is the run"


@pytest.mark.parametrize(
    ("variants", "sweeps", "names"),
    [
        (["oar"], ["algorithm.oar.importance=fisher,oar_g,oar_p,entropy"], ["fisher", "oar_g", "oar_p", "entropy"]),
        (["oar"], ["oar=default,published,decision"], ["default", "published", "decision"]),
        (
            ["oar", "grpo"],  # a baseline has no tau
            ["algorithm.oar.tau=0.3,0.9", "algorithm.oar.beta=range(1,3)"],
            ["beta1-tau0.3", "beta2-tau0.3", "beta1-tau0.9", "beta2-tau0.9", "grpo"],
        ),
        (["oar", "grpo"], ["data.train_batch_size=64,128"], ["batch_size64", "batch_size128"] * 2),
    ],
)
def test_a_sweep_is_every_combination_once(without_hydra, variants, sweeps, names):
    made = plan_runs(find_recipe(RECIPE), variants, [1], sweeps)
    assert len(made) == len(names) == len({run.folder for run in made})
    assert all(name in run.name for name, run in zip(names, made, strict=True))


@pytest.mark.parametrize(
    ("variants", "sweep", "message"),
    [
        (["grpo"], "algorithm.oar.tau=0.3,0.5", "--sweep algorithm.oar.tau=0.3,0.5: GRPO has no such key"),
        (["oar"], "trainer.total_epochs=1,2", "two of these runs would write there"),
        (["oar"], "algorithm.oar.tau=0.3,", "algorithm.oar.tau=0.3,"),
        (["oar"], "oar=glob(*)", "--sweep oar=glob(*): not a list of values; write them out: oar=VALUE,VALUE,..."),
        (["oar"], "algorithm.oar.tau=interval(0,1)", "not a list of values"),
    ],
)
def test_a_sweep_that_cannot_work(without_hydra, variants, sweep, message):
    with pytest.raises(RecipeError) as refused:
        plan_runs(find_recipe(RECIPE), variants, [1], [sweep])
    assert message in str(refused.value)


def test_names_of_jobs_fit_every_scheduler():
    words = ("algorithm.oar.importance=oar_g", "algorithm.oar.tau=0.5")
    jobs = [runs.Run("oar", name_of(Path("qwen2_5_7b_math").name, "oar", seed, words), (), None).job for seed in (1, 2)]
    assert len(set(jobs)) == 2
    assert all(len(job) <= 46 and set(job) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for job in jobs)
