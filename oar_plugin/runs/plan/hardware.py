"""Figures of GPUs from datasheets, and every assumption of the planner."""

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links, from the vendor's datasheet; nothing here was measured."""

    name: str
    memory_gib: float  # total as CUDA reports it, a little less than on the label
    tflops: float  # dense bf16, 1e12 per second
    bandwidth: float  # of its memory, 1e9 bytes per second
    link: float  # between GPUs of a node, 1e9 bytes per second in one direction
    network: float  # between nodes, the same unit, with one adapter per GPU

    @property
    def memory(self) -> float:
        return self.memory_gib * GIB


GPUS = {
    "A100-40": Gpu("NVIDIA A100 SXM 40 GB", 39.4, 312, 1555, 300, 25),
    "A100-80": Gpu("NVIDIA A100 SXM 80 GB", 79.1, 312, 2039, 300, 25),
    "L40S-48": Gpu("NVIDIA L40S 48 GB", 44.4, 362, 864, 32, 25),
    "H20-96": Gpu("NVIDIA H20 96 GB", 95.1, 148, 4000, 450, 50),
    "H100-80": Gpu("NVIDIA H100 SXM 80 GB", 79.1, 989, 3350, 450, 50),
    "H200-141": Gpu("NVIDIA H200 SXM 141 GB", 139.7, 989, 4800, 450, 50),
    "B200-180": Gpu("NVIDIA B200 180 GB", 178.0, 2250, 7700, 900, 50),
}


def choose_gpu(name: str = "H100-80", memory_gib: float | None = None) -> Gpu:
    """Return a GPU of the table (also by `h100`), with another memory if given. ValueError: it is unknown, or has no memory."""
    matches = [gpu for key, gpu in GPUS.items() if name.lower() in (key.lower(), key.split("-")[0].lower())]
    if len(matches) != 1:
        raise ValueError(f"--gpu {name}: not known; allowed: {', '.join(GPUS)}, with --gpu-memory for another memory")
    if memory_gib is not None and memory_gib <= 0:
        raise ValueError(f"--gpu-memory {memory_gib}: must be positive")
    return replace(matches[0], memory_gib=memory_gib or matches[0].memory_gib)


@dataclass(frozen=True)
class Efficiency:
    """Share of the datasheet's figures that a run reaches; assumed, from reports of large runs."""

    training: float = 0.40  # of the arithmetic with recomputation; 40-55 % in arXiv 2104.04473, 2205.05198 on A100s
    inference: float = 0.50  # of the arithmetic in forwards without a graph, prefill among them
    decoding: float = 0.60  # of the memory's bandwidth
    link: float = 0.70  # of links within a node and of the network
    decode_overhead_s: float = 2e-3  # per decoding step beside its reading: launches, sampling, scheduling
    all_reduce_s: float = 1.5e-5  # latency in a node; under tensor parallelism two per layer and decoding step


EXPECTED = Efficiency()
# The range of the hours: an untuned run, and a very good one.
POOR, GOOD = Efficiency(0.25, 0.30, 0.35, 0.40, 6e-3, 3e-5), Efficiency(0.55, 0.65, 0.75, 0.85, 1e-3, 1e-5)

MEAN_RESPONSE, MEAN_PROMPT = 0.5, 0.25  # shares of the maximum length
SCORED = 0.5  # share of the responses whose advantage is not zero; only those get importance
ANSWER = 8  # tokens of an answer
# Measured on one core (AMD EPYC), with padding: verl's driver alone runs the gate.
GATE_SECONDS_PER_TOKEN = 7e-8

CONTEXT = 1.0 * GIB  # CUDA contexts of trainer and engine, and NCCL's buffers
TRAINER_OVERHEAD = 1.0 * GIB  # fragmentation and libraries' workspaces while the trainer works
ENGINE_OVERHEAD = 1.0 * GIB  # CUDA graphs and workspaces inside vLLM's share
TIGHT = 0.10  # with a smaller share of free memory, fragmentation may end the run

# Rows on the hub of the files that `oar data` makes; a file that exists is counted instead.
ROWS = {
    **{"gsm8k/train": 7473, "gsm8k/test": 1319, "math/train": 7500, "math500/test": 500, "deepmath/train": 103022},
    **{"aime24/test": 30, "aime25/test": 30, "amc23/test": 40},
}
