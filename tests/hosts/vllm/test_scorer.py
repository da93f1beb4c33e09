"""What the scorer makes of what comes back, with a made-up engine; `test_engine_scoring` has real ones."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from oar_plugin.hosts.vllm import scorer as scorer_module
from oar_plugin.hosts.vllm.outcomes import NO_REFERENCE
from oar_plugin.hosts.vllm.request import Refused
from oar_plugin.hosts.vllm.scorer import RESPONSES_AT_ONCE, ResponseScorer, ScoringTask
from oar_plugin.hosts.vllm.throttle import Throttle

TASK = ScoringTask(
    token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
    prompt_length=2,
    answer_start=5,
    units=[(0,), (1, 2)],
    response_length=7,
    probe="answer_mean",
    budget=1.0,
    replacement_token=0,
    seed=0,
)
REFERENCE, COPY = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 0, 4, 5, 6, 7, 8)  # the copy of the first unit
ROWS = 3.0
NOT_COMPUTED, NOT_FINITE, NOT_KNOWN = [math.nan, 1.0], [math.nan, ROWS], [math.nan, NO_REFERENCE]
either = pytest.mark.parametrize("where", [REFERENCE, COPY], ids=["reference", "copy"])


class Engine:
    """Answers with what a list says, attempt by attempt, for each token sequence."""

    def __init__(self, monkeypatch, answers=None, seconds=0.0):
        self.answers = answers or {}
        self.seconds = seconds
        self.requests: list[tuple[tuple[int, ...], str, str, bool]] = []
        self.forgotten: list[str] = []
        self.keys: set[str] = set()
        self.most_keys = 0
        monkeypatch.setattr(scorer_module, "tagged_request", self.tagged_request)
        self.scorer = ResponseScorer(self, Throttle(100, 1.0), max_model_len=100)

    async def tagged_request(self, engine, token_ids, spec, salt, use_cache, priority, lora_request, admit):
        before = sum(tuple(token_ids) == seen for seen, *_ in self.requests)
        self.requests.append((tuple(token_ids), spec.key, salt, use_cache))
        self.keys.add(spec.key)
        self.most_keys = max(self.most_keys, len(self.keys))
        await asyncio.sleep(self.seconds)
        answers = self.answers.get(tuple(token_ids), [[0.5 if spec.role == "copy" else 0.0, ROWS]])
        answer = answers[min(before, len(answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        rows = [None, *({0: SimpleNamespace(logprob=number)} for number in answer)]
        ended = [SimpleNamespace(finish_reason="abort" if answer == [] else "length")]
        return SimpleNamespace(prompt_logprobs=rows, outputs=ended, num_cached_tokens=2)

    async def collective_rpc(self, method, kwargs):
        assert method == "oar_forget"
        self.forgotten += kwargs["keys"]
        self.keys -= set(kwargs["keys"])

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
    (key,) = {key for _, key, _, _ in engine.requests}
    assert engine.forgotten == [key]


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
    assert len(engine.forgotten) == 1
    assert engine.scorer.throttle.in_flight == engine.scorer.throttle.waiting == 0
    assert ("unwell" in caplog.text) == isinstance(answer, RuntimeError)


def test_a_copy_that_makes_the_answer_likelier_counts_nothing(monkeypatch):
    assert Engine(monkeypatch, {COPY: [[-0.25, ROWS]]}).score().importance[0] == 0


def test_time_runs_out(monkeypatch):
    engine = Engine(monkeypatch, seconds=1e6)
    assert engine.score(seconds=0.05).fault == "timed_out"
    assert len(engine.forgotten) == 1


def test_an_engine_that_cannot_forget_does_not_spoil_the_result(monkeypatch):
    engine = Engine(monkeypatch)

    async def broken(method, kwargs):
        raise RuntimeError("dead")

    engine.collective_rpc = broken
    assert engine.score().fault is None


def test_references_under_way_are_bounded(monkeypatch):
    engine = Engine(monkeypatch, seconds=0.001)

    async def many():
        return await asyncio.gather(*[engine.scorer.score(TASK) for _ in range(3 * RESPONSES_AT_ONCE)])

    assert all(result.fault is None for result in asyncio.run(many()))
    assert engine.most_keys == RESPONSES_AT_ONCE
    assert len(engine.forgotten) == 3 * RESPONSES_AT_ONCE


@pytest.mark.parametrize("units", [[], [(3,)], [(0,), (2, 4)]])
def test_units_behind_the_answers_start_are_refused(units):
    with pytest.raises(ValueError, match="before its answer"):
        replace(TASK, units=units)
