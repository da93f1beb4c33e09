"""Whole runs of verl on GPUs, and the front door. Models are tiny and made here."""

import json

import pytest

from tests.hosts.whole_run import check
from tests.processes import run

RUN_S = 1500
RUN = ("verl", "vllm", "ray", "math_verify", "pebble", "pandas", "tyro", "matplotlib")
ROLLOUT = [
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
]
ACTOR = "actor_rollout_ref.actor"
# Tiny responses have too few spans of eight tokens: a copy for every token of every response.
COPIES = ["algorithm.oar.perturbation.span=1", "algorithm.oar.amortize.share=null"]
MEGATRON = [f"{ACTOR}.megatron.{size}" for size in ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=1")]
MEGATRON.append(f"{ACTOR}.megatron.context_parallel_size=1")


def recipe(name, gpus, *overrides, packages=()):
    needs = pytest.mark.needs(gpus=gpus, packages=(*RUN, *packages), memory_gb=20)
    return pytest.param(name, gpus, overrides, marks=needs, id=f"{name}, {gpus}")


def sizes(gpus, overrides):
    """Overrides of a recipe's smoke test on GPUs, beside `+cpu_smoke=tiny`."""
    return [f"trainer.n_gpus_per_node={gpus}", *ROLLOUT, *overrides]


@pytest.mark.parametrize(
    ("name", "gpus", "overrides"),
    [
        recipe("qwen2_5_7b_math", 1, packages=("flash_attn",)),
        recipe("qwen2_5_7b_math", 2, f"{ACTOR}.ulysses_sequence_parallel_size=1", packages=("flash_attn",)),
        recipe("qwen2_5_7b_oar_p", 1, *COPIES, packages=("flash_attn",)),
        recipe(
            "qwen2_5_32b_megatron", 2, *MEGATRON, packages=("megatron.core", "megatron.bridge", "transformer_engine")
        ),
    ],
)
def test_two_steps_of_a_recipe(log, figures, name, gpus, overrides):
    """Model, data and lengths are tiny; engines, precision, attention and runner are the recipe's."""
    out = log.with_suffix("")
    run(["recipes/smoke.py", name, "--out", str(out), *sizes(gpus, overrides)], log, RUN_S)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [{"step": line["step"], **line["data"]} for line in lines]
    for key in ("training/rollout_probs_diff_max", "perf/max_memory_allocated_gb", "oar/scored", "oar/offload/scored"):
        if key in steps[-1]:
            figures(key, f"{steps[-1][key]:.3g}")
    check(steps, [1, 2])
    assert all(step.get("oar/offload/scored", 1) > 0.5 for step in steps)


@pytest.mark.needs
def test_the_front_door(suite, figures):
    """The ordinary tests; one of them needs a GPU."""
    count = suite(["tests/test_front_door.py"], 600)
    figures("tests", count["tests"])
    assert count["tests"] > count["skipped"]
