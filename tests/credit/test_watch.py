"""Warnings about runs in which OAR does little: when they are due, and what they say."""

import pytest

from oar_plugin.credit.diagnostics import FALLBACKS
from oar_plugin.credit.watch import ADVICE, STEPS, Watch

ALL = {"oar/answer_found": 0.0, "oar/fallback/any": 1.0, "oar/fallback/constant": 0.75, "oar/fallback/no_answer": 0.25}
NONE = {"oar/answer_found": 1.0, "oar/fallback/any": 0.0}
NO_CREDIT_NEEDED = {"oar/fallback/any": 0.0}
ROUNDED = {"oar/answer_found": 0.0, "oar/fallback/any": 0.9999999999999999, "oar/fallback/truncated": 1.0}
ROUNDED_UP = ROUNDED | {"oar/fallback/any": 1.0000000000000002}
LEARNS = NONE | {"oar/fallback/any": 1.0, "oar/fallback/learning": 0.8, "oar/fallback/truncated": 0.2}
MOST = {"oar/answer_found": 0.9, "oar/fallback/any": 0.6, "oar/fallback/out_of_memory": 0.6}


def said(caplog, steps, share=0.5, reward=None):
    watch = Watch(share)
    for step, metrics in enumerate(steps, start=7):  # a run may resume
        watch.see(step, metrics, reward)
    return caplog.messages


def test_a_first_step_in_which_all_fall_back_is_told_with_reasons_and_advice(caplog):
    (message,) = said(caplog, [ALL])
    assert message.startswith("OAR, step 7: 100% of the responses that need credit")
    assert "constant 75%, no_answer 25%. constant: the importance gives all tokens one score" in message


@pytest.mark.parametrize(
    ("steps", "share", "count"),
    [
        ([MOST], 0.5, 0),
        ([MOST] * (STEPS - 1), 0.5, 0),
        ([MOST] * STEPS, 0.5, 1),
        ([NONE] * 100 + [MOST] * (STEPS - 1), 0.5, 1),  # 19 of the last 20 steps
        ([MOST] * STEPS, 0.6, 0),
        ([LEARNS], 0.5, 0),
        ([LEARNS] * STEPS, 0.5, 1),
        ([MOST | {"oar/fallback/learning": 0.2}] * STEPS, 0.3, 1),
        ([ROUNDED], 0.5, 1),
        ([ROUNDED_UP] * STEPS, 1.0, 1),
        ([NONE] * 500, 0.5, 0),
        ([NO_CREDIT_NEEDED] * 500, 0.01, 0),
        ([ALL] * 159, 0.5, 4),  # at steps 1, 20, 40, 80
        ([ALL] * 500, 1.0, 1),
        ([{"val-core/x": 0.0}, MOST], 0.5, 0),  # what is logged of a validation is no step
    ],
)
def test_shares_are_of_twenty_steps_and_warnings_become_rare(caplog, steps, share, count):
    messages = said(caplog, steps, share)
    assert len(messages) == count
    assert all(
        ADVICE[reason] in messages[0] for reason in FALLBACKS if f"{reason.name.lower()}: " in "".join(messages[:1])
    )


@pytest.mark.parametrize(("found", "reward", "due"), [(0.05, 0.3, 1), (0.05, 0.05, 0), (0.05, None, 0), (0.2, 0.3, 0)])
def test_rewards_without_answers_point_to_the_patterns(caplog, found, reward, due):
    metrics = {"oar/answer_found": found, "oar/fallback/any": 0.0}
    messages = said(caplog, [metrics] * STEPS, reward=reward)
    assert [("answer_patterns" in message, "0.30" in message) for message in messages] == [(True, True)] * due


@pytest.mark.parametrize(
    ("steps", "said_of"),
    [
        ([NONE | {"oar/lost_responses": 0.0}] * STEPS, []),
        ([NONE | {"oar/lost_responses": 0.25}, *[NONE] * 10], ["25.0% of the responses are lost"]),
        ([NONE, NONE | {"oar/fallback/bad_reward": 0.25}], ["12.5% of the responses have a reward that is missing"]),
    ],
)
def test_bad_rewards_and_lost_responses_are_told(caplog, steps, said_of):
    messages = said(caplog, steps)
    assert [part in message for message, part in zip(messages, said_of, strict=True)] == [True] * len(said_of)


def test_every_reason_that_is_counted_has_its_advice():
    assert ADVICE.keys() == {*FALLBACKS}
