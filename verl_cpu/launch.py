"""Overrides and environment variables of a run of verl on a CPU.

The settings themselves, each with its reason, are in ``conf/cpu/*.yaml``. They do not depend on the model, the data or the
algorithm. Overrides on the command line win.
"""


def cpu_overrides(workers: int = 1) -> list[str]:
    """Return Hydra overrides for an FSDP actor with this number of workers; Ray counts each as a GPU."""
    return ["+cpu=dp", *([f"trainer.n_gpus_per_node={workers}"] if workers != 1 else [])]


ON_LOOPBACK = {
    # Ray listens on 127.0.0.1 alone, its default on Windows and macOS; so do verl, vLLM's server and TransferQueue, which
    # use Ray's address. Ray's default on Linux is every address of the machine.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""For a run on one machine: other machines cannot reach its ports, except those of torch's TCPStore, which takes no address."""


def cpu_environment(one_machine: bool = True) -> dict[str, str]:
    """Return environment variables for a run on a CPU, to be added to the caller's."""
    from verl_cpu.before_platforms import external_modules  # the plugin imports this module in every process

    return {
        **(ON_LOOPBACK if one_machine else {}),
        **external_modules(),
        # A dozen actors have a process each; several threads in each would only compete for the cores.
        "OMP_NUM_THREADS": "1",
        # vLLM compiles its sampler, and verl its entropy, which takes longer than the run.
        "TORCH_COMPILE_DISABLE": "1",
        # A KV cache of 1 GB. vLLM's default is a share of the machine's memory, which another run may use.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Connections between the processes of a run must not go through the user's proxy.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        # Models are local folders: do not look for newer ones on the hub.
        "HF_HUB_OFFLINE": "1",
        # No usage reports, and no message about them.
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # Ray's default drops equal lines of different processes.
        "RAY_DEDUP_LOGS": "0",
        # Ray's default is 60 s; the first worker waits for the imports of all (forks.py).
        "RAY_worker_register_timeout_seconds": "600",
        # TransferQueue warns at every message that the machine has fewer than 8 cores.
        "TQ_LOGGING_LEVEL": "ERROR",
        # The message about a failing override names the line.
        "HYDRA_FULL_ERROR": "1",
        # Log lines when they happen.
        "PYTHONUNBUFFERED": "1",
    }
