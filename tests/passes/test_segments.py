import time

import numpy as np
import pytest

from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes import segments as module
from oar_plugin.passes.segments import LostTime, segment_response, segment_rows
from oar_plugin.passes.tokens import TokenBytes
from tests.asked import GIVEN, asked
from tests.hosts.engine import world
from tests.passes.test_tokens import WithoutBackend

TOKENIZER = world.make_tokenizer()


def segment(text, max_answer_tokens=10):
    ids = TOKENIZER(text)["input_ids"]
    finder, ends, own = make_finder(("hash",)), {TOKENIZER.eos_token_id}, np.ones(len(ids), dtype=bool)
    longest = world.MAX_RESPONSE_LENGTH, max_answer_tokens
    return segment_response(ids, own, finder, TokenBytes(TOKENIZER), ends, *longest, LostTime())


@pytest.mark.parametrize("number", range(len(world.ROWS)))
def test_a_response_is_cut_into_segments_or_says_why_not(number):
    response = world.ROWS[number][1]
    segments, status = segment(response)
    assert status == Status[world.STATUS[number].replace("NOT_NEEDED", "SCORED")]
    if status == Status.SCORED:
        assert segments.tolist() == world.segments_of(response).tolist()
    else:
        assert (segments == Segment.OUTSIDE).all()


@pytest.mark.parametrize("case", GIVEN["cut"])
def test_a_response_without_an_end_is_cut_where_it_alone_or_with_its_prompt_is_as_long_as_it_may_be(case):
    limits = {name: value for name, value in case.items() if name.startswith("max")}
    request, ids = asked(answer_patterns=("hash",), **limits), TOKENIZER("well 3+4 is 7 so\n#### 7")["input_ids"]
    assert len(ids) == 23
    ids += [TOKENIZER.eos_token_id] * ("end" in case)
    row = ids, np.ones(len(ids), dtype=bool), True, 3
    _, (status,) = segment_rows([row], request, TokenBytes(TOKENIZER), {TOKENIZER.eos_token_id})
    assert Status(int(status)).name == case["status"]


@pytest.mark.parametrize(("most", "status"), [(3, Status.SCORED), (2, Status.ANSWER_TOO_LONG)])
def test_a_longer_answer_than_allowed_is_none(most, status):
    segments, found = segment("so\n#### 400<eos>", max_answer_tokens=most)
    assert found == status
    assert (segments != Segment.OUTSIDE).any() == (status == Status.SCORED)


# ---- searches that fail


SLOWED = []
"""Texts that took a while."""


def slow(text):
    """A user's own function that takes a while and fails, but for one text."""
    if text.startswith("good"):
        return (5, 6)
    SLOWED.append(text)
    time.sleep(0.05)
    raise KeyError(text)


SLOW = f"python:{__name__}:slow"


def rows_of(*texts):
    encoded = [TOKENIZER(text)["input_ids"] for text in texts]
    return [(ids, np.ones(len(ids), bool), text != "unneeded", 3) for ids, text in zip(encoded, texts, strict=True)]


def status_of(rows, patterns=(SLOW,), tokenizer=TOKENIZER):
    request = asked("fisher", answer_patterns=patterns, max_response_length=100)
    segments, status = segment_rows(rows, request, TokenBytes(tokenizer), ())
    for row, one in zip(segments, status, strict=True):
        assert (one == Status.SCORED) or (row == Segment.OUTSIDE).all()
    return [Status(int(one)).name for one in status]


def test_a_search_that_fails_falls_back_and_says_so_once(caplog):
    names = status_of(rows_of("good 5", "bad", "worse", "unneeded"))
    assert names == ["SCORED", "SEARCH_FAILED", "SEARCH_FAILED", "NOT_NEEDED"]
    (record,) = caplog.records
    assert "slow raised KeyError" in record.getMessage()
    assert record.exc_info, "with the user's own traceback"


def test_a_batch_that_has_lost_too_much_time_is_not_searched_on(monkeypatch):
    """Where every response takes all the time that it may, a step would take hours."""
    monkeypatch.setattr(module, "LOST_SECONDS", 0.12)
    SLOWED.clear()
    names = status_of(rows_of("good 1", "unneeded", *(100 * ["bad"]), "good 2", "unneeded"))
    assert names == ["SCORED", "NOT_NEEDED", *(101 * ["SEARCH_FAILED"]), "NOT_NEEDED"]
    assert 0 < len(SLOWED) < 10, "of a hundred"
    assert status_of(rows_of("good 1")) == ["SCORED"], "the next batch begins anew"


def test_searches_that_are_slow_and_find_nothing_count_too(monkeypatch):
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOST_SECONDS", 1e-9)
    assert status_of(rows_of("nothing", "nothing"), ("hash",)) == ["NO_ANSWER", "SEARCH_FAILED"]


def test_a_tokenizer_that_raises_does_not_stop_a_run():
    tokenizer, decode = WithoutBackend(), WithoutBackend().decode
    tokenizer.decode = lambda ids, **options: 1 / 0 if 9 in ids else decode(ids, **options)
    rows = [(ids, np.ones(len(ids), dtype=bool), True, 3) for ids in ([1, 2, 3], [1, 9, 3])]
    assert status_of(rows, ("hash",), tokenizer) == ["NO_ANSWER", "SEARCH_FAILED"]
