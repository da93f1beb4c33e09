"""verl's agent loop, which also scores a response: after its reward is computed, and before it enters the replay queue.

The engines keep the current weights until the batch is complete. So the masked copies of early responses run while late
responses are still being generated. A response is scored as soon as two rewards of its group differ: only then can its
weights change the update. A group whose rewards are all equal is not scored.
"""

import asyncio
import time
from contextvars import ContextVar
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from pydantic import Field
from torch import Tensor
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import response_seeds, step_seed
from oar_plugin.credit.perturbation import Unit, units
from oar_plugin.estimator import needs_credit, weigh_rows
from oar_plugin.hosts.verl.capabilities import accepted
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS, OFFLOAD, TENTHS, OffloadRecord
from oar_plugin.hosts.verl.settings import ZERO_WHEN_EQUAL, length_limits, resolve
from oar_plugin.hosts.vllm.scorer import ScoringResult, ScoringTask
from oar_plugin.output import logger
from oar_plugin.passes.prediction import drawn_units, hashed
from oar_plugin.passes.request import replacement_token
from oar_plugin.passes.segments import LostTime, end_of_sequence_tokens, longest_of, segment_response
from oar_plugin.passes.tokens import TokenBytes

PRIORITY = 2**30  # of masked copies: they run after all generation (vLLM runs smaller numbers first)
ATTEMPTS = 2  # maximum number of attempts to score a response
STATUS_OF_FAULT: dict[str | None, Status] = {None: Status.SCORED, "failed": Status.ENGINE_FAILED}
STATUS_OF_FAULT |= {fault: Status[fault.upper()] for fault in ("timed_out", "too_long", "aborted", "non_finite")}


class Group:
    """The responses to one prompt. `matters` returns whether to score them, as early as this is known.

    `size` sessions will be reported. `decides`: equal rewards make all advantages zero; otherwise every response is scored.
    """

    def __init__(self, size: int, decides: bool) -> None:
        self._size, self._differ = size, not decides
        self._reported, self._rewards = set[int](), list[float]()
        self._known = asyncio.Event()

    def report(self, session: int, reward: float | None, comes_later: bool = False) -> None:
        """Count a session as finished, once. `reward` is None if it failed, or if rewards are computed after this loop."""
        self._reported.add(session)
        if reward is not None:
            self._rewards.append(reward)
        if (number := len(self._rewards)) > 1:
            reward_B1, some_B1 = torch.tensor(self._rewards)[:, None], torch.ones(number, 1)
            self._differ |= bool(needs_credit(some_B1, reward_B1, [0] * number).any())
        self._differ |= comes_later
        if self._differ or len(self._reported) >= self._size:
            self._known.set()

    async def matters(self) -> bool:
        """Return whether to score the responses. Wait until two rewards differ, or until all responses are reported."""
        await self._known.wait()
        return self._differ


class ScoredOutput(AgentLoopOutput):
    """verl's output of one session, with OAR's fields added to verl's fields."""

    oar_fields: Any = Field(default=None, exclude=True)
    generated_at: float = Field(default=0.0, exclude=True)

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | self.oar_fields

    @classmethod
    def of(cls, output: AgentLoopOutput) -> "ScoredOutput":
        return cls.model_construct(output.model_fields_set, **dict(output), generated_at=time.time())


_group: ContextVar[Group | None] = ContextVar("oar_group", default=None)  # of the loop that runs; None in a validation


class OarAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    # Attributes of verl's worker.
    config: DictConfig
    llm_client: Any  # its `LLMServerClient`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._oar = resolve(self.config)
        self._finder = make_finder(self._oar.answer_patterns)
        self._lost_time = 0, LostTime()  # the newest step with a response here, and its answer searches' lost time
        self._token_bytes = TokenBytes(self.tokenizer)
        self._eos_ids = end_of_sequence_tokens(self.model_config.tokenizer, self.model_config.generation_config)
        self._replacement = replacement_token(self._oar, self.tokenizer)
        self._groups: dict[str, Group] = {}
        self._share = 1.0  # of the responses that engines score: until the driver says otherwise, all

    async def _run_prompt(
        self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False, **more: Any
    ) -> None:
        uid = prompt["uid"]
        if not trajectory["validate"]:
            decides = self._oar.base_estimator in ZERO_WHEN_EQUAL and not self.config.algorithm.use_kl_in_reward
            size = prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
            self._groups[uid] = Group(size, decides)
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace, **more)
        finally:
            self._groups.pop(uid, None)

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        if trajectory["validate"]:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        group = self._groups[kwargs["uid"]]
        token = _group.set(group)
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        finally:
            _group.reset(token)
            group.report(kwargs["session_id"], None)  # if it failed, the other responses must not wait for its reward

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if _group.get() is not None:
            output = [ScoredOutput.of(one) for one in output] if isinstance(output, list) else ScoredOutput.of(output)
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict, **more: Any) -> None:
        await super()._compute_score(outputs, kwargs=kwargs, **more)
        group = _group.get()
        if group is None:
            return
        reward = outputs[-1].reward_score
        group.report(kwargs["session_id"], reward, comes_later=reward is None)
        for output in outputs:
            assert isinstance(output, ScoredOutput)
            output.oar_fields = await self._fields(output, group, kwargs["global_steps"])

    async def _fields(self, output: ScoredOutput, group: Group, step: int) -> dict[str, Tensor]:
        """Return the engines' fields and the record of one output. An error in OAR never stops the run."""
        length = len(output.response_ids)
        importance, segments = np.zeros(length, dtype=np.float32), np.zeros(length, dtype=np.int8)
        record = OffloadRecord(Status.NOT_SCORED, generated_at=output.generated_at)
        try:
            if not await group.matters():
                record = record._replace(status=Status.NOT_NEEDED)
            elif not output.multi_modal_data:
                mask = np.array(output.response_mask, dtype=bool)
                response, total = length_limits(self.config, longest_of(self.model_config.hf_config))
                longest = min(response, total - len(output.prompt_ids)), self._oar.max_answer_tokens
                if step > self._lost_time[0]:
                    self._lost_time = step, LostTime()
                found_by = self._finder, self._token_bytes, self._eos_ids, *longest, self._lost_time[1]
                segments, status = segment_response(output.response_ids, mask, *found_by)
                seed_1 = self._seed(output, step_seed(self._oar.seed, max(step, 1)))
                if status == Status.SCORED and not bool(hashed(seed_1) < self._share):
                    status = Status.NOT_SCORED
                record = record._replace(status=status)
                if record.status == Status.SCORED:
                    result, record = await self._score(output, segments, step)
                    if result.importance is not None:
                        importance[:] = result.importance  # raises an error if the length is wrong
            fields = self._weighed(importance, segments, record.status)
        except Exception:
            logger.exception("OAR could not score a response; it falls back to GRPO")
            record = record._replace(status=Status.ENGINE_FAILED)
            fields = self._weighed(np.zeros_like(importance), segments, record.status)
        return fields | {OFFLOAD: record.to_row()}

    def oar_share(self, share: float) -> None:
        """From now on the engines score this share of the responses, for the actor's predictions: the smallest hashes."""
        self._share = share

    def _seed(self, output: ScoredOutput, seed: int) -> Tensor:
        token_T = torch.tensor([*output.prompt_ids, *output.response_ids])
        return response_seeds(token_T, torch.zeros_like(token_T), 1, seed)

    def _units(self, output: ScoredOutput, segments: np.ndarray) -> list[Unit]:
        """The units of a response that get copies: those that the actor takes for labels."""
        every = units((segments == Segment.REASONING).tolist(), self._oar.perturbation.span)
        if (number := self._oar.amortize.units) is None or len(every) <= number:
            return every
        drawn_1K = drawn_units(torch.tensor([len(every)]), self._seed(output, self._oar.seed), number)
        return [every[index] for index in drawn_1K[0].tolist()]

    def _weighed(self, importance: np.ndarray, segments: np.ndarray, status: int) -> dict[str, Tensor]:
        if status != Status.SCORED:
            segments = np.zeros_like(segments)
        score_L, segment_L = torch.from_numpy(importance), torch.from_numpy(segments)
        answer = weigh_rows([score_L], [segment_L], torch.tensor([int(status)]), self._oar)
        return {ENGINE_FIELDS[name]: row for name, (row,) in answer.items()}

    async def _score(
        self, output: ScoredOutput, segments: np.ndarray, step: int
    ) -> tuple[ScoringResult, OffloadRecord]:
        oar, answer, prompt_length = self._oar, np.flatnonzero(segments == Segment.ANSWER), len(output.prompt_ids)
        task = ScoringTask(
            token_ids=[*output.prompt_ids, *output.response_ids[: int(answer[-1]) + 1]],
            prompt_length=prompt_length,
            answer_start=prompt_length + int(answer[0]),
            units=self._units(output, segments),
            response_length=len(segments),
            probe=oar.probe_at(max(step, 1)),
            replacement_token=self._replacement,
            seed=step_seed(oar.seed, max(step, 1)),
            priority=PRIORITY,
        )
        result = ScoringResult()
        for attempts in range(1, ATTEMPTS + 1):
            began = time.time()
            result = await self._call(task, after_exchange=result.fault == "aborted")
            if result.fault in (None, "too_long"):
                break
            logger.warning("OAR: an engine could not score a response (%s), attempt %d", result.fault, attempts)
        numbers = attempts, result.copies, result.retried, result.tokens, result.cached_tokens, output.generated_at
        done_at = np.quantile([began + seconds for seconds in result.done_at] or [0.0], TENTHS).tolist()
        return result, OffloadRecord(STATUS_OF_FAULT[result.fault], *numbers, done_at)

    async def _call(self, task: ScoringTask, after_exchange: bool) -> ScoringResult:
        """Call one engine, and return every error as a fault. `after_exchange`: first wait, without limit, until it admits."""
        request_id = f"oar-{id(task)}-{time.monotonic_ns()}"
        client, server_id, call = self.llm_client, None, None
        try:
            # Some versions of verl's router choose the server by the prompt.
            by_prompt = accepted(client._acquire_server, prompt_ids=task.token_ids)
            server_id, server = await client._acquire_server(request_id, **by_prompt)
            if after_exchange:
                await server.oar_wait_open.remote()
            call = server.oar_score.remote(task, self._oar.perturbation.timeout_s)
            return await call
        except asyncio.CancelledError:
            if call is not None:
                ray.cancel(call)
            raise
        except Exception as error:
            logger.warning("OAR: scoring failed on server %s: %s", server_id, str(error).splitlines()[-1:])
            return ScoringResult(fault="failed")
        finally:
            if server_id is not None:
                client._release_server(server_id, **accepted(client._release_server, request_id=request_id))


class OarAgentLoopManager(AgentLoopManagerTQ):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(OarAgentLoopWorker)
