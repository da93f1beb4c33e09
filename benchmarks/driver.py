"""What OAR adds to verl's driver, against verl's own advantage: `python -m benchmarks.driver` measures and prints the page."""

import statistics
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer as verl_ray
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from benchmarks.machine import describe_machine
from benchmarks.report import Table
from oar_plugin.config import OarConfig
from oar_plugin.estimator import weigh_rows
from oar_plugin.hosts.verl import ray_trainer
from oar_plugin.passes.request import NEEDED, SECONDS, USED
from oar_plugin.token_credit import TokenCredit

RESPONSES, GROUP, TOKENS = (2_048, 16_384), 8, 1_024
REPEATS = 7
CONFIG = {
    "algorithm": {"adv_estimator": "oar", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False},
    "actor_rollout_ref": {"rollout": {"n": GROUP, "temperature": 1.0}},
    "trainer": {},
}

TEXT = """\
# The driver's part of token credit

`python -m benchmarks.driver` prints this page. {cpu}, one core; torch {torch}. CPU seconds, median of {repeats} calls.

Each rank of the actor makes the weights of its own responses. verl's driver multiplies them with its advantages, and
computes the metrics. Batches of responses with {tokens:,} tokens each, half of them scored, default settings. Both columns
are calls of the trainers' own methods: "verl" is its advantage (GRPO), "OAR" all that we add after it. A stand-in for the
transfer queue returns fields at once, so transport is in neither column. `RayPPOTrainer` gets the actor's answer as nested
rows and pads it; that is part of "OAR".

The gate itself (last table) takes this long on the actor's CPU, where the data-parallel ranks divide the batch.
"""


def nested(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def answer(responses: int) -> dict[str, torch.Tensor]:
    """The actor's fields, of which every second group has a signal; the time of its scoring is 0."""
    importance = torch.rand(responses, TOKENS, generator=torch.Generator().manual_seed(0))
    segments = torch.ones(responses, TOKENS, dtype=torch.int8)
    status_B = torch.arange(responses) // GROUP % 2
    rows = weigh_rows(importance.unbind(), segments.unbind(), status_B, OarConfig())
    rows[SECONDS] = list(torch.zeros(responses, 1))
    return {name: nested(row) for name, row in rows.items()}


def rewards(responses: int) -> torch.Tensor:
    reward_BL = torch.zeros(responses, TOKENS)
    reward_BL[:, -1] = (torch.arange(responses) % 2) * (1 - torch.arange(responses) // GROUP % 2)
    return reward_BL


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def ready(one: Any) -> Any:
    """A trainer, made without `__init__`, with what OAR's part of a step uses."""
    one.oar, one.global_steps, one.logger = OarConfig(), 1, SimpleNamespace(logger={})
    one.config, one._credit = OmegaConf.create(CONFIG), TokenCredit(one.oar, None)
    one.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
    return one


def of_v1(responses: int) -> tuple[float, float]:
    """Seconds of verl's advantage and of what OAR adds, in the v1 trainers; their transfer queue is a dictionary."""
    one, ids = ready(object.__new__(get_trainer_cls("sync"))), [str(row // GROUP) for row in range(responses)]
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(ids)]
    batch = KVBatchMeta(keys=keys, partition_id="train", extra_info={}, tags=[{}] * responses)
    queue: dict[str, Any] = {"uid": NonTensorStack(*ids), "response_mask": nested(torch.ones(responses, TOKENS).long())}
    queue |= {"rm_scores": nested(rewards(responses)), NEEDED: nested(torch.ones(responses, 1).long())}
    queue |= answer(responses)

    def get(select_fields: list[str], **_: Any) -> TensorDict:
        return TensorDict({name: queue[name] for name in select_fields if name in queue}, responses)

    def put(fields: TensorDict, **_: Any) -> KVBatchMeta:
        queue.update(fields.items())
        return batch

    verls, ours = [], []
    with mock.patch.multiple(transfer_queue, kv_batch_get=get, kv_batch_put=put):
        for _ in range(REPEATS):
            one.timing_raw, one.config.algorithm.adv_estimator = {}, "grpo"
            verls.append(seconds(lambda: PPOTrainer._compute_advantage(one, batch, {})))
            one._compute_advantage(batch, {})
            ours.append(one.timing_raw["oar"])
    return statistics.median(verls), statistics.median(ours)


class _Updates:
    """A trainer below ours, whose update does nothing."""

    def _update_actor(self, batch: DataProto) -> Any:
        return SimpleNamespace(meta_info={"metrics": {}})


class _RayTrainer(ray_trainer.OarRayTrainer, _Updates):
    pass


def of_ray_trainer(responses: int) -> tuple[float, float]:
    """Seconds of verl's advantage and of what OAR adds, in `RayPPOTrainer`."""
    one, fields = ready(_RayTrainer()), answer(responses)
    mask_BL, reward_BL = torch.ones(responses, TOKENS).long(), rewards(responses)
    rows = {"responses": mask_BL, "attention_mask": mask_BL, "response_mask": mask_BL}
    rewarded = rows | {"token_level_rewards": reward_BL, "token_level_scores": reward_BL}
    ids = np.array([str(row // GROUP) for row in range(responses)], dtype=object)
    workers = SimpleNamespace(compute_log_prob=lambda data: TensorDict(dict(fields), responses))
    asking = ray_trainer._Asking(workers, {NEEDED: mask_BL[:, :1]}, {}, 1, USED)
    verls, ours = [], []
    for _ in range(REPEATS):
        batch, config = DataProto.from_dict(dict(rewarded), {"uid": ids}), one.config.algorithm
        verls.append(seconds(lambda: verl_ray.compute_advantage(batch, "grpo", num_repeat=GROUP, config=config)))  # noqa: B023
        asked = seconds(lambda: asking.compute_log_prob(TensorDict(dict(rows), responses)))
        batch.batch.update(asking.answer)
        ours.append(asked + one._update_actor(batch).meta_info["metrics"]["timing_s/oar"][0])
    return statistics.median(verls), statistics.median(ours)


def of_gate(gate: str, responses: int = 256) -> float:
    """Seconds in which one rank weighs its responses, all of them scored."""
    importance = torch.rand(responses, TOKENS, generator=torch.Generator().manual_seed(0)).unbind()
    segments, status_B = torch.ones(responses, TOKENS, dtype=torch.int8).unbind(), torch.zeros(responses).long()
    config = OarConfig(gate=gate)
    return statistics.median(
        seconds(lambda: weigh_rows(importance, segments, status_B, config)) for _ in range(REPEATS)
    )


@mock.patch.object(time, "perf_counter", time.process_time)
def main() -> None:
    """The trainers' own clocks, too, count processor seconds, so that other processes on the machine do not matter."""
    torch.set_num_threads(1)
    machine, rows = describe_machine(torch.device("cpu")), []
    for name, measured in (("v1", of_v1), ("RayPPOTrainer", of_ray_trainer)):
        for responses in RESPONSES:
            verls, ours = measured(responses)
            each = [f"{one / responses / TOKENS * 1e9:.2f}" for one in (verls, ours)]
            rows.append([name, f"{responses:,}", f"{verls:.4f}", f"{ours:.4f}", *each, f"{ours / verls:.2f}"])
    gates = [[gate, f"{of_gate(gate) / 256 / TOKENS * 1e9:.0f}"] for gate in ("two_level", "bi_level")]
    facts = {"cpu": machine["cpu"], "torch": torch.__version__, "repeats": REPEATS, "tokens": TOKENS}
    columns = ["trainer", "responses", "verl s", "OAR s", "verl ns per token", "OAR ns per token", "OAR / verl"]
    tables = Table("The driver", columns, rows), Table("An actor rank", ["gate", "ns per token"], gates)
    print(TEXT.format(**facts), *(line for table in tables for line in table.markdown()), sep="\n")


if __name__ == "__main__":
    main()
