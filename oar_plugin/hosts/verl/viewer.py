"""What `algorithm.oar.dump` asks for, at the steps that it names: a file for `oar inspect`, and pictures on dashboards.

No fault in it stops the run: a metric counts it, and the log says it once.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.protocol import DataProto

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance import importance_of
from oar_plugin.hosts.verl.capabilities import host_version
from oar_plugin.hosts.verl.dashboards import DASHBOARDS, Picture
from oar_plugin.page.dumps import DUMP_FAILED, Sibling, choose
from oar_plugin.page.record import Response
from oar_plugin.token_credit import ReshapedBatch, TokenCredit

DASHBOARD_FAILED = "oar/dashboard_failed"
QUEUED = ["prompts", "responses", "old_log_probs", "entropy", "response_mask", "reward_model", "data_source"]
"""Fields that are read for the chosen responses only. There is no entropy where old log-probs are the rollout's."""


@dataclass(frozen=True)
class QueuedBatch:
    """A batch of verl's after reshaping, and a way to its other fields."""

    keys: Sequence[str]  # of the rows, verl's `{uid of the prompt}_{session}_{index}`
    own_B: Tensor  # bool, false for rows that verl added to fill up the batch
    by_actor_B: Tensor  # bool, rows that the actor was asked to score; rollout engines, if they score, do the others
    reshaped: ReshapedBatch
    read: Callable[..., TensorDict]  # `read(keys=..., select_fields=...)`: fields of some rows, if they were written

    def siblings(self) -> Iterator[Sibling]:
        """The responses, a group's in the order of sampling, without the rows that verl added."""
        scores = self.read(keys=list(self.keys), select_fields=["rm_scores"])["rm_scores"]
        reward_B = torch.stack([row.sum() for row in scores.unbind()])
        places, first_row = list[tuple[int, int, int, int, str]](), dict[str, int]()
        for row in self.own_B.nonzero()[:, 0].tolist():
            uid, session, index = self.keys[row].rsplit("_", 2)
            places.append((first_row.setdefault(uid, row), int(session), int(index), row, uid))
        for *_, row, uid in sorted(places):
            yield Sibling(uid, self.keys[row], reward_B[row].item(), int(self.reshaped.status_B[row]))


def padded_batch(batch: DataProto, reshaped: ReshapedBatch, entropy_BL: Tensor | None) -> QueuedBatch:
    """The batch of a trainer that holds it padded: prompts on the left, responses on the right."""
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(batch.non_tensor_batch["uid"])]

    def read(keys: Sequence[str], select_fields: Sequence[str]) -> Any:
        rows = [int(key.split("_")[-2]) for key in keys]
        real_BT, prompt = batch.batch["attention_mask"].bool(), batch.batch["prompts"].shape[1]
        entropy = {} if entropy_BL is None else {"entropy": entropy_BL}
        fields: dict[str, Any] = {}
        for name in select_fields:
            tensors = entropy if name in entropy else batch.batch
            if name in tensors:
                keep_BT = real_BT[:, :prompt] if name == "prompts" else real_BT[:, prompt:]
                fields[name] = torch.nested.masked_select(tensors[name][rows], keep_BT[rows])
            elif name in batch.non_tensor_batch:
                fields[name] = batch.non_tensor_batch[name][rows]
        return fields

    everything_B = torch.ones(len(keys), dtype=torch.bool)
    return QueuedBatch(keys, everything_B, everything_B, reshaped, read)


class Viewer:
    def __init__(self, credit: TokenCredit) -> None:
        self.credit, oar = credit, credit.config
        fallback = oar.actor_importance or oar.importance
        # The engines' importance where they score, and the actor's.
        self._names = importance_of(oar.importance).name, importance_of(fallback).name
        # A fallback's importance is on the scale of the one that it replaces.
        arbitrary = dict.fromkeys(self._names, oar.importance_object.arbitrary_scale)
        self._header = credit.header(arbitrary, verl=host_version())
        self._step, self._responses = 0, list[Response]()

    def show(self, batch: QueuedBatch, loggers: Mapping[str, Any]) -> dict[str, float]:
        """Shows some groups of a batch if it is time to; `loggers` are verl's, by name.

        A step may have several batches: each may add groups to the step's file, and dashboards get the first one's.

        Returns metrics: whether files and dashboards failed, 1 or 0, and the seconds of a step at which something was shown.
        """
        dumps, reshaped = self.credit.dumps, batch.reshaped
        boards = [name for name in DASHBOARDS if name in loggers]
        metrics = {DUMP_FAILED: 0.0} if dumps.folder else {}
        metrics |= {DASHBOARD_FAILED: 0.0} if boards else {}
        if not metrics or not dumps.due(reshaped.step):
            return metrics
        start, first = time.perf_counter(), reshaped.step != self._step
        if first:
            self._step, self._responses = reshaped.step, []
        counted = partial(dumps.counted, reshaped.step, metrics)
        with counted("reading responses", *metrics):
            groups = self._groups(batch)
            self._responses += [response for group in groups for response in group]
            if dumps.folder is not None:
                with counted(f"writing into {dumps.folder}", DUMP_FAILED):
                    dumps.write(self._header, reshaped.step, self._responses)
            for name in boards if first else ():
                with counted(name, DASHBOARD_FAILED):
                    scored_B1 = (reshaped.status_B == Status.SCORED)[:, None]
                    paid_BL = (reshaped.segments_BL == Segment.REASONING) & scored_B1
                    weights, importance = reshaped.weight_BL[paid_BL].numpy(), reshaped.importance_BL[paid_BL].numpy()
                    group = groups[0] if groups else []
                    DASHBOARDS[name](loggers[name], Picture(reshaped.step, weights, importance, group, self._header))
        return metrics | {"timing_s/oar_dump": time.perf_counter() - start}

    def _groups(self, batch: QueuedBatch) -> list[list[Response]]:
        """The groups that there is still room for in this step. Of a row that is not chosen only the reward is read."""
        room = self.credit.config.dump.groups - len({response.group for response in self._responses})
        chosen = choose(batch.siblings(), room)
        keys = [sibling.uid for group in chosen for sibling in group]
        if not keys:
            return []
        queued = batch.read(keys=keys, select_fields=QUEUED)
        columns = {name: f.unbind() if isinstance(f, Tensor) else f.tolist() for name, f in queued.items()}
        fields = {key: {name: column[at] for name, column in columns.items()} for at, key in enumerate(keys)}
        return [[self._response(batch, sibling, fields[sibling.uid]) for sibling in group] for group in chosen]

    def _response(self, batch: QueuedBatch, sibling: Sibling, fields: Mapping[str, Any]) -> Response:
        ids, row = fields["responses"].tolist(), batch.keys.index(sibling.uid)
        by_actor = not self.credit.config.offloads or bool(batch.by_actor_B[row])
        asked = fields.get("reward_model")
        return self.credit.record(
            batch.reshaped,
            row,
            slice(len(ids)),
            ids,
            importance=self._names[by_actor],
            group=sibling.group,
            uid=sibling.uid,
            reward=sibling.reward,
            source=str(fields.get("data_source", "")),
            prompt=self.credit.tokenizer.decode(fields["prompts"]),
            truth=asked.get("ground_truth") if isinstance(asked, Mapping) else None,
            log_probs=fields.get("old_log_probs"),
            entropies=fields.get("entropy"),
            mask=fields.get("response_mask"),
        )
