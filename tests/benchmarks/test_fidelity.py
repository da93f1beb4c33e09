"""How rankings of tokens are judged, by hand; estimators; problems and responses of a language model; and the study on it."""

import json
import math
import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.fidelity.estimators import REFERENCE, added_estimators, counted_work, package_estimators
from benchmarks.fidelity.language import Writer
from benchmarks.fidelity.responses import Batch, Response, Source
from benchmarks.fidelity.scores import (
    auc,
    beyond_position,
    causal_recall,
    mean_over_groups,
    rank_correlation,
    top_overlap,
)
from benchmarks.fidelity.study import Settings, judge, measure
from benchmarks.fidelity.tables import BASELINE, plus_minus
from benchmarks.language.problems import problems
from benchmarks.report import silent
from benchmarks.statistics import Estimate
from benchmarks.tiny.model import SHAPES, build_model, model_of
from benchmarks.tiny.words import PAD, make_tokenizer
from oar_plugin.credit.answer import Segment

SALIENCY = ("python:tests.own_importance:Saliency",)
OWN = added_estimators(SALIENCY)
ALL = package_estimators() | OWN


def response(length, seed=0):
    """Four prompt tokens, reasoning, a marker, two answer tokens and one token after the answer."""
    token_T = torch.randint(PAD, (length,), generator=torch.Generator().manual_seed(seed))
    segments_T = torch.tensor([0] * 4 + [1] * (length - 8) + [2, 3, 3, 4])
    causal_T = torch.isin(torch.arange(length), torch.tensor([6, 8]))
    return Response(token_T, segments_T, causal_T, seed != 1, "a question", ["w"] * (length - 4))


def batch_of(*lengths):
    rows = [response(length, seed) for seed, length in enumerate(lengths)]
    return Batch(Source("made", 0, build_model(0), rows, 0, 0.5), rows, "answer_mean", 0, 2**11)


PASSES = {"fisher 1": (1, 1), "fisher 4": (4, 4), "oar_g 4": (5, 4), "entropy": (1, 0), "random": (0, 0)}


@pytest.mark.parametrize("name", [*PASSES, REFERENCE, "Saliency"])
def test_a_score_depends_on_its_response_alone_and_passes_are_counted(name):
    model = build_model(0, hidden=16, heads=2)
    alone, together = (ALL[name](model, batch)[0, 4:12].double() for batch in (batch_of(16), batch_of(16, 21)))
    torch.testing.assert_close(alone, together, rtol=2e-3, atol=1e-5)
    with counted_work(model) as work:  # after the first scores, which also run a trial
        ALL[name](model, batch_of(16))
    if name in PASSES:
        assert [work[way] / 16 for way in ("forward", "backward")] == pytest.approx(PASSES[name])
    if name == REFERENCE:
        assert 1 < work["forward"] / 16 < 8, "copies read their prefix from a cache"


def test_rank_correlation_overlap_recall_auc_and_their_intervals():
    """Spearman's by hand: ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4."""
    score, reference = torch.tensor([0.0, 5.0, 5.0, 9.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert rank_correlation(score, reference) == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    assert rank_correlation(torch.ones(4), reference) == 0.0
    assert math.isnan(rank_correlation(score, torch.ones(4)))
    assert beyond_position(torch.arange(9.0), torch.arange(9.0).square()) == 0
    ten = torch.arange(10.0)
    assert top_overlap(ten.where(ten > 0, 99.0), ten) == 0.5
    keep, causal = torch.tensor([[True, True, True, True, False]]), torch.tensor([[False, True, True, False, False]])
    assert causal_recall(torch.tensor([[0.1, 5.0, 0.2, 4.0, 9.0]]), keep, causal).item() == 0.5
    assert auc(score.numpy(), np.array([False, True, False, False])) == pytest.approx((1 + 0.5 + 0) / 3)
    assert math.isnan(auc(score.numpy(), np.ones(4, dtype=bool)))
    # Two groups that differ a lot: the interval is about the scatter within them, not between.
    mean = mean_over_groups([[0.0, 0.1, math.nan] * 20, [1.0, 0.9] * 20])
    assert (mean.value, mean.count) == (pytest.approx(0.5), 80)
    assert mean.high - mean.low < 0.05
    assert math.isnan(mean_over_groups([[math.nan]]).value)
    assert [plus_minus(Estimate(0.5, 0.4, 0.6, count)) for count in (0, 4, 5)] == ["", "0.50 (4)", "0.50 ± 0.10"]


WRITTEN = "Ben has 3 pens, and 3 + 4 = 7.\n#### {}<eos><pad>"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a random model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(SHAPES["tiny"].vocab, by_bytes=True).save_pretrained(folder)
    model_of(SHAPES["tiny"], 2048).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def questions(tmp_path):
    asked = {n: f"It is{' so' * 30 * (1 + n % 2 * 5)} <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}" for n in range(9)}
    rows = [{"question": f"What is {n} + 1?", "answer": answer} for n, answer in asked.items()]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("kind", ["words", "arithmetic", "gsm8k"])
def test_problems_have_examples_and_the_right_answer(kind, long, questions):
    if kind == "arithmetic":
        pytest.importorskip("reasoning_gym")
    made, again, others = (list(islice(problems(kind, long, seed, questions), 4)) for seed in (3, 3, 4))
    assert made == again != others
    first = made[0]
    assert first.prompt != made[1].prompt
    *examples, asked = [message["content"] for message in first.prompt]
    assert all(re.search(r"\n#### -?\d+$", one) and "<<" not in one for one in examples[1::2])
    if kind == "words":
        sign = {"has": 1, "gets": 1, "gives": -1}
        said = sum(sign[verb] * int(number) for verb, number in re.findall(r"(has|gets|gives) (\d+)", asked))
    else:
        said = eval(asked.removeprefix("What is ").removesuffix("?"))
    assert said == int(first.answer)


@pytest.mark.parametrize(
    ("kind", "told"), [("gsm8k", "--questions None"), ("lookup", "--tasks lookup: allowed with --model: words")]
)
def test_what_has_no_problems_is_told_at_the_start(kind, told):
    with pytest.raises(ValueError, match=told):
        Settings(model="made", tasks=(kind,)).check()


def test_a_response_ends_and_its_answer_is_compared(made):
    writer, problem = Writer(made, torch.device("cpu"), 1.0, 2**11), next(problems("words"))

    def read(text):
        return writer.read(problem, [5, 6], writer.tokenizer(text).input_ids)

    right = read(WRITTEN.format(problem.answer))
    assert right.right
    assert "".join(right.words) == WRITTEN.format(problem.answer).removesuffix("<pad>")
    assert right.token_T.tolist()[:2] == [5, 6]
    assert (right.segments_T == Segment.ANSWER).sum() == len(problem.answer)
    assert not read(WRITTEN.format("99")).right
    assert read("3 + 4 = 7.\n#### 7") is None, "cut off"
    assert read("3 + 4 = 7.<eos>") is None, "no answer"
    assert read("#### 7<eos>") is None, "no reasoning"
    written = writer.write([problem.prompt, problem.prompt[-1:]], 12)
    assert [len(row) for _, row in written] == [12, 12]
    assert writer.tokenizer.decode(written[1][0]).strip() == problem.prompt[-1]["content"]


def test_the_study_of_a_language_model(made, questions, monkeypatch, tmp_path):
    working = {name: ALL[name] for name in (REFERENCE, BASELINE, "random")}
    for module in ("tables", "study"):
        monkeypatch.setattr(f"benchmarks.fidelity.{module}.package_estimators", lambda: working)

    def write(self, chats, longest):
        return [([5, 6], self.tokenizer(WRITTEN.format(n)).input_ids) for n in range(len(chats))]

    monkeypatch.setattr(Writer, "write", write)
    settings = Settings(
        model=made,
        tasks=("words", "gsm8k"),
        questions=questions,
        responses=2,
        also=SALIENCY,
        device="cpu",
        folder=tmp_path,
    )
    settings.check()
    measure(replace(settings, tasks=("gsm8k",)), silent)
    judged = []
    monkeypatch.setattr("benchmarks.fidelity.study.judge", lambda *given: judged.append(given[1].task) or judge(*given))
    report = measure(settings, silent)
    assert judged == ["words"] * 2, "gsm8k is in the folder"
    report.machine = None
    page = report.markdown(None)
    for row in ("| gsm8k short model 0 | 2 |", "| gsm8k long model 0 | 1 |", "| answer_joint |"):
        assert row in page
    assert "causal" not in page
    assert next(problems("words")).prompt[-1]["content"] in report.extra["html"]
    for name in [*working, *OWN]:
        assert f"| {name} |" in page
        assert f'<span class="who">{name}</span>' in report.extra["html"]
    means = pd.DataFrame(json.loads(report.to_json())["runs"]["means"])
    counts = {"float32": 4, "bfloat16": 4, "another seed": 1, "last": 2, "answer_joint": 2}
    sources = means.groupby(["task", "length", "answer"]).ngroups
    assert means.groupby("way").size().to_dict() == {name: n * sources for name, n in counts.items()}
    exact = means[(means["estimator"] == REFERENCE) & means["way"].isin(["float32", "last", "answer_joint"])]
    assert (exact[["overlap", "spearman"]] == 1).all(axis=None), "each probe has a reference of its own"
