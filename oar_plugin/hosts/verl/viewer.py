"""What `algorithm.oar.dump` asks for, at the steps that it names: a file for `oar inspect`, and pictures on dashboards.

No fault in it stops the run: a metric counts it, and the log says it once.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.protocol import DataProto

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance import importance_of
from oar_plugin.hosts.verl.capabilities import host_version
from oar_plugin.hosts.verl.dashboards import DASHBOARDS, Picture
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.page.dumps import DUMP_FAILED, Sibling, choose
from oar_plugin.page.record import Response
from oar_plugin.passes.request import SHOWN, WEIGHTS
from oar_plugin.token_credit import CreditedBatch, TokenCredit

DASHBOARD_FAILED = "oar/dashboard_failed"
QUEUED = ["prompts", "responses", "old_log_probs", "entropy", "response_mask", "reward_model", "data_source"]
"""Fields that are read for the chosen responses only. There is no entropy where old log-probs are the rollout's."""


@dataclass(frozen=True)
class QueuedBatch:
    """A batch of verl's with its credit, and a way to its fields. The advantages there are still the host's own."""

    step: int  # training step
    keys: Sequence[str]  # of the rows, verl's `{uid of the prompt}_{session}_{index}`
    own_B: Tensor  # bool, false for rows that verl added to fill up the batch
    by_actor_B: Tensor  # bool, rows whose credit is in the actor's fields; that of others is in the engines'
    status_B: Tensor  # int64, a `Status` per row
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
            yield Sibling(uid, self.keys[row], reward_B[row].item(), int(self.status_B[row]))


def padded_batch(step: int, batch: DataProto, status_B: Tensor, more: Mapping[str, Tensor]) -> QueuedBatch:
    """The batch of a trainer that holds it padded: prompts on the left, responses on the right. `more`: other fields."""
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(batch.non_tensor_batch["uid"])]

    def read(keys: Sequence[str], select_fields: Sequence[str]) -> Any:
        rows = [int(key.split("_")[-2]) for key in keys]
        real_BT, prompt = batch.batch["attention_mask"].bool(), batch.batch["prompts"].shape[1]
        fields: dict[str, Any] = {}
        for name in select_fields:
            tensors = more if name in more else batch.batch
            if name in tensors:
                keep_BT = real_BT[:, :prompt] if name == "prompts" else real_BT[:, prompt:]
                fields[name] = torch.nested.masked_select(tensors[name][rows], keep_BT[rows])
            elif name in batch.non_tensor_batch:
                fields[name] = batch.non_tensor_batch[name][rows]
        return fields

    everything_B = torch.ones(len(keys), dtype=torch.bool)
    return QueuedBatch(step, keys, everything_B, everything_B, status_B, read)


class Viewer:
    def __init__(self, credit: TokenCredit) -> None:
        self.credit, oar = credit, credit.config
        fallback = oar.actor_importance or oar.importance
        # The engines' importance where they score, and the actor's.
        self._names = importance_of(oar.importance).name, importance_of(fallback).name
        arbitrary = {one.name: one.arbitrary_scale for one in map(importance_of, (oar.importance, fallback))}
        self._header = credit.header(arbitrary, verl=host_version())
        self._step, self._responses = 0, list[Response]()

    def show(self, batch: QueuedBatch, loggers: Mapping[str, Any]) -> dict[str, float]:
        """Shows some groups of a batch if it is time to; `loggers` are verl's, by name.

        A step may have several batches: each may add groups to the step's file, and dashboards get the first one's.

        Returns metrics: whether files and dashboards failed, 1 or 0, and the seconds of a step at which something was shown.
        """
        dumps = self.credit.dumps
        boards = [name for name in DASHBOARDS if name in loggers]
        metrics = {DUMP_FAILED: 0.0} if dumps.folder else {}
        metrics |= {DASHBOARD_FAILED: 0.0} if boards else {}
        if not metrics or not dumps.due(batch.step):
            return metrics
        start, first = time.perf_counter(), batch.step != self._step
        if first:
            self._step, self._responses = batch.step, []
        counted = partial(dumps.counted, batch.step, metrics)
        with counted("reading responses", *metrics):
            groups = self._groups(batch)
            self._responses += [response for group in groups for response in group]
            if dumps.folder is not None:
                with counted(f"writing into {dumps.folder}", DUMP_FAILED):
                    dumps.write(self._header, batch.step, self._responses)
            if boards and first:
                with counted("reading all scores", DASHBOARD_FAILED):
                    picture = self._picture(batch, groups)
                    for name in boards:
                        with counted(name, DASHBOARD_FAILED):
                            DASHBOARDS[name](loggers[name], picture)
        return metrics | {"timing_s/oar_dump": time.perf_counter() - start}

    def _groups(self, batch: QueuedBatch) -> list[list[Response]]:
        """The groups that there is still room for in this step. Of a row that is not chosen only the reward is read."""
        room = self.credit.config.dump.groups - len({response.group for response in self._responses})
        chosen = choose(batch.siblings(), room)
        shown = [sibling for group in chosen for sibling in group]
        if not shown:
            return []
        keys, row_of = [sibling.uid for sibling in shown], {key: row for row, key in enumerate(batch.keys)}
        queued, rows = batch.read(keys=keys, select_fields=QUEUED), [row_of[key] for key in keys]
        columns = {name: f.unbind() if isinstance(f, Tensor) else f.tolist() for name, f in queued.items()}
        credited, by_actor = self._credited(batch, rows), batch.by_actor_B[rows].tolist()
        responses = iter(
            [
                self._response(credited, at, self._names[by_actor[at]], sibling, {n: c[at] for n, c in columns.items()})
                for at, sibling in enumerate(shown)
            ]
        )
        return [list(islice(responses, len(group))) for group in chosen]

    def _credited(self, batch: QueuedBatch, rows: Sequence[int]) -> CreditedBatch:
        """Some rows of a batch, padded, with what the actor or the engines say of them."""
        names = ["advantages", *SHOWN, WEIGHTS]
        fields = batch.read(keys=[batch.keys[row] for row in rows], select_fields=[*names, *ENGINE_FIELDS.values()])
        columns = {name: field.unbind() for name, field in fields.items()}

        def padded(name: str) -> Tensor:
            of = [name if batch.by_actor_B[row] else ENGINE_FIELDS.get(name, name) for row in rows]
            return pad_sequence([columns[name][at] for at, name in enumerate(of)], batch_first=True)

        advantage_BL, importance_BL, segments_BL, weight_BL = map(padded, names)
        return CreditedBatch(batch.step, advantage_BL, importance_BL, segments_BL, weight_BL, batch.status_B[rows])

    def _response(
        self, credited: CreditedBatch, place: int, importance: str, sibling: Sibling, fields: Mapping[str, Any]
    ) -> Response:
        """The response in row `place` of `credited`. `importance`: its name. `fields`: those of `QUEUED`."""
        ids, asked = fields["responses"].tolist(), fields.get("reward_model")
        return self.credit.record(
            credited,
            place,
            slice(len(ids)),
            ids,
            importance=importance,
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

    def _picture(self, batch: QueuedBatch, groups: list[list[Response]]) -> Picture:
        weights = importance = torch.zeros(0)
        if scored := (batch.status_B == Status.SCORED).nonzero()[:, 0].tolist():
            credited = self._credited(batch, scored)
            paid_BL = credited.segments_BL == Segment.REASONING
            weights, importance = credited.weight_BL[paid_BL], credited.importance_BL[paid_BL]
        return Picture(batch.step, weights.numpy(), importance.numpy(), groups[0] if groups else [], self._header)
