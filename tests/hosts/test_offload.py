"""The offload as the driver sees it: records, and merging the engines' scores with the actor's. No engine here."""

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("verl")

import verl  # noqa: F401

from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl.offload import ACTOR_MAY_HELP, ENGINE_FIELDS, OffloadRecord, merged, offload_metrics
from oar_plugin.passes.request import MEASURES, STATUS, WEIGHTS
from tests.hosts.engine.world import nested


def record(**changes):
    base = {
        "status": int(Status.SCORED),
        "attempts": 1,
        "copies": 10,
        "retried": 1,
        "tokens": 400,
        "cached_tokens": 100,
    }
    return OffloadRecord(**base | {"generated_at": 1e9, "done_at": [1e9 + i for i in range(11)]} | changes)


def metrics_of(*records, left=(0,)):
    return offload_metrics(torch.stack([one.to_row() for one in records]), torch.tensor(left))


def test_metrics_say_what_hid_behind_generation():
    late = record(generated_at=1e9 + 4, copies=30, attempts=2, status=int(Status.TIMED_OUT))
    idle = OffloadRecord(int(Status.NOT_NEEDED), generated_at=1e9 + 5)
    metrics = metrics_of(record(), late, idle, left=[0, 1, 0])
    want = {"scored": 0.5, "hidden_share": 0.5, "exposed_s": 5, "retried_copies": 2, "fault/timed_out": 1}
    assert metrics == pytest.approx(want | {"left_for_actor": 1 / 3, "cached_share": 0.25})
    for last, hidden in ((4.9, 1), (5, 1), (5.1, 0)):  # its copies end at one moment
        at_once = record(done_at=[1e9 + last] * 11)
        assert metrics_of(at_once, idle)["hidden_share"] == hidden
    assert metrics_of(idle) == {"retried_copies": 0, "left_for_actor": 0}


def fields_of(names, weight, statuses, lengths):
    columns = (
        [torch.full((n,), weight) for n in lengths],
        [torch.tensor([int(status)]) for status in statuses],
        [torch.full((4,), weight)] * len(lengths),
    )
    return {name: nested(rows) for name, rows in zip(names, columns, strict=True)}


@pytest.mark.parametrize("asked", [True, False])
def test_the_actor_fills_what_the_engines_left_and_nothing_else(asked):
    """The last row is verl's padding: a copy of the first, cut short after the engines had scored it."""
    lengths, scored, names = [3, 4, 2, 1], [3, 4, 2, 3], (WEIGHTS, STATUS, MEASURES)
    statuses = [Status.SCORED, Status.TIMED_OUT, Status.NO_ANSWER, Status.SCORED]
    fields = {"advantages": nested([torch.ones(n) for n in lengths])}
    fields |= fields_of([ENGINE_FIELDS[name] for name in names], 2.0, statuses, scored)
    assert torch.isin(torch.tensor(statuses), ACTOR_MAY_HELP).tolist() == [False, True, False, False]
    if asked:
        fields |= fields_of(names, 7.0, [Status.CONSTANT] * 4, lengths)
    asked_B, padding_B = torch.tensor([False, asked, False, False]), torch.tensor([False, False, False, True])
    weights, status_B, measure_B4 = merged(TensorDict(fields, batch_size=4), asked_B, padding_B)
    weight, status = (7.0, Status.CONSTANT) if asked else (2.0, Status.TIMED_OUT)
    assert [row.tolist() for row in weights.unbind()] == [[2.0] * 3, [weight] * 4, [2.0] * 2, [1.0]]
    assert status_B.tolist() == [Status.SCORED, status, Status.NO_ANSWER, Status.NOT_NEEDED]
    assert measure_B4[:, 0].tolist() == [2.0, weight, 2.0, 2.0]
