"""The answer of an actor, made of importance: what stands in for verl's workers returns it."""

import torch

from oar_plugin.estimator import weigh_rows
from oar_plugin.passes.request import SECONDS
from tests.hosts.engine.world import nested


def answer_of(importance, segments, status, settings, seconds=0.5):
    """All fields, nested. `status`: a `Status` per row, before the gate. `settings`: of the gate, a request or OarConfig."""
    segments = [row.to(torch.int8) for row in segments]
    answer = weigh_rows(importance, segments, torch.tensor([int(s) for s in status]), settings)
    answer[SECONDS] = list(torch.full((len(segments), 1), seconds))
    return {name: nested(rows) for name, rows in answer.items()}
