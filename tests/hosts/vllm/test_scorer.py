"""What the scorer makes of what comes back, with a made-up engine; `test_engine_scoring` has real ones."""

import asyncio
import math
import random
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import pytest

from oar_plugin.hosts.vllm import scorer as scorer_module
from oar_plugin.hosts.vllm.outcomes import MAX_REFERENCES, DrawSpec
from oar_plugin.hosts.vllm.scorer import RESPONSES_AT_ONCE, Refused, ResponseScorer, ScoringTask
from oar_plugin.hosts.vllm.throttle import Throttle

SETTINGS = {"probe": "answer_mean", "replacement_token": 0, "seed": 0, "response_length": 7}
TASK = ScoringTask(token_ids=[*range(1, 9)], prompt_length=2, answer_start=5, units=[(0,), (1, 2)], **SETTINGS)
REFERENCE, COPY = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 0, 4, 5, 6, 7, 8)  # the copy of the first unit
ROWS = 3.0
NOT_COMPUTED, NOT_FINITE, NOT_KNOWN = [math.nan, 1.0], [math.nan, ROWS], [math.nan, 0.0]
either = pytest.mark.parametrize("where", [REFERENCE, COPY], ids=["reference", "copy"])


def request_output(numbers, finish_reason="length", num_cached_tokens=0):
    """vLLM's output of a request with the worker's numbers."""
    rows = [None, *({0: SimpleNamespace(logprob=number)} for number in numbers)]
    ended = [SimpleNamespace(finish_reason=finish_reason)]
    return SimpleNamespace(prompt_logprobs=rows, outputs=ended, num_cached_tokens=num_cached_tokens)


class Engine:
    """Answers with what a list says, attempt by attempt, for each token sequence. Has no call to its workers."""

    def __init__(self, monkeypatch, answers=None, seconds=0.0):
        self.answers = answers or {}
        self.seconds = seconds
        self.requests: list[tuple[tuple[int, ...], str, str, bool]] = []
        monkeypatch.setattr(scorer_module, "tagged_request", self.tagged_request)
        self.scorer = ResponseScorer(self, Throttle(100, 1.0), max_model_len=100)

    async def tagged_request(self, engine, token_ids, spec, salt, use_cache, priority, lora_request, admit):
        before = sum(tuple(token_ids) == seen for seen, *_ in self.requests)
        self.requests.append((tuple(token_ids), spec.key, salt, use_cache))
        await asyncio.sleep(self.seconds)
        answers = self.answers.get(tuple(token_ids), [[0.5 if spec.role == "copy" else 0.0, ROWS]])
        answer = answers[min(before, len(answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        return request_output(answer, "abort" if answer == [] else "length", num_cached_tokens=2)

    def score(self, seconds=None):
        return asyncio.run(self.scorer.score(TASK, seconds))


@pytest.mark.parametrize("first", [NOT_COMPUTED, NOT_KNOWN, [1.0]], ids=["row", "reference", "short"])
@either
def test_what_is_missing_is_asked_for_once_more(monkeypatch, first, where):
    engine = Engine(monkeypatch, {where: [first, [0.0, ROWS]]})
    result = engine.score()
    assert (result.fault, result.copies, result.retried, result.tokens, result.cached_tokens) == (None, 2, 1, 32, 8)
    assert result.importance.tolist() == [0.5 * (where == REFERENCE), 0.25, 0.25, 0, 0, 0, 0]
    one, two = (request for request in engine.requests if request[0] == where)
    assert one[2] != two[2], "a salt of its own"
    assert (one[3], two[3]) == (True, False)
    assert len({key for _, key, _, _ in engine.requests}) == 1


@either
@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (NOT_COMPUTED, "failed"),
        (NOT_KNOWN, "failed"),
        (NOT_FINITE, "non_finite"),
        ([math.inf, ROWS], "non_finite"),
        ([], "aborted"),
        (Refused(), "aborted"),
        (RuntimeError("unwell"), "failed"),
    ],
)
def test_what_stays_missing_is_a_fault(monkeypatch, caplog, answer, fault, where):
    engine = Engine(monkeypatch, {where: [answer]})
    result = engine.score()
    assert (result.fault, result.importance) == (fault, None)
    assert engine.scorer.throttle.in_flight == len(engine.scorer.throttle._waiters) == 0
    assert ("unwell" in caplog.text) == isinstance(answer, RuntimeError)


def test_what_is_too_long_for_the_engine_is_not_sent(monkeypatch):
    engine = Engine(monkeypatch)
    engine.scorer.max_model_len = len(TASK.token_ids)  # every request generates one token
    assert (engine.score().fault, engine.requests) == ("too_long", [])
    engine.scorer.max_model_len += 1
    assert engine.score().fault is None


def test_time_runs_out(monkeypatch):
    engine = Engine(monkeypatch, seconds=1e6)
    assert engine.score(seconds=0.05).fault == "timed_out"


def test_references_outlive_their_copies(monkeypatch):
    """Workers are never told that a reference is of no more use: what they keep of the last ones has to be enough."""
    kept: OrderedDict[str, None] = OrderedDict()
    missed, draw = [], random.Random(0)

    async def tagged_request(engine, token_ids, spec, salt, use_cache, *others):
        await asyncio.sleep(draw.random() / 500)
        missed.extend([spec.key] if spec.role == "copy" and spec.key not in kept else [])
        lost = spec.role == "reference" and draw.random() < 0.2  # then it is asked for again, later
        if not lost:
            kept[spec.key] = None
            kept.move_to_end(spec.key)
            while len(kept) > MAX_REFERENCES:
                kept.popitem(last=False)
        return request_output(NOT_KNOWN if lost else [0.5, ROWS])

    engine = Engine(monkeypatch)
    monkeypatch.setattr(scorer_module, "tagged_request", tagged_request)
    engine.scorer.throttle = Throttle(8, 1.0)
    units = [(t,) for t in range(30)]
    task = replace(TASK, token_ids=[1] * 40, answer_start=35, units=units, response_length=38)

    async def many():
        return await asyncio.gather(*[engine.scorer.score(task) for _ in range(6 * RESPONSES_AT_ONCE)])

    scored = sum(result.fault is None for result in asyncio.run(many()))  # a reference lost twice is a fault
    assert scored > 4 * RESPONSES_AT_ONCE
    assert not missed


def test_replacements_are_drawn_by_parts_of_which_each_computes_the_rows_it_reads(monkeypatch):
    """Also where the cache has every block of two tokens that the requests before have filled."""
    monkeypatch.setattr(scorer_module, "DRAWS_AT_ONCE", 2)
    drawn = []
    engine = Engine(monkeypatch)

    async def tagged_request(its_engine, token_ids, spec, *others):
        if not isinstance(spec, DrawSpec):
            return await stock(its_engine, token_ids, spec, *others)
        assert len(spec.at) <= 2
        assert list(spec.avoid) == [TASK.token_ids[p] for p in spec.at]
        computed = range(cached[0], len(token_ids))
        assert set(spec.rows(len(token_ids))) <= set(computed)
        cached[0] = len(token_ids) // 2 * 2
        drawn.extend(spec.at)
        return request_output([0.0, float(len(spec.at)), *[9.0] * len(spec.at)])

    stock, cached = engine.tagged_request, [0]
    monkeypatch.setattr(scorer_module, "tagged_request", tagged_request)
    task = replace(TASK, replacement_token=None, answer_start=6, units=[(0,), (1,), (2,), (3,)])
    result = asyncio.run(engine.scorer.score(task))
    assert (result.fault, drawn) == (None, [2, 3, 4, 5])
    copies = [token_ids for token_ids, *_ in engine.requests[1:]]
    assert copies == [tuple(9 if i == p else t for i, t in enumerate(TASK.token_ids)) for p in drawn]
