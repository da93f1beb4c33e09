"""Plans of the recipes: verdicts, suggestions that really fit, and what must not depend on what."""

import pytest

from oar_plugin.plan import Expected, Plan, PlanError, choose_gpu, on_gpus, suggest
from oar_plugin.plan.memory import states
from oar_plugin.plan.seconds import COPIES, GATE, GENERATION, IMPORTANCE, UPDATE, step_flops
from oar_plugin.plan.setup import Setup, with_overrides

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL_GPU = choose_gpu("A100-80", memory_gib=24)


@pytest.fixture(params=["fsdp_config", "megatron_config"])
def config(request):
    return request.getfixturevalue(request.param)


def totals(made):
    return {phase: sum(parts.values()) for phase, parts in made.memory.items()}


def test_states_are_sixteen_bytes_a_weight_and_megatrons_twelve_over_the_data_parallel_ranks(
    fsdp_config, megatron_config
):
    one = Setup(fsdp_config)
    assert sum(states(one)) == pytest.approx(16 * one.model.parameters / 8)
    whole = Setup(with_overrides(megatron_config, {f"{ACTOR}.megatron.pipeline_model_parallel_size": 1}))
    local = whole.model.parameters / 8
    assert states(whole) == pytest.approx((2 * local, 4 * local, 12 * local / 4))


def test_adapters_have_gradients_and_moments_and_the_model_has_not(fsdp_config):
    setup = Setup(with_overrides(fsdp_config, {"actor_rollout_ref.model.lora_rank": 32}))
    weights, gradients, optimizer = states(setup)
    assert gradients == optimizer / 2 == 4 * 32 * setup.model.adapters / 8
    assert weights == 4 * setup.model.parameters / 8 + gradients


def test_suggestions_make_it_fit_and_have_no_superfluous_part(fsdp_config):
    def replan(changed):
        return Plan(changed, SMALL_GPU)

    current = replan(fsdp_config)
    assert not current.fits
    found = suggest(current, replan)
    assert all(replan(with_overrides(fsdp_config, made.overrides)).fits for made in found)
    together = next(made for made in found if ";" in made.reason)
    budgets = {key: value for key, value in together.overrides.items() if "max_token_len" in key}
    others = {key: value for key, value in together.overrides.items() if key not in budgets}
    for part in (budgets, others):
        assert part
        assert not replan(with_overrides(fsdp_config, part)).fits


def test_nothing_is_suggested_where_there_is_room(fsdp_config):
    assert suggest(Plan(fsdp_config), lambda changed: pytest.fail("planned again")) == []


def test_a_gpu_without_room_for_a_sequence_does_not_fit(fsdp_config):
    made = Plan(with_overrides(fsdp_config, {f"{ROLLOUT}.gpu_memory_utilization": 0.115}))
    assert made.cached < 1
    assert made.verdict == "does not fit"
    assert any(f"{ROLLOUT}.gpu_memory_utilization" in each.overrides for each in suggest(made, Plan))


def test_grpo_takes_what_oar_takes_without_the_oar(config):
    oar, grpo = Plan(config), Plan(with_overrides(config, {"algorithm.adv_estimator": "grpo"}))
    assert grpo.oar == 0
    assert grpo.step == pytest.approx(oar.step - oar.oar)
    assert oar.to_grpo == pytest.approx(oar.step / grpo.step)
    assert totals(oar)["importance (fisher)"] < totals(oar)["update"], "importance needs less memory than the update"


def test_onward_takes_a_second_forward_and_backward_and_projects_the_reasoning(config):
    s = Setup(config)
    onward = step_flops(Setup(with_overrides(config, {"algorithm.oar.importance": "onward"})))[IMPORTANCE]
    scored = s.sequences * s.scored_share
    forward = s.model.layers_flops(s.mean_length) + 2 * s.model.head_flops(s.mean_response - 2 * s.answer_rows)
    assert onward == pytest.approx(2 * step_flops(s)[IMPORTANCE] + scored * forward)


@pytest.mark.parametrize(("name", "share"), [("entropy", 0.02), ("random", 0.01)])
def test_without_a_backward_nothing_is_kept_for_one(config, name, share):
    made = Plan(with_overrides(config, {"algorithm.oar.importance": name}))
    assert made.oar < share * made.step
    assert (IMPORTANCE in made.seconds) == (f"importance ({name})" in made.memory) == (name == "entropy")
    if name == "entropy":
        assert totals(made)["importance (entropy)"] - totals(made)["log-probs"] < 2**31, "a chunk of rows of logits"


def test_an_importance_of_ones_own_is_planned_like_any_other(config):
    own = with_overrides(config, {"algorithm.oar.importance": "python:tests.own_importance:Saliency"})
    assert Plan(own).seconds == Plan(config).seconds


def test_copies_cost_more_than_a_gradient_and_by_budget(fsdp_config):
    def seconds(**keys):
        return Plan(with_overrides(fsdp_config, {f"algorithm.oar.{key}": x for key, x in keys.items()})).seconds

    every, some = seconds(importance="oar_p"), seconds(importance="hybrid")
    assert every[COPIES] > some[COPIES] > seconds()[IMPORTANCE] == pytest.approx(some[IMPORTANCE])
    s = Setup(fsdp_config)
    own_forward = s.sequences * s.scored_share * s.model.layers_flops(s.mean_length) / (8 * 989e12 * 0.5)
    assert (some[COPIES] - own_forward) / (every[COPIES] - own_forward) == pytest.approx(0.3)


def test_offload_takes_the_states_off_the_gpu_while_it_generates(fsdp_config):
    both = {f"{ACTOR}.fsdp_config.{what}_offload": True for what in ("param", "optimizer")}
    moved = Plan(with_overrides(fsdp_config, both)).memory
    assert moved["generation"]["weights"] == moved["generation"]["optimizer"] == 0
    assert moved["update"]["optimizer"] > 0  # verl brings all of it back for the update


def test_separate_rollouts_overlap_with_training(fsdp_config):
    keys = {f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 8, "actor_rollout_ref.hybrid_engine": False}
    mode = {"trainer.v1.trainer_mode": "separate_async", "trainer.v1.separate_async.parameter_sync_step": 2}
    made = Plan(with_overrides(fsdp_config, keys | mode))
    training = sum(made.seconds.values()) - made.seconds[GENERATION]
    assert made.step == max(made.seconds[GENERATION], training)
    assert list(made.memory)[:2] == ["generation, GPUs of its own", "log-probs"]


def test_hours_are_those_of_all_steps_and_validations_within_a_range(fsdp_config):
    made = Plan(fsdp_config)
    expected, least, most = made.hours
    assert made.setup.steps == (7473 + 7500) // 256 * 15
    assert least < made.setup.steps * made.step / 3600 < expected < most
    fewer = with_overrides(fsdp_config, {"trainer.total_training_steps": 87})
    assert Plan(fewer).hours[0] == pytest.approx(expected / 10, rel=0.02)
    assert Plan(with_overrides(fsdp_config, {"data.train_files": ["/nowhere/own.parquet"]})).hours is None


def test_training_rows_are_counted_where_the_file_is_there(fsdp_config, tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"prompt": ["?"] * 1000}).to_parquet(tmp_path / "train.parquet")
    config = with_overrides(fsdp_config, {"data.train_files": [str(tmp_path / "train.parquet")]})
    assert Plan(config).setup.steps == 3 * 15


def test_more_gpus_never_need_more_memory_each_and_larger_micro_batches_never_less(config):
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu"
    own = Plan(config)
    more = Plan(on_gpus(config, own.setup.gpus * 2))
    larger = Plan(with_overrides(config, {budget: 2 * config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu}))
    for phase, total in totals(own).items():
        assert totals(more)[phase] <= total + 1 <= totals(larger)[phase] + 2


def test_scoring_more_responses_takes_more_importance_and_nothing_else(config):
    half, all_ = (Plan(config, expected=Expected(scored_share=share)).seconds for share in (0.5, 1.0))
    assert half[IMPORTANCE] < all_[IMPORTANCE]
    assert (half[UPDATE], half[GATE]) == (all_[UPDATE], all_[GATE])


# ---- what cannot run


@pytest.mark.parametrize(
    ("config", "overrides", "key", "allowed"),
    [
        ("fsdp_config", {f"{ACTOR}.ppo_mini_batch_size": 100}, "ppo_mini_batch_size=100", "128"),
        (
            "fsdp_config",
            {"data.train_batch_size": 3, f"{ACTOR}.ppo_mini_batch_size": 3, f"{ROLLOUT}.n": 5},
            "size=3",
            "8",
        ),
        ("fsdp_config", {f"{ACTOR}.ulysses_sequence_parallel_size": 8}, "sequence_parallel_size=8", "1, 2, 4"),
        ("fsdp_config", {f"{ROLLOUT}.tensor_model_parallel_size": 8}, "model_parallel_size=8", "1, 2, 4"),
        ("fsdp_config", {f"{ROLLOUT}.max_model_len": 2048}, f"{ROLLOUT}.max_model_len=2048", "3072"),
        ("fsdp_config", {f"{ACTOR}.ppo_max_token_len_per_gpu": 2048}, "ppo_max_token_len_per_gpu=2048", "3072"),
        (
            "fsdp_config",
            {"actor_rollout_ref.model.path": "Qwen2.5-Math-7B", "data.max_response_length": 4096},
            "=4096",
            "3072",
        ),
        (
            "megatron_config",
            {f"{ACTOR}.megatron.tensor_model_parallel_size": 3},
            "tensor_model_parallel_size=3",
            "1, 2, 4, 8",
        ),
        (
            "megatron_config",
            {f"{ACTOR}.megatron.pipeline_model_parallel_size": 3},
            "pipeline_model_parallel_size=3",
            "1, 2, 4",
        ),
        ("megatron_config", {f"{ACTOR}.megatron.context_parallel_size": 3}, "context 3 = 48", "32 GPUs"),
    ],
)
def test_what_cannot_run_is_named(request, config, overrides, key, allowed):
    with pytest.raises(PlanError) as error:
        Plan(with_overrides(request.getfixturevalue(config), overrides))
    assert key in str(error.value)
    assert allowed in str(error.value)


def test_experts_under_megatron_are_refused(megatron_config):
    with pytest.raises(PlanError, match="mixture of experts"):
        Plan(megatron_config, expected=Expected(model="Qwen/Qwen3-30B-A3B"))


def test_gpus_fill_whole_nodes(fsdp_config):
    assert Plan(on_gpus(fsdp_config, 16)).setup.gpus == 16
    with pytest.raises(PlanError, match="multiple of 8"):
        on_gpus(fsdp_config, 12)
