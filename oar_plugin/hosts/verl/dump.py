"""Whole groups of a batch with their credit as records for people to look at (`oar inspect`)."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance import importance_of
from oar_plugin.estimator import Reshaped
from oar_plugin.hosts.verl.capabilities import host_version
from oar_plugin.page.dumps import choose
from oar_plugin.page.record import Header, Response, header_for
from oar_plugin.passes.request import IMPORTANCE, NEEDED, SEGMENTS
from oar_plugin.passes.tokens import TokenBytes

QUEUED = ["prompts", "responses", "old_log_probs", "entropy", "response_mask", "reward_model", "data_source"]
"""What only the queue has of a response. There is no entropy where old log-probs are the rollout's."""


@dataclass(frozen=True)
class Credited:
    """A batch after reshaping.

    Attributes:
        step: training step.
        keys: of the rows, verl's `{uid of the prompt}_{session}_{index}`.
        own_B: bool `[B]`, false for rows that verl added to fill up the batch.
        padded: `advantages` before reshaping, importance and segments, `[B, L]`, and `NEEDED`, `[B, 1]`.
        reshaped: what became of them.
        read: gives fields of some rows, `read(keys=..., select_fields=...)`, without those that nobody wrote.
    """

    step: int
    keys: Sequence[str]
    own_B: Tensor
    padded: TensorDict
    reshaped: Reshaped
    read: Callable[..., TensorDict]


def siblings(keys: Sequence[str], own_B: Tensor) -> dict[str, list[int]]:
    """By a prompt's id, the rows of its responses in the order of sampling, without those that verl added."""
    rows_of = defaultdict(list)
    for row in own_B.nonzero()[:, 0].tolist():
        uid, session, index = keys[row].rsplit("_", 2)
        rows_of[uid].append((int(session), int(index), row))
    return {uid: [row for *_, row in sorted(places)] for uid, places in rows_of.items()}


class Reader:
    """Makes records of a run's responses."""

    def __init__(self, oar: OarConfig, tokenizer: Any) -> None:
        self._oar, self._tokenizer = oar, tokenizer
        self._bytes = TokenBytes(tokenizer)
        # Of the engines where they score, and of the actor.
        self._names = importance_of(oar.importance).name, importance_of(oar.actor_importance or oar.importance).name

    def header(self) -> Header:
        """What the responses have in common."""
        # A fallback's importance is on the scale of the one it stands in for.
        arbitrary = dict.fromkeys(self._names, self._oar.importance_object.arbitrary_scale)
        return header_for(self._oar, arbitrary, verl=host_version())

    def groups(self, batch: Credited, most: int) -> list[list[Response]]:
        """The groups of a batch to look at, at most so many. Of rows that are not chosen only the reward is read."""
        scores = batch.read(keys=list(batch.keys), select_fields=["rm_scores"])["rm_scores"]
        reward_B = torch.stack([row.sum() for row in scores.unbind()])
        chosen = choose(siblings(batch.keys, batch.own_B).values(), reward_B, batch.reshaped.status_B, most)
        rows = [row for group in chosen for row in group]
        if not rows:
            return []
        queued = batch.read(keys=[batch.keys[row] for row in rows], select_fields=QUEUED)
        columns = {name: f.unbind() if isinstance(f, Tensor) else f.tolist() for name, f in queued.items()}
        has = {row: {name: column[place] for name, column in columns.items()} for place, row in enumerate(rows)}
        return [[self._response(batch, row, has[row], reward_B[row].item()) for row in group] for group in chosen]

    def _response(self, batch: Credited, row: int, has: Mapping[str, Any], reward: float) -> Response:
        ids = has["responses"].tolist()
        advantage_L = batch.padded["advantages"][row]
        by_actor = not self._oar.offloads or bool(batch.padded[NEEDED][row] > 0)
        asked = has.get("reward_model")
        truth = asked.get("ground_truth") if isinstance(asked, Mapping) else None

        def numbers(values: Tensor | None) -> Any:
            return None if values is None else values[: len(ids)].tolist()

        return Response(
            step=batch.step,
            group=batch.keys[row].rsplit("_", 2)[0],
            uid=batch.keys[row],
            source=str(has.get("data_source", "")),
            prompt=self._tokenizer.decode(has["prompts"]),
            truth=None if truth is None else str(truth),
            token_ids=ids,
            tokens=self._bytes.texts(ids),
            segments=numbers(batch.padded[SEGMENTS][row]),
            importance={self._names[by_actor]: numbers(batch.padded[IMPORTANCE][row])},
            weights=numbers(batch.reshaped.weight_BL[row]),
            log_probs=numbers(has.get("old_log_probs")),
            entropies=numbers(has.get("entropy")),
            mask=numbers(has.get("response_mask")),
            # The same at each token that was sampled, and 0 at those that a tool wrote.
            advantage=advantage_L[advantage_L.abs().argmax()].item(),
            reward=reward,
            status=Status(int(batch.reshaped.status_B[row])).name.lower(),
        )
