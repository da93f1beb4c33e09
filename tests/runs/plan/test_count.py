"""Counts of a step on fake tensors, beside closed formulas, a real rank with PyTorch's profiler, and a deeper model."""

import json
from dataclasses import replace

import pytest
from torch import distributed

from benchmarks.count import real
from oar_plugin.runs.plan import count as counting
from oar_plugin.runs.plan import fake_step
from oar_plugin.runs.plan.count import SHIPPED, Polynomial, counts, dimensions
from oar_plugin.runs.plan.fake_step import count, measure
from oar_plugin.runs.plan.models import PlanError

DENSE, KEY, LENGTH = real.DENSE, real.SMALL, real.SMALL.tokens
LAYERS = 6  # not among the depths that are counted
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def test_bytes_and_collectives_are_those_of_a_real_rank():
    keys = [replace(KEY, element="fp32"), replace(KEY, recompute=False)]
    for key, measured in zip(keys, real.measured(keys), strict=True):
        assert real.counted(measure(key, real.LAYERS, real.LENGTH)) == pytest.approx(measured, rel=0.03)


def products(config):
    """Numbers of products of one token and all weights of a layer, of one token and the projection, of two tokens."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    attention = 2 * hidden * (heads + config["num_key_value_heads"] * config["head_dim"])
    width = config["intermediate_size"]
    if visits := config.get("num_experts_per_tok", 0):
        width, attention = visits * config["moe_intermediate_size"], attention + hidden * config["num_experts"]
    return attention + 3 * hidden * width, hidden * config["vocab_size"], heads


@pytest.mark.parametrize(
    ("config", "changes"),
    [(DENSE, {}), (EXPERTS, {"importance": "oar_g"})],
    ids=["whole activations", "experts, noise"],
)
def test_any_depth_and_length_is_told_by_few_and_follows_a_closed_formula(config, changes):
    key = replace(KEY, model=dimensions(config), recompute=False, **changes)
    counted, found = count(key), measure(key, LAYERS, LENGTH)
    assert counted.keys() == found.keys()
    for section, numbers in found.items():
        told = {name: counted[section][name].at(LAYERS, LENGTH) for name in numbers}
        assert told == pytest.approx(dict(numbers), rel=1e-4), section
    longer = measure(key, LAYERS, 5 * LENGTH)["flops"]
    assert {name: counted["flops"][name].at(LAYERS, 5 * LENGTH) for name in longer} == pytest.approx(longer, rel=1e-4)
    layer, head, pairs = products(config)
    matrices, row = 2 * (LAYERS * layer + head) * LENGTH, 2 * head
    attention = 2 * LAYERS * pairs * LENGTH**2  # a causal mask leaves half of 4
    # The backward of attention computes five products where the forward has two.
    assert found["flops"]["log-probs"] == pytest.approx(matrices + attention, rel=0.01)
    assert found["flops"]["update"] == pytest.approx(3 * matrices + 3.5 * attention, rel=0.01)
    backward = matrices - row * LENGTH + 2.5 * attention + 2 * row  # one pooled row, projected and back
    noise_free = 1 if changes else 0  # with noise: one more forward, which projects the answer's rows alone
    added = found["flops"]["importance"] - found["flops"]["log-probs"]
    assert added == pytest.approx(backward + noise_free * (matrices - row * LENGTH + attention), rel=0.03)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 4, "fused": True},
        {
            "model": dimensions(EXPERTS),
            "strategy": "megatron",
            "weights": "bf16",
            "tp": 2,
            "sequence_split": 2,
            "ep": 4,
        },
    ],
    ids=["adapters, fused kernels", "Megatron's experts"],
)
def test_numbers_are_linear_in_the_number_of_layers(changes):
    key = replace(KEY, importance="decision", **changes)
    three, four, six = (measure(key, layers, LENGTH) for layers in (3, 4, 6))
    for section, numbers in six.items():
        told = {name: 3 * four[section][name] - 2 * three[section][name] for name in numbers}
        assert told == pytest.approx(dict(numbers), rel=1e-4), section


def test_counts_come_from_the_package_then_the_cache_and_a_broken_cache_stops_nobody(tmp_path, monkeypatch, capsys):
    counted = {"states": {"weights": Polynomial((1.0, 2.0), (3.0, 4.0))}}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fake_step, "count", lambda key: counted)
    counting.counts.cache_clear()
    assert counts(KEY) == counted
    assert len(capsys.readouterr().err.splitlines()) == 1
    counting.counts.cache_clear()
    assert counts(KEY) == counted
    assert not capsys.readouterr().err
    (file,) = tmp_path.rglob("*.json")
    file.write_text("{")
    counting.counts.cache_clear()
    assert counts(KEY) == counted
    monkeypatch.setattr(counting, "_shipped", lambda: {counting._name(KEY): counted})
    counting.counts.cache_clear()
    monkeypatch.setattr(fake_step, "count", None)
    file.unlink()
    assert counts(KEY) == counted
    counting.counts.cache_clear()


def test_shipped_counts_are_those_of_today():
    """One of them is counted again. `python -m benchmarks.count.ship` writes all of them."""
    shipped = json.loads(SHIPPED.read_text())
    name = next(name for name in shipped if '"hidden_size": 896' in json.loads(name)["model"].replace("\\", ""))
    key = counting.Key(**json.loads(name))
    for section, numbers in measure(key, 3, key.tokens).items():
        told = {one: Polynomial(*shipped[name][section][one]).at(3, key.tokens) for one in numbers}
        assert told == pytest.approx(dict(numbers), rel=0.01), section


def test_a_process_group_that_exists_is_refused_and_ours_is_gone():
    measure(KEY, 1, 512)
    assert not distributed.is_initialized()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PlanError, match="process group"):
            measure(KEY, 1, 512)
    finally:
        distributed.destroy_process_group()
