"""What each feature hooks in verl and vLLM. A feature whose hooks the installed ones lack is refused, and no other."""

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PLUGIN = "oar_plugin.hosts.verl.plugin"
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"  # names the modules that `import verl` imports, in every version

_V1, _ENGINE, _ROLLOUT, _VLLM = "verl.trainer.ppo.v1", "verl.workers.engine", "verl.workers.rollout", "vllm.v1.worker"
TRAINERS = {
    "sync": f"{_V1}.trainer_sync:PPOTrainerSync",
    "colocate_async": f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync",
    "separate_async": f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync",
}
"""Features that are values of `trainer.v1.trainer_mode`, and the class of verl's trainer."""

_V1_TRAINER = (
    "__init__(config) on_init_end() _init_tokenizer() _balance_batch(batch, metrics, logging_prefix, ...) "
    "_compute_old_log_prob(batch, metrics) _compute_advantage(batch, metrics)"
)
FEATURES: dict[str, dict[str, str]] = {
    # verl's branch `neo` has the code of these trainers and does not start them.
    **{mode: {trainer: _V1_TRAINER, "verl.trainer.main_ppo": "TaskRunnerV1(...)"} for mode, trainer in TRAINERS.items()},
    "ray_trainer": {
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer":
            "_balance_batch(batch, metrics, logging_prefix, keep_minibatch) _compute_old_log_prob(batch) _update_actor(batch)",
    },
    "fsdp": {
        f"{_ENGINE}.fsdp.transformer_impl:FSDPEngineWithLMHead":
            "infer_batch(data, loss_function) get_data_parallel_group() prepare_model_inputs(micro_batch) "
            "forward_step(micro_batch, loss_function, forward_only)",
    },
    "megatron": {
        f"{_ENGINE}.megatron.transformer_impl:MegatronEngineWithLMHead":
            "infer_batch(data, loss_function) forward_backward_batch(data, loss_function, forward_only) "
            "get_data_parallel_group() _lm_head_logits_processor(...) "
            "forward_step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
        "verl.models.mcore.util":
            "preprocess_thd_engine(pad_to_length_bucket, ...) preprocess_bshd_engine(forced_max_seqlen, ...)",
    },
    "offload": {
        f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__.modified_class":
            "_run_prompt(prompt, sampling_params, trajectory, trace, ...) _compute_score(outputs, kwargs, ...) "
            "_run_agent_loop(sampling_params, trajectory, ...) _agent_loop_postprocess(output, validate, ...)",
        "verl.experimental.agent_loop:AgentLoopOutput": "as_dict()",
        f"{_ROLLOUT}.llm_server:LLMServerClient": "_acquire_server(request_id, ...) _release_server(server_id, ...)",
        f"{_ROLLOUT}.vllm_rollout.utils:vLLMColocateWorkerExtension": "monkey_patch_model(vocab_size, banned_token_ids)",
        f"{_ROLLOUT}.vllm_rollout.vllm_async_server:vLLMHttpServer":
            "_get_worker_extension_cls() generate(...) abort_all_requests(...) resume_generation()",
        # vLLM has two model runners, and promises nothing about them.
        f"{_VLLM}.gpu_model_runner:GPUModelRunner": "_get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens, ...)",
        f"{_VLLM}.gpu.model_runner:GPUModelRunner": "add_requests(scheduler_output, ...)",
        f"{_VLLM}.gpu.sample.prompt_logprob:PromptLogprobsWorker":
            "compute_prompt_logprobs(logits_fn, hidden_states, input_batch, ...)",
    },
}  # fmt: skip
"""Module or `module:Class` -> what is overridden, replaced or called there, with its parameters; `...`: and any others."""


@cache
def missing(feature: str) -> tuple[str, ...]:
    """The hooks of a feature that the installed verl lacks; empty where the feature is supported."""
    return tuple(fault for place, hooks in FEATURES[feature].items() for fault in lacking(place, hooks))


def lacking(place: str, hooks: str) -> Iterator[str]:
    """What a module or class of a host lacks; nothing of a module that is there and does not import in this process."""
    module, _, path = place.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except Exception as error:  # a broken CUDA library raises OSError, for example
        absent = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        if "." in absent and f"{module}.".startswith(f"{absent}."):
            yield absent
        return
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, None)
    for name, parameters in re.findall(r"(\w+)\((.*?)\)", hooks):
        thing = getattr(owner, name, None)
        given = [one for one in inspect.signature(thing).parameters if one != "self"] if callable(thing) else []
        fits = {*parameters.split(", ")} <= {*given, "..."} if "..." in parameters else parameters == ", ".join(given)
        if thing is None or not fits:
            yield f"{place}.{name}({parameters})"


def host_folder() -> Path:
    """verl's package, which is not imported. ModuleNotFoundError: there is no verl."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'verl'", name="verl")
    return Path(spec.origin).parent


def host_version() -> str:
    """verl's own version, also of sources on the path. ModuleNotFoundError: there is no verl."""
    return (host_folder() / "version" / "version").read_text(encoding="utf-8").strip()


def external_modules() -> dict[str, str]:
    """The environment variable with which verl 0.8 loads OAR, its value extended. Later ones look for entry points: empty."""
    named = os.environ.get(EXTERNAL_MODULES, "")
    if PLUGIN in named or not find_spec("verl") or '"verl.plugins"' in (host_folder() / "__init__.py").read_text():
        return {}
    return {EXTERNAL_MODULES: f"{PLUGIN},{named}".strip(",")}


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this verl's function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def subclass(mixin: type, held: type, host: type, place: str) -> type:
    """The class for `place` in a registry: `held` with our mixin. RuntimeError: another plugin has put no `host` there."""
    if issubclass(held, mixin):
        return held
    if not issubclass(held, host):
        raise RuntimeError(f"verl's {place} was already replaced by {held}; OAR cannot replace it too.")
    name = f"Oar{held.__name__.removeprefix('PPO')}"
    return type(name, (mixin, held), {"host": held, "__module__": mixin.__module__})
