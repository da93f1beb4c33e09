import random
from pathlib import Path

import pytest
import torch

from benchmarks import soundness
from benchmarks.learning import warm_start
from benchmarks.learning.tasks import TASKS, known, wrong_results
from benchmarks.learning.warm_start import SPREAD, batches, widened
from benchmarks.soundness import Batch, change, on_plausible, rescaled, scores
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD, VOCABULARY, encode
from oar_plugin.credit.answer import Segment

PAGE = Path(soundness.__file__).parent / "results" / "soundness.md"


@pytest.fixture
def model():
    return build_model(0, heads=2)


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


def test_words_that_are_not_the_tasks_read_as_filler():
    task = TASKS["chain_32k"]
    problem = task.problem(random.Random(1))
    start, ((op, b), *_) = problem.content
    result = (start + b if op == "+" else start - b) % 10
    response = encode(["so", "A", str(start), op, str(b), "=", str((result + 1) % 10), ";"])
    strange = [31_999, *response[1:6], 31_999, response[7]]
    assert known(strange)[1:6] == response[1:6]
    assert task.read(problem, strange).causal == ()
    reading = task.read(problem, [31_999, *response[1:]])
    assert reading.causal == wrong_results(task, problem, [31_999, *response[1:]], reading) == (6,)
    # A word of the step itself that cannot be read makes its result wrong.
    assert wrong_results(task, problem, [*response[:4], 40_000, *response[5:]], reading) == (6,)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_rescaled_model_computes_the_same(model, batch, factor):
    other = rescaled(model, factor)
    both = (soundness.logits(of, batch, batch.mask_BL) for of in (other, model))
    torch.testing.assert_close(*both, atol=1e-3, rtol=0)
    large_VH, small_VH = (of.get_input_embeddings().weight for of in (other, model))
    torch.testing.assert_close(large_VH, factor * small_VH)
    for name in ("fisher", "decision", "onward", "entropy"):
        assert change(name, scores(model, name, batch), scores(other, name, batch), batch).overlap > 0.95


def test_change_by_hand():
    reasoning = torch.full((1, 10), int(Segment.REASONING))
    batch = Batch(torch.zeros(1, 10, dtype=torch.long), reasoning, torch.ones(1, 10, dtype=torch.bool))
    before = torch.arange(10.0)[None]
    nothing = change("decision", before, before, batch)
    assert (nothing.overlap, nothing.weights) == (1, [0, 0, 0, 0])
    assert nothing.spearman == pytest.approx(1)
    other = change("decision", before, before[:, [9, *range(1, 9), 0]], batch)
    # The highest two of ten are boosted; one of them now stands elsewhere.
    assert other.overlap == 0.5
    assert other.spearman == pytest.approx(1 - 6 * (81 + 81) / (10 * 99))
    assert other.weights[:2] == pytest.approx([2 * 2 / 14, 20 / 14])


def test_on_plausible_by_hand():
    p = torch.tensor([[0.6, 0.3995, 0.0005]])
    share = on_plausible(p.log())
    spread = p * (1 - p)
    assert share.fisher == pytest.approx((1 - spread[0, 2] / spread.sum()).item())
    flat = p**0.25 / (p**0.25).sum()
    spread = flat * (1 - flat)
    assert share.onward == pytest.approx((1 - spread[0, 2] / spread.sum()).item())
    assert share.decision == 1
    assert on_plausible(torch.tensor([[0.9995, 0.0005]]).log()).decision == 0.5


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
