"""Counts of a step on fake tensors, beside closed formulas, a real rank with PyTorch's profiler, and a deeper model."""

from dataclasses import replace
from functools import cache

import pytest
from oar_plugin.runs.plan.count import Polynomial, Work, dimensions
from oar_plugin.runs.plan.counted import NotCountedError, counts
from oar_plugin.runs.plan.fake_step import count, measure
from oar_plugin.runs.plan.setup import Setup
from torch import distributed

from benchmarks.count import real
from oar_plugin.runs.plan import counted as counting
from oar_plugin.runs.plan import fake_step
from oar_plugin.runs.recipe import compose_recipe, find_recipe, recipe_names

DENSE, SMALL = real.DENSE, real.SMALL
LAYERS, LENGTH = 6, 5000  # not among those that are counted
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def test_bytes_are_those_of_a_real_rank():
    # In float32, because products in bf16 take workspace on some CPUs.
    keys = [replace(SMALL, element="fp32", recompute=recompute) for recompute in (True, False)]
    for key, measured in zip(keys, real.measured(keys), strict=True):
        assert real.counted(measure(key, real.LAYERS, key.tokens)) == pytest.approx(measured, rel=0.03)


work = cache(count)


def products(config):
    """Numbers of products of one token and all weights of a layer, of one token and the projection, of two tokens."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    attention = 2 * hidden * (heads + config["num_key_value_heads"] * config["head_dim"])
    width = config["intermediate_size"]
    if visits := config.get("num_experts_per_tok", 0):
        width, attention = visits * config["moe_intermediate_size"], attention + hidden * config["num_experts"]
    return attention + 3 * hidden * width, hidden * config["vocab_size"], heads


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_flops_follow_a_closed_formula(config):
    flops = {
        name: of.at(LAYERS, LENGTH) for name, of in work(Work(dimensions(config), recompute=False))["flops"].items()
    }
    layer, head, pairs = products(config)
    layers, head, row = 2 * LAYERS * layer * LENGTH, 2 * head * LENGTH, 2 * head
    attention = 2 * LAYERS * pairs * LENGTH**2  # a causal mask leaves half of 4
    assert flops["layers"] == pytest.approx(layers + attention, rel=0.01)
    assert flops["head"] == pytest.approx(head)
    # The backward of attention computes five products where the forward has two.
    assert flops["update"] == pytest.approx(3 * (layers + head) + 3.5 * attention, rel=0.01)
    backward = layers + 2.5 * attention + 2 * row  # one pooled row, projected and back
    assert flops["importance"] - flops["log-probs"] == pytest.approx(backward, rel=0.01)


def test_checkpointing_computes_layers_again_and_torchs_leaves_out_the_last_projection():
    plain, torchs, megatrons = (
        work(Work(dimensions(DENSE), *how))["flops"] for how in ((False,), (True,), (True, True))
    )
    for phase in ("importance", "update"):
        first, again, whole = (of[phase].at(LAYERS, LENGTH) for of in (plain, torchs, megatrons))
        assert whole - first == pytest.approx(plain["layers"].at(LAYERS, LENGTH), rel=1e-3)
        assert whole - again == pytest.approx(2 * LAYERS * 256 * 704 * LENGTH, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [{"shards": 8, "model": dimensions(EXPERTS)}, {"lora_rank": 4, "fused": True, "shards": 2}],
    ids=["experts", "adapters, fused kernels"],
)
def test_bytes_and_collectives_are_linear_in_the_number_of_layers(changes):
    key = replace(SMALL, **changes)
    counted, found = count(key), measure(key, LAYERS, key.tokens)
    for section, numbers in counted.items():
        assert {name: of.at(LAYERS) for name, of in numbers.items()} == pytest.approx(found[section], rel=1e-4)
    # An all-gather for each layer, for the embedding, and for the root, with the projection in it or beside it.
    assert counted["collectives"]["log-probs"].at(LAYERS) == LAYERS + (2 if changes.get("fused") else 3)


def test_counts_come_from_the_package_then_the_cache_and_a_broken_cache_stops_nobody(tmp_path, monkeypatch, capsys):
    counted = {"states": {"weights": Polynomial((1.0, 2.0), (3.0, 4.0))}}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fake_step, "count", lambda key: counted)
    counting.counts.cache_clear()
    assert counts(SMALL) == counted
    assert len(capsys.readouterr().err.splitlines()) == 1
    counting.counts.cache_clear()
    assert counts(SMALL) == counted
    assert not capsys.readouterr().err
    (file,) = tmp_path.rglob("*.json")
    file.write_text("{")
    counting.counts.cache_clear()
    assert counts(SMALL) == counted
    monkeypatch.setattr(counting, "_shipped", lambda: {counting.name_of(SMALL): counted})
    counting.counts.cache_clear()
    monkeypatch.setattr(fake_step, "count", None)
    file.unlink()
    assert counts(SMALL) == counted
    counting.counts.cache_clear()


def test_shipped_counts_are_those_of_today_and_have_all_recipes():
    """One of them is counted again. `python -m benchmarks.count.ship` writes all of them."""
    shipped = counting._shipped()
    for name in recipe_names():
        config = compose_recipe(find_recipe(name))
        if config.trainer.device == "cpu":
            continue
        setup = Setup(config)
        memory = [] if setup.megatron else [setup.memory_key(False), setup.memory_key(True)]
        assert {counting.name_of(key) for key in (setup.work_key, *memory)} <= shipped.keys(), name
    key = Setup(compose_recipe(find_recipe("qwen2_5_7b_lora"))).memory_key(True)
    assert counting.parsed(shipped[counting.name_of(key)]) == count(key)


def test_a_process_group_that_exists_is_refused_and_ours_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure(SMALL, 1, 512)
    assert not distributed.is_initialized()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotCountedError, match="process group"):
            counts(SMALL)
    finally:
        distributed.destroy_process_group()
        counts.cache_clear()
