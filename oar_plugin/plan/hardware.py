"""Figures of GPUs and of the links between them, and how much of them a real run gets.

The figures are the vendors' datasheet figures (dense bf16 without sparsity; bandwidth in one direction). What a run gets of
them is an assumption, and stated as one wherever a time is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links.

    Attributes:
        name: of the datasheet.
        memory_gib: what CUDA reports as the total, a little less than the label says.
        tflops: dense bf16, 1e12 a second.
        bandwidth: of its memory, 1e9 bytes a second.
        link: between GPUs of a node, 1e9 bytes a second in one direction (NVLink; PCIe for L40S).
        network: between nodes, 1e9 bytes a second and GPU in one direction (one adapter a GPU).
    """

    name: str
    memory_gib: float
    tflops: float
    bandwidth: float
    link: float
    network: float

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.memory_gib * GIB


GPUS = {
    "A100-40": Gpu("NVIDIA A100 SXM 40 GB", 39.4, 312, 1555, 300, 25),
    "A100-80": Gpu("NVIDIA A100 SXM 80 GB", 79.1, 312, 2039, 300, 25),
    "L40S-48": Gpu("NVIDIA L40S 48 GB", 44.4, 362, 864, 32, 25),
    "H100-80": Gpu("NVIDIA H100 SXM 80 GB", 79.1, 989, 3350, 450, 50),
    "H200-141": Gpu("NVIDIA H200 SXM 141 GB", 139.7, 989, 4800, 450, 50),
    "B200-180": Gpu("NVIDIA B200 180 GB", 178.0, 2250, 7700, 900, 50),
}
DEFAULT_GPU = "H100-80"


def choose_gpu(
    name: str | None = None,
    memory_gib: float | None = None,
    tflops: float | None = None,
    bandwidth: float | None = None,
) -> Gpu:
    """A GPU of the table, with some of its figures replaced.

    Raises:
        ValueError: unknown name, or a figure that is not positive.
    """
    key = DEFAULT_GPU if name is None else name
    matches = [known for known in GPUS if known.lower() == key.lower() or known.split("-")[0].lower() == key.lower()]
    if len(matches) != 1:
        raise ValueError(
            f"--gpu {key}: not known; allowed: {', '.join(GPUS)} (or give --gpu-memory --tflops --bandwidth)"
        )
    given = {"memory_gib": memory_gib, "tflops": tflops, "bandwidth": bandwidth}
    for what, value in given.items():
        if value is not None and value <= 0:
            raise ValueError(f"{what}={value}: must be positive")
    changed = {what: value for what, value in given.items() if value is not None}
    gpu = GPUS[matches[0]]
    return replace(gpu, name=f"{gpu.name}, changed" if changed else gpu.name, **changed)


@dataclass(frozen=True)
class Efficiency:
    """How much of the datasheet's figures a run gets. Assumptions, from what large dense runs report, not measured here.

    Attributes:
        training: of the arithmetic in forward and backward, recomputation counted as work (hardware FLOPs utilisation;
            40-55 % in arXiv 2104.04473 and 2205.05198 on A100).
        inference: of the arithmetic in forwards without a graph, prefill among them.
        decode_bandwidth: of the memory's bandwidth while decoding.
        link: of links within a node and of the network.
        decode_overhead_s: seconds that a decoding step takes beside reading weights and cache (launches, sampling, scheduling).
        all_reduce_s: latency of one small all-reduce within a node; a decoding step has two a layer under tensor parallelism.
    """

    training: float = 0.40
    inference: float = 0.50
    decode_bandwidth: float = 0.60
    link: float = 0.70
    decode_overhead_s: float = 2e-3
    all_reduce_s: float = 1.5e-5
