"""Scoring on real vLLM engines, against a plain HuggingFace model in float64 that sees one copy at a time.

Two engines, one after the other: one whose KV cache holds a few requests only, so that it preempts, with prompts in chunks;
and one on two tensor-parallel ranks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from oar_plugin.credit.noise import position_seeds, response_seeds
from oar_plugin.credit.perturbation import Search, sample_replacements, units
from oar_plugin.credit.probe import PROBES
from oar_plugin.hosts.vllm import scorer as scorer_module
from oar_plugin.hosts.vllm.outcomes import NO_REFERENCE, OutcomeSpec
from oar_plugin.hosts.vllm.request import numbers_of, tagged_request
from oar_plugin.hosts.vllm.scorer import ResponseScorer, ScoringTask
from oar_plugin.hosts.vllm.throttle import Throttle
from oar_plugin.passes.masked_copies import Candidate
from tests.hosts.engine import world
from tests.hosts.engine.world import PAD
from tests.passes.test_masked_copies import one_by_one

psutil = pytest.importorskip("psutil")
pytest.importorskip("vllm")

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 256
BLOCK = 16
PROMPT, LENGTH, ANSWER = 20, 150, 132  # the answer has 18 tokens, over a block's boundary and, in chunks, over a step's

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}


# ---- a model, and what is right


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # Heads of 32: smaller ones are not served on a CPU.
    size = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 512}
    world.make_model(folder, vocab_size=300, initializer_range=0.2, **size)
    return folder


class Truth:
    """Scores from a HuggingFace model in float64."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        self._known: dict[str, torch.Tensor] = {}

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0]

    def replacements(self, task: ScoringTask) -> dict[int, int]:
        at = sorted(task.prompt_length + t for unit in task.units for t in unit)
        if task.replacement_token is not None:
            return dict.fromkeys(at, task.replacement_token)
        token_T, at_R = torch.tensor(task.token_ids), torch.tensor(at)
        seed_1 = response_seeds(token_T, torch.zeros_like(token_T), 1, task.seed)
        seed_R = position_seeds(seed_1.expand(len(at)), at_R, 0)
        drawn = sample_replacements(self.logits(task.token_ids)[at_R - 1], token_T[at_R], seed_R)
        return dict(zip(at, drawn.tolist(), strict=True))

    def importance(self, task: ScoringTask) -> torch.Tensor:
        key = repr(replace(task, priority=0))
        if key not in self._known:
            replaced, token_T = self.replacements(task), torch.tensor(task.token_ids)
            replacement_T = torch.tensor([replaced.get(at, token) for at, token in enumerate(task.token_ids)])
            candidate = Candidate(token_T, task.prompt_length, task.answer_start)
            search = Search(task.units, task.response_length, task.budget)
            while search.wanted:
                search.send(one_by_one(self.model, candidate, search.wanted, task.probe, replacement_T))
            self._known[key] = search.importance
        return self._known[key]


@pytest.fixture(scope="module")
def truth(model_folder) -> Truth:
    return Truth(model_folder)


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
        "budget": 1.0,
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
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, 120))

    def score(self, task: ScoringTask, **kwargs: Any) -> Any:
        return self.run(self.scorer.score(task, **kwargs))

    async def generate(self, token_ids: Sequence[int], **params: Any) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        final = None
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        with self.throttle.generating():
            async for output in self.engine.generate(
                prompt, SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **params), uuid.uuid4().hex
            ):
                final = output
        return final

    def left_over(self) -> dict[str, int]:
        """What the workers keep, summed over ranks, and what the engine still runs."""
        total: Counter[str] = Counter()
        for counts in self.run(self.engine.collective_rpc("oar_counts")):
            total.update(counts)
        return dict(total) | {"running": len(self.engine.output_processor.request_states)}

    async def under_way(self, requests: int = 4) -> None:
        """Returns once this many requests are in the engine."""
        while len(self.engine.output_processor.request_states) < requests:
            await asyncio.sleep(0.002)

    def restarts_within_answers(self) -> int:
        """Of tagged requests; see `CountingExtension`."""
        return self.run(self.engine.collective_rpc("oar_restarts_within_answers"))[0]

    def preemptions(self) -> float:
        """Of all requests, as vLLM counts them."""
        from prometheus_client import REGISTRY

        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")


async def together(*awaitables: Any) -> list[Any]:
    return await asyncio.gather(*awaitables)


NOTHING = {"references": 0, "requests": 0, "running": 0}


@contextmanager
def host(folder: Path, environment: dict[str, str], **settings: Any) -> Iterator[Host]:
    patch = pytest.MonkeyPatch()
    for name, value in {**ENVIRONMENT, **environment}.items():
        patch.setenv(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    this = psutil.Process()
    before = set(this.children(recursive=True))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    engine = None
    started: list[Any] = []
    try:
        arguments = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            scheduling_policy="priority",
            distributed_executor_backend="mp",
            disable_log_stats=False,
            worker_extension_cls="tests.hosts.vllm.counting.CountingExtension",
            **settings,
        )

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)  # it wants a running loop

        engine = loop.run_until_complete(start())
        for _ in range(2):  # a second time changes nothing
            loop.run_until_complete(engine.collective_rpc("oar_install"))
        started = [child for child in this.children(recursive=True) if child not in before]
        throttle = Throttle(max_in_flight=64, share=0.5)
        yield Host(engine, loop, throttle, ResponseScorer(engine, throttle, MAX_MODEL_LEN))
    finally:
        if engine is not None:
            engine.shutdown()
        for pending in asyncio.all_tasks(loop):
            pending.cancel()
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()
        asyncio.set_event_loop(None)
        patch.undo()
        # Python's own resource tracker lives as long as this process does.
        mine = [process for process in started if process.pid != resource_tracker._resource_tracker._pid]
        _, alive = psutil.wait_procs(mine, timeout=20)
        for process in alive:
            process.kill()
        assert not alive, "vLLM left processes behind"


@pytest.fixture(scope="class")
def small(model_folder) -> Iterator[Host]:
    """Prompts in chunks of at most 40 tokens; a cache of 40 blocks, which is four prompts."""
    with host(
        model_folder, {}, max_num_batched_tokens=40, max_num_seqs=16, num_gpu_blocks_override=40, seed=0
    ) as running:
        yield running


@pytest.fixture(scope="class")
def two_ranks(model_folder) -> Iterator[Host]:
    with host(
        model_folder,
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0"},
        tensor_parallel_size=2,
        max_num_batched_tokens=256,
        max_num_seqs=32,
    ) as running:
        yield running


def assert_right(result: Any, expected: torch.Tensor) -> None:
    assert result.fault is None
    got = torch.from_numpy(result.importance)
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert expected.max() > 1e-3, "a score worth the name"
    assert (got.double() - expected).abs().max() / expected.max() < 1e-4
    assert list(result.done_at) == sorted(result.done_at)
    assert len(result.done_at) == result.copies


def assert_nothing_is_left(host: Host, *throttles: Throttle) -> None:
    """The engine's scheduler has nothing to do: a short request is through at once, and its cache is free."""
    assert host.left_over() == NOTHING
    for throttle in (host.throttle, *throttles):
        assert throttle.in_flight == throttle.waiting == 0
    assert host.run(host.generate(tokens(70, 20), max_tokens=1)).finished
    assert host.run(host.engine.reset_prefix_cache()), "no block is in use"


# ---- one rank


class TestOneRank:
    @pytest.mark.parametrize("probe", PROBES)
    def test_scores_are_those_of_a_plain_model(self, small, truth, probe):
        one = task(probe=probe)
        result = small.score(one)
        assert_right(result, truth.importance(one))
        assert result.copies == len(one.units)
        assert result.cached_tokens > 0
        assert result.tokens == (result.copies + result.retried + 1) * LENGTH
        assert small.left_over() == NOTHING

    @pytest.mark.parametrize(
        ("changes", "copies"),
        [
            ({"span": 5}, None),
            ({"every": 1, "budget": 40}, 40),
            # The first token of the response is drawn from a row of the prompt.
            ({"every": 2, "replacement_token": None}, None),
            ({"span": 4, "replacement_token": None}, None),
        ],
    )
    def test_of_spans_and_budgets_and_sampled_replacements(self, small, truth, changes, copies):
        one = task(seed=1, **changes)
        assert one.units[0] == tuple(range(changes.get("span", 1)))
        result = small.score(one)
        assert_right(result, truth.importance(one))
        assert result.copies == (copies or len(one.units))

    def test_the_drawn_tokens_are_those_of_a_plain_model(self, small, truth):
        one = task(seed=4, every=1, replacement_token=None)
        wanted = truth.replacements(one)
        run = scorer_module._Run(small.scorer, one, None)
        small.run(run._reference())
        small.run(small.scorer._forget(run.key))
        assert run._replacements == wanted
        assert len(set(wanted.values())) > 20

    def test_a_copy_equal_to_the_response_costs_nothing(self, small, truth):
        token_ids = [PAD if PROMPT <= i < PROMPT + 30 else t for i, t in enumerate(tokens(5))]
        one = task(token_ids=token_ids)
        result = small.score(one)
        assert_right(result, truth.importance(one))
        assert result.copies == len(one.units) - 10
        assert not result.importance[:30].any()

    def test_beside_generation_and_through_preemption(self, small, truth):
        """Generation outgrows the cache and throws copies out of it; copies of a later priority wait for it."""
        before = small.preemptions()
        responses = [task(seed=10 + i, probe=probe) for i, probe in enumerate([*PROBES, "answer_mean"])]
        responses.append(responses[0])  # twice at the same time
        prompts = [tokens(50 + i, 30 + i) for i in range(6)]

        async def busy():
            alone = [await small.generate(p, max_tokens=20) for p in prompts[:2]]
            scoring = [asyncio.ensure_future(small.scorer.score(one)) for one in responses]
            await small.under_way()
            generated = await asyncio.gather(*[small.generate(p, max_tokens=180) for p in prompts])
            return alone, generated, await asyncio.gather(*scoring)

        alone, generated, results = small.run(busy())
        for one, result in zip(responses, results, strict=True):
            assert_right(result, truth.importance(one))
        for short, long in zip(alone, generated, strict=False):
            assert short.outputs[0].token_ids == long.outputs[0].token_ids[:20], "generation is what it was"
        assert small.preemptions() > before
        assert small.left_over() == NOTHING

    def test_copies_preempted_within_their_answer(self, small, truth):
        """Copies of a late priority give way to whatever comes, wherever they are, and start over or go on from the cache."""
        before = small.restarts_within_answers()
        one = task(seed=30, every=2)
        crowded = ResponseScorer(small.engine, Throttle(16, 1.0), MAX_MODEL_LEN)
        prompts = [tokens(200 + i, 90) for i in range(4)]

        async def busy():
            scoring = asyncio.ensure_future(crowded.score(one))
            generated = 0
            while not scoring.done():
                await asyncio.gather(*[small.generate(p[generated % 7 :], max_tokens=60) for p in prompts])
                generated += 1
            return await scoring

        for _ in range(8):
            assert_right(small.run(busy()), truth.importance(one))
        assert small.restarts_within_answers() > before

    def test_scoring_again_gives_the_same(self, small, truth):
        one = task(seed=20, every=48)  # few, so that the cache still has them all
        for _ in range(3):
            result = small.score(one)
            assert_right(result, truth.importance(one))
            assert result.retried == 0, "nothing of the last time is within reach"

    def test_answer_rows_in_the_cache_are_noticed(self, small, truth):
        """The trap: the same copy a second time under the same salt finds its answer in the prefix cache.

        Its rows have no hidden states then. Stock vLLM returns uninitialised memory in their place: numbers, no error.
        """
        one = task(seed=21)
        key, salt = uuid.uuid4().hex, uuid.uuid4().hex
        copy = [PAD if i == PROMPT else t for i, t in enumerate(one.token_ids)]

        async def ask(token_ids, role, salt=salt, **kwargs):
            spec = OutcomeSpec(key, role, "answer_mean", ANSWER)
            output = await tagged_request(small.engine, token_ids, spec, salt, **kwargs)
            return numbers_of(output), output.num_cached_tokens

        reference, _ = small.run(ask(one.token_ids, "reference"))
        assert reference == [0.0, LENGTH - ANSWER]
        (score, rows), cached = first = small.run(ask(copy, "copy"))
        assert rows == LENGTH - ANSWER
        assert cached == PROMPT // BLOCK * BLOCK, "only what lies before the replaced token"
        assert score == pytest.approx(truth.importance(one)[0].item(), rel=1e-4)
        (score, rows), cached = small.run(ask(copy, "copy"))
        assert cached == LENGTH // BLOCK * BLOCK > ANSWER
        assert math.isnan(score)
        assert rows == 0
        for elsewhere in ({"salt": "another"}, {"use_cache": False}):
            numbers, cached = small.run(ask(copy, "copy", **elsewhere))
            assert numbers == pytest.approx(first[0], rel=1e-5)
            assert cached == 0
        small.run(small.engine.collective_rpc("oar_forget", kwargs={"keys": [key]}))
        (score, rows), _ = small.run(ask(copy, "copy", use_cache=False))
        assert math.isnan(score)
        assert rows == NO_REFERENCE

    def test_such_a_copy_is_run_again_without_the_cache(self, small, truth, monkeypatch):
        """A run whose salt was used before: every copy's first attempt reads answer rows from the cache."""
        one = task(seed=22, every=48)  # few, so that the cache keeps them all
        salt = uuid.UUID(int=1)
        real = uuid.uuid4
        fresh = iter([salt])
        monkeypatch.setattr(scorer_module.uuid, "uuid4", lambda: next(fresh, None) or real())
        first = small.score(one)
        fresh = iter([salt])
        second = small.score(one)
        for result in (first, second):
            assert_right(result, truth.importance(one))
        assert first.retried == 0
        assert second.retried == second.copies + 1
        assert second.copies == first.copies
        assert second.tokens == first.tokens + second.retried * LENGTH
        assert small.left_over() == NOTHING

    def test_untagged_requests_are_left_alone(self, small, truth):
        token_ids = tokens(40)
        want = truth.logits(token_ids).log_softmax(-1)[:-1].gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]

        one = task(seed=41, every=8)
        generation = small.generate(token_ids, max_tokens=1, prompt_logprobs=0)
        output, result = small.run(together(generation, small.scorer.score(one)))
        assert_right(result, truth.importance(one))
        rows = output.prompt_logprobs
        assert rows[0] is None
        got = torch.tensor([row[token].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True)])
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)

    def test_tokens_that_are_never_sampled_belong_to_the_outcome(self, small, truth):
        """verl masks them in `compute_logits` of the model's instance; the actor, and the truth here, do not."""
        one = task(seed=43, every=8)
        token_ids = tokens(44)

        def log_prob():
            output = small.run(small.generate(token_ids, max_tokens=1, prompt_logprobs=0))
            return output.prompt_logprobs[1][token_ids[1]].logprob

        plain = log_prob()
        small.run(small.engine.collective_rpc("oar_mask_tail", args=(200,)))
        try:
            assert log_prob() > plain + 0.01, "the mask is there, and vLLM itself goes through it"
            result = small.score(one)
        finally:
            small.run(small.engine.collective_rpc("oar_mask_tail", args=(None,)))
        assert_right(result, truth.importance(one))

    def test_a_tag_that_makes_no_sense_scores_nan(self, small):
        spec = OutcomeSpec("key", "copy", "answer_mean", ANSWER)
        object.__setattr__(spec, "probe", "no such probe")
        score, rows = numbers_of(small.run(tagged_request(small.engine, tokens(42), spec, "salt")))
        assert math.isnan(score)
        assert rows == NO_REFERENCE

    def test_time_runs_out(self, small):
        slowly = ResponseScorer(small.engine, Throttle(4, 1.0), MAX_MODEL_LEN)
        began = time.monotonic()

        results = small.run(together(*[slowly.score(task(seed=60 + i, every=1), 1e-4) for i in range(10)]))
        assert [r.fault for r in results] == ["timed_out"] * 10
        assert all(r.importance is None for r in results)
        assert time.monotonic() - began < 3
        assert small.score(task(seed=60), timeout_s=0.0).fault == "timed_out"
        assert_nothing_is_left(small, slowly.throttle)

    def test_cancellation(self, small, truth):
        async def cancel_some():
            scoring = [asyncio.ensure_future(small.scorer.score(task(seed=80 + i, every=1))) for i in range(4)]
            await small.under_way()
            for one in scoring[:3]:
                one.cancel()
            return await asyncio.gather(*scoring, return_exceptions=True)

        *cancelled, kept = small.run(cancel_some())
        assert all(isinstance(c, asyncio.CancelledError) for c in cancelled)
        assert_right(kept, truth.importance(task(seed=83, every=1)))
        assert_nothing_is_left(small)

    def test_too_long(self, small):
        length = MAX_MODEL_LEN - PROMPT
        fits = task(token_ids=tokens(90, MAX_MODEL_LEN - 1), response_length=length, every=16)
        result = small.score(fits)
        assert result.fault is None
        result = small.score(replace(fits, token_ids=tokens(90, MAX_MODEL_LEN)))
        assert result.fault == "too_long"
        assert result.tokens == 0

    def test_a_closed_gate(self, small):
        admitted = iter(range(4))

        @asynccontextmanager
        async def gate():
            if next(admitted, None) is None:
                raise RuntimeError("closed")
            yield

        scorer = ResponseScorer(small.engine, small.throttle, MAX_MODEL_LEN, admit=gate)
        assert small.run(scorer.score(task(seed=91))).fault == "aborted"
        assert_nothing_is_left(small)

    def test_requests_that_a_host_aborts(self, small):
        async def abort():
            scoring = asyncio.ensure_future(small.scorer.score(task(seed=92, every=1)))
            await small.under_way()
            await small.engine.pause_generation(mode="abort", clear_cache=True)
            result = await scoring
            await small.engine.resume_generation()
            return result

        assert small.run(abort()).fault == "aborted"
        assert small.left_over() == NOTHING

    def test_an_error_of_the_engine(self, small, monkeypatch, caplog):
        def generate(*args, **kwargs):
            raise ValueError("the engine is unwell")

        monkeypatch.setattr(small.engine, "generate", generate)
        with caplog.at_level(logging.WARNING):
            assert small.score(task(seed=93)).fault == "failed"
        assert "unwell" in caplog.text

    def test_a_reference_lost(self, small, monkeypatch):
        """As with data parallelism inside of the engine, or too many responses at once."""
        real = scorer_module.tagged_request

        async def forgetful(engine, token_ids, spec, *args):
            output = await real(engine, token_ids, spec, *args)
            if spec.role == "reference":
                await engine.collective_rpc("oar_forget", kwargs={"keys": [spec.key]})
            return output

        monkeypatch.setattr(scorer_module, "tagged_request", forgetful)
        result = small.score(task(seed=94))
        assert result.fault == "failed"
        assert result.retried > 0
        assert small.left_over() == NOTHING


# ---- two ranks


class TestTwoRanks:
    @pytest.mark.parametrize("probe", PROBES)
    @pytest.mark.parametrize("replacement_token", [PAD, None])
    def test_scores_are_those_of_a_plain_model(self, two_ranks, truth, probe, replacement_token):
        one = task(seed=100, probe=probe, every=4, replacement_token=replacement_token)
        result = two_ranks.score(one)
        assert_right(result, truth.importance(one))
        assert result.cached_tokens > 0

    def test_several_beside_generation(self, two_ranks, truth):
        responses = [task(seed=110 + i, every=4) for i in range(3)]

        generations = [two_ranks.generate(tokens(150 + i, 40), max_tokens=60) for i in range(4)]
        results = two_ranks.run(together(*[two_ranks.scorer.score(one) for one in responses], *generations))
        for one, result in zip(responses, results[:3], strict=True):
            assert_right(result, truth.importance(one))
        assert two_ranks.left_over() == NOTHING
