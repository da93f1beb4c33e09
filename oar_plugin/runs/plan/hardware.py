"""GPU figures from datasheets (`gpus.json`), and all assumptions of the planner."""

import json
from pathlib import Path
from typing import NamedTuple

GIB = 2**30


class Gpu(NamedTuple):
    """One GPU and its links, from the vendor's datasheet (RTX 4090: Ada whitepaper); nothing here was measured."""

    name: str
    memory_gib: float  # total memory as CUDA reports it, a little less than the label says
    tflops: float  # dense bf16 arithmetic, 1e12 FLOPs per second
    bandwidth: float  # memory bandwidth, 1e9 bytes per second
    link: float  # between two GPUs of a node, 1e9 bytes per second and direction
    network: float  # between nodes, 1e9 bytes per second and direction, one adapter per GPU


GPUS = {key: Gpu(*of) for key, of in json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8")).items()}


def choose_gpu(name: str = "H100-80", memory_gib: float | None = None) -> Gpu:
    """Return the GPU called `name` (`h100` if one matches), with `memory_gib` if given. ValueError: unknown or ambiguous."""
    matches = [gpu for key, gpu in GPUS.items() if name.lower() in (key.lower(), key.split("-")[0].lower())]
    if len(matches) != 1:
        raise ValueError(f"--gpu {name}: unknown or ambiguous; allowed: {', '.join(GPUS)}, with any --gpu-memory")
    return matches[0]._replace(memory_gib=memory_gib or matches[0].memory_gib)


class Efficiency(NamedTuple):
    """Shares of the datasheet's peak figures that a run reaches; assumed, based on reports of large runs."""

    training: float  # share of peak FLOPs, with recomputation; A100s: 40-55 % (arXiv 2104.04473, 2205.05198)
    inference: float  # share of peak FLOPs in forwards without a backward, including prefill
    decoding: float  # share of the memory bandwidth
    link: float  # share of the bandwidth within a node and between nodes
    decode_overhead_s: float  # per decoding step, besides reads and arithmetic: launches, sampling, scheduling
    all_reduce_s: float  # latency of one all-reduce; tensor parallelism has two per layer and decoding step


EXPECTED = Efficiency(0.40, 0.50, 0.60, 0.70, 2e-3, 1.5e-5)
# The bounds of the projected hours: an untuned run, and a very good one.
POOR, GOOD = Efficiency(0.25, 0.30, 0.35, 0.40, 6e-3, 3e-5), Efficiency(0.55, 0.65, 0.75, 0.85, 1e-3, 1e-5)
MEAN_RESPONSE, MEAN_PROMPT = 0.5, 0.25  # mean lengths as shares of the maximum lengths
SCORED = 0.5  # share of the responses whose advantage is not zero; only those get importance
ANSWER = 8  # tokens per answer
# Per response token, with padding, on one core (AMD EPYC; benchmarks/results/driver.md): the gate on each actor rank's CPU, and
# the multiplication by verl's driver.
GATE_SECONDS_PER_TOKEN, DRIVER_SECONDS_PER_TOKEN = 7.8e-8, 1.5e-9
CONTEXT = ENGINE_OVERHEAD = 1.0 * GIB  # CUDA contexts and NCCL buffers; CUDA graphs and workspaces inside vLLM's share
# What a trainer's phase may need besides: workspaces of libraries, and fragmentation, as a share of the temporary tensors.
WORKSPACES, FRAGMENTATION = 1.0 * GIB, 0.15
