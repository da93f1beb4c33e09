"""Scoring on real vLLM engines, against a plain HuggingFace model in float64 that sees one copy at a time.

Three engines: one whose KV cache holds a few requests only, so that it preempts; the same with vLLM's second model runner, its
Triton kernels in Triton's interpreter; and one on two tensor-parallel ranks.
"""

import asyncio
import json
import math
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch

from oar_plugin.credit.perturbation import units
from oar_plugin.credit.probe import PROBES
from oar_plugin.hosts.vllm.outcomes import MAX_REFERENCES, OutcomeSpec
from oar_plugin.hosts.vllm.scorer import ResponseScorer, ScoringTask, numbers_of, tagged_request
from oar_plugin.hosts.vllm.throttle import Throttle
from tests.hosts.engine import world
from tests.hosts.engine.world import PAD
from tests.limits import PROCESS_S
from verl_cpu import cpu_environment

psutil = pytest.importorskip("psutil")
pytest.importorskip("vllm")

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 256
BLOCK = 32  # newer vLLMs take multiples of 32 only, on a CPU
PROMPT, LENGTH, ANSWER = 36, 150, 118  # the answer has 32 tokens, over a block's boundary and, in chunks, over a step's
CORES = "VLLM_CPU_OMP_THREADS_BIND"
V2 = "VLLM_USE_V2_MODEL_RUNNER"
FEW: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 16, "num_gpu_blocks_override": 20}
"""Prompts in chunks of at most 40 tokens; a cache of four prompts."""
OTHERWISE = json.loads(os.environ.get("OAR_TEST_ENGINE", "{}"))  # what `tests/gpu` has the engines do in another way
DEVICE = "gpu" if torch.cuda.is_available() else "cpu"
TOLERANCE = float(os.environ.get("OAR_TEST_TOLERANCE", "1e-4"))  # relative to the response's largest score


# ---- a model, and what is right


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # Heads of 32: smaller ones are not served on a CPU.
    size = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 512}
    world.make_model(folder, vocab_size=300, initializer_range=0.2, **size)
    return folder


@pytest.fixture(scope="module")
def plain(model_folder):
    return world.load_model(model_folder)


@pytest.fixture(scope="module")
def right(plain):
    """Asserts that a task's result is what the plain model says."""
    known: dict[str, torch.Tensor] = {}

    def check(task: ScoringTask, result: Any) -> Any:
        if (key := repr(task)) not in known:
            candidate = world.Candidate(torch.tensor(task.token_ids), task.prompt_length, task.answer_start)
            settings = task.probe, task.replacement_token, task.seed
            known[key] = world.copies_importance(plain, candidate, task.units, task.response_length, *settings)
        expected = known[key]
        assert result.fault is None
        got = torch.from_numpy(result.importance)
        assert got.dtype == torch.float32
        assert got.shape == expected.shape
        assert expected.max() > 1e-3, "a score worth the name"
        assert (got.double() - expected).abs().max() / expected.max() < TOLERANCE
        assert list(result.done_at) == sorted(result.done_at)
        assert len(result.done_at) == result.copies
        return result

    return check


def right_rows(plain: Any, token_ids: Sequence[int], prompt_logprobs: Any) -> None:
    """Asserts that a request that is not ours has the plain model's log-probability of each token of its prompt."""
    with torch.no_grad():
        log_p = plain(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    none, *rows = prompt_logprobs
    assert none is None
    got = torch.tensor([row[token].logprob for row, token in zip(rows, token_ids[1:], strict=True)])
    want = log_p.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE, atol=TOLERANCE)


def tokens(seed: int, length: int = LENGTH) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def task(seed: int = 0, probe: str = "answer_mean", every: int = 3, span: int = 1, **changes: Any) -> ScoringTask:
    """A response with 5 more tokens after its answer; every third reasoning token is a unit, from the first on."""
    reasoning = [t < ANSWER - PROMPT - 4 and (span > 1 or t % every == 0) for t in range(LENGTH - PROMPT + 5)]
    settings: dict[str, Any] = {
        "token_ids": tokens(seed),
        "prompt_length": PROMPT,
        "answer_start": ANSWER,
        "units": units(reasoning, span),
        "response_length": LENGTH - PROMPT + 5,
        "probe": probe,
        "replacement_token": PAD,
        "seed": 3,
        "priority": 5,
    }
    return ScoringTask(**(settings | changes))


# ---- an engine


@dataclass
class Host:
    """An engine, and the loop that it lives in."""

    engine: Any
    loop: asyncio.AbstractEventLoop
    throttle: Throttle
    scorer: ResponseScorer

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, PROCESS_S))

    def call(self, method: str, **kwargs: Any) -> list[Any]:
        """What each worker's method returns."""
        return self.run(self.engine.collective_rpc(method, kwargs=kwargs))

    def score(self, task: ScoringTask, **kwargs: Any) -> Any:
        return self.run(self.scorer.score(task, **kwargs))

    async def generate(self, token_ids: Sequence[int], **params: Any) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        parameters = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **params)
        with self.throttle.generating():
            return [output async for output in self.engine.generate(prompt, parameters, uuid.uuid4().hex)][-1]

    async def under_way(self) -> None:
        """Returns once four requests are in the engine."""
        while len(self.engine.output_processor.request_states) < 4:
            await asyncio.sleep(0.002)

    def preemptions(self) -> float:
        """Of all requests, as vLLM counts them."""
        from prometheus_client import REGISTRY

        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")

    def assert_idle(self) -> None:
        """Workers keep nothing of requests. The scheduler has nothing to do: a short request is through, its cache is free."""
        # A step drops what belonged to aborted requests.
        assert self.run(self.generate(tokens(70, 20), max_tokens=1)).finished
        for count in self.call("oar_counts"):
            assert count["requests"] == 0
            assert count["references"] <= MAX_REFERENCES
        assert not self.engine.output_processor.request_states
        assert self.throttle.in_flight == len(self.throttle._waiters) == 0
        assert self.run(self.engine.reset_prefix_cache()), "no block is in use"


async def together(*awaitables: Any) -> list[Any]:
    return await asyncio.gather(*awaitables)


@contextmanager
def host(folder: Path, environment: dict[str, str], **settings: Any) -> Iterator[Host]:
    resource_tracker.ensure_running()  # Python's own, which lives as long as this process does
    this = psutil.Process()
    before = this.children(recursive=True)
    loop, engine = asyncio.new_event_loop(), None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**cpu_environment(), "VLLM_LOGGING_LEVEL": "WARNING", **environment}.items():
            patch.setenv(name, value)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            scheduling_policy="priority",
            distributed_executor_backend="mp",
            disable_log_stats=False,
            worker_extension_cls="tests.hosts.vllm.counting.CountingExtension",
            **{"dtype": "float32", "enforce_eager": True, **OTHERWISE, **settings},
        )

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)  # it wants a running loop

        try:
            engine = loop.run_until_complete(start())
            throttle = Throttle(max_in_flight=64, share=0.5)
            running = Host(engine, loop, throttle, ResponseScorer(engine, throttle, MAX_MODEL_LEN))
            for _ in range(2):  # a second time changes nothing
                running.call("oar_install")
            yield running
        finally:
            started = [process for process in this.children(recursive=True) if process not in before]
            if engine is not None:
                engine.shutdown()
            if pending := asyncio.all_tasks(loop):
                for one in pending:
                    one.cancel()
                loop.run_until_complete(asyncio.wait(pending, timeout=PROCESS_S))
            loop.close()
            _, alive = psutil.wait_procs(started, timeout=PROCESS_S)
            for process in alive:
                process.kill()
            assert not alive, "vLLM left processes behind"


@pytest.fixture(scope="class")
def small(model_folder) -> Iterator[Host]:
    with host(model_folder, {CORES: "nobind", V2: "0"}, **FEW, seed=0) as running:
        assert running.call("oar_runner") == [f"vllm.v1.worker.{DEVICE}_model_runner"]
        yield running


@pytest.fixture(scope="class")
def small_v2(model_folder) -> Iterator[Host]:
    pytest.importorskip("triton")
    interpreter = os.pathsep.join([str(Path(__file__).parent / "interpreter"), os.environ.get("PYTHONPATH", "")])
    environment = {CORES: "nobind", V2: "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if DEVICE == "cpu":
        environment["PYTHONPATH"] = interpreter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.config.vllm.HAS_TRITON", True)  # which this process has no use for
        with host(model_folder, environment, **FEW, seed=0) as running:
            assert running.call("oar_runner") == [f"vllm.v1.worker.{DEVICE}.model_runner"]
            yield running


@pytest.fixture(scope="class")
def two_ranks(model_folder) -> Iterator[Host]:
    cores = {CORES: "0|1" if (os.cpu_count() or 1) > 1 else "0|0"}
    with host(model_folder, cores, tensor_parallel_size=2, max_num_batched_tokens=256, max_num_seqs=32) as running:
        yield running


# ---- one rank


class EitherRunner:
    """What both model runners do. Triton's interpreter takes longer for a copy: of the second one fewer units are asked."""

    every, seldom, densely = 3, 8, 1

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, one_rank):
        yield
        one_rank.assert_idle()

    def test_beside_generation_and_through_preemption(self, one_rank, right):
        """Generation outgrows the cache and throws copies out of it; copies of a later priority wait for it."""
        before = one_rank.preemptions()
        responses = [task(seed=10 + i, probe=probe, every=self.every) for i, probe in enumerate(PROBES)]
        responses.append(responses[0])  # twice at the same time
        prompts = [tokens(50 + i, 30 + i) for i in range(6)]

        async def busy():
            alone = [await one_rank.generate(p, max_tokens=20) for p in prompts[:2]]
            scoring = [asyncio.ensure_future(one_rank.scorer.score(one)) for one in responses]
            await one_rank.under_way()
            generated = await asyncio.gather(*[one_rank.generate(p, max_tokens=180) for p in prompts])
            return alone, generated, await asyncio.gather(*scoring)

        alone, generated, results = one_rank.run(busy())
        for one, result in zip(responses, results, strict=True):
            right(one, result)
        for short, long in zip(alone, generated, strict=False):
            assert short.outputs[0].token_ids == long.outputs[0].token_ids[:20], "generation is what it was"
        assert one_rank.preemptions() > before

    def test_untagged_requests_are_left_alone(self, one_rank, right, plain):
        one, token_ids = task(seed=41, every=self.seldom), tokens(40, 60)
        generation = one_rank.generate(token_ids, max_tokens=1, prompt_logprobs=0)
        output, result = one_rank.run(together(generation, one_rank.scorer.score(one)))
        right(one, result)
        right_rows(plain, token_ids, output.prompt_logprobs)

    def test_a_request_with_a_tag_that_makes_no_sense_is_handled_as_usual(self, one_rank, plain):
        spec = OutcomeSpec("key", "copy", "answer_mean", ANSWER)
        object.__setattr__(spec, "probe", "no such probe")
        output = one_rank.run(tagged_request(one_rank.engine, tokens(42), spec, "salt"))
        right_rows(plain, tokens(42), output.prompt_logprobs)

    def test_cancellation(self, one_rank, right):
        responses = [task(seed=80 + i, every=self.densely) for i in range(4)]

        async def cancel_some():
            scoring = [asyncio.ensure_future(one_rank.scorer.score(one)) for one in responses]
            await one_rank.under_way()
            for one in scoring[:3]:
                one.cancel()
            return await asyncio.gather(*scoring, return_exceptions=True)

        *cancelled, kept = one_rank.run(cancel_some())
        assert all(isinstance(c, asyncio.CancelledError) for c in cancelled)
        right(responses[-1], kept)


class TestOneRank(EitherRunner):
    @pytest.fixture
    def one_rank(self, small):
        return small

    @pytest.mark.parametrize("probe", PROBES)
    def test_scores_are_those_of_a_plain_model(self, small, right, probe):
        one = task(probe=probe)
        result = right(one, small.score(one))
        assert result.copies == len(one.units)
        assert result.cached_tokens > 0
        assert result.tokens == (result.copies + result.retried + 1) * LENGTH

    @pytest.mark.parametrize(
        "changes",
        [
            {"span": 5},
            # The first token of the response is drawn from a row of the prompt.
            {"every": 2, "replacement_token": None},
            {"span": 4, "replacement_token": None},
        ],
    )
    def test_of_spans_and_sampled_replacements(self, small, right, changes):
        one = task(seed=1, **changes)
        assert one.units[0] == tuple(range(changes.get("span", 1)))
        result = right(one, small.score(one))
        assert result.copies == len(one.units)
        assert result.retried == 0

    def test_a_copy_equal_to_the_response_costs_nothing(self, small, right):
        one = task(token_ids=[PAD if PROMPT <= i < PROMPT + 30 else t for i, t in enumerate(tokens(5))])
        result = right(one, small.score(one))
        assert result.copies == len(one.units) - 10
        assert not result.importance[:30].any()

    def test_answer_rows_in_the_cache_are_noticed(self, small, plain):
        """The same copy a second time under the same salt finds its answer in the prefix cache, and its rows have no hidden
        states. Stock vLLM returns uninitialised memory in their place: numbers, no error."""
        key, salt, token_ids = uuid.uuid4().hex, uuid.uuid4().hex, tokens(21)
        copy = [PAD if i == PROMPT else t for i, t in enumerate(token_ids)]
        (want,) = world.one_by_one(
            plain, world.Candidate(torch.tensor(token_ids), PROMPT, ANSWER), [(0,)], replacement=PAD
        )

        async def ask(token_ids, role, salt=salt, key=key, **kwargs):
            spec = OutcomeSpec(key, role, "answer_mean", ANSWER)
            output = await tagged_request(small.engine, token_ids, spec, salt, **kwargs)
            return numbers_of(output), output.num_cached_tokens

        assert small.run(ask(token_ids, "reference"))[0] == [0.0, LENGTH - ANSWER]
        first, cached = small.run(ask(copy, "copy"))
        assert cached == PROMPT // BLOCK * BLOCK, "only what lies before the replaced token"
        assert first == pytest.approx([want, LENGTH - ANSWER], rel=TOLERANCE)
        numbers, cached = small.run(ask(copy, "copy"))
        assert cached == LENGTH // BLOCK * BLOCK > ANSWER
        assert numbers == pytest.approx([math.nan, 0], nan_ok=True)
        for elsewhere in ({"salt": "another"}, {"use_cache": False}):
            numbers, cached = small.run(ask(copy, "copy", **elsewhere))
            assert numbers == pytest.approx(first, rel=1e-5)
            assert cached == 0
        numbers, _ = small.run(ask(copy, "copy", key="unknown", use_cache=False))
        assert numbers == pytest.approx([math.nan, 0], nan_ok=True)

    def test_tokens_that_are_never_sampled_belong_to_the_outcome(self, small, right):
        """verl masks them in `compute_logits` of the model's instance; the actor, and the plain model here, do not."""
        one = task(seed=43, every=8)
        token_ids = tokens(44)

        def log_prob():
            output = small.run(small.generate(token_ids, max_tokens=1, prompt_logprobs=0))
            return output.prompt_logprobs[1][token_ids[1]].logprob

        unmasked = log_prob()
        small.call("oar_mask_tail", vocabulary=200)
        try:
            assert log_prob() > unmasked + 0.01, "the mask is there, and vLLM itself goes through it"
            result = small.score(one)
        finally:
            small.call("oar_mask_tail", vocabulary=None)
        right(one, result)


class TestSecondRunner(EitherRunner):
    every, seldom, densely = 16, 24, 16

    @pytest.fixture
    def one_rank(self, small_v2):
        return small_v2

    @pytest.mark.parametrize(
        "changes",
        [*({"probe": probe, "every": 8} for probe in PROBES), {"every": 8, "replacement_token": None}],
        ids=str,
    )
    def test_scores_are_those_of_a_plain_model(self, small_v2, right, changes):
        one = task(seed=1, **changes)
        result = right(one, small_v2.score(one))
        assert result.cached_tokens > 0
        assert result.retried == 0

    def test_rows_in_the_cache_score_nan(self, small_v2):
        spec = OutcomeSpec(uuid.uuid4().hex, "reference", "answer_mean", ANSWER)
        for want in ([0.0, LENGTH - ANSWER], [math.nan, 0]):
            output = small_v2.run(tagged_request(small_v2.engine, tokens(42), spec, spec.key))
            assert numbers_of(output) == pytest.approx(want, nan_ok=True)


# ---- two ranks


class TestTwoRanks:
    @pytest.mark.parametrize("probe", PROBES)
    @pytest.mark.parametrize("replacement_token", [PAD, None])
    def test_scores_are_those_of_a_plain_model(self, two_ranks, right, probe, replacement_token):
        one = task(seed=100, probe=probe, every=4, replacement_token=replacement_token)
        assert right(one, two_ranks.score(one)).cached_tokens > 0
