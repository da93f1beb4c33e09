"""Generates one model's responses to several problem sets with vLLM; each response is written as soon as it is ready."""

import hashlib
import json
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from oar_plugin.output import cause, locked, no_link
from oar_plugin.runs.evaluate import EvaluationError
from oar_plugin.runs.evaluate.checkpoints import fingerprint
from oar_plugin.runs.evaluate.grade import GeneratedResponse, Problem, ProblemSet

_POLL_S = 1.0
_GRACE_S = 15.0
_VLLM_DEFAULTS = {
    **{"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}

Request = tuple[int, list[int], int]  # number, token ids of the prompt, seed


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


class ResponseFile:
    """File with the responses of one model to one problem set: a header, then one JSON line per response.

    Different weights, sampling parameters or problems give a different file; more samples are appended to the same file. Inside
    `with` the file is locked for this process; `responses` can still be read afterwards.
    """

    def __init__(self, folder: Path, model: str, sampling: Sampling, problems: ProblemSet) -> None:
        self.header = {"model": model, "weights": fingerprint(model), **asdict(sampling), "data": problems.digest}
        key = hashlib.sha256(json.dumps(self.header).encode()).hexdigest()[:12]
        self.path = folder / f"{problems.name}-{key}.jsonl"
        self.responses: dict[tuple[int, int], GeneratedResponse] = {}

    def __enter__(self) -> "ResponseFile":
        """Lock and read the file, and remove an incomplete last line.

        Raise EvaluationError if it is locked, or if `oar eval` did not write it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", opener=no_link)
        if not locked(self._file):
            self._file.close()
            raise EvaluationError(f"{self.path}: another oar eval is writing it; wait for it, or choose another --out")
        self._file.seek(0)
        good = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                if number > 1:
                    self.responses[row["problem"], row["sample"]] = GeneratedResponse(**row)
                elif row != self.header:
                    raise ValueError("different header")
            except (ValueError, TypeError, KeyError) as error:
                text = f"{self.path}, line {number}: not written by oar eval; delete this file"
                raise EvaluationError(text) from error
            good += len(line)
        self._file.truncate(good)
        if good == 0:
            self._write(self.header)
        return self

    def add(self, response: GeneratedResponse) -> None:
        self.responses[response.problem, response.sample] = response
        self._write(asdict(response))

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()


def generate(
    model: str,
    sets: Sequence[ProblemSet],
    files: Sequence[ResponseFile],
    sampling: Sampling,
    samples: int,
    tensor_parallel: int,
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> None:
    """Add responses to each file, one per set, until every problem has `samples` of them.

    Args:
        tensor_parallel: GPUs per engine; there are as many engines as fit. Without a GPU, one engine runs on the CPU.
        progress: called with the number of finished responses, and the number of all.
        say: called with a message if the model's context is too short for the longest prompt plus `max_tokens`.

    Raise EvaluationError if the model cannot be loaded or prompted, a file is locked or broken, or an engine dies.
    """
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        missing = [
            (index, problem, sample)
            for index, file in enumerate(files)
            for sample in range(samples)
            for problem in range(len(sets[index].problems))
            if (problem, sample) not in file.responses
        ]
        total = samples * sum(len(each.problems) for each in sets)
        progress(total - len(missing), total)
        if not missing:
            return
        groups = _gpu_groups(tensor_parallel)[: len(missing)]
        prompts, context = _prompts(model, sets, sampling.max_tokens, say)
        requests = [
            (number, prompts[index][problem], _seed_of(sampling.seed, sets[index].problems[problem], sample))
            for number, (index, problem, sample) in enumerate(missing)
        ]
        with closing(_answered(model, sampling, context, groups, requests)) as answered:
            for done, (number, text, cut) in enumerate(answered, start=total - len(missing) + 1):
                index, problem, sample = missing[number]
                files[index].add(GeneratedResponse(problem, sample, text, cut))
                progress(done, total)


def _seed_of(seed: int, problem: Problem, sample: int) -> int:
    """Return the seed of one response; it depends neither on the order of requests nor on the engine."""
    return int.from_bytes(hashlib.sha256(f"{seed} {problem.prompt} {sample}".encode()).digest()[:4], "big")


def _prompts(
    model: str, sets: Sequence[ProblemSet], max_tokens: int, say: Callable[[str], None]
) -> tuple[list[list[list[int]]], int]:
    """Return the prompts' token ids (set, problem, token), and the maximum length of prompt plus response.

    That length is the longest prompt plus `max_tokens`, at most the model's context. As in verl, a prompt is made by the
    tokenizer's chat template. Raise EvaluationError if tokenizer or template fails, or if a prompt fills the context.
    """
    from jinja2 import TemplateError
    from transformers import AutoConfig, AutoTokenizer

    try:
        context = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "max_position_embeddings", None)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        encode = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=True, return_dict=False)
        prompts = [[encode(problem.prompt) for problem in each.problems] for each in sets]
    except (OSError, ValueError, TypeError, TemplateError) as error:
        text = "its configuration or tokenizer cannot be loaded, or its chat template is missing or fails"
        raise EvaluationError(f"{model}: {text}: {cause(error)}") from error
    length, data_set, number = max(
        (len(ids), each.name, number)
        for each, of_set in zip(sets, prompts, strict=True)
        for number, ids in enumerate(of_set, start=1)
    )
    if context is None or length + max_tokens <= context:
        return prompts, length + max_tokens
    if length >= context:
        raise EvaluationError(
            f"{model}: problem {number} of {data_set} has {length} tokens and fills the model's context "
            f"({context}): no room for a response; remove the problem, or the set from --data"
        )
    left = f"a context of {context} tokens leaves {context - length} response tokens"
    say(f"{model}: with the longest prompt, {left}; max_tokens is {max_tokens}")
    return prompts, context


def _gpu_groups(tensor_parallel: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each engine; one empty string if there is no GPU."""
    import torch

    count = torch.cuda.device_count()  # does not initialise CUDA
    if not count:
        return [""]
    if count < tensor_parallel:
        raise EvaluationError(f"--tp={tensor_parallel}: must be at most {count}, the number of visible GPUs")
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    starts = range(0, count - tensor_parallel + 1, tensor_parallel)
    return [",".join(visible[start : start + tensor_parallel]) for start in starts]


def _answered(
    model: str, sampling: Sampling, context: int, groups: Sequence[str], requests: Sequence[Request]
) -> Generator[tuple[int, str, bool], None, None]:
    """Yield (number, text, truncated) as responses get ready; requests are divided evenly among the engines.

    `context` is the maximum length of prompt plus response. All engines are terminated at the end, also after an error. Raise
    EvaluationError if one of them dies.
    """
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    engines = [
        spawn.Process(target=_serve, args=(model, sampling, context, gpus, requests[place :: len(groups)], results))
        for place, gpus in enumerate(groups)
    ]
    try:
        for engine in engines:
            engine.start()
        for _ in requests:
            yield _next(model, engines, results)
        for engine in engines:
            engine.join(_GRACE_S)
    finally:
        started = [engine for engine in engines if engine.pid is not None]
        for engine in started:
            engine.terminate()
        for engine in started:
            engine.join(_GRACE_S)
            engine.kill()  # no effect on a process that has ended


def _next(model: str, engines: Sequence[Any], results: Any) -> Any:
    while True:
        with suppress(queue.Empty):
            return results.get(timeout=_POLL_S)
        if dead := [engine.exitcode for engine in engines if engine.exitcode not in (None, 0)]:
            raise EvaluationError(
                f"{model}: an engine ended with status {dead[0]}; see its messages above. Finished responses are kept; "
                "run the same command again to continue"
            )


def _end_with_parent() -> None:
    """Wait until the parent process ends, then end this one: an engine without a parent would keep its GPU."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _serve(model: str, sampling: Sampling, context: int, gpus: str, requests: Sequence[Request], results: Any) -> None:
    """Run an engine in this process, and put (number, text, truncated) into `results` for each request."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but the parent terminates it
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, and ends with it
    for name, value in _VLLM_DEFAULTS.items():
        os.environ.setdefault(name, value)

    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext

    arguments = EngineArgs(
        model=model,
        max_model_len=context,
        tensor_parallel_size=gpus.count(",") + 1,
        seed=sampling.seed,
        enforce_eager=not gpus,  # compiling for a CPU takes longer than it saves
        use_tqdm_on_load=False,  # there is one progress bar already
    )
    # With this usage context vLLM chooses its batch sizes for offline use.
    engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    for number, prompt, seed in requests:
        given = {**asdict(sampling), "seed": seed if sampling.temperature > 0 else None}
        parameters = SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), parameters)
    while engine.has_unfinished_requests():
        for output in engine.step():
            made = output.outputs[0]
            results.put((int(output.request_id), made.text, made.finish_reason == "length"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides warnings that vLLM's libraries print at exit
