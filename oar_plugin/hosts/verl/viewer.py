"""What `algorithm.oar.dump` asks for: a file for `oar inspect`, and one group on dashboards. A fault here stops no run."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from textwrap import indent
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.protocol import DataProto

from oar_plugin.credit.diagnostics import MEASURE_NAMES, Status
from oar_plugin.credit.importance import importance_of
from oar_plugin.hosts.verl.capabilities import host_version
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.page.dumps import DUMP_FAILED, Sibling, choose
from oar_plugin.page.inspector import inspector_page
from oar_plugin.page.record import Header, Response
from oar_plugin.page.terminal import text_of
from oar_plugin.passes.request import MEASURES, SHOWN, WEIGHTS
from oar_plugin.token_credit import CreditedBatch, PaddedBatch, TokenCredit

DASHBOARD_FAILED = "oar/dashboard_failed"
CREDIT = ["advantages", *SHOWN, WEIGHTS]
TEXTS = ["prompts", "responses", "old_log_probs", "entropy", "response_mask", "reward_model", "data_source"]
Known = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class QueuedBatch:
    """A batch of verl's with its credit, and a way to its fields. The advantages there are still the host's own."""

    step: int  # training step
    keys: Sequence[str]  # of the rows, verl's `{uid of the prompt}_{session}_{index}`
    own_B: Tensor  # bool, false for rows that verl added to fill up the batch
    by_actor_B: Tensor  # bool, rows whose credit is in the actor's fields; that of others is in the engines'
    status_B: Tensor  # int64, a `Status` per row
    read: Callable[..., TensorDict]  # `read(keys=..., select_fields=...)`: fields of some rows, if they were written

    def columns(self, rows: Iterable[int], names: Sequence[str]) -> dict[str, Sequence[Any]]:
        """The values of some fields by row: tensors, or what else verl holds. A field that was not written is left out."""
        fields = self.read(keys=[self.keys[row] for row in rows], select_fields=list(names))
        return {name: f.unbind() if isinstance(f, Tensor) else f.tolist() for name, f in fields.items()}

    def siblings(self) -> Iterator[Sibling]:
        """The responses, a group's in the order of sampling, without the rows that verl added."""
        scores = self.columns(range(len(self.keys)), ["rm_scores"])["rm_scores"]
        places, first_row = list[tuple[int, int, int, int, str]](), dict[str, int]()
        for row in self.own_B.nonzero()[:, 0].tolist():
            uid, session, index = self.keys[row].rsplit("_", 2)
            places.append((first_row.setdefault(uid, row), int(session), int(index), row, uid))
        for *_, row, uid in sorted(places):
            yield Sibling(uid, self.keys[row], scores[row].sum().item(), int(self.status_B[row]))


def padded_batch(step: int, batch: DataProto, status_B: Tensor, more: Mapping[str, Tensor]) -> QueuedBatch:
    """The batch of a trainer that holds it padded: prompts on the left, responses on the right. `more`: other fields."""
    tensors, others = {**batch.batch, **more}, batch.non_tensor_batch
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(others["uid"])]
    real_BT, prompt = batch.batch["attention_mask"].bool(), batch.batch["prompts"].shape[1]

    def read(keys: Sequence[str], select_fields: Sequence[str]) -> Any:
        rows = [int(key.split("_")[-2]) for key in keys]
        fields: dict[str, Any] = {name: others[name][rows] for name in select_fields if name in others}
        for name in tensors.keys() & set(select_fields):
            real_BL = real_BT[:, :prompt] if name == "prompts" else real_BT[:, prompt:]
            of_rows = tensors[name][rows]
            fields[name] = of_rows if name == MEASURES else torch.nested.masked_select(of_rows, real_BL[rows])
        return fields

    every_B = torch.ones(len(keys), dtype=torch.bool)
    return QueuedBatch(step, keys, every_B, every_B, status_B, read)


def show(credit: TokenCredit, batch: QueuedBatch, loggers: Mapping[str, Any]) -> dict[str, float]:
    """Shows some groups of a batch if it is time to. Returns metrics: faults of files and dashboards, 1 or 0, and seconds."""
    boards = [name for name in DASHBOARDS if name in loggers]
    metrics = ({DUMP_FAILED: 0.0} if credit.dumps.folder else {}) | ({DASHBOARD_FAILED: 0.0} if boards else {})
    if not metrics or not credit.dumps.due(batch.step):
        return metrics
    start = time.perf_counter()
    with credit.dumps.counted(batch.step, metrics, "reading responses", *metrics):
        everyone, header = list(batch.siblings()), credit.header(verl=host_version())
        # Of other rows only the reward is read. One row at least: `dump` leaves it out if it does not matter.
        chosen = list(chain(*choose(everyone, credit.config.dump.groups))) or everyone[:1]
        padded, credited, known = _read(credit, batch, [batch.keys.index(one.uid) for one in chosen])
        rows = [(row, one.group, one.uid, one.reward) for row, one in enumerate(chosen)]
        responses = credit.dump(padded, credited, metrics, rows, known, header=header, always=True)
        first = [response for response in responses if response.group == responses[0].group]
        for name in boards if first else ():
            with credit.dumps.counted(batch.step, metrics, name, DASHBOARD_FAILED):
                DASHBOARDS[name](loggers[name], batch.step, first, header)
    return metrics | {"timing_s/oar_dump": time.perf_counter() - start}


def _read(credit: TokenCredit, batch: QueuedBatch, rows: list[int]) -> tuple[PaddedBatch, CreditedBatch, Known]:
    """Some rows of a batch, padded on the right: the responses, their credit, and what else is `known` of a row."""
    names = [*TEXTS, *CREDIT, MEASURES, *ENGINE_FIELDS.values()]
    columns, by_actor = batch.columns(rows, names), batch.by_actor_B[rows].tolist()

    def padded(name: str) -> Tensor:
        names = [name if actor else ENGINE_FIELDS.get(name, name) for actor in by_actor]
        return pad_sequence([columns[name][place] for place, name in enumerate(names)], batch_first=True)

    def known(place: int) -> dict[str, Any]:
        one = {name: column[place] for name, column in columns.items()}
        asked, oar = one.get("reward_model"), credit.config
        name = oar.actor_importance if by_actor[place] else oar.importance  # the engines' where they score
        return {
            "importance": importance_of(name or oar.importance).name,
            "source": str(one.get("data_source", "")),
            "prompt": credit.tokenizer.decode(one["prompts"]),
            "truth": asked.get("ground_truth") if isinstance(asked, Mapping) else None,
            "log_probs": one.get("old_log_probs"),
            "entropies": one.get("entropy"),  # not there where old log-probs are the rollout's
        }

    response_BL = pad_sequence([torch.ones_like(row) for row in columns["responses"]], batch_first=True).bool()
    own_BL = padded("response_mask").bool() if "response_mask" in columns else None
    advantage_BL, importance_BL, segments_BL, weight_BL = map(padded, CREDIT)
    weight_BL[batch.status_B[rows] == Status.BAD_REWARD] = 1.0  # it may have been scored before its advantage was known
    measures = padded(MEASURES) if MEASURES in columns else weight_BL[:, :0]
    predicted = [len(row) > len(MEASURE_NAMES) and bool(row[len(MEASURE_NAMES)]) for row in measures]
    given = advantage_BL, importance_BL, segments_BL, weight_BL, batch.status_B[rows], torch.tensor(predicted)
    shown = PaddedBatch(padded("responses"), response_BL, response_BL, own_BL)
    return shown, CreditedBatch(batch.step, *given), known


def _wandb(logger: Any, step: int, responses: Sequence[Response], header: Header) -> None:
    """The page, beside the step's scalars: nothing is sent before verl logs these."""
    from wandb import Html

    page = Html(inspector_page(responses, header, header.run), inject=False)
    logger.log({"oar/responses": page}, step=step, commit=False)


def _mlflow(logger: Any, step: int, responses: Sequence[Response], header: Header) -> None:
    from mlflow import log_text

    log_text(inspector_page(responses, header, header.run), f"oar/step_{step:06d}.html")


def _tensorboard(logger: Any, step: int, responses: Sequence[Response], header: Header) -> None:
    """A block of code in Markdown, the only form in which TensorBoard keeps hostile text as it is."""
    logger.writer.add_text("oar/responses", indent(text_of(responses), "    ", lambda line: True), step)


DASHBOARDS = {"wandb": _wandb, "tensorboard": _tensorboard, "mlflow": _mlflow}  # by the name of verl's logger
