import random
from pathlib import Path

import pytest
import torch

from benchmarks import soundness
from benchmarks.learning import warm_start
from benchmarks.learning.tasks import TASKS
from benchmarks.learning.warm_start import HEADS, SPREAD, batches, widened
from benchmarks.soundness import Batch, change, rescaled, scores
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD, VOCABULARY

PAGE = Path(soundness.__file__).parent / "results" / "soundness.md"


@pytest.fixture
def model():
    return build_model(0, heads=HEADS)


@pytest.fixture
def batch(model):
    """Demonstrations: a model with random weights writes no answers."""
    task, rng = TASKS["chain"], random.Random(0)
    problems = [task.problem(rng) for _ in range(4)]
    written = [task.demonstration(problem, rng, task.error_rate) for problem in problems]
    token_BL = torch.full((4, task.prompt_length + max(map(len, written))), PAD)
    segments_BL = torch.zeros_like(token_BL)
    for row, (problem, ids) in enumerate(zip(problems, written, strict=True)):
        end = task.prompt_length + len(ids)
        token_BL[row, :end] = torch.tensor([*problem.prompt, *ids])
        segments_BL[row, task.prompt_length : end] = torch.from_numpy(task.read(problem, ids).segments).long()
    return Batch(token_BL, segments_BL, token_BL != PAD)


def test_a_wide_model_knows_the_old_words_as_before_and_gives_the_others_the_mass(model, batch):
    wide = widened(model, TASKS["chain"], 4000, 0.02)
    before_NV, after_NV = (soundness.logits(of, batch, batch.mask_BL) for of in (model, wide))
    torch.testing.assert_close(after_NV[:, : len(VOCABULARY)], before_NV)
    assert wide.get_input_embeddings().weight is wide.get_output_embeddings().weight
    token_BL, label_BL = next(batches(TASKS["chain"], warm_start.BATCH, 0, None))
    rows_NV = soundness.logits(wide, Batch(token_BL, label_BL, label_BL), label_BL != PAD)
    tail_NV = rows_NV[:, len(VOCABULARY) :]
    assert rows_NV.softmax(-1)[:, len(VOCABULARY) :].sum(-1).mean().item() == pytest.approx(0.02, rel=0.1)
    assert tail_NV.std(-1).mean().item() == pytest.approx(SPREAD, rel=0.1)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_rescaled_model_computes_the_same(model, batch, factor):
    other = rescaled(model, factor)
    torch.testing.assert_close(
        *(soundness.logits(of, batch, batch.mask_BL) for of in (other, model)), atol=1e-3, rtol=0
    )
    large_VH, small_VH = (of.get_input_embeddings().weight for of in (other, model))
    torch.testing.assert_close(large_VH, factor * small_VH)
    for name in ("fisher", "decision", "onward", "entropy"):
        assert change(name, scores(model, name, batch), scores(other, name, batch), batch).overlap > 0.95


def test_the_page_is_made(model, batch, monkeypatch, capsys):
    """With other models, and so other figures."""
    monkeypatch.setattr(soundness, "warm_model", lambda *_: model)
    monkeypatch.setattr(soundness, "responses", lambda *_: batch)
    monkeypatch.setattr(soundness, "widened", lambda model, task, words, mass: widened(model, task, words // 250, mass))
    soundness.main()
    made, committed = (
        [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
        for page in (capsys.readouterr().out, PAGE.read_text(encoding="utf-8"))
    )
    assert made == committed, "the rows of its tables"
