"""The offload as driver and agent loop see it: groups, records, merging, refusals. No engine here."""

import asyncio

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

pytest.importorskip("verl")

import verl  # noqa: F401

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl import offload
from oar_plugin.hosts.verl.agent_loop import Group, ScoredOutput
from oar_plugin.hosts.verl.offload_record import ENGINE_FIELDS, OffloadRecord, deciles, summarize_offload
from oar_plugin.hosts.verl.settings import resolve
from oar_plugin.passes.request import FIELDS, IMPORTANCE, REPORT, SEGMENTS, replacement_token
from tests.hosts.engine import world


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


# ---- groups


def verdicts(rewards, size=None, decides=True):
    """What `matters` says after each report: None while it cannot know."""

    async def run():
        group = Group(size or len(rewards), decides)
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
    ("rewards", "expected"),
    [
        ([1.0, 1.0, 1.0], [None, None, False]),
        ([1.0, 0.0, 1.0], [None, True, True]),
        ([1.0, 1.0, 0.0], [None, None, True]),
        ([None, None], [None, False]),
        ([1.0, None, 1.0], [None, None, False]),
        ([0.5], [False]),
    ],
)
def test_a_group_matters_as_soon_as_two_rewards_differ_and_never_when_none_do(rewards, expected):
    assert verdicts(rewards) == expected


def test_where_equal_rewards_decide_nothing_every_response_matters_at_once():
    assert verdicts([1.0, 1.0], decides=False) == [True, True]


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
    assert OffloadRecord.from_row(record().to_row()) == record()
    empty = OffloadRecord(int(Status.NO_ANSWER))
    assert OffloadRecord.from_row(empty.to_row()) == empty


@pytest.mark.parametrize(("moment", "copies"), [(-5, 0), (0, 0), (5, 5), (7.5, 7.5), (10, 10), (99, 10)])
def test_copies_done_by_a_moment(moment, copies):
    assert record().done_by(1e9 + moment) == pytest.approx(copies)


def test_copies_that_were_all_done_at_once():
    at_once = record(done_at=deciles([1e9 + 3.0]))
    assert (at_once.done_by(1e9 + 2.9), at_once.done_by(1e9 + 3.0)) == (0, 10)


def test_summary_says_what_hid_behind_generation():
    late = record(generated_at=1e9 + 4, copies=30, attempts=2, status=int(Status.TIMED_OUT))
    idle = OffloadRecord(int(Status.NOT_NEEDED), generated_at=1e9 + 5)
    metrics = summarize_offload([record(), late, idle])
    assert metrics["responses"] == 2
    assert metrics["scored"] == 0.5
    assert metrics["copies"] == 40
    assert metrics["hidden_share"] == pytest.approx(0.5)
    assert metrics["exposed_s"] == pytest.approx(5)
    assert metrics["cached_share"] == 0.4
    assert metrics["retried_responses"] == 1


def test_nothing_sent_is_no_division_by_zero():
    assert summarize_offload([OffloadRecord(int(Status.NOT_NEEDED))])["responses"] == 0


# ---- merging


def fields_of(names, values, segments, statuses, lengths):
    importance, segment, report = (names[name] for name in FIELDS)
    return {
        importance: nested([torch.full((n,), value) for value, n in zip(values, lengths, strict=True)]),
        segment: nested([torch.full((n,), segments, dtype=torch.int8) for n in lengths]),
        report: nested([torch.tensor([float(s), 0.0]) for s in statuses]),
    }


@pytest.mark.parametrize("asked", [True, False])
def test_the_actor_fills_what_the_engines_left_and_nothing_else(asked):
    """The last row is verl's padding: a copy of the first, cut short after the engines had scored it."""
    lengths, scored = [3, 4, 2, 1], [3, 4, 2, 3]
    statuses = [Status.SCORED, Status.TIMED_OUT, Status.NO_ANSWER, Status.SCORED]
    fields = {"advantages": nested([torch.ones(n) for n in lengths])}
    fields |= fields_of(ENGINE_FIELDS, [1.0, 2.0, 3.0, 1.0], 1, statuses, scored)
    assert offload.actor_may_help(torch.tensor(statuses)).tolist() == [False, True, False, False]
    if asked:
        fields |= fields_of(dict(zip(FIELDS, FIELDS, strict=True)), [-7.0] * 4, 2, [Status.SCORED] * 4, lengths)
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
    padded = TensorDict(
        {
            "advantages": torch.ones(2, 3),
            IMPORTANCE: torch.tensor([[9.0, 9, 9], [1.0, 2, 3]]) * scale,
            SEGMENTS: torch.full((2, 3), int(Segment.REASONING), dtype=torch.int8),
            REPORT: torch.zeros(2, 2),
            ENGINE_FIELDS[IMPORTANCE]: torch.full((2, 3), 0.5),
            ENGINE_FIELDS[SEGMENTS]: torch.full((2, 3), int(Segment.REASONING), dtype=torch.int8),
            ENGINE_FIELDS[REPORT]: torch.zeros(2, 2),
        },
        batch_size=2,
    )
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


# ---- what stops a run


def config(**changes):
    base = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "oar",
                "oar": {"importance": "oar_p", "perturbation": {"backend": "rollout"}},
            },
            "critic": {"enable": None},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2"},
                "model": {"use_fused_kernels": False},
                "rollout": {"name": "vllm", "agent": {"agent_loop_manager_class": None}, "scheduling_policy": "fcfs"},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(base, key.replace("__", "."), value, force_add=True)
    return base


ROLLOUT = "actor_rollout_ref__rollout__"


def test_the_offload_is_possible_here():
    assert resolve(config()).offloads


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({ROLLOUT + "name": "sglang"}, ["rollout.name=sglang", "allowed: vllm", "backend=actor"]),
        ({ROLLOUT + "agent__agent_loop_manager_class": "my.Manager"}, ["agent_loop_manager_class=my.Manager", "null"]),
        ({ROLLOUT + "engine_kwargs__vllm__worker_extension_cls": "x.Y"}, ["worker_extension_cls=x.Y", "unset"]),
        ({ROLLOUT + "data_parallel_size": 2}, ["data_parallel_size=2", "allowed: 1"]),
        ({ROLLOUT + "pipeline_model_parallel_size": 2}, ["pipeline_model_parallel_size=2", "allowed: 1"]),
        ({ROLLOUT + "disaggregation__enabled": True}, ["disaggregation.enabled=True"]),
        ({"algorithm__oar__importance": "hybrid"}, ["importance=hybrid", "backend=rollout", "backend=actor"]),
        ({"algorithm__oar__perturbation__budget": 0}, ["algorithm.oar.perturbation.budget=0", "greater than 0"]),
        ({"algorithm__oar__perturbation__span": "words"}, ["algorithm.oar.perturbation.span='words'"]),
        (
            {"algorithm__oar__perturbation__fallback": "hybrid"},
            ["fallback=hybrid", "masked copies", "allowed: none, fisher"],
        ),
        ({"algorithm__oar__perturbation__fallback": "fish"}, ["fallback=fish", "allowed: fisher"]),
        ({"algorithm__oar__perturbation__buget": 0.3}, ["did you mean algorithm.oar.perturbation.budget"]),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(changes, parts):
    with pytest.raises(OarConfigError) as error:
        resolve(config(**changes))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(("version", "said"), [("0.11.0", r"vLLM 0\.11\.0 is installed"), (None, "not installed")])
def test_another_vllm_is_refused_and_the_local_backend_is_named(monkeypatch, version, said):
    monkeypatch.setattr(offload, "installed", lambda: version)
    with pytest.raises(OarConfigError, match=rf"backend=rollout: .*{said}.*0\.28.*backend=actor"):
        resolve(config())
    assert resolve(config(algorithm__oar__perturbation__backend="actor")).copies is not None


def test_without_the_offload_none_of_this_is_looked_at():
    assert not resolve(config(**{ROLLOUT + "name": "sglang", "algorithm__oar__importance": "fisher"})).offloads


# ---- what to mask with


def test_replacement_tokens():
    tokenizer = world.make_tokenizer()

    def token(kind):
        return replacement_token(
            OarConfig.parse({"importance": "oar_p", "perturbation": {"replacement": kind}}), tokenizer
        )

    assert token("pad") == world.PAD
    assert token("sampled") is None
    tokenizer.pad_token = None
    with pytest.raises(OarConfigError, match=r"replacement=pad.*no padding token.*sampled"):
        token("pad")
    assert token("sampled") is None
