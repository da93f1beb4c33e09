"""Problems with worked examples, a language model's responses to them, and the study of fidelity on it."""

import json
from itertools import islice

import pytest
import torch

from benchmarks.fidelity.estimators import REFERENCE, package_estimators
from benchmarks.fidelity.language import Writer, language_sources
from benchmarks.fidelity.responses import Batch
from benchmarks.fidelity.study import Settings, measure
from benchmarks.fidelity.tables import BASELINE
from benchmarks.language import smollm2
from benchmarks.language.problems import problems
from benchmarks.report import silent
from benchmarks.tiny.model import SHAPES, model_of
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.credit.answer import Segment

CPU = torch.device("cpu")
WRITTEN = " Ben has 3 pens, and 3 + 4 = 7.\n#### {}\n\nQuestion: more"


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
def test_problems_have_worked_examples_and_the_right_answer(kind, long, questions):
    if kind == "arithmetic":
        pytest.importorskip("reasoning_gym")
    first, second = islice(problems(kind, long, 3, questions), 2)
    assert (first, second) == tuple(islice(problems(kind, long, 3, questions), 2))
    assert first.prompt != second.prompt != next(problems(kind, long, 4, questions)).prompt
    *shown, asked = first.prompt.split("\n\n")
    assert asked.startswith("Question: ")
    assert asked.endswith("\nAnswer:")
    assert all(int(one.rpartition("\n#### ")[2]) is not None and "<<" not in one for one in shown)
    if kind == "arithmetic":
        assert eval(asked.partition("problem: ")[2].partition(" =")[0]) == int(first.answer)
    if kind == "gsm8k":
        assert eval(asked.partition("is ")[2].partition("?")[0]) == int(first.answer)


@pytest.mark.parametrize(
    ("kind", "told"), [("gsm8k", "--questions None"), ("lookup", "--tasks lookup: allowed with --model: words")]
)
def test_what_has_no_problems_is_told_at_the_start(kind, told):
    with pytest.raises(ValueError, match=told):
        Settings(model="made", tasks=(kind,)).check()


def test_a_response_ends_at_a_blank_line_and_its_answer_is_compared(made):
    writer = Writer(made, CPU, 1.0, 2**11)
    (problem,) = islice(problems("words"), 1)
    prompt = writer.tokenizer(problem.prompt).input_ids

    def read(text):
        return writer.read(problem, writer.tokenizer(text).input_ids)

    right = read(WRITTEN.format(problem.answer))
    assert right.right
    assert "".join(right.words[len(prompt) :]) == WRITTEN.format(problem.answer).removesuffix("Question: more")
    assert (
        "".join(word for word, s in zip(right.words, right.segments_T, strict=True) if s == Segment.ANSWER)
        == problem.answer
    )
    assert not read(WRITTEN.format("99")).right
    assert read(" 3 + 4 = 7.\n#### 7\n") is None, "cut off"
    assert read(" 3 + 4 = 7.\n\n") is None, "no answer"
    assert read("#### 7\n\n") is None, "no reasoning"
    assert [len(row) for row in writer.write([problem.prompt, "Question:"], 12)] == [12, 12]


def test_the_study_of_a_language_model(made, questions, monkeypatch):
    working = {name: package_estimators()[name] for name in (REFERENCE, BASELINE, "random")}
    monkeypatch.setattr("benchmarks.fidelity.tables.package_estimators", lambda: working)
    monkeypatch.setattr("benchmarks.fidelity.language.problems", lambda *a: islice(problems(*a), 2))

    def write(self, prompts, longest):
        return [self.tokenizer(WRITTEN.format(1 + n)).input_ids for n in range(len(prompts))]

    monkeypatch.setattr(Writer, "write", write)
    settings = Settings(model=made, tasks=("words", "gsm8k"), questions=questions, responses=2, device="cpu")
    settings.check()
    report = measure(settings, silent)
    report.machine = None
    page = report.markdown(None)
    assert "| gsm8k short model 0 | 2 |" in page
    assert "| gsm8k long model 0 | 1 |" in page
    assert "causal" not in page
    assert "pens" in report.extra["html"]


@pytest.mark.skipif(smollm2.missing() is not None, reason=f"{smollm2.missing()}")
def test_smollm2s_answer_depends_most_on_its_last_result(monkeypatch):
    text = " Ben has 3 pens. Ben gets 4 more, so 3 + 4 = 7 pens.\n#### 7\n\n"
    monkeypatch.setattr(
        Writer, "write", lambda self, prompts, longest: [self.tokenizer(text).input_ids for _ in prompts]
    )
    writer = Writer("smollm2", CPU, 0.7, 2**11)
    source = next(language_sources(writer, ["words"], 1, 0, None, silent))
    (score_T,) = package_estimators()[REFERENCE](writer.model, Batch(source, source.responses, "answer_mean", 0, 2**11))
    assert source.responses[0].words[int(score_T.argmax())] == "7"
