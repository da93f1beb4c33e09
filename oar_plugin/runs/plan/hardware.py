"""GPU figures from datasheets, and all assumptions of the planner."""

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links, from the vendor's datasheet (RTX 4090: Ada whitepaper); nothing here was measured."""

    name: str
    memory_gib: float  # total memory as CUDA reports it, a little less than the label says
    tflops: float  # dense bf16 arithmetic, 1e12 FLOPs per second
    bandwidth: float  # memory bandwidth, 1e9 bytes per second
    link: float  # between two GPUs of a node, 1e9 bytes per second and direction
    network: float  # between nodes, 1e9 bytes per second and direction, one adapter per GPU


GPUS = {
    "L4-24": Gpu("NVIDIA L4 24 GB", 22.0, 121, 300, 32, 25),
    "4090-24": Gpu("NVIDIA GeForce RTX 4090 24 GB", 23.5, 165, 1008, 32, 25),
    "A100-40": Gpu("NVIDIA A100 SXM 40 GB", 39.4, 312, 1555, 300, 25),
    "A100-80": Gpu("NVIDIA A100 SXM 80 GB", 79.1, 312, 2039, 300, 25),
    "L40S-48": Gpu("NVIDIA L40S 48 GB", 44.4, 362, 864, 32, 25),
    "H20-96": Gpu("NVIDIA H20 96 GB", 95.1, 148, 4000, 450, 50),
    "H100-80": Gpu("NVIDIA H100 SXM 80 GB", 79.1, 989, 3350, 450, 50),
    "H200-141": Gpu("NVIDIA H200 SXM 141 GB", 139.7, 989, 4800, 450, 50),
    "B200-180": Gpu("NVIDIA B200 180 GB", 178.0, 2250, 7700, 900, 50),
}


def choose_gpu(name: str = "H100-80", memory_gib: float | None = None) -> Gpu:
    """Return the GPU called `name` (`h100` if one matches), with `memory_gib` if given. ValueError: unknown or ambiguous."""
    matches = [gpu for key, gpu in GPUS.items() if name.lower() in (key.lower(), key.split("-")[0].lower())]
    if len(matches) != 1:
        raise ValueError(f"--gpu {name}: unknown or ambiguous; allowed: {', '.join(GPUS)}, with any --gpu-memory")
    return replace(matches[0], memory_gib=memory_gib or matches[0].memory_gib)


@dataclass(frozen=True)
class Efficiency:
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
