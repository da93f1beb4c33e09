"""Counts of a step on fake tensors, beside closed formulas, two real ranks with PyTorch's profiler, and a deeper model."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.tensor.debug import CommDebugMode

from oar_plugin.runs.plan import count as counting
from oar_plugin.runs.plan import fake_step
from oar_plugin.runs.plan.count import Counts, Flops, Key, Linear, counts, dimensions
from oar_plugin.runs.plan.fake_step import MOMENTS, Meter, Step, count, count_flops, measure
from oar_plugin.runs.plan.models import Model, PlanError

DENSE = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
DENSE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
KEY = Key(dimensions(DENSE), length=512, log_prob_tokens=1024, update_tokens=1024, entropy_rows=512, shards=2)
REAL = [replace(KEY, element="fp32"), replace(KEY, recompute=False)]
SHAPES = dict.fromkeys(("log-probs", "importance", "update"), (2, 512))


def peak(run):
    """The most bytes that `run` has at once beyond what is there before it, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(0, int(torch.tensor(sizes).cumsum(0).max()))


def real_rank(rank, folder):
    """A step of each key on real tensors. Writes peaks by the profiler and the number of collectives by `CommDebugMode`."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = []
    for key in REAL:
        tables, step = fake_step._tables(key, SHAPES["importance"]), Step(key, 3)
        step.shard(distributed.init_device_mesh("cpu", (2,)))
        step.log_probs((1, 8))
        phases = {"log-probs": lambda step=step: step.log_probs((2, 512))}
        phases["importance"] = lambda step=step, tables=tables: step.importance((2, 512), tables)
        bytes_ = {phase: peak(run) for phase, run in phases.items()}
        step.update((1, 8))
        bytes_["update"] = peak(lambda step=step: step.update((2, 512)))
        with CommDebugMode() as log_probs:
            phases["log-probs"]()
        with Meter() as meter:
            phases["log-probs"]()
        optimizer = step.optimizer()
        optimizer()
        numbers = {"number": log_probs.get_total_counts(), "bytes": meter.found["build"]["collective bytes"]}
        results.append([bytes_, {"optimizer": peak(optimizer)}, numbers])
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def test_bytes_and_collectives_are_those_of_two_real_ranks(tmp_path):
    multiprocessing.start_processes(real_rank, args=(tmp_path,), nprocs=2, start_method="spawn")
    for key, (real, step, numbers) in zip(REAL, json.loads((tmp_path / "results.json").read_text()), strict=True):
        found, _ = measure(key, 3, SHAPES)
        assert found["update"].pop("optimizer") == pytest.approx(step["optimizer"], rel=0.03)
        peaks = {phase: max(found[phase].get(name, 0) for name in MOMENTS) for phase in SHAPES}
        assert peaks == pytest.approx(real, rel=0.03)
        assert [found["log-probs"][name] for name in ("number", "collective bytes")] == list(numbers.values())


VARIANTS = {
    "checkpointing": {"shards": 8, "importance": "decision"},
    "noise": {"importance": "oar_g", "recompute": False, "entropy_rows": 0},
    "adapters": {"lora_rank": 4},
    "experts": {"model": dimensions(EXPERTS), "strategy": "megatron", "tp": 2, "sequence_split": 2, "ep": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_few_layers_and_short_lengths_tell_of_all(variant):
    key = replace(KEY, **VARIANTS[variant])
    counted, (found, states) = count(key), measure(key, 5, SHAPES)
    for phase in SHAPES:
        of_bytes, collectives = counted.bytes[phase], counted.collectives[phase]
        assert {name: of.at(5) for name, of in of_bytes.items()} == pytest.approx(
            {n: found[phase][n] for n in of_bytes}
        )
        names = {"number": "number", "bytes": "collective bytes"}
        assert {n: of.at(5) for n, of in collectives.items()} == {n: found[phase][names[n]] for n in collectives}
        assert 2 * counted.flops[phase].at(5, 512) == pytest.approx(found[phase]["flops"], rel=1e-3)
    assert {name: of.at(5) for name, of in (counted.parameters | counted.states).items()} == pytest.approx(
        states, rel=1e-5
    )


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_flops_follow_a_closed_formula(config):
    """Two per product of a token and a weight; attention 2, and 5 in the backward, per pair of tokens and query dimension."""
    model, length, layers = Model(config | {"num_hidden_layers": 6}), 1024, 6
    counted = count_flops(replace(KEY, model=dimensions(config), recompute=False))
    pairs = layers * 256 * length**2
    matrices = model.training_flops(length) - 6 * pairs
    want = {"log-probs": matrices / 3 + 2 * pairs, "update": matrices + 7 * pairs}
    want["added"] = (matrices - 6 * model.embedding * length) / 3 + 5 * pairs
    assert {name: counted[name].at(layers, length) for name in want} == pytest.approx(want, rel=0.03)
    assert counted["layers"].at(layers, length) == pytest.approx(model.layers_flops(length), rel=0.03)


def test_counts_come_from_the_package_then_the_cache_and_a_broken_cache_stops_nobody(tmp_path, monkeypatch, capsys):
    layer, kept = Linear(1.0, 2.0), {"update": {"kept": Linear(0.0, 3.0)}}
    counted = Counts({"all": layer}, {"weights": layer}, {"layers": Flops((0.0, 1.0, 2.0), (3.0, 4.0, 5.0))}, kept, {})
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
    monkeypatch.setattr(counting, "_shipped", lambda: {counting._digest(KEY): asdict(counted)})
    counting.counts.cache_clear()
    monkeypatch.setattr(fake_step, "count", None)
    file.unlink()
    assert counts(KEY) == counted
    counting.counts.cache_clear()


def test_a_process_group_that_exists_is_refused_and_ours_is_gone():
    measure(KEY, 1, {"log-probs": (1, 8)})
    assert not distributed.is_initialized()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PlanError, match="process group"):
            measure(KEY, 1, {"log-probs": (1, 8)})
    finally:
        distributed.destroy_process_group()
