"""The offload as driver and agent loop see it: groups, records, merging, refusals. No engine here."""

import asyncio

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("verl")

import verl  # noqa: F401

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl import offload
from oar_plugin.hosts.verl.agent_loop import Group, ScoredOutput
from oar_plugin.hosts.verl.offload_record import ENGINE_FIELDS, OffloadRecord, deciles, summarize_offload
from oar_plugin.passes.request import FIELDS, IMPORTANCE, REPORT, SEGMENTS, replacement_token
from tests.hosts.engine import world

# ---- groups


def verdicts(rewards, decides):
    """What `matters` says after each report: None while it cannot know."""

    async def run():
        group = Group(len(rewards), decides)
        seen = []
        for reward in rewards:
            group.report(reward)
            try:
                seen.append(await asyncio.wait_for(group.matters(), 0.01))
            except asyncio.TimeoutError:
                seen.append(None)
        return seen

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("rewards", "decides", "expected"),
    [
        ([1.0, 1.0, 1.0], True, [None, None, False]),
        ([1.0, 0.0, 1.0], True, [None, True, True]),
        ([1.0, 1.0, 0.0], True, [None, None, True]),
        ([None, None], True, [None, False]),
        ([1.0, None, 1.0], True, [None, None, False]),
        ([0.5], True, [False]),
        ([1.0, 1.0], False, [True, True]),
    ],
)
def test_a_group_matters_as_soon_as_two_rewards_differ_or_where_equal_ones_decide_nothing(rewards, decides, expected):
    assert verdicts(rewards, decides) == expected


def test_rewards_that_come_later_make_all_matter():
    async def run():
        group = Group(2, decides=True)
        group.reward_comes_later()
        return await asyncio.wait_for(group.matters(), 1)

    assert asyncio.run(run())


# ---- records


def record(**changes):
    base = dict(
        status=int(Status.SCORED), attempts=1, copies=10, retried=1, tokens=1000, cached_tokens=400,
        generated_at=1e9, done_at=deciles([1e9 + i for i in range(11)]),
    )  # fmt: skip
    return OffloadRecord(**{**base, **changes})


def test_a_record_survives_its_row():
    for one in (record(), OffloadRecord(int(Status.NO_ANSWER))):
        assert OffloadRecord.from_row(one.to_row()) == one


def test_copies_done_by_a_moment():
    for moment, copies in [(-5, 0), (0, 0), (5, 5), (7.5, 7.5), (10, 10), (99, 10)]:
        assert record().done_by(1e9 + moment) == pytest.approx(copies)
    at_once = record(done_at=deciles([1e9 + 3.0]))
    assert (at_once.done_by(1e9 + 2.9), at_once.done_by(1e9 + 3.0)) == (0, 10)


def test_summary_says_what_hid_behind_generation():
    late = record(generated_at=1e9 + 4, copies=30, attempts=2, status=int(Status.TIMED_OUT))
    idle = OffloadRecord(int(Status.NOT_NEEDED), generated_at=1e9 + 5)
    metrics = summarize_offload([record(), late, idle])
    want = {"responses": 2, "scored": 0.5, "copies": 40, "hidden_share": 0.5, "exposed_s": 5, "cached_share": 0.4}
    assert {name: metrics[name] for name in want} == pytest.approx(want)
    assert metrics["retried_responses"] == 1
    assert summarize_offload([idle])["responses"] == 0, "and no division by zero"


# ---- merging


def fields_of(names, values, segment, statuses, lengths):
    columns = (
        [torch.full((n,), value) for value, n in zip(values, lengths, strict=True)],
        [torch.full((n,), segment, dtype=torch.int8) for n in lengths],
        [torch.tensor([float(status), 0.0]) for status in statuses],
    )
    return {name: world.nested(rows) for name, rows in zip(names, columns, strict=True)}


@pytest.mark.parametrize("asked", [True, False])
def test_the_actor_fills_what_the_engines_left_and_nothing_else(asked):
    """The last row is verl's padding: a copy of the first, cut short after the engines had scored it."""
    lengths, scored = [3, 4, 2, 1], [3, 4, 2, 3]
    statuses = [Status.SCORED, Status.TIMED_OUT, Status.NO_ANSWER, Status.SCORED]
    fields = {"advantages": world.nested([torch.ones(n) for n in lengths])}
    fields |= fields_of(ENGINE_FIELDS.values(), [1.0, 2.0, 3.0, 1.0], 1, statuses, scored)
    assert offload.actor_may_help(torch.tensor(statuses)).tolist() == [False, True, False, False]
    if asked:
        fields |= fields_of(FIELDS, [-7.0] * 4, 2, [Status.SCORED] * 4, lengths)
    padded = TensorDict(fields, batch_size=4).to_padded_tensor()
    oar = OarConfig.parse({"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": "entropy"}})
    asked_B, padding_B = torch.tensor([False, asked, False, False]), torch.tensor([False, False, False, True])
    got = offload.merged(padded, asked_B, padding_B, oar)
    second = -7.0 if asked else 2.0
    assert got[IMPORTANCE].tolist() == [[1.0, 1, 1, 0], [second] * 4, [3.0, 3, 0, 0], [0.0] * 4]
    assert got[SEGMENTS].tolist() == [[1, 1, 1, 0], [2 if asked else 1] * 4, [1, 1, 0, 0], [0] * 4]
    status = [Status(int(row[0])) for row in got[REPORT]]
    second_status = Status.SCORED if asked else Status.TIMED_OUT
    assert status == [Status.SCORED, second_status, Status.NO_ANSWER, Status.NOT_NEEDED]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_fallback_without_a_scale_of_its_own_is_made_free_of_it(scale):
    """Nats of the engines stay what they are; a Fisher norm beside them does not change with the embeddings' scale."""
    fields = {"advantages": torch.ones(2, 3)}
    for names, importance in (
        (FIELDS, torch.tensor([[9.0, 9, 9], [1.0, 2, 3]]) * scale),
        (ENGINE_FIELDS.values(), torch.full((2, 3), 0.5)),
    ):
        reasoning = torch.full((2, 3), int(Segment.REASONING), dtype=torch.int8)
        fields |= dict(zip(names, (importance, reasoning, torch.zeros(2, 2)), strict=True))
    padded = TensorDict(fields, batch_size=2)
    oar = OarConfig.parse({"importance": "oar_p", "perturbation": {"backend": "rollout", "fallback": "fisher"}})
    got = offload.merged(padded, torch.tensor([False, True]), torch.tensor([False, False]), oar)
    torch.testing.assert_close(got[IMPORTANCE], torch.tensor([[0.5, 0.5, 0.5], [0.5, 1.0, 1.5]]))


def test_faults_are_counted_by_reason():
    rows = [record(status=int(s)).to_row() for s in (Status.SCORED, Status.TIMED_OUT)]
    metrics = offload.offload_metrics(rows, torch.tensor([False, True]))
    assert metrics["fault/timed_out"] == 1
    assert metrics["left_for_actor"] == 0.5


def test_fields_ride_on_verls_own_output():
    from verl.experimental.agent_loop import AgentLoopOutput
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], metrics=AgentLoopMetrics(), reward_score=0.5
    )
    scored = ScoredOutput.of(output)
    scored.extra_fields["later"] = 1
    scored.oar_fields = {IMPORTANCE: torch.ones(2)}
    plain, ours = output.as_dict(), scored.as_dict()
    assert torch.equal(ours.pop(IMPORTANCE), torch.ones(2))
    assert ours.keys() == plain.keys()
    assert torch.equal(ours["rm_scores"], plain["rm_scores"])


# ---- what to mask with


def test_replacement_tokens():
    tokenizer = world.make_tokenizer()

    def token(kind):
        oar = OarConfig.parse({"importance": "oar_p", "perturbation": {"replacement": kind}})
        return replacement_token(oar, tokenizer)

    assert token("pad") == world.PAD
    assert token("sampled") is None
    tokenizer.pad_token = None
    with pytest.raises(OarConfigError, match=r"replacement=pad.*no padding token.*sampled"):
        token("pad")
    assert token("sampled") is None
