"""The settings that a run of verl on a CPU needs, and why each of them is there.

Nothing here depends on the model, the data or the algorithm: put those after these overrides, and yours win.
"""

FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"

ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM turns the short name of this executor, ``uni``, back into ``mp`` on a CPU, to bind threads to cores."""

PRETENDED_CPUS = 16
"""CPUs that Ray is told of: verl's actors ask for about ten on one worker, and most of them sleep."""


def cpu_overrides(workers: int = 1, rollout_parallel: int = 1) -> list[str]:
    """Hydra overrides for ``python -m verl.trainer.main_ppo`` on a CPU.

    To change a key that is added here (those with a ``+``), override it with ``++``.

    Args:
        workers: how many FSDP workers, that is pretended GPUs, to run.
        rollout_parallel: over how many processes vLLM splits the model.
    """
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    ref = "actor_rollout_ref.ref"
    ray = "ray_kwargs.ray_init"
    return [
        # The device. verl's default is cuda.
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={workers}",
        # Ray: an own cluster even where RAY_ADDRESS names another one; "GPUs" to place the workers on; room for every
        # actor; no dashboard (two processes and 10 s of start-up); object store of 300 MB instead of a third of memory.
        f"+{ray}.address=local",
        f"+{ray}.num_gpus={workers}",
        f"{ray}.num_cpus={PRETENDED_CPUS + 4 * workers}",
        f"+{ray}.include_dashboard=False",
        f"+{ray}.object_store_memory=300000000",
        # Fewer processes: each of them spends ten seconds on imports. verl's defaults are 8, 8 and 8.
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "data.dataloader_num_workers=0",
        # FSDP2 needs fewer patches on a CPU than FSDP1. Flash attention and Triton kernels are not there, compiling
        # takes longer than the run.
        f"{actor}.strategy=fsdp2",
        f"{ref}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{ref}.fsdp_config.use_torch_compile=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        # Everything in fp32: bf16 is slow on most CPUs, and rollout and actor then agree to 1e-6.
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"{actor}.fsdp_config.dtype=float32",
        f"+{actor}.fsdp_config.mixed_precision={FP32}",
        f"{ref}.fsdp_config.model_dtype=fp32",
        f"{ref}.fsdp_config.dtype=float32",
        f"+{ref}.fsdp_config.mixed_precision={FP32}",
        # vLLM: one process for engine and worker instead of two; no compilation; it cannot put itself to sleep on a
        # CPU, so its cache is not freed either; a tenth of the memory is plenty for a cache of the size used here.
        f"{rollout}.name=vllm",
        f"{rollout}.dtype=float32",
        f"{rollout}.tensor_model_parallel_size={rollout_parallel}",
        f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend={ONE_PROCESS if rollout_parallel == 1 else 'mp'}",
        f"{rollout}.enforce_eager=True",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.free_cache_engine=False",
        f"{rollout}.gpu_memory_utilization=0.1",
        f"{rollout}.max_num_seqs=64",
        # Weights travel through shared memory, one bucket at a time. No single tensor may be larger than a bucket, and
        # verl's 2 GB are more than many containers have in /dev/shm.
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
        # verl polls every 2 s for a finished batch: longer than a step. (An asynchronous trainer needs
        # QuickReplayBufferAsync; algorithm.filter_groups needs verl's own buffer: path and name null.)
        "trainer.v1.sampler.custom_sampler.path=pkg://oar_plugin.hosts.verl.cpu.sampler",
        "trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer",
    ]


def cpu_environment() -> dict[str, str]:
    """Environment variables for such a run, on top of the caller's."""
    return {
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
