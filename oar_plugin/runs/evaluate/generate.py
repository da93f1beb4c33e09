"""Responses of one model to several problem sets: vLLM, one engine a GPU, every response on disk as soon as it is there."""

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

IN_FLIGHT = 1024
"""Requests that an engine holds at a time: more than it runs at once, so that it never waits for the next."""
_LOOK_AGAIN_S = 1.0
_GRACE_S = 15.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Response:
    problem: int  # its place in the set
    sample: int
    text: str
    cut: bool  # it reached the most tokens that were allowed


class ResponseFile:
    """The responses of one model to one problem set under one sampling, a line each behind a header.

    Other weights, sampling or problems have another file; the number of samples may grow in the same. Within `with` the file
    is this process's; `responses` stays.
    """

    def __init__(self, folder: Path, model: str, sampling: Sampling, problems: ProblemSet) -> None:
        self.header = {"model": model, "weights": fingerprint(model), **asdict(sampling), "data": problems.digest}
        key = hashlib.sha256(json.dumps(self.header).encode()).hexdigest()[:12]
        self.path = folder / f"{problems.name}-{key}.jsonl"
        self.responses: dict[tuple[int, int], Response] = {}

    def __enter__(self) -> "ResponseFile":
        """Read what is there; a last line that was cut off is taken away. Raises EvaluationError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", opener=no_link)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EvaluationError(
                f"{self.path}: another oar eval writes it; wait for it, or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some file systems of clusters have none
                raise
        self._file.seek(0)
        good = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                if number > 1:
                    self.responses[row["problem"], row["sample"]] = Response(**row)
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

    def add(self, response: Response) -> None:
        self.responses[response.problem, response.sample] = response
        self._write(asdict(response))

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()


class Request(NamedTuple):
    """One sample of one problem of a set."""

    of: int
    problem: int
    sample: int
    seed: int


@dataclass(frozen=True)
class Job:
    """What every engine is told."""

    model: str  # a folder or a name on the hub
    sampling: Sampling
    prompts: list[list[list[int]]]  # ids of each set's problems
    context: int  # tokens of a prompt with its response
    at_a_time: int  # requests that an engine holds


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
    """Bring each file, one for each of `sets`, to `samples` responses a problem; what is there already is not made again.

    Args:
        tensor_parallel: GPUs of an engine. All visible GPUs are used; where there is none, one engine on the CPU.
        progress: called with responses that are there, and those that there shall be.
        say: told when the model's context is too short for the longest prompt and `max_tokens`.

    Raises EvaluationError.
    """
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        missing = [
            Request(of, problem, sample, _seed_of(sampling.seed, sets[of].problems[problem], sample))
            for of, file in enumerate(files)
            for sample in range(samples)
            for problem in range(len(sets[of].problems))
            if (problem, sample) not in file.responses
        ]
        total = samples * sum(len(each.problems) for each in sets)
        progress(total - len(missing), total)
        if not missing:
            return
        groups = _gpu_groups(tensor_parallel)[: len(missing)]
        at_a_time = min(IN_FLIGHT, -(-len(missing) // len(groups)))  # no engine takes the others' share
        job = Job(model, sampling, *_prompts(model, sets, sampling.max_tokens, say), at_a_time)
        with closing(_answered(job, groups, missing)) as answered:
            for done, (of, response) in enumerate(answered, start=1):
                files[of].add(response)
                progress(total - len(missing) + done, total)


def _seed_of(seed: int, problem: Problem, sample: int) -> int:
    """A response's own: the same in whatever order and on whichever engine it is made."""
    return int.from_bytes(hashlib.sha256(f"{seed} {problem.prompt} {sample}".encode()).digest()[:4], "big")


def _prompts(
    model: str, sets: Sequence[ProblemSet], max_tokens: int, say: Callable[[str], None]
) -> tuple[list[list[list[int]]], int]:
    """Ids of each set's problems, and the tokens that the longest takes with its response: no more than the model's context.

    As verl makes prompts: the tokenizer's chat template, asked for a response. Raises EvaluationError.
    """
    from jinja2 import TemplateError
    from transformers import AutoConfig, AutoTokenizer

    try:
        context = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "max_position_embeddings", None)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        make = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=True, return_dict=False)
        prompts = [[make(problem.prompt) for problem in each.problems] for each in sets]
    except (OSError, ValueError, TypeError, TemplateError) as error:
        raise EvaluationError(
            f"{model}: its configuration or tokenizer cannot be loaded, or it has no chat template that takes these prompts: "
            f"{reason(error)}"
        ) from error
    longest = max(len(ids) for of in prompts for ids in of)
    if context is None or longest + max_tokens <= context:
        return prompts, longest + max_tokens
    for each, of in zip(sets, prompts, strict=True):
        for number, ids in enumerate(of, start=1):
            if len(ids) >= context:
                raise EvaluationError(
                    f"{model}: problem {number} of {each.name} has {len(ids)} tokens, which leaves none of the model's context "
                    f"({context}) to a response; take the problem or the set out of --data"
                )
    left = context - longest
    say(f"{model}: its context of {context} tokens leaves {left} to a response of the longest prompt, not {max_tokens}")
    return prompts, context


def _gpu_groups(tensor_parallel: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine; one empty text where there is no GPU."""
    import torch

    count = torch.cuda.device_count()  # does not open them
    if not count:
        return [""]
    if count < tensor_parallel:
        raise EvaluationError(f"--tp={tensor_parallel}: {count} GPUs are visible; at most {count}")
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    return [
        ",".join(visible[at : at + tensor_parallel]) for at in range(0, count - tensor_parallel + 1, tensor_parallel)
    ]


def _answered(
    job: Job, groups: Sequence[str], requests: Sequence[Request]
) -> Generator[tuple[int, Response], None, None]:
    """Every request's response with its set, as they are ready. The engines are gone at the end in every case."""
    context = multiprocessing.get_context("spawn")
    work, results = context.Queue(), context.Queue()
    engines = [context.Process(target=_serve, args=(job, gpus, work, results)) for gpus in groups]
    for request in (*requests, *[None] * len(engines)):
        work.put(request)
    try:
        for engine in engines:
            engine.start()
        for _ in requests:
            yield _next(job.model, engines, results)
        for engine in engines:
            engine.join(_GRACE_S)
    finally:
        work.cancel_join_thread()
        for engine in engines:
            if engine.pid is not None:
                engine.terminate()
        for engine in engines:
            if engine.pid is not None:
                engine.join(_GRACE_S)
                engine.kill()  # does nothing to one that has ended


def _next(model: str, engines: Sequence[Any], results: Any) -> tuple[int, Response]:
    while True:
        with suppress(queue.Empty):
            of, response = results.get(timeout=_LOOK_AGAIN_S)
            return of, response
        for engine in engines:
            if engine.exitcode not in (None, 0):
                raise EvaluationError(
                    f"{model}: an engine ended with status {engine.exitcode}; its messages stand above. What was generated "
                    "is kept: the same command goes on"
                )


def _end_with_parent() -> None:
    """A parent that is killed ends nobody, and an engine holds a whole GPU."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _serve(job: Job, gpus: str, work: Any, results: Any) -> None:
    """The process of an engine: takes requests until it meets None."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches this process too; its parent ends it
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process, and ends with it
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ):
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
    # By this vLLM chooses how many sequences run at a time: as many as for offline use.
    engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    under_way: dict[str, Request] = {}
    more = True
    while more or under_way:
        while more and len(under_way) < job.at_a_time:
            request = work.get()
            if request is None:
                more = False
                break
            parameters = SamplingParams(
                temperature=job.sampling.temperature,
                top_p=job.sampling.top_p,
                max_tokens=job.sampling.max_tokens,
                seed=request.seed if job.sampling.temperature > 0 else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            key = f"{request.of}-{request.problem}-{request.sample}"
            engine.add_request(key, TokensPrompt(prompt_token_ids=job.prompts[request.of][request.problem]), parameters)
            under_way[key] = request
        for output in engine.step() if under_way else ():
            request, made = under_way.pop(output.request_id), output.outputs[0]
            response = Response(request.problem, request.sample, made.text, made.finish_reason == "length")
            results.put((request.of, response))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # vLLM's libraries print warnings when they end
