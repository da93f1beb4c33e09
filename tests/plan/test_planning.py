"""Plans of the recipes: verdicts, suggestions that really fit, and what must not depend on what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.plan import LayoutError, choose_gpu, plan, suggest
from oar_plugin.plan.layout import read_setup, with_overrides
from oar_plugin.plan.planning import plan_setup

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL_GPU = choose_gpu("A100-80", memory_gib=24)


@pytest.fixture(params=["fsdp_config", "megatron_config"])
def config(request):
    return request.getfixturevalue(request.param)


def test_the_recipes_fit_on_the_cluster_that_they_name(config):
    for gpu in ("A100-80", "H100-80"):
        assert plan(config, gpu=gpu).verdict == "fits"


def test_peak_and_headroom_add_up_to_the_gpu(config):
    made = plan(config)
    assert made.peak.total + made.headroom == pytest.approx(made.gpu.memory)
    assert made.to_dict()["peak_bytes"] == max(phase["total"] for phase in made.to_dict()["memory"])


def test_suggestions_make_it_fit_and_have_no_superfluous_part(fsdp_config):
    def replan(changed):
        return plan(changed, gpu=SMALL_GPU)

    current = replan(fsdp_config)
    assert not current.fits
    found = suggest(fsdp_config, current, replan)
    assert found
    for suggestion in found:
        assert replan(with_overrides(fsdp_config, suggestion.overrides)).fits, suggestion.arguments
    together = next(s for s in found if ";" in s.reason)
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu"
    assert not replan(with_overrides(fsdp_config, {budget: together.overrides[budget]})).fits
    offload = {key: value for key, value in together.overrides.items() if key.endswith("offload")}
    assert offload
    assert not replan(with_overrides(fsdp_config, offload)).fits


def test_nothing_is_suggested_where_there_is_room(fsdp_config):
    def never(changed):
        raise AssertionError("planned again")

    assert suggest(fsdp_config, plan(fsdp_config), never) == []


def test_a_gpu_without_room_for_a_sequence_does_not_fit(fsdp_config):
    made = plan(with_overrides(fsdp_config, {f"{ROLLOUT}.gpu_memory_utilization": 0.115}))
    assert made.cache.sequences < 1
    assert made.verdict == "does not fit"
    found = suggest(fsdp_config, made, plan)
    assert any(f"{ROLLOUT}.gpu_memory_utilization" in s.overrides for s in found)


def test_grpo_takes_what_oar_takes_without_the_oar(fsdp_config):
    oar = plan(fsdp_config).seconds
    grpo = plan(with_overrides(fsdp_config, {"algorithm.adv_estimator": "grpo"})).seconds
    assert grpo.oar == 0
    assert grpo.total == pytest.approx(oar.total - oar.importance)
    assert oar.ratio_to_grpo == pytest.approx(oar.total / grpo.total)


def test_importance_needs_less_memory_than_the_update(config):
    totals = {phase.name: phase.total for phase in plan(config).memory}
    assert totals["log-probs with importance (fisher)"] < totals["update"]


@pytest.mark.parametrize("name", ["entropy", "random"])
def test_without_a_backward_nothing_is_kept_for_one(config, name):
    made = plan(with_overrides(config, {"algorithm.oar.importance": name}))
    phases = {phase.name: phase.total for phase in made.memory}
    importance = phases.get(f"log-probs with importance ({name})")
    assert (importance is None) == (made.seconds.oar == 0) == (name == "random")
    if importance is not None:
        assert importance - phases["log-probs"] < 2**31, "a chunk of rows of logits"
        assert 0 < made.seconds.oar_share < 0.02


def test_copies_cost_more_than_a_gradient(fsdp_config):
    fisher = plan(fsdp_config).seconds
    every = plan(with_overrides(fsdp_config, {"algorithm.oar.importance": "oar_p"})).seconds
    some = plan(with_overrides(fsdp_config, {"algorithm.oar.importance": "hybrid"})).seconds
    assert every.copies > some.copies > fisher.importance
    assert some.importance == pytest.approx(fisher.importance)


def test_offload_takes_the_states_off_the_gpu_while_it_generates(fsdp_config):
    group = f"{ACTOR}.fsdp_config"
    both = {f"{group}.param_offload": True, f"{group}.optimizer_offload": True}
    moved = {phase.name: phase.parts for phase in plan(with_overrides(fsdp_config, both)).memory}
    assert moved["generation"]["weights"] == moved["generation"]["optimizer"] == 0
    assert moved["update"]["optimizer"] > 0  # verl brings all of it back for the update


def test_separate_rollouts_overlap_with_training(fsdp_config):
    apart = with_overrides(
        fsdp_config,
        {
            "trainer.v1.trainer_mode": "separate_async",
            "trainer.v1.separate_async.parameter_sync_step": 2,
            "actor_rollout_ref.hybrid_engine": False,
            f"{ROLLOUT}.nnodes": 1,
            f"{ROLLOUT}.n_gpus_per_node": 8,
        },
    )
    made = plan(apart)
    assert made.seconds.total == max(made.seconds.generation, made.seconds.training)
    assert [phase.name for phase in made.memory][:2] == ["generation, GPUs of its own", "weight sync"]


# ---- what must hold whatever the sizes are

SIZES = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module")
def setups(fsdp_config, megatron_config):
    return [read_setup(fsdp_config), read_setup(megatron_config)]


@SIZES
@given(factor=st.sampled_from([2, 4, 8, 16]), tokens=st.integers(1024, 65536), which=st.integers(0, 1))
def test_more_gpus_never_need_more_memory_each(setups, factor, tokens, which):
    from dataclasses import replace

    few = setups[which]
    few = replace(few, training=replace(few.training, update_tokens=tokens, log_prob_tokens=tokens))
    shards = few.layout.shards * factor if which == 0 else few.layout.shards
    layout = replace(few.layout, gpus=few.layout.gpus * factor, shards=shards)
    many = replace(few, layout=layout, rollout=replace(few.rollout, gpus=few.rollout.gpus * factor))
    before, after = plan_setup(few, SMALL_GPU), plan_setup(many, SMALL_GPU)
    for one, other in zip(before.memory, after.memory, strict=True):
        assert other.total <= one.total + 1


@SIZES
@given(tokens=st.integers(512, 60000), more=st.integers(1, 60000), which=st.integers(0, 1))
def test_larger_micro_batches_never_need_less_memory(setups, tokens, more, which):
    from dataclasses import replace

    def peak(budget: int) -> dict[str, float]:
        training = replace(setups[which].training, update_tokens=budget, log_prob_tokens=budget)
        return {p.name: p.total for p in plan_setup(replace(setups[which], training=training), SMALL_GPU).memory}

    small, large = peak(tokens), peak(tokens + more)
    assert all(small[name] <= large[name] for name in small)


@SIZES
@given(share=st.floats(0, 1), more=st.floats(0, 1), which=st.integers(0, 1))
def test_scoring_more_responses_never_takes_less_time(setups, share, more, which):
    from dataclasses import replace

    low, high = sorted((share, more))
    times = []
    for part in (low, high):
        one = replace(setups[which], workload=replace(setups[which].workload, scored_share=part))
        times.append(plan_setup(one, SMALL_GPU).seconds.importance)
    assert times[0] <= times[1]


# ---- what cannot run


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        ({f"{ACTOR}.ppo_mini_batch_size": 100}, f"{ACTOR}.ppo_mini_batch_size=100", "128"),
        (
            {"data.train_batch_size": 3, f"{ACTOR}.ppo_mini_batch_size": 3, f"{ROLLOUT}.n": 5},
            "data.train_batch_size=3",
            "8",
        ),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 8}, f"{ACTOR}.ulysses_sequence_parallel_size=8", "1, 2, 4"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 8}, f"{ROLLOUT}.tensor_model_parallel_size=8", "1, 2, 4"),
        ({f"{ROLLOUT}.max_model_len": 2048}, f"{ROLLOUT}.max_model_len=2048", "3072"),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 2048}, f"{ACTOR}.ppo_max_token_len_per_gpu=2048", "3072"),
        ({"algorithm.oar.tau": 2}, "algorithm.oar.tau=2", "less than or equal to 1"),
        ({f"{ACTOR}.use_dynamic_bsz": False}, f"{ACTOR}.use_dynamic_bsz=False", "numbers"),
    ],
)
def test_what_cannot_run_under_fsdp_is_named(fsdp_config, overrides, key, allowed):
    with pytest.raises(LayoutError) as error:
        plan(with_overrides(fsdp_config, overrides))
    assert key in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size=3", "1, 2, 4, 8"),
        ({"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size=3", "1, 2, 4, 8"),
        ({"context_parallel_size": 3}, "context 3 = 48", "32 GPUs"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2", "allowed: 1"),
    ],
)
def test_what_cannot_run_under_megatron_is_named(megatron_config, overrides, key, allowed):
    with pytest.raises(LayoutError) as error:
        plan(with_overrides(megatron_config, {f"{ACTOR}.megatron.{k}": v for k, v in overrides.items()}))
    assert key in str(error.value)
    assert allowed in str(error.value)


def test_experts_under_megatron_are_refused_for_oar_only(megatron_config):
    # Its four key-value heads allow eight tensor-parallel ranks, which hold copies.
    model = "Qwen/Qwen3-30B-A3B"
    with pytest.raises(LayoutError, match="mixture of experts"):
        plan(megatron_config, model=model)
    plain = with_overrides(megatron_config, {"algorithm.adv_estimator": "grpo"})
    assert plan(plain, model=model).fits


def test_gpus_fill_whole_nodes(fsdp_config):
    assert plan(fsdp_config, gpus=16).setup.layout.gpus == 16
    with pytest.raises(LayoutError, match="multiple of 8"):
        plan(fsdp_config, gpus=12)
