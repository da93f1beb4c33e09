"""How a run of verl on a CPU is started: overrides and environment variables.

The settings themselves, each with its reason, are in ``conf/cpu/*.yaml``. Nothing there depends on the model, the data or the
algorithm; overrides on the command line win.
"""


def cpu_overrides(workers: int = 1) -> list[str]:
    """Hydra overrides for a run with so many workers of an FSDP actor, each a pretended GPU: ``conf/cpu/dp.yaml``."""
    return ["+cpu=dp", *([f"trainer.n_gpus_per_node={workers}"] if workers != 1 else [])]


ON_LOOPBACK = {
    # What Ray does by itself on Windows and macOS: it listens on 127.0.0.1 alone, and so do verl, vLLM's server
    # and TransferQueue, which take its address. On Linux it would be every address of the machine.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""For a run on one machine: no other machine reaches its ports, but those of torch's TCPStore, which takes no address."""


def cpu_environment(one_machine: bool = True) -> dict[str, str]:
    """Environment variables for such a run, on top of the caller's."""
    return {
        **(ON_LOOPBACK if one_machine else {}),
        # A process each for a dozen actors: more threads than one would only fight over the cores.
        "OMP_NUM_THREADS": "1",
        # A KV cache of 1 GB, in place of a share of the machine's memory that another run may have taken.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Ray and vLLM talk to themselves: a proxy of the user's must not get these connections.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        # Models are local paths: do not look on the hub for newer ones.
        "HF_HUB_OFFLINE": "1",
        # No usage reports, and no message about them.
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # Ray would otherwise hold back equal lines of different processes.
        "RAY_DEDUP_LOGS": "0",
        # TransferQueue warns at every message that the machine has fewer than 8 cores.
        "TQ_LOGGING_LEVEL": "ERROR",
        # A failing override names the line at fault.
        "HYDRA_FULL_ERROR": "1",
        # Log lines when they happen.
        "PYTHONUNBUFFERED": "1",
        # vLLM renames its processes by writing over their environment, where session.py looks for its tag.
        "SPT_NOENV": "1",
    }
