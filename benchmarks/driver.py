"""What OAR adds to verl's driver, against verl's own advantage: `python -m benchmarks.driver` measures and prints the page."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer as verl_ray
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

from benchmarks.machine import describe_machine
from benchmarks.report import Table
from oar_plugin.config import OarConfig
from oar_plugin.estimator import weigh_rows
from oar_plugin.hosts.verl import ray_trainer, trainer
from oar_plugin.hosts.verl.viewer import Viewer
from oar_plugin.passes.request import NEEDED, SECONDS, USED
from oar_plugin.token_credit import TokenCredit

RESPONSES, GROUP, TOKENS = (2_048, 16_384), 8, 1_024
REPEATS = 7
ALGORITHM = {"adv_estimator": "oar", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}

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


class Queue:
    """verl's transfer queue without transport."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return TensorDict({name: self.fields[name] for name in select_fields if name in self.fields}, len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.fields.update(dict(fields.items()))
        return KVBatchMeta(keys=keys, partition_id=partition_id, extra_info={}, tags=[{}] * len(keys))


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
    """CPU seconds: other processes on the machine do not count."""
    started = time.process_time()
    call()
    return time.process_time() - started


@contextmanager
def timer(name: str, timing: dict[str, float], **_: Any) -> Iterator[None]:
    """verl's `marked_timer` in CPU seconds."""
    started = time.process_time()
    yield
    timing[name] = timing.get(name, 0.0) + time.process_time() - started


def of_v1(responses: int) -> tuple[float, float]:
    """Seconds of verl's advantage and of what OAR adds, in the v1 trainers."""
    ids = [str(row // GROUP) for row in range(responses)]
    one, reward_BL = object.__new__(get_trainer_cls("sync")), rewards(responses)
    rollout = {"rollout": {"n": GROUP, "temperature": 1.0}}
    one.config = OmegaConf.create({"algorithm": ALGORITHM, "actor_rollout_ref": rollout})
    one.oar, one.global_steps, one.logger = OarConfig(), 1, SimpleNamespace(logger={})
    one._credit = TokenCredit(one.oar, None)
    one._viewer, one.actor_rollout_wg = Viewer(one._credit), SimpleNamespace(_dispatch_info={"actor": [0]})
    fields = {"uid": NonTensorStack(*ids), "response_mask": nested(torch.ones(responses, TOKENS).long())}
    fields |= {"rm_scores": nested(reward_BL), NEEDED: nested(torch.ones(responses, 1).long())} | answer(responses)
    trainer_base.tq = trainer.tq = Queue(fields)
    trainer.marked_timer = timer
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(ids)]
    batch = KVBatchMeta(keys=keys, partition_id="train", extra_info={}, tags=[{}] * responses)
    verls, ours = [], []
    for _ in range(REPEATS):
        one.timing_raw, one.config.algorithm.adv_estimator = {}, "grpo"
        verls.append(seconds(lambda: trainer_base.PPOTrainer._compute_advantage(one, batch, {})))
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
    one, reward_BL = _RayTrainer(), rewards(responses)
    vars(ray_trainer)["time"] = SimpleNamespace(perf_counter=time.process_time)
    one.oar, one.global_steps = OarConfig(), 1
    one._credit = TokenCredit(one.oar, None)
    one._viewer, one.actor_rollout_wg = Viewer(one._credit), SimpleNamespace(_dispatch_info={"actor": [0]})
    mask_BL, verls, ours, fields = torch.ones(responses, TOKENS).long(), [], [], answer(responses)
    rows = {"responses": mask_BL, "attention_mask": mask_BL, "response_mask": mask_BL}
    asking = ray_trainer._Asking(
        SimpleNamespace(compute_log_prob=lambda data: TensorDict(dict(fields), responses)), mask_BL[:, 0], {}, 1, USED
    )
    for _ in range(REPEATS):
        ids = np.array([str(row // GROUP) for row in range(responses)], dtype=object)
        batch = DataProto.from_dict(
            rows | {"token_level_rewards": reward_BL, "token_level_scores": reward_BL}, {"uid": ids}
        )
        config = OmegaConf.create(ALGORITHM)
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


def main() -> None:
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
