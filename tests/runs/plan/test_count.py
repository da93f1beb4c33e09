"""Counts of a step on fake tensors, beside closed formulas, PyTorch's allocation profiler, two real ranks and whole models."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch import distributed

from oar_plugin.runs.plan import count as counting
from oar_plugin.runs.plan import fake_step
from oar_plugin.runs.plan.count import Counts, Key, Linear, counts, dimensions
from oar_plugin.runs.plan.fake_step import Step, count, measure
from oar_plugin.runs.plan.models import PlanError

DENSE = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
DENSE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
KEY = Key(dimensions(DENSE), length=512, log_prob_tokens=1024, update_tokens=1024, entropy_rows=512)
SHAPES = dict.fromkeys(("log-probs", "importance", "update"), (2, 512))


def peak_and_left(run):
    """The bytes that `run` allocates above what is there before it, at most and at its end, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


@pytest.fixture
def alone(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("element", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [True, False])
def test_bytes_are_those_that_a_real_step_allocates(element, recompute, alone, monkeypatch):
    key = replace(KEY, element=element, recompute=recompute)
    monkeypatch.setattr(fake_step.distributed, "is_initialized", lambda: False)
    tables, step = fake_step._tables(key, SHAPES["importance"]), Step(key, 3)
    step.shard(alone)
    step.log_probs((1, 8))
    real = {"log-probs": peak_and_left(lambda: step.log_probs((2, 512)))[0]}
    real["importance"] = peak_and_left(lambda: step.importance((2, 512), tables))[0]
    step.update((1, 8))
    real["update"] = peak_and_left(lambda: step.update((2, 512)))[0]
    optimizer = step.optimizer()
    optimizer()
    real["optimizer"] = peak_and_left(optimizer)[0]
    distributed.destroy_process_group()
    found, _ = measure(key, 3, SHAPES)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # for the fixture's end
    assert found["update"].pop("optimizer") == pytest.approx(real.pop("optimizer"), rel=0.03)
    moments = {phase: max(found[phase].get(name, 0) for name in fake_step.MOMENTS) for phase in SHAPES}
    assert moments == pytest.approx(real, rel=0.03)


VARIANTS = {
    "fsdp2": {"shards": 8},
    "whole activations": {"recompute": False, "importance": "decision"},
    "noisy": {"importance": "oar_g", "draws": 2, "entropy_rows": 0},
    "lora": {"lora_rank": 4},
    "fused": {"fused": True, "element": "fp32"},
    "megatron": {"strategy": "megatron", "tp": 2, "sequence_split": 2},
    "experts": {"model": dimensions(EXPERTS), "shards": 4},
    "expert parallel": {"model": dimensions(EXPERTS), "strategy": "megatron", "ep": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_few_layers_and_short_lengths_tell_of_all(variant):
    key = replace(KEY, **VARIANTS[variant])
    counted, (found, states) = count(key), measure(key, 9, SHAPES)
    for phase in SHAPES:
        assert {name: of.at(9) for name, of in counted.bytes[phase].items()} == pytest.approx(
            {name: found[phase][name] for name in counted.bytes[phase]}
        )
        names = {"number": "number", "bytes": "collective bytes"}
        assert {names[name]: of.at(9) for name, of in counted.collectives[phase].items()} == {
            name: found[phase][name] for name in names.values() if name in found[phase]
        }
        assert 2 * counted.flops[phase].at(9, 512) == pytest.approx(found[phase]["flops"], rel=1e-3)
    assert {name: of.at(9) for name, of in (counted.parameters | counted.states).items()} == pytest.approx(states)
