"""What of verl each feature touches, in one place, and whether the verl that is here has it.

The plugin serves whatever verl has all of a feature's entries, and refuses the others by themselves: a version number says less
(verl's development snapshots keep theirs for months). The driver and `oar doctor` ask for every feature that a run needs; in
the other processes a hook asks for the feature whose module was just imported, and imports next to nothing for it.
"""

import dis
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

OLDEST = "0.9.0"
"""Versions before have no v1 trainer."""

TRIED = ("0.9.0", "0.9.1", "0.10.0.dev")
"""verl versions that whole runs and tests were made with; others are served if they have what is listed here."""


_OF_RAY = "_ray_trace_ctx"  # a parameter that Ray adds to the methods of an actor's class


class Use(NamedTuple):
    """One thing of the host's that a feature touches."""

    module: str
    name: str  # of an object in it, dotted; of a class, an attribute that its methods set counts too
    call: tuple[int, tuple[str, ...]] | None = None  # how many positional arguments it gets, and which by name
    override: tuple[str, ...] | None = None  # parameters, without self, of our method in its place; "**" takes the rest


def _has(module: str, *names: str) -> tuple[Use, ...]:
    return tuple(Use(module, name) for name in names)


def _calls(module: str, name: str, positional: int = 0, *by_name: str) -> tuple[Use, ...]:
    return (Use(module, name, call=(positional, by_name)),)


def _overrides(module: str, name: str, *parameters: str) -> tuple[Use, ...]:
    return (Use(module, name, override=parameters),)


TRAINERS = {
    mode: (f"verl.trainer.ppo.v1.trainer_{mode}", name)
    for mode, name in (
        ("sync", "PPOTrainerSync"),
        ("colocate_async", "PPOTrainerColocateAsync"),
        ("separate_async", "PPOTrainerSeparateAsync"),
    )
}
"""Of the features those that are values of `trainer.v1.trainer_mode`: module and class of verl's trainer."""


_BALANCING = (
    *_calls("verl.utils.seqlen_balancing", "calculate_workload", 1),
    *_calls("verl.utils.seqlen_balancing", "get_seqlen_balanced_partitions", 3),
)


def _trainer(module: str, name: str) -> tuple[Use, ...]:
    queue = "transfer_queue"
    return (
        *_has("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"),
        *_calls("verl.trainer.ppo.v1", "get_trainer_cls", 1),
        *_calls(module, name, 1),
        *_overrides(module, f"{name}.on_init_end"),
        *_overrides(module, f"{name}._init_tokenizer"),
        *_overrides(module, f"{name}._balance_batch", "batch", "metrics", "logging_prefix", "**"),
        *_overrides(module, f"{name}._compute_old_log_prob", "batch", "metrics"),
        *_overrides(module, f"{name}._compute_advantage", "batch", "metrics"),
        *_has(
            module, *(f"{name}.{x}" for x in ("config", "global_steps", "timing_raw", "actor_rollout_wg", "tokenizer"))
        ),
        *_calls("verl.protocol", "DataProto", 0, "batch"),
        *_has("verl.protocol", "DataProto.batch", "DataProto.non_tensor_batch"),
        *_calls(
            "verl.trainer.ppo.v1.utils",
            "compute_advantage_for_multi_trajectories",
            1,
            *("batch_keys", "adv_estimator", "gamma", "lam", "num_repeat", "norm_adv_by_std_in_grpo", "config"),
        ),
        *_calls("verl.utils.debug", "marked_timer", 2),
        *_calls("verl.workers.utils.padding", "response_to_nested", 2),
        *_calls("verl.workers.engine_workers", "ActorRolloutRefWorker.compute_log_prob", 1),
        *_has("verl.single_controller.ray.base", "RayWorkerGroup._dispatch_info", "RayWorkerGroup.workers"),
        *_BALANCING,
        *_calls("verl.utils.seqlen_balancing", "log_seqlen_unbalance", 3),
        *_has(module, f"{name}.llm_server_manager"),
        *_calls("verl.workers.rollout.llm_server", "LLMServerManager.get_replicas"),
        *_has("verl.workers.rollout.replica", "RolloutReplica.servers"),
        *_calls(queue, "kv_batch_get", 0, "keys", "partition_id", "select_fields"),
        *_calls(queue, "kv_batch_put", 0, "keys", "partition_id", "fields"),
        *_calls(queue, "KVBatchMeta.reorder", 1),
        *_has(queue, *(f"KVBatchMeta.{field}" for field in ("keys", "tags", "partition_id", "extra_info"))),
    )


_TENSORDICT = (
    *_calls("verl.utils.tensordict_utils", "pop", 1, "key", "default"),
    *_calls("verl.utils.tensordict_utils", "get_non_tensor_data", 0, "data", "key", "default"),
    *_calls("verl.utils.tensordict_utils", "index_select_tensor_dict", 2),
    *_calls("verl.utils.tensordict_utils", "assign_non_tensor", 1, "max_token_len_per_gpu"),
)

_PASS = (  # importance_pass.py
    *_TENSORDICT,
    *_BALANCING,
    *_calls("verl.utils.tensordict_utils", "maybe_fix_3d_position_ids", 1),
    *_calls("verl.utils.device", "get_device_id"),
    *_calls("verl.utils.device", "get_device_name"),
    *_calls("verl.utils.device", "get_torch_device"),
    *_calls("verl.utils.device", "get_vendor"),
    *_calls("verl.workers.engine.base", "EngineRegistry.get_engine_cls", 2),
    *_has("verl.workers.engine.base", "EngineRegistry._engines"),
)


def _engine(module: str, name: str, *attributes: str) -> tuple[Use, ...]:
    return (
        *_overrides(module, f"{name}.infer_batch", "data", "loss_function"),
        *_calls(module, f"{name}.get_data_parallel_group"),
        *_has(
            module, *(f"{name}.{attribute}" for attribute in ("module", "engine_config", "model_config", *attributes))
        ),
    )


def _megatron_core() -> tuple[Use, ...]:
    """megatron.py and passes/megatron_taps.py."""
    core, ddp = "megatron.core", "DistributedDataParallel"
    model = ("embedding", "output_layer", "pre_process", "post_process", "position_embedding_type")
    functions = ("finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "no_sync_func", "param_sync_func")
    config = (*functions, "sequence_parallel", "microbatch_group_size_per_vp_stage")
    linear = ("weight", "bias", "sequence_parallel", "output_size_per_partition")
    sizes = ("pipeline_model_parallel", "virtual_pipeline_model_parallel", "context_parallel", "tensor_model_parallel")
    groups = ("tensor_model_parallel", "context_parallel", "model_parallel")
    return (
        *_has(f"{core}.models.gpt", *(f"GPTModel.{name}" for name in model)),
        *_has(f"{core}.tensor_parallel", *(f"ColumnParallelLinear.{name}" for name in linear)),
        *_calls(f"{core}.tensor_parallel.mappings", "copy_to_tensor_model_parallel_region", 1, "group"),
        *_calls(f"{core}.tensor_parallel.mappings", "reduce_from_tensor_model_parallel_region", 1, "group"),
        *_has(f"{core}.transformer.attention", "Attention"),
        *_has(f"{core}.transformer.transformer_block", "TransformerBlock"),
        *_has(f"{core}.transformer.transformer_config", "TransformerConfig.recompute_granularity"),
        *_has(f"{core}.model_parallel_config", *(f"ModelParallelConfig.{name}" for name in config)),
        *_calls(f"{core}.distributed", f"{ddp}.disable_forward_pre_hook"),
        *_calls(f"{core}.distributed", f"{ddp}.enable_forward_pre_hook"),
        *_has(f"{core}.distributed", f"{ddp}.remove_forward_pre_hook_handles"),
        *_calls(f"{core}.utils", "get_model_config", 1),
        *_has(f"{core}.parallel_state", *(f"get_{name}_world_size" for name in sizes)),
        *_has(f"{core}.parallel_state", *(f"get_{name}_group" for name in groups), "get_tensor_model_parallel_rank"),
    )


_FSDP = ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead")
_MEGATRON = ("verl.workers.engine.megatron.transformer_impl", "MegatronEngineWithLMHead")
_WORKER = ("verl.trainer.ppo.v1.agent_loop_tq", "AgentLoopWorkerTQ.__ray_metadata__.modified_class")
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_ROLLOUT_UTILS = "verl.workers.rollout.vllm_rollout.utils"

FEATURES: Mapping[str, tuple[Use, ...]] = {
    **{mode: _trainer(*trainer) for mode, trainer in TRAINERS.items()},
    "fsdp": (
        *_PASS,
        *_engine(
            *_FSDP,
            *("use_remove_padding", "use_ulysses_sp", "ulysses_sequence_parallel_size", "ulysses_parallel_group"),
        ),
        *_calls(_FSDP[0], f"{_FSDP[1]}.forward_step", 1, "loss_function", "forward_only"),
        *_overrides(_FSDP[0], f"{_FSDP[1]}.prepare_model_inputs", "micro_batch"),
        *_overrides(
            *(_FSDP[0], f"{_FSDP[1]}.prepare_model_outputs"),
            *("output", "output_args", "micro_batch", "logits_processor_func"),
        ),
        *_calls("verl.workers.engine.utils", "prepare_micro_batches", 0, "data", "dp_group", "same_micro_num_in_dp"),
        *_calls("verl.workers.engine.utils", "postprocess_batch_func", 0, "output_lst", "indices", "data"),
    ),
    "megatron": (
        *_PASS,
        *_engine(*_MEGATRON, "tf_config", "peft_cls"),
        *_calls(_MEGATRON[0], f"{_MEGATRON[1]}.forward_backward_batch", 2, "forward_only"),
        *_overrides(
            *(_MEGATRON[0], f"{_MEGATRON[1]}.forward_step"),
            *("batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"),
        ),
        *_has(_MEGATRON[0], f"{_MEGATRON[1]}._lm_head_logits_processor"),
        *_calls("verl.models.mcore.util", "preprocess_thd_engine", 1, "pad_to_length_bucket"),
        *_calls("verl.models.mcore.util", "preprocess_bshd_engine", 1, "forced_max_seqlen"),
        *_megatron_core(),
    ),
    "offload": (
        *_has("verl.experimental.agent_loop", *(f"AgentLoopOutput.{field}" for field in (
            "prompt_ids", "response_ids", "response_mask", "multi_modal_data", "reward_score", "as_dict",
        ))),
        *_has(_WORKER[0], "AgentLoopManagerTQ.agent_loop_workers_class"),
        *_has(_WORKER[0], *(f"{_WORKER[1]}.{x}" for x in ("config", "tokenizer", "model_config", "llm_client"))),
        *_overrides(_WORKER[0], f"{_WORKER[1]}._run_prompt", "prompt", "sampling_params", "trajectory", "trace"),
        *_overrides(_WORKER[0], f"{_WORKER[1]}._run_agent_loop", "sampling_params", "trajectory", "**"),
        *_overrides(_WORKER[0], f"{_WORKER[1]}._agent_loop_postprocess", "output", "validate", "**"),
        *_overrides(_WORKER[0], f"{_WORKER[1]}._compute_score", "outputs", "kwargs"),
        *_calls("verl.workers.rollout.llm_server", "LLMServerClient._acquire_server", 1),
        *_calls("verl.workers.rollout.llm_server", "LLMServerClient._release_server", 1),
        *_calls("verl.workers.rollout.replica", "RolloutReplicaRegistry.register", 2),
        *_has(_ROLLOUT_UTILS, "VLLM_LORA_INT_ID", "VLLM_LORA_NAME", "VLLM_LORA_PATH"),
        *_overrides(
            *(_ROLLOUT_UTILS, "vLLMColocateWorkerExtension.monkey_patch_model"), *("vocab_size", "banned_token_ids")
        ),
        *_has(_SERVER, *(f"vLLMHttpServer.{name}" for name in (
            "generate", "abort_all_requests", "resume_generation", "engine", "config", "global_steps", "lora_as_adapter",
        ))),
        *_overrides(_SERVER, "vLLMHttpServer._get_worker_extension_cls"),
        *_has(_SERVER, *(f"vLLMReplica.{name}" for name in ("server_class", "is_reward_model", "is_teacher_model"))),
    ),
}  # fmt: skip
"""Feature -> what it touches. The three trainers, the two engines, and OAR-P on vLLM's rollout engines."""


def host_version() -> str:
    """verl's own version, also where verl was never installed and is found by PYTHONPATH. Imports nothing.

    ModuleNotFoundError: there is no verl.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("verl is not installed")
    return (Path(spec.origin).parent / "version" / "version").read_text(encoding="utf-8").strip()


def version_note() -> str | None:
    """What there is to say about verl's version: None from the oldest to the newest tried. Never a reason to refuse."""
    from packaging.version import InvalidVersion, Version

    version = host_version()
    try:
        if Version(TRIED[0]) <= Version(version) <= Version(TRIED[-1]):
            return None
    except InvalidVersion:  # a fork's own
        pass
    return f"verl {version} was not tried with OAR; these were: {', '.join(TRIED)}"


def missing(feature: str) -> list[str]:
    """What a feature needs and this verl has not, one sentence each: what was expected, and what was found.

    Imports the modules of verl that the feature touches. Empty where the feature is served; a module that cannot be imported
    here for a reason that is not verl's is not counted (see `unchecked`).
    """
    from packaging.version import InvalidVersion, Version

    version = host_version()
    try:
        if Version(version).release < Version(OLDEST).release:
            return [f"verl {version} has no v1 trainer; OAR needs verl {OLDEST} or newer"]
    except InvalidVersion:  # a fork's own: what is there decides
        pass
    return [fault for use in dict.fromkeys(FEATURES[feature]) if (fault := _fault(use)) is not None]


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this verl's function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def unchecked(feature: str) -> list[str]:
    """The modules of a feature that this process cannot import for a reason that is not verl's, one sentence each.

    A driver may run on a node without megatron-core, say.
    """
    modules = dict.fromkeys(use.module for use in FEATURES[feature])
    return [reason for module in modules if (reason := _unimportable(module)) is not None]


@cache
def _imported(module: str) -> Any:
    """The module, or what its first import raised: a second one may trip over what the first one left behind."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken CUDA library raises OSError, for example
        return error


def _unimportable(module: str) -> str | None:
    error = _imported(module)
    if not isinstance(error, Exception) or (isinstance(error, ModuleNotFoundError) and _is_of_host(error.name, module)):
        return None
    return f"{module} cannot be imported here ({type(error).__name__}: {error})"


def _is_of_host(absent: str | None, wanted: str) -> bool:
    """Whether what an import did not find is the wanted module itself, or a package that holds it and is itself in another:
    a distribution that this machine does not have at all says nothing about its version."""
    return absent is not None and "." in absent and (wanted == absent or wanted.startswith(f"{absent}."))


def _fault(use: Use) -> str | None:
    found = _imported(use.module)
    if isinstance(found, Exception):  # `unchecked` says so, where it is not this
        absent = isinstance(found, ModuleNotFoundError) and _is_of_host(found.name, use.module)
        return f"{use.module} is not there" if absent else None
    owner = found
    for part in use.name.split("."):
        if not _holds(found, part):
            return f"{use.module}: {use.name} is not there"
        owner, found = found, getattr(found, part, None)
    if use.call is None and use.override is None:
        return None
    signature = inspect.signature(found)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != _OF_RAY]
    if isinstance(owner, type) and isinstance(found, FunctionType):  # a method: without self
        parameters = parameters[1:]
    signature = inspect.Signature(parameters)
    takes = f"{use.module}: {use.name} takes ({', '.join(map(_shown, parameters))})"
    if use.call is not None:
        positional, by_name = use.call
        try:
            signature.bind(*[None] * positional, **dict.fromkeys(by_name))
        except TypeError as error:
            passed = ", ".join([*["_"] * positional, *(f"{name}=" for name in by_name)])
            return f"{takes}; OAR calls it with ({passed}): {error}"
    if use.override is not None and not _covers(use.override, [_shown(parameter) for parameter in parameters]):
        return f"{takes}; OAR's own takes ({', '.join(use.override)})"
    return None


def _holds(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    return isinstance(owner, type) and any(_sets(base, name) for base in owner.__mro__)


def _sets(base: type, name: str) -> bool:
    """Whether a class declares the attribute, or one of its methods sets it on something."""
    if name in vars(base).get("__annotations__", {}):
        return True
    functions = (inspect.unwrap(value) for value in vars(base).values() if isinstance(value, FunctionType))
    return any(
        name in function.__code__.co_names  # asked first: disassembling takes a thousand times as long
        and any(step.opname == "STORE_ATTR" and step.argval == name for step in dis.get_instructions(function))
        for function in functions
        if isinstance(function, FunctionType)  # what was wrapped may be a partial
    )


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return "**"
    return "*" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name


def _covers(ours: tuple[str, ...], theirs: list[str]) -> bool:
    """Whether a method with our parameters can be called like theirs: by place or by name."""
    if ours and ours[-1] == "**":
        return theirs[: len(ours) - 1] == list(ours[:-1])
    return theirs == list(ours)
