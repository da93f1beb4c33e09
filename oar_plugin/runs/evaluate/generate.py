"""Responses of one model to several problem sets by vLLM: one engine per GPU; each response is written when it is ready."""

import errno
import fcntl
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
from typing import Any, NamedTuple

from oar_plugin.output import no_link
from oar_plugin.runs.evaluate.checkpoints import fingerprint
from oar_plugin.runs.evaluate.problems import EvaluationError, Problem, ProblemSet, reason

_LOOK_AGAIN_S = 1.0
_GRACE_S = 15.0
_VLLM_DEFAULTS = {
    **{"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class GeneratedResponse:
    problem: int  # index in the set
    sample: int
    text: str
    cut: bool  # it has `max_tokens` tokens


class ResponseFile:
    """The responses of one model to one problem set under one sampling: a header, then one JSON line per response.

    Other weights, sampling or problems have another file; the number of samples may grow in the same file. Within `with` only
    this process may write it; `responses` stays after it.
    """

    def __init__(self, folder: Path, model: str, sampling: Sampling, problems: ProblemSet) -> None:
        self.header = {"model": model, "weights": fingerprint(model), **asdict(sampling), "data": problems.digest}
        key = hashlib.sha256(json.dumps(self.header).encode()).hexdigest()[:12]
        self.path = folder / f"{problems.name}-{key}.jsonl"
        self.responses: dict[tuple[int, int], GeneratedResponse] = {}

    def __enter__(self) -> "ResponseFile":
        """Read the file, and remove a last line that was cut off. EvaluationError: it is locked, or of something else."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", opener=no_link)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EvaluationError(
                f"{self.path}: another oar eval writes it; wait for it, or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some file systems of clusters have no locks
                raise
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
                    raise ValueError("another header")
            except (ValueError, TypeError, KeyError) as error:
                raise EvaluationError(
                    f"{self.path}, line {number}: not what oar eval wrote; delete this file"
                ) from error
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


class SampleRequest(NamedTuple):
    """One sample of one problem of a set."""

    data_set: int
    problem: int
    sample: int
    seed: int


@dataclass(frozen=True)
class Job:
    """The same for every engine."""

    model: str  # a folder or a name on the hub
    sampling: Sampling
    prompts: list[list[list[int]]]  # token ids by data set and problem
    context: int  # tokens of a prompt with its response


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
        tensor_parallel: GPUs per engine. All visible GPUs are used; where there is none, one engine on the CPU.
        progress: called with the number of responses that are there, and with their number at the end.
        say: called where the model's context is too short for the longest prompt and `max_tokens`.

    EvaluationError: the model cannot be loaded or prompted, a file is locked or broken, or an engine died.
    """
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        missing = [
            SampleRequest(index, problem, sample, _seed_of(sampling.seed, sets[index].problems[problem], sample))
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
        job = Job(model, sampling, *_prompts(model, sets, sampling.max_tokens, say))
        with closing(_answered(job, groups, missing)) as answered:
            for done, (index, response) in enumerate(answered, start=1):
                files[index].add(response)
                progress(total - len(missing) + done, total)


def _seed_of(seed: int, problem: Problem, sample: int) -> int:
    """Return a seed per response, which depends neither on the order nor on the engine."""
    return int.from_bytes(hashlib.sha256(f"{seed} {problem.prompt} {sample}".encode()).digest()[:4], "big")


def _prompts(
    model: str, sets: Sequence[ProblemSet], max_tokens: int, say: Callable[[str], None]
) -> tuple[list[list[list[int]]], int]:
    """Return token ids by set and problem, and the tokens of the longest prompt with its response, limited by the context.

    Prompts are made as in verl: the tokenizer's chat template, with the generation prompt. EvaluationError: the tokenizer or
    template fails, or a prompt fills the context.
    """
    from jinja2 import TemplateError
    from transformers import AutoConfig, AutoTokenizer

    try:
        context = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "max_position_embeddings", None)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        encode = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=True, return_dict=False)
        prompts = [[encode(problem.prompt) for problem in each.problems] for each in sets]
    except (OSError, ValueError, TypeError, TemplateError) as error:
        raise EvaluationError(
            f"{model}: its configuration or tokenizer cannot be loaded, or it has no chat template that takes these prompts: "
            f"{reason(error)}"
        ) from error
    length, data_set, number = max(
        (len(ids), each.name, number)
        for each, of_set in zip(sets, prompts, strict=True)
        for number, ids in enumerate(of_set, start=1)
    )
    if context is None or length + max_tokens <= context:
        return prompts, length + max_tokens
    left = context - length
    if left <= 0:
        raise EvaluationError(
            f"{model}: problem {number} of {data_set} has {length} tokens, which leaves none of the model's context "
            f"({context}) to a response; take the problem or the set out of --data"
        )
    say(f"{model}: its context of {context} tokens leaves {left} to a response of the longest prompt, not {max_tokens}")
    return prompts, context


def _gpu_groups(tensor_parallel: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each engine; one empty text where there is no GPU."""
    import torch

    count = torch.cuda.device_count()  # does not open them
    if not count:
        return [""]
    if count < tensor_parallel:
        raise EvaluationError(f"--tp={tensor_parallel}: {count} GPUs are visible; at most {count}")
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    starts = range(0, count - tensor_parallel + 1, tensor_parallel)
    return [",".join(visible[start : start + tensor_parallel]) for start in starts]


def _answered(
    job: Job, groups: Sequence[str], requests: Sequence[SampleRequest]
) -> Generator[tuple[int, GeneratedResponse], None, None]:
    """Yield each request's set and response when it is ready; each engine serves an equal share of the requests.

    The engines are ended in every case. EvaluationError: one of them died.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    shares = [requests[place :: len(groups)] for place in range(len(groups))]
    engines = [context.Process(target=_serve, args=(job, *each, results)) for each in zip(groups, shares, strict=True)]
    try:
        for engine in engines:
            engine.start()
        for _ in requests:
            yield _next(job.model, engines, results)
        for engine in engines:
            engine.join(_GRACE_S)
    finally:
        started = [engine for engine in engines if engine.pid is not None]
        for engine in started:
            engine.terminate()
        for engine in started:
            engine.join(_GRACE_S)
            engine.kill()  # no effect on one that has ended


def _next(model: str, engines: Sequence[Any], results: Any) -> Any:
    while True:
        with suppress(queue.Empty):
            return results.get(timeout=_LOOK_AGAIN_S)
        if dead := [engine.exitcode for engine in engines if engine.exitcode not in (None, 0)]:
            raise EvaluationError(
                f"{model}: an engine ended with status {dead[0]}; its messages stand above. What was generated is kept: the "
                "same command goes on"
            )


def _end_with_parent() -> None:
    """End this process when its parent does: the parent may be killed, and an engine holds a whole GPU."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _serve(job: Job, gpus: str, requests: Sequence[SampleRequest], results: Any) -> None:
    """Run an engine in this process until all requests are answered."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; its parent ends it
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
        model=job.model,
        max_model_len=job.context,
        tensor_parallel_size=gpus.count(",") + 1,
        seed=job.sampling.seed,
        enforce_eager=not gpus,  # compiling for a CPU takes longer than it saves
        use_tqdm_on_load=False,  # there is one progress bar already
    )
    # From the context vLLM chooses how many sequences run at a time: as many as for offline use.
    engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    sampling = asdict(job.sampling)
    by_key = {str(number): request for number, request in enumerate(requests)}
    for key, request in by_key.items():
        sampling["seed"] = request.seed if job.sampling.temperature > 0 else None
        parameters = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = TokensPrompt(prompt_token_ids=job.prompts[request.data_set][request.problem])
        engine.add_request(key, prompt, parameters)
    while by_key:
        for output in engine.step():
            request, made = by_key.pop(output.request_id), output.outputs[0]
            response = GeneratedResponse(request.problem, request.sample, made.text, made.finish_reason == "length")
            results.put((request.data_set, response))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # vLLM's libraries print warnings when they end
