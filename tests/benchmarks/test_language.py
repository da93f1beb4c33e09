"""Problems with few-shot examples, a language model's responses to them, and the study of fidelity on it."""

import json
import re
from dataclasses import replace
from itertools import islice

import pytest
import torch

from benchmarks.fidelity.estimators import REFERENCE, package_estimators
from benchmarks.fidelity.language import Writer
from benchmarks.fidelity.responses import Batch, Source
from benchmarks.fidelity.study import Settings, judge, measure
from benchmarks.fidelity.tables import BASELINE
from benchmarks.language import smollm2
from benchmarks.language.problems import problems
from benchmarks.report import silent
from benchmarks.tiny.model import SHAPES, model_of
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.credit.answer import Segment

CPU = torch.device("cpu")
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
    writer, problem = Writer(made, CPU, 1.0, 2**11), next(problems("words"))

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
    working = {name: package_estimators()[name] for name in (REFERENCE, BASELINE, "random")}
    for module in ("tables", "study"):
        monkeypatch.setattr(f"benchmarks.fidelity.{module}.package_estimators", lambda: working)

    def write(self, chats, longest):
        return [([5, 6], self.tokenizer(WRITTEN.format(n)).input_ids) for n in range(len(chats))]

    monkeypatch.setattr(Writer, "write", write)
    settings = Settings(
        model=made, tasks=("words", "gsm8k"), questions=questions, responses=2, device="cpu",
        folder=tmp_path,
    )  # fmt: skip
    settings.check()
    measure(replace(settings, tasks=("gsm8k",)), silent)
    judged = []
    monkeypatch.setattr("benchmarks.fidelity.study.judge", lambda *given: judged.append(given[1].task) or judge(*given))
    report = measure(settings, silent)
    assert judged == ["words"] * 2, "gsm8k is in the folder"
    with pytest.raises(ValueError, match=r"--folder: .*words_short\.pickle was made with another value of "):
        measure(replace(settings, seed=1), silent)
    report.machine = None
    page = report.markdown(None)
    for row in ("| gsm8k short model 0 | 2 |", "| gsm8k long model 0 | 1 |", "| answer_joint |"):
        assert row in page
    assert "causal" not in page
    assert next(problems("words")).prompt[-1]["content"] in report.extra["html"]


@pytest.mark.skipif(smollm2.missing() is not None, reason=f"{smollm2.missing()}")
def test_smollm2s_answer_depends_on_its_last_result():
    writer, problem = Writer("smollm2", CPU, 1.0, 2**11), next(problems("words"))
    row = writer.tokenizer("Ben has 3 pens. Ben gets 4 more, so 3 + 4 = 7 pens.\n#### 7<|im_end|>").input_ids
    response = writer.read(problem, [1, 4093], row)
    source = Source("words", 0, writer.model, [response], 0, 0.0, pad=writer.pad)
    (score_T,) = package_estimators()[REFERENCE](writer.model, Batch(source, [response], "answer_mean", 0, 2**11))
    assert "7" in [response.words[at - 2] for at in score_T.topk(3).indices.tolist()]
