"""The agent-loop worker between verl's loop and a server: what is scored, retried, given up. Servers are made up here."""

import asyncio
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config

pytest.importorskip("verl")

import verl  # noqa: F401
from ray.exceptions import RayActorError
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import response_seeds
from oar_plugin.hosts.verl import agent_loop
from oar_plugin.hosts.verl.agent_loop import Group
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS, OFFLOAD, OffloadRecord
from oar_plugin.hosts.vllm.scorer import ScoringResult
from oar_plugin.passes.gradient import Packed
from oar_plugin.passes.prediction import Predictor, Units
from oar_plugin.passes.request import IMPORTANCE, SEGMENTS, STATUS
from tests.hosts.engine import world


@pytest.mark.parametrize(
    ("rewards", "decides", "expected"),
    [
        ([1.0, 1.0, 1.0], True, [None, None, False]),
        ([1.0, 0.0, 1.0], True, [None, True, True]),
        ([1.0, 1.0, 0.0], True, [None, None, True]),
        ([None, None], True, [None, False]),
        ([1.0, None, 1.0], True, [None, None, False]),
        ([0.5], True, [False]),
        ([0.1 + 0.2, 0.3, 0.3], True, [None, None, False]),
        ([1.0, 1.0], False, [True, True]),
        (["later", None], True, [True, True]),
    ],
)
def test_a_group_matters_as_soon_as_two_rewards_differ_or_where_equal_ones_decide_nothing(rewards, decides, expected):
    """None while it cannot know."""

    async def run():
        group, seen = Group(len(rewards), decides), []
        for session, reward in enumerate(rewards):
            group.report(session, *((None, True) if reward == "later" else (reward,)))
            asked = asyncio.ensure_future(group.matters())
            await asyncio.sleep(0)
            seen.append(asked.result() if asked.done() else None)
            asked.cancel()
        return seen

    assert asyncio.run(run()) == expected


class Server:
    """Answers as it is told to: a fault, an exception, or scores of 1, 2, 3 ... And verl's client that finds it."""

    def __init__(self, *answers):
        self.answers, self.tasks, self.waited, self.held = list(answers), [], 0, 0
        self.oar_score = SimpleNamespace(remote=self._score)
        self.oar_wait_open = SimpleNamespace(remote=self._wait_open)

    async def _score(self, task, timeout_s):
        self.tasks.append(task)
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return ScoringResult(None, answer)
        importance = np.zeros(task.response_length, dtype=np.float32)
        for place, unit in enumerate(task.units):
            importance[list(unit)] = 1.0 + place
        importance.flags.writeable = False  # as Ray hands it out
        return ScoringResult(importance, None, len(task.units), 100, 40, 0, (0.1, 0.2))

    async def _wait_open(self):
        self.waited += 1

    async def _acquire_server(self, request_id, **extra):
        self.held += 1
        return "one", self

    def _release_server(self, server_id, request_id):
        self.held -= 1


def output(row=0, reward=1.0):
    prompt, response = world.encode()[row]
    return AgentLoopOutput(
        prompt_ids=prompt.tolist(), response_ids=response.tolist(), response_mask=[1] * len(response),
        metrics=AgentLoopMetrics(), reward_score=reward, extra_fields={},  # verl 0.9.0 looks into them
    )  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """Sessions of one prompt through a worker; returns each session's fields as they would enter the queue."""
    base = agent_loop.OarAgentLoopWorker.__mro__[1]

    async def session(self, sampling_params, trajectory, **kwargs):
        made = kwargs["outputs"][kwargs["session_id"]]
        if isinstance(made, Exception):
            raise made
        await self._agent_loop_postprocess(made, trajectory["validate"], **kwargs)

    async def postprocess(self, output, validate, **kwargs):
        outputs = output if isinstance(output, list) else [output]
        await self._compute_score(outputs, kwargs=kwargs)
        if kwargs["session_id"] == 0:
            await asyncio.sleep(0.01)  # the first one is the last to get through
        kwargs["queue"][kwargs["session_id"]] = [one.as_dict() for one in outputs]

    async def score(self, outputs, kwargs):
        """The rewards are there already."""

    async def prompt(self, prompt, sampling_params, trajectory, trace=False):
        start = partial(self._run_agent_loop, sampling_params, trajectory=trajectory, **prompt)
        sessions = [start(session_id=i) for i in range(len(prompt["outputs"]))]
        await asyncio.gather(*sessions, return_exceptions=True)

    monkeypatch.setattr(base, "__init__", lambda self, **given: vars(self).update(given))
    monkeypatch.setattr(base, "_run_agent_loop", session)
    monkeypatch.setattr(base, "_agent_loop_postprocess", postprocess)
    monkeypatch.setattr(base, "_compute_score", score)
    monkeypatch.setattr(base, "_run_prompt", prompt)

    def go(server, outputs, validate=False, limits=None, share=None, **oar):
        tokenizer, rollout = world.make_tokenizer(), {"n": len(outputs), **(limits or {})}
        settings = {"algorithm": {"use_kl_in_reward": False}, "actor_rollout_ref": {"rollout": rollout}}
        config = OmegaConf.create(settings | {"data": {"max_response_length": world.MAX_RESPONSE_LENGTH}})
        hf_config = Qwen2Config(max_position_embeddings=128)
        held = SimpleNamespace(hf_config=hf_config, tokenizer=tokenizer, generation_config=None)
        copies = {
            "importance": "oar_p",
            "perturbation": {"backend": "rollout", "replacement": "pad"},
            "answer_patterns": ["hash"],
        }
        monkeypatch.setattr(agent_loop, "resolve", lambda config: OarConfig.parse(copies | oar))
        worker = agent_loop.OarAgentLoopWorker(config=config, model_config=held, tokenizer=tokenizer, llm_client=server)
        if share is not None:
            worker.oar_share(share)
        queue = {}
        task = dict(uid="u", global_steps=1, outputs=outputs, queue=queue)
        asyncio.run(worker._run_prompt(task, {}, {"validate": validate}))
        assert worker._groups == {}
        assert server.held == 0
        return queue

    return go


def status_of(fields):
    record = OffloadRecord(*fields[OFFLOAD][:2].tolist())
    assert fields[ENGINE_FIELDS[STATUS]].dtype == torch.int64
    assert fields[ENGINE_FIELDS[STATUS]].tolist() == [record.status]
    return Status(record.status)


def test_a_group_with_a_signal_is_scored(run):
    server, outputs = Server(), [output(0, 1.0), output(1, 0.0)]
    fields = run(server, outputs)
    for row, made in enumerate(outputs):
        (ours,) = fields[row]
        assert status_of(ours) is Status.SCORED
        segments = world.segments_of(world.ROWS[row][1])
        assert torch.equal(ours[ENGINE_FIELDS[SEGMENTS]].long(), segments)
        reasoning = segments == Segment.REASONING
        assert torch.equal(ours[ENGINE_FIELDS[IMPORTANCE]][reasoning], torch.arange(1.0, reasoning.sum() + 1))
        assert not ours[ENGINE_FIELDS[IMPORTANCE]][~reasoning].any()
        plain = made.as_dict()
        assert ours.keys() == plain.keys() | {*ENGINE_FIELDS.values(), OFFLOAD}
        assert torch.equal(ours["rm_scores"], plain["rm_scores"])
    task = next(t for t in server.tasks if t.response_length == len(outputs[0].response_ids))
    text = world.make_tokenizer().decode(task.token_ids)
    assert text == "3+4?well 3+4 is 7 then\n#### 7"
    assert text[task.answer_start :] == "7"
    assert task.priority > 0
    assert task.replacement_token == world.PAD


LOST = RuntimeError("lost")


@pytest.mark.parametrize(
    ("oar", "outputs", "expected"),
    [
        pytest.param({}, [(0, 1.0), (1, 1.0), (3, 1.0)], [Status.NOT_NEEDED] * 3, id="equal rewards"),
        # A base that normalises over the batch.
        ({"base_estimator": "reinforce_plus_plus_baseline"}, [(0, 1.0), (1, 1.0)], [Status.SCORED] * 2),
        ({}, [(5, 0.0), (6, 0.0), (7, 1.0)], [Status.NO_ANSWER, Status.TRUNCATED, Status.NO_REASONING]),
        ({"max_answer_tokens": 2}, [(3, 0.0), (1, 1.0)], [Status.ANSWER_TOO_LONG, Status.SCORED]),
        pytest.param({}, [(0, 1.0), LOST, (1, 1.0)], [Status.NOT_NEEDED] * 2, id="a session failed"),
        pytest.param({}, [(0, 1.0), LOST, (1, 0.0)], [Status.SCORED] * 2, id="a session failed"),
        pytest.param({}, [[(0, 1.0), (1, 1.0)], (3, 0.0)], [Status.SCORED] * 3, id="several trajectories of a session"),
    ],
)
def test_only_what_has_a_signal_and_an_answer_is_sent(run, oar, outputs, expected):
    server = Server()

    def made(what):
        if isinstance(what, list):
            return [made(one) for one in what]
        return what if what is LOST else output(*what)

    fields = run(server, made(outputs), **oar)
    assert [status_of(ours) for session in sorted(fields) for ours in fields[session]] == expected
    assert len(server.tasks) == expected.count(Status.SCORED)


@pytest.mark.parametrize(("share", "scored"), [(None, [0, 1, 3, 4]), (world.SHARE, [0])])
def test_the_share_that_the_driver_says_is_scored_until_then_all(run, share, scored):
    """The actor predicts from these."""
    outputs = [output(row, float(row > 0)) for row in world.SCORED]
    fields = run(Server(), outputs, amortize={"share": world.SHARE, "units": None}, share=share)
    statuses = {row: status_of(fields[session][0]) for session, row in enumerate(world.SCORED)}
    assert statuses == {row: Status.SCORED if row in scored else Status.NOT_SCORED for row in world.SCORED}


def test_engines_score_the_units_that_the_actor_takes_for_labels(run):
    server = Server()
    run(server, [output(row, float(row > 0)) for row in world.SCORED], amortize={"share": world.SHARE, "units": 3})
    assert len(server.tasks) == 4
    for task in server.tasks:
        packed = packed_of_task(task)
        seed_B = response_seeds(packed.token_T, packed.response_T, 1, 0)
        labelled_N = Predictor(world.SHARE, 3, 1).labelled(Units(packed, 1), seed_B, torch.tensor([True]))
        at_T = packed.reasoning_T.nonzero()[:, 0][labelled_N] - task.prompt_length
        assert [place for unit in task.units for place in unit] == at_T.tolist()


def packed_of_task(task):
    """The whole response of a task, which one of the rows has."""
    rows = {row: torch.cat(world.encode()[row]) for row in world.SCORED}
    ((row, whole),) = ((row, ids) for row, ids in rows.items() if ids.tolist()[: len(task.token_ids)] == task.token_ids)
    segments_L = world.segments_of(world.ROWS[row][1]).long()
    outside = torch.full((task.prompt_length,), int(Segment.OUTSIDE))
    return Packed(whole, torch.cat([outside, segments_L]), torch.tensor([0, len(whole)]))


def test_validation_is_not_scored(run):
    server = Server()
    fields = run(server, [output(0, 1.0), output(1, 0.0)], validate=True)
    assert server.tasks == []
    assert ENGINE_FIELDS[IMPORTANCE] not in fields[0][0]


@pytest.mark.parametrize("fault", ["timed_out", "aborted", "non_finite", RayActorError()])
def test_a_fault_is_retried_once_and_then_counted(run, fault):
    once = Server(fault)
    outputs = [output(0, 1.0), LOST, output(5, 0.0)]
    (ours,) = run(once, outputs)[0]
    assert status_of(ours) is Status.SCORED
    assert OffloadRecord(*ours[OFFLOAD][:2].tolist()).attempts == 2
    assert once.waited == (fault == "aborted")

    twice = Server(fault, fault)
    (ours,) = run(twice, outputs)[0]
    assert status_of(ours) is agent_loop.STATUS_OF_FAULT[fault if isinstance(fault, str) else "failed"]
    assert len(twice.tasks) == 2
    assert not ours[ENGINE_FIELDS[IMPORTANCE]].any()
    assert not ours[ENGINE_FIELDS[SEGMENTS]].any()


def test_what_is_too_long_is_not_sent_again(run):
    server = Server("too_long", "too_long")
    (ours,) = run(server, [output(0, 1.0), output(5, 0.0)])[0]
    assert status_of(ours) is Status.TOO_LONG
    assert len(server.tasks) == 1


def test_tokens_that_are_not_the_models_own_are_not_masked(run):
    """A tool's output in the middle of a response."""
    server = Server()
    multi_turn = output(0, 1.0)
    multi_turn.response_mask[5:9] = [0] * 4
    run(server, [multi_turn, output(5, 0.0)])
    masked = {t for unit in server.tasks[0].units for t in unit}
    assert masked
    assert masked.isdisjoint(range(5, 9))


@pytest.mark.parametrize("limits", [{"response_length": 20}, {"max_model_len": 24}])
def test_a_response_that_the_engine_cut_is_not_scored(run, limits):
    cut = output(0, 1.0)  # with a prompt of 4 tokens
    cut.response_ids, cut.response_mask = cut.response_ids[:20], cut.response_mask[:20]
    (ours,) = run(Server(), [cut, output(1, 0.0)], limits=limits)[0]
    assert status_of(ours) is Status.TRUNCATED
