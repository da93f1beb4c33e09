"""Counts on fake tensors: beside real tensors, closed formulas, other numbers of layers and committed ones."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.count import derived, real, shapes
from benchmarks.count.fake_step import count, measure
from benchmarks.count.meter import Meter
from benchmarks.count.shapes import Memory, Work, at
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.prefix import WORKS
from oar_plugin.passes.request import Request
from oar_plugin.passes.trial import _ACCEPTED
from oar_plugin.runs.plan.known import load_model

DENSE, SMALL, work = real.DENSE, real.SMALL, cache(count)
dimensions = partial(json.dumps, sort_keys=True)
LAYERS, LENGTH = 6, 5000  # not among those that are counted
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}

pytestmark = pytest.mark.slow  # counts whole steps


def test_bytes_are_those_of_a_real_rank():
    # In float32, because products in bf16 take workspace on some CPUs.
    keys = [replace(SMALL, element="fp32", recompute=recompute) for recompute in (True, False)]
    for key, measured in zip(keys, real.measured(keys), strict=True):
        assert real.counted(measure(key, real.LAYERS, key.tokens)) == pytest.approx(measured, rel=0.03)


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
    counted, torchs, megatrons = (
        work(Work(dimensions(config), *how))["flops"] for how in ((False,), (True,), (True, True))
    )
    flops = {name: at(of, LAYERS, LENGTH) for name, of in counted.items()}
    layer, head, pairs = products(config)
    layers, head, row = 2 * LAYERS * layer * LENGTH, 2 * head * LENGTH, 2 * head
    attention = 2 * LAYERS * pairs * LENGTH**2  # a causal mask leaves half of 4
    assert flops["layers"] == pytest.approx(layers + attention, rel=0.01)
    assert flops["head"] == pytest.approx(head)
    # The backward of attention computes five products where the forward has two.
    assert flops["update"] == pytest.approx(3 * (layers + head) + 3.5 * attention, rel=0.01)
    backward = layers + 2.5 * attention + 2 * row  # one pooled row, projected and back
    assert flops["importance"] - flops["log-probs"] == pytest.approx(backward, rel=0.01)
    for phase in ("importance", "update"):  # checkpointing: layers again, torch's without the last projection
        again, whole = (at(of[phase], LAYERS, LENGTH) for of in (torchs, megatrons))
        assert whole - flops[phase] == pytest.approx(flops["layers"], rel=1e-3)
        if config is DENSE:
            assert whole - again == pytest.approx(2 * LAYERS * 256 * 704 * LENGTH, rel=1e-3)


@pytest.mark.parametrize("prefix", [False, True], ids=["whole", "cached prefix"])
def test_copies_cost_what_is_derived_from_forwards(prefix):
    length, copies = derived.PROMPT + 240, 7
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**DENSE, num_hidden_layers=LAYERS)).eval()
    WORKS[model] = prefix
    ids, segments = torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long)
    segments[0, -derived.ANSWER :] = Segment.ANSWER
    segments[0, derived.PROMPT + 16 : -derived.ANSWER : 32][:copies] = Segment.REASONING
    request = Request.of_step(OarConfig(importance="oar_p"), 1, replacement_token=0)
    _ACCEPTED.add(model)
    with Meter() as meter:
        meter.begin("copies")
        batch_importance(model, request, ids, segments, torch.ones_like(ids).bool(), max_tokens=1)
    expected = partial(derived.copies_flops, work(Work(dimensions(DENSE))), LAYERS, length)
    fills = expected(1, False) - expected(0, False) if prefix else 0.0  # a forward that keeps keys and values
    # The meter halves the products of attention, of which a prefix needs more.
    assert meter.numbers["flops"]["copies"] == pytest.approx(
        expected(copies, prefix) + fills, rel=0.1 if prefix else 0.02
    )


def test_the_page_has_what_follows_from_its_own_counts():
    page = json.loads((Path(__file__).parents[2] / "benchmarks/results/count.json").read_text())
    for table in derived.tables({name: of["checkpointing"] for name, of in page["runs"].items()}):
        assert page["tables"][table.title] == [dict(zip(table.columns, row, strict=True)) for row in table.rows]


SHAPES = {"experts": {"shards": 8, "model": dimensions(EXPERTS)}, "fused": {"lora_rank": 4, "fused": True, "shards": 2}}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_bytes_and_collectives_are_linear_in_the_number_of_layers(changes):
    key = replace(SMALL, **changes)
    counted, found = count(key), measure(key, LAYERS, key.tokens)
    for section, numbers in counted.items():
        assert {name: at(of, LAYERS) for name, of in numbers.items()} == pytest.approx(found[section], rel=1e-4)
    # An all-gather for each layer, for the embedding, and for the root, with the projection in it or beside it.
    assert at(counted["collectives"]["log-probs"], LAYERS) == LAYERS + (2 if changes.get("fused") else 3)


def test_a_count_of_today_is_one_that_the_planner_is_compared_with():
    name, tokens, changes, peaks = json.loads((Path(__file__).parents[1] / "runs/plan/counts.json").read_text())[3]
    layers, counted = (
        load_model(name).num_hidden_layers,
        count(Memory(shapes.dimensions(load_model(name)), tokens, **changes)),
    )
    phases = (counted[phase].values() for phase in ("log-probs", "importance", "update"))
    assert [max(at(of, layers) for of in parts) / 2**30 for parts in phases] == pytest.approx(peaks, abs=1e-3)
