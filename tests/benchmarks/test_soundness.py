"""What is changed to see whether an importance is sound computes the same, and the measure by hand."""

import copy

import pytest
import torch

from benchmarks.learning.tasks import TASKS
from benchmarks.learning.warm_start import BATCH, SPREAD, batches, widened
from benchmarks.soundness import Batch, change, logits, rescaled
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD, VOCABULARY
from oar_plugin.credit.answer import Segment


def test_changed_models_compute_the_same():
    model = build_model(0, heads=2)
    token_BL, label_BL = next(batches(TASKS["chain"], BATCH, 0, None))
    batch = Batch(token_BL, label_BL, label_BL)
    wide, large = widened(model, TASKS["chain"], 4000, 0.02), rescaled(copy.deepcopy(model), 1e3)
    before_NV, wide_NV, large_NV = (logits(of, batch, label_BL != PAD) for of in (model, wide, large))
    torch.testing.assert_close(large_NV, before_NV, atol=1e-3, rtol=0)
    torch.testing.assert_close(wide_NV[:, : len(VOCABULARY)], before_NV)
    assert wide_NV.softmax(-1)[:, len(VOCABULARY) :].sum(-1).mean().item() == pytest.approx(0.02, rel=0.1)
    assert wide_NV[:, len(VOCABULARY) :].std(-1).mean().item() == pytest.approx(SPREAD, rel=0.1)


def test_change_by_hand():
    reasoning = torch.full((1, 10), int(Segment.REASONING))
    batch = Batch(torch.zeros(1, 10, dtype=torch.long), reasoning, torch.ones(1, 10, dtype=torch.bool))
    before = torch.arange(10.0)[None]
    other = change("decision", before, before[:, [9, *range(1, 9), 0]], batch)
    # The highest two of ten are boosted; one of them now stands elsewhere.
    assert other.overlap == 0.5
    assert other.spearman == pytest.approx(1 - 6 * (81 + 81) / (10 * 99))
    assert other.weights[:2] == pytest.approx([2 * 2 / 14, 20 / 14])
