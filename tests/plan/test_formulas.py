"""Formulas against numbers worked out by hand."""

from dataclasses import replace

import pytest

from oar_plugin.config import OarConfig
from oar_plugin.plan import communication, compute, memory
from oar_plugin.plan.activations import LayerStyle, held, layer_saved
from oar_plugin.plan.layout import Layout, Rollout, Setup, Training, Workload
from oar_plugin.plan.shape import ModelShape, load_shape

# Hidden 8, two layers, two heads of 4, one of them key-value, MLP 16, ten tokens.
SMALL = ModelShape("small", 8, 2, 2, 1, 4, 16, 10, tied=False)
ATTENTION, MLP = 8 * (8 + 2 * 4) + 8 * 8, 3 * 8 * 16


def setup(layout: Layout, training: Training | None = None, oar: OarConfig | None = None) -> Setup:
    work = Workload(64, 8, 256, 768, 128, 512, updates=2)
    rollout = Rollout(layout.gpus, 2, 2, 0.5, 1024, 256, 8192)
    return Setup(load_shape("Qwen/Qwen2.5-7B"), work, layout, training or Training(), rollout, oar)


def test_a_forward_takes_two_operations_a_weight_and_token_and_attention():
    layers = 2 * (ATTENTION + MLP)
    scores = 2 * 4 * 8 * 6 * 0.5  # two layers, two products of query x length, half of them masked
    assert compute.forward(SMALL, 5, length=6) == 5 * (2 * layers + scores) + 5 * 2 * 8 * 10


def test_an_update_takes_three_forwards_without_attention_and_recomputation():
    forward = compute.forward(SMALL, 5, length=0)
    assert compute.update(SMALL, 5, 0, "none") == 3 * forward
    recomputed = compute.layers_forward(SMALL, 5, 0)
    assert compute.update(SMALL, 5, 0, "full", stops_early=False) == 3 * forward + recomputed
    assert compute.update(SMALL, 5, 0, "full") == 3 * forward + recomputed - 5 * 2 * 2 * 8 * 16  # no last projection


def test_importance_adds_one_forward_of_the_layers_and_the_answers_rows():
    added = compute.importance_backward(SMALL, 5, 0, rows=3, recompute="none")
    assert added == compute.layers_forward(SMALL, 5, 0) + 2 * 3 * 2 * 8 * 10


def test_copies_cost_by_budget_and_span():
    work = Workload(1, 1, 100, 1000, 100, 1008)
    every = compute.masked_copies(SMALL, OarConfig.parse({"importance": "oar_p"}), work, True)
    third = compute.masked_copies(
        SMALL, OarConfig.parse({"importance": "oar_p", "perturbation": {"budget": 0.3}}), work, True
    )
    whole = compute.masked_copies(SMALL, OarConfig.parse({"importance": "oar_p"}), work, False)
    assert third / every == pytest.approx(0.3, rel=0.01)
    assert whole > 1.4 * every


def test_fsdp_states_are_sixteen_bytes_a_weight_over_the_shards():
    shape = load_shape("Qwen/Qwen2.5-7B")
    state = memory.states(shape, Layout("fsdp", 8, 8, shards=8), Training(weight_bytes=4))
    assert state.weights == state.gradients == pytest.approx(4 * shape.parameters / 8)
    assert state.weights + state.gradients + state.optimizer == pytest.approx(16 * shape.parameters / 8)


def test_megatron_states_are_six_bytes_a_weight_and_twelve_over_the_data_parallel_ranks():
    shape = load_shape("Qwen/Qwen2.5-32B")
    layout = Layout("megatron", 32, 8, tp=8, pp=1, sequence_parallel=True)
    state = memory.states(shape, layout, Training(weight_bytes=2))
    local = (shape.parameters - shape.hidden) / 8
    assert state.weights + state.gradients == pytest.approx(6 * local)
    assert state.optimizer == pytest.approx(12 * local / 4)


def test_adapters_have_gradients_and_moments_and_the_model_has_not():
    shape = load_shape("Qwen/Qwen2.5-7B")
    state = memory.states(shape, Layout("fsdp", 8, 8, shards=8), Training(lora_rank=32))
    assert state.gradients == pytest.approx(4 * shape.lora_parameters(32) / 8)
    assert state.weights > 4 * shape.parameters / 8


def test_a_cache_entry_of_qwen_7b_is_56_kib():
    assert memory.kv_bytes_per_token(load_shape("Qwen/Qwen2.5-7B"), 1, 2) == 2 * 28 * 4 * 128 * 2
    # Four key-value heads on eight GPUs: each holds one.
    assert memory.kv_bytes_per_token(load_shape("Qwen/Qwen2.5-7B"), 8, 2) == 2 * 28 * 1 * 128 * 2


def test_a_float32_layer_saves_what_its_modules_save():
    style = LayerStyle("hf", 4)
    norms = 2 * (4 + 4 + 4) * 8  # float32 input, normalised, output
    attention = 4 * (8 + 4 + 4 + 8) + 4 * 2
    assert layer_saved(SMALL, style, "all", experts=False) == norms + attention + 4 * 4 * 16
    # Frozen: neither normalised values and outputs of norms, nor the product before the last projection.
    assert layer_saved(SMALL, style, "none", experts=False) == 2 * 4 * 8 + attention + 3 * 4 * 16


def test_sequence_parallelism_divides_all_of_a_layer():
    whole = layer_saved(SMALL, LayerStyle("megatron", 2), "all", experts=False)
    assert layer_saved(SMALL, LayerStyle("megatron", 2, 2, True), "all", experts=False) == whole / 2
    assert whole / 2 < layer_saved(SMALL, LayerStyle("megatron", 2, 2, False), "all", experts=False) < whole


def test_recomputation_keeps_an_input_a_layer():
    deep = replace(SMALL, layers=100)
    kept = held(deep, LayerStyle("megatron", 2), "none", "full")
    assert kept.head == 100 * 2 * 8 + 2 * 8
    assert kept.layer < 0.4 * held(deep, LayerStyle("megatron", 2), "none", "none").layer


def test_entropy_in_chunks_takes_less():
    whole = memory.logits_in_forward(1000, 2, False, 16384, None)
    assert memory.logits_in_forward(1000, 2, False, 16384, 2048) == 1000 * (2 * 16384 + 12 * 2048) < whole


def test_fsdp_gathers_twice_and_reduces_once_in_an_update():
    one = setup(Layout("fsdp", 8, 8, shards=8), Training(update_tokens=10**9, log_prob_tokens=10**9))
    sent = communication.step_traffic(one).sent
    weights = one.shape.parameters
    assert sent["log_prob"]["FSDP all-gather"] == pytest.approx(2 * weights * 7 / 8)
    # Two optimizer steps of one micro-batch each.
    assert sent["update"]["FSDP all-gather"] == pytest.approx(2 * 2 * 2 * weights * 7 / 8)
    assert sent["update"]["FSDP reduce-scatter"] == pytest.approx(2 * 4 * weights * 7 / 8)
    assert "importance" not in sent


def test_what_importance_sends_under_megatron_is_what_its_documentation_says():
    layout = Layout("megatron", 8, 8, tp=2, pp=1, cp=2, sequence_parallel=True)
    one = setup(layout, oar=OarConfig.parse({"importance": "fisher"}))
    added = communication.megatron_importance(one)
    responses, answer, length = 64 * 8 * 0.5 / 2, 8, 128 + 512
    rows = 2 * 2 * responses * answer * one.shape.hidden + 12 * responses  # e N H twice, 12 B
    assert added["OAR rows"] == pytest.approx(2 * rows / 2)
    assert added["OAR pooled logits"] == pytest.approx(2 * 4 * responses * one.shape.vocab / 2 / 2)
    assert added["OAR scores"] == pytest.approx(2 * 2 * 4 * responses * length / 2)


def test_onward_takes_a_second_forward_and_backward_and_projects_the_reasoning():
    layout = Layout("megatron", 8, 8, tp=2, pp=1, cp=2, sequence_parallel=True)
    fisher, onward = (setup(layout, oar=OarConfig.parse({"importance": name})) for name in ("fisher", "onward"))
    responses, answer, response, length = 64 * 8 * 0.5, 8, 512, 128 + 512
    one, two = (compute.step_flops(each).importance for each in (fisher, onward))
    projected = compute.head(onward.shape, responses * (response - 2 * answer))
    assert two == pytest.approx(
        2 * one + compute.layers_forward(onward.shape, responses * length, length) + 2 * projected
    )
    added = communication.megatron_importance(onward)
    rows, reasoning = responses / 2 * answer, responses / 2 * (response - answer)
    hidden = 2 * 2 * (rows + reasoning) * onward.shape.hidden  # e (N + R) H twice
    assert added["OAR rows"] == pytest.approx(2 * (hidden + 12 * rows + 24 * reasoning) / 2)
    assert added["OAR pooled logits"] == 0
    assert added["OAR scores"] == pytest.approx(3 * communication.megatron_importance(fisher)["OAR scores"])


def test_what_importance_sends_under_ulysses():
    layout = Layout("fsdp", 8, 8, shards=8, ulysses=2)
    responses, length = 64 * 8 * 0.5 / 4, 128 + 512
    counts = {"fisher": (1, 1), "oar_g": (2, 1), "onward": (0, 3), "entropy": (0, 1), "random": (0, 0)}
    for name, (pooled, scores) in counts.items():
        one = setup(layout, oar=OarConfig.parse({"importance": name}))
        sent = communication.step_traffic(one).sent.get("importance", {})
        assert sent.get("OAR pooled logits", 0) == pytest.approx(pooled * 4 * responses * one.shape.vocab), name
        assert sent.get("OAR scores", 0) == pytest.approx(scores * 4 * responses * length), name
    joint = setup(layout, oar=OarConfig.parse({"probe": "answer_joint"}))
    assert "OAR pooled logits" not in communication.step_traffic(joint).sent["importance"]


def test_entropy_projects_the_reasoning_once_more_and_random_nothing():
    layout = Layout("megatron", 8, 8, tp=2, pp=1, cp=2, sequence_parallel=True)
    entropy, random = (setup(layout, oar=OarConfig.parse({"importance": name})) for name in ("entropy", "random"))
    responses, answer, response, length = 64 * 8 * 0.5, 8, 512, 128 + 512
    reasoning = responses * (response - answer)
    assert compute.step_flops(entropy).importance == compute.head(entropy.shape, reasoning)
    assert compute.step_flops(random).importance == 0
    added = communication.megatron_importance(entropy)
    assert added["OAR rows"] == pytest.approx(2 * reasoning / 2 * (2 * entropy.shape.hidden + 12) / 2)
    assert added["OAR scores"] == pytest.approx(2 * 2 * 4 * responses / 2 * length / 2)
    assert not any(communication.megatron_importance(random).values())
    traffic = communication.step_traffic(entropy).sent
    assert traffic["importance"] == {kind: amount for kind, amount in added.items() if amount}
    assert "importance" not in communication.step_traffic(random).sent


def test_an_importance_of_ones_own_is_planned_like_any_other():
    own = OarConfig.parse({"importance": "python:tests.own_importance:Saliency", "probe": "answer_joint"})
    layout = Layout("megatron", 8, 8, tp=2, pp=1, cp=2, sequence_parallel=True)
    joint = setup(layout, oar=OarConfig.parse({"probe": "answer_joint"}))
    assert compute.step_flops(setup(layout, oar=own)).importance == compute.step_flops(joint).importance
    rows = 64 * 8 * 0.5 / 2 * 8  # answer tokens of a data-parallel rank
    added = communication.megatron_importance(setup(layout, oar=own))
    softmax = 8  # bytes a row
    assert added["OAR rows"] == pytest.approx(2 * rows * (2 * 2 * joint.shape.hidden + softmax) / 2)
    assert added["OAR pooled logits"] == 0


def test_ulysses_exchanges_every_head_and_repeats_the_few():
    shape = load_shape("Qwen/Qwen2.5-7B")
    assert communication.ulysses(shape, 100, 2, 2) == 28 * 2 * 100 * (2 * 28 + 2 * 4) * 128 / 2
    assert communication.ulysses(shape, 100, 7, 2) == pytest.approx(28 * 2 * 100 * (2 * 28 + 2 * 7) * 128 * 6 / 7)
