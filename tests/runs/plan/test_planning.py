"""Plans of the recipes: verdicts, what must not depend on what, what cannot run; and the models that are known."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.count.shapes import at, dimensions
from oar_plugin.runs.plan.known import KNOWN, NotPlannedError, PlanError, load_model
from oar_plugin.runs.plan.planning import COPIES, GATE, GENERATION, IMPORTANCE, LOG_PROB, UPDATE, Plan, temporary
from oar_plugin.runs.recipe import compose_recipe, find_recipe
from tests.recipes.test_recipes import FOLDER, composed, with_overrides


def of(name):
    return pytest.fixture(lambda: composed(FOLDER / name))


fsdp, megatron, experts = map(of, ("qwen2_5_7b_math", "qwen2_5_32b_megatron", "qwen3_30b_a3b_megatron"))


@pytest.fixture(params=["fsdp", "megatron"])
def config(request):
    return request.getfixturevalue(request.param)


def changed(config, *overrides):
    """A copy with overrides as on a command line; `actor`, `rollout`, `model` and `oar` stand for their whole names."""
    short = {"actor": "actor_rollout_ref.actor", "rollout": "actor_rollout_ref.rollout"}
    short |= {"model": "actor_rollout_ref.model", "oar": "algorithm.oar"}
    pairs = (re.sub(r"^\w+", lambda name: short.get(name[0], name[0]), one).split("=") for one in overrides)
    return with_overrides(config, {key: yaml.safe_load(value) for key, value in pairs})


def states(made):
    return tuple(made.memory[UPDATE][part] for part in ("weights", "gradients", "optimizer"))


def total(made, phase):
    return sum(made.memory[phase].values())


def test_states_are_sixteen_bytes_per_weight_and_megatrons_twelve_over_the_data_parallel_ranks(fsdp, megatron):
    one = Plan(fsdp)
    assert sum(states(one)) == pytest.approx(16 * one.parameters["all"] / 8)
    whole = Plan(changed(megatron, "actor.megatron.pipeline_model_parallel_size=1"))
    local = whole.parameters["all"] / 8
    assert states(whole) == pytest.approx((2 * local, 4 * local, 12 * local / 4))
    # Adapters have gradients and moments, and the model has not.
    lora = Plan(compose_recipe(find_recipe("qwen2_5_7b_lora")))
    weights, gradients, optimizer = states(lora)
    linear = 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))  # inputs and outputs of all linear layers
    assert gradients == optimizer / 2 == pytest.approx(4 * 64 * linear / 8)
    assert weights == pytest.approx(4 * one.parameters["all"] / 8 + gradients)


def test_experts_are_split_over_ranks_of_their_own(experts):
    whole = Plan(experts)  # tensor parallel 4, expert parallel 8, on 32 GPUs
    dense, mixed = (whole.parameters["all"] - whole.parameters["experts"]) / 4, whole.parameters["experts"] / 8
    optimizer = 12 * (dense / 8 + mixed / 4)  # over the ranks that hold the same parameters
    assert states(whole) == pytest.approx((2 * (dense + mixed), 4 * (dense + mixed), optimizer))
    # By default Megatron splits an expert as attention.
    sliced = Plan(changed(experts, "actor.megatron.expert_tensor_parallel_size=null"))
    assert states(sliced)[0] == pytest.approx(2 * (dense + mixed / 4))
    assert sliced.step > whole.step


def test_a_gpu_without_room_for_a_sequence_does_not_fit(fsdp):
    made = Plan(changed(fsdp, "rollout.gpu_memory_utilization=0.115"))
    assert (made.cached < 1, made.verdict) == (True, "does not fit")
    assert "less than one sequence" in made.margin
    advised = [Plan(changed(fsdp, f"actor.ppo_max_token_len_per_gpu={tokens}")).advice for tokens in (3072, 3073)]
    assert ["a smaller" in advice for advice in advised] == [False, True], "one sequence must fit"


def test_grpo_takes_what_oar_takes_without_the_oar(config):
    config = changed(config, "oar.importance=fisher")
    oar, grpo = Plan(config), Plan(changed(config, "algorithm.adv_estimator=grpo"))
    assert grpo.oar == 0
    assert grpo.step == pytest.approx(oar.step - oar.oar) == pytest.approx(oar.step / oar.to_grpo)
    assert total(oar, IMPORTANCE) < total(oar, UPDATE), "importance needs less memory than the update"
    # Scoring all responses in place of half of them changes importance alone.
    all_ = Plan(config, scored=1.0).seconds
    assert oar.seconds[IMPORTANCE] < all_[IMPORTANCE]
    assert (oar.seconds[UPDATE], oar.seconds[GATE]) == (all_[UPDATE], all_[GATE])


def test_a_backward_from_the_reasoning_projects_it_and_each_backward_takes_a_forward(config):
    s = Plan(changed(config, "oar.importance=fisher"))
    two = Plan(changed(config, "oar.importance=python:benchmarks.candidates.learning:Onward"))  # also from the answer
    more = two.passes[IMPORTANCE][0] - 2 * s.passes[IMPORTANCE][0]
    reasoning = s.mean_response - 8
    assert more == pytest.approx(s.sequences * s.scored_share * 2 * s.flops_of("head", reasoning - 8))
    passes = s.flops_of("layers", s.length) + s.flops_of("importance", s.length) - s.flops_of(LOG_PROB, s.length)
    assert s.passes[IMPORTANCE][0] > s.sequences * s.scored_share * passes


def test_without_a_backward_nothing_is_kept_for_one(config):
    entropy, random = (Plan(changed(config, f"oar.importance={name}")) for name in ("entropy", "random"))
    assert entropy.oar < 0.02 * entropy.step
    assert random.oar < 0.01 * random.step
    assert total(entropy, IMPORTANCE) == total(entropy, LOG_PROB)
    assert IMPORTANCE not in random.memory | random.seconds


def test_copies_cost_more_than_a_gradient_by_their_number_and_length(fsdp):
    keys = "oar.perturbation.span=1", "oar.perturbation.span=8", "oar.amortize.share=0.25", "rollout.n=8"
    exact = "oar.importance=oar_p", "oar.amortize.share=null"
    plans = [Plan(changed(fsdp, *exact, key)) for key in keys]
    every, spans, some, same = (made.seconds[COPIES] for made in plans)
    s = Plan(changed(fsdp, "oar.importance=fisher"))
    assert every > spans > s.seconds[IMPORTANCE]
    assert every / spans == pytest.approx(8)
    reasoning = s.mean_response - 8
    assert some / every == pytest.approx(plans[2].computed * 8 / reasoning), "eight units of each"
    assert plans[2].seconds[IMPORTANCE] > 0, "predictions are not free"
    assert same == every


def test_the_default_costs_what_was_counted(fsdp):
    """Without seconds of a driver: 2.8 % of log-probs and update (docs/amortized.md), of as many responses."""
    keys = "data.train_batch_size=256", "data.max_response_length=6144", "data.max_prompt_length=256"
    made = Plan(changed(fsdp, *keys))
    assert made.computed == pytest.approx(4 / 128), "26 of 1,024 on eight ranks"
    added = made.seconds[COPIES] + made.seconds[IMPORTANCE]
    assert 0.01 < added / (made.seconds[LOG_PROB] + made.seconds[UPDATE]) < 0.04


def test_the_driver_deals_chosen_rows_out_evenly(fsdp):
    keys = "oar.importance=fisher", "oar.amortize.share=0.125"
    one, many = (Plan(changed(fsdp, *keys, f"trainer.nnodes={nodes}")) for nodes in (1, 64))
    assert 0.125 <= one.computed < 0.13
    assert one.passes[IMPORTANCE][1] == one.scored_share * one.computed
    assert many.computed == pytest.approx(1 / (many.sequences * many.scored_share / many.dp)), "one row of each rank"


def test_offload_takes_the_states_off_the_gpu_while_it_generates(fsdp):
    both = (f"actor.fsdp_config.{what}_offload=True" for what in ("param", "optimizer"))
    moved = Plan(changed(fsdp, *both)).memory
    assert moved["generation"]["weights"] == moved["generation"]["optimizer"] == 0
    assert moved["update"]["optimizer"] > 0  # verl brings all of it back for the update


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_replaced_groups_are_generated_and_all_of_the_batch_is_scored(fsdp, share):
    all_scored = Plan(fsdp, scored=1.0)
    made = Plan(changed(fsdp, "algorithm.filter_groups.enable=True"), scored=share)
    assert sum(made.rounds) == pytest.approx(made.sequences / share)
    more = made.seconds.pop(GENERATION) / all_scored.seconds.pop(GENERATION)
    assert more == 1 if share == 1 else more > 1
    assert made.seconds == all_scored.seconds


def test_separate_rollouts_overlap_with_training(fsdp):
    mode = ("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2")
    keys = ("rollout.nnodes=1", "rollout.n_gpus_per_node=8", "actor_rollout_ref.hybrid_engine=False")
    made = Plan(changed(fsdp, *mode, *keys))
    training = sum(made.seconds.values()) - made.seconds[GENERATION]
    assert made.step == max(made.seconds[GENERATION], training)
    assert list(made.memory)[:2] == ["generation, GPUs of its own", "log-probs"]


def test_hours_are_those_of_all_steps_and_validations_within_a_range(fsdp):
    made = Plan(fsdp)
    expected, least, most = made.hours
    assert made.steps == (7473 + 7500) // 256 * 4
    assert least < made.steps * made.step / 3600 < expected < most
    validation = Plan(changed(fsdp, "trainer.total_training_steps=0")).hours[0]  # one, before training
    assert expected == pytest.approx(made.steps * made.step / 3600 + 13 * validation)
    assert Plan(changed(fsdp, "data.train_files=[/nowhere/own.parquet]")).hours is None


def test_more_gpus_never_need_more_memory_each(config):
    one, more = (Plan(changed(config, f"trainer.nnodes={n * config.trainer.nnodes}")) for n in (1, 2))
    assert [phase for phase in one.memory if total(more, phase) > total(one, phase) + 1] == []


@pytest.mark.parametrize(
    ("layout", "overrides", "said"),
    [
        ("fsdp", "actor.ulysses_sequence_parallel_size=3", "context 3 = 3: must divide the 8 GPUs"),
        ("fsdp", "rollout.tensor_model_parallel_size=16", "tensor_model_parallel_size=16: must divide the 8 GPUs"),
        ("megatron", "actor.megatron.context_parallel_size=3", "context 3 = 48: must divide the 32 GPUs"),
        ("experts", "actor.megatron.expert_model_parallel_size=24", "expert 24: must divide the 32 GPUs"),
        ("fsdp", "actor.strategy=veomni", "actor_rollout_ref.actor.strategy=veomni; only fsdp, fsdp2, megatron"),
        ("fsdp", "model.path=nobody/Model-7B", "model.path=nobody/Model-7B: no folder with a config.json, and not in"),
        ("fsdp", "model.path=nobody/Model-7B", "(`hf download MODEL config.json`)"),
        ("fsdp", "actor.use_dynamic_bsz=False", "use_dynamic_bsz=False; only True"),
        ("megatron", "actor.megatron.sequence_parallel=False", "megatron.sequence_parallel=False; only True"),
    ],
)
def test_what_cannot_run_is_named_without_a_network(request, monkeypatch, layout, overrides, said):
    monkeypatch.setattr("socket.getaddrinfo", lambda *asked: pytest.fail(f"looked for {asked}"))
    with pytest.raises(PlanError) as error:
        Plan(changed(request.getfixturevalue(layout), *overrides.split()))
    assert said in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp"), [("qwen2_5_7b_math", 2), ("qwen2_5_1_5b_math", 4), ("qwen3_30b_a3b_megatron", 8)]
)
def test_a_token_in_vllms_cache(name, tp):
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    overrides = [f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}"]
    made = Plan(compose_recipe(find_recipe(name), "oar", overrides))
    heads, size = max(1, made.model.num_key_value_heads // tp), made.model.head_dim
    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)
    assert made.cache_bytes == spec.page_size_bytes / 16 * made.model.num_hidden_layers


# ---- models

# Name -> number of parameters, as the model cards and the checkpoints' indices have it.
MODELS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "/models/Qwen2.5-7B/": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen2.5-Math-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "01-ai/Yi-1.5-34B-Chat-16K": 34_388_917_248,
}


def parameters(model):
    """Of the whole model, from transformers' own models of one layer and of two."""
    values = json.loads(dimensions(model))
    kind = values.pop("model_type")
    configs = (AutoConfig.for_model(kind, num_hidden_layers=layers, **values) for layers in (1, 2))
    with torch.device("meta"):
        one, two = (AutoModelForCausalLM.from_config(config).num_parameters() for config in configs)
    return one + (model.num_hidden_layers - 1) * (two - one)


def test_known_models_have_the_published_sizes_and_are_known_by_the_end_of_their_path(fsdp):
    assert {name: parameters(load_model(name)) for name in MODELS} == MODELS
    for name, size in MODELS.items():
        assert Plan(changed(fsdp, f"model.path={name}")).parameters["all"] == size


def test_a_model_in_a_folder_is_what_its_config_says_and_not_what_the_folder_is_called(fsdp, tmp_path):
    (folder := tmp_path / "Qwen2.5-7B").mkdir()
    values = json.loads(dimensions(load_model("Qwen2.5-1.5B"))) | {"num_hidden_layers": 28, "head_dim": None}
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
    made = Plan(changed(fsdp, f"model.path={folder}"))
    assert made.parameters["all"] == MODELS["Qwen/Qwen2.5-1.5B"] + made.parameters["embedding"]
    assert made.model.source == str(folder / "config.json")
    experts = json.loads(dimensions(load_model("Qwen3-30B-A3B"))) | {"num_hidden_layers": 48, "num_local_experts": 64}
    del experts["num_experts"]  # as transformers 5 writes it
    (folder / "config.json").write_text(json.dumps(experts))
    assert load_model(str(folder)).num_experts == 64


def test_a_config_that_the_formulas_do_not_describe_is_named(tmp_path):
    experts = dict(zip(KNOWN["columns"], KNOWN["models"]["Qwen3-30B-A3B"][:8], strict=False))
    for text, said in {
        "{": "JSONDecodeError",
        "[]": "config.json is not an object",
        '{"model_type": "mamba"}': f"model_type=mamba ({tmp_path}/config.json); only llama, mistral, ",
        '{"model_type": "llama", "hidden_size": "64"}': "no number hidden_size, intermediate_size, ",
        json.dumps({**experts, "num_experts_per_tok": 8}): "no number num_experts, moe_intermediate_size in",
    }.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(NotPlannedError, match=re.escape(said)):
            load_model(str(tmp_path))


# ---- formulas beside counts

COUNTS = json.loads(Path(__file__).with_name("counts.json").read_text())
KEYS = {"shards": "trainer.n_gpus_per_node", "weights": "actor.fsdp_config.model_dtype", "lora_rank": "model.lora_rank"}
KEYS |= {"recompute": "model.enable_gradient_checkpointing", "fused": "model.use_fused_kernels"}
KEYS |= {"entropy_rows": "actor.entropy_from_logits_chunk_size"}
LOOSE = {"fused", "lora_rank"}  # their peaks are small: they may be overestimated
COUNTED = json.loads((Path(__file__).parents[3] / "benchmarks/results/count.json").read_text())["runs"]
LAYOUTS = {"checkpointing": [], "whole activations": [f"{KEYS['recompute']}=False"], "LoRA 32": ["model.lora_rank=32"]}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_and_parameters_are_what_was_counted(fsdp, name):
    for layout, words in LAYOUTS.items():
        made = Plan(changed(fsdp, f"model.path={name}", *words))
        counts, layers = COUNTED[name].get(layout, {"flops": {}, "parameters": {}}), made.model.num_hidden_layers
        flops = {phase: at(of, layers, 4096) for phase, of in counts["flops"].items()}
        assert {phase: made.flops_of(phase, 4096) for phase in flops} == pytest.approx(flops, rel=0.003)
        assert {what: at(of, layers) for what, of in counts["parameters"].items()}.items() <= made.parameters.items()


@pytest.mark.parametrize(("name", "tokens", "shape", "peaks"), COUNTS)
def test_memory_is_what_was_counted_within_a_tenth(fsdp, name, tokens, shape, peaks):
    words = [f"{KEYS[key]}={value}" for key, value in {"shards": 8, "entropy_rows": 2048, **shape}.items()]
    made = Plan(changed(fsdp, f"model.path={name}", "rollout.tensor_model_parallel_size=1", *words))
    found = [temporary(made, phase, tokens) / 2**30 for phase in (LOG_PROB, "importance", UPDATE)]
    for size, peak in zip(found, peaks, strict=True):
        assert 0.9 < size / peak < (1.5 if LOOSE & shape.keys() else 1.1), (found, peaks)
