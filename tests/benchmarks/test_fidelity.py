"""The fidelity study: its estimators, how they are judged, and what it refuses."""

import json
import math
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.fidelity.attention import answer_scalars, replaced_key_effect, with_pad
from benchmarks.fidelity.estimators import (
    REFERENCE,
    counted_work,
    loaded_estimators,
    package_estimators,
    without_copies,
)
from benchmarks.fidelity.marked import read_marked
from benchmarks.fidelity.responses import Response, Source, micro_batches, task_sources
from benchmarks.fidelity.scores import (
    auc,
    causal_recall,
    deletion_curves,
    mean_over_groups,
    rank_correlation,
    top_overlap,
)
from benchmarks.fidelity.study import Settings, report_on
from benchmarks.fidelity.tables import BASELINE
from benchmarks.learning.tasks import TASKS
from benchmarks.report import silent
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD, VOCABULARY, make_tokenizer
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import IMPORTANCES

ROOT = Path(__file__).parents[2]
SMALL = Settings(tasks=("made", "other"), models=1, responses=3, curves=2, micro_batch=2, rounds=1, device="cpu")
ALL = package_estimators() | loaded_estimators([ROOT / "benchmarks/candidates/fidelity/attention.py"])
WORKING = {name: ALL[name] for name in (REFERENCE, "attention", BASELINE, "random")}


def small_model(seed=0):
    return build_model(seed, hidden=16, heads=2)


def response(length, seed=0, right=True):
    """Four prompt tokens, reasoning, a marker, two answer tokens and one token after the answer."""
    token_T = torch.randint(PAD, (length,), generator=torch.Generator().manual_seed(seed))
    segments_T = torch.tensor([0] * 4 + [1] * (length - 8) + [2, 3, 3, 4])
    return Response(token_T, segments_T, torch.isin(torch.arange(length), torch.tensor([6, 8])), right)


def source(task="made", number=0):
    rows = [response(16 + index, index, right=index != 1) for index in range(3)]
    return Source(task, number, small_model(number), rows, unusable=1, right=0.5, faithful=1.0)


def batch_of(*lengths):
    rows = [response(length, seed) for seed, length in enumerate(lengths)]
    ((_, batch),) = micro_batches(rows, len(rows), torch.device("cpu"), "answer_mean", 0)
    return batch


@pytest.fixture(autouse=True, scope="module")
def _few_estimators():
    """One test scores every estimator; the report needs a few only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.fidelity.tables.package_estimators", lambda: dict(WORKING))
        yield


@pytest.fixture(scope="module")
def report():
    return report_on(SMALL, [source("made"), source("other", 1)], silent)


def judged(report, **key):
    """The rows of a report's JSON with these values."""
    columns = json.loads(report.to_json())["runs"]["judged"]
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return [row for row in rows if key.items() <= row.items()]


@pytest.mark.parametrize("name", ALL)
def test_a_score_does_not_depend_on_the_batch_around_it(name):
    """Padding and neighbours change nothing, and the model is left as it was."""
    model = small_model()
    alone, together = (ALL[name](model, batch)[0] for batch in (batch_of(16), batch_of(16, 21)))
    reasoning = batch_of(16).responses[0].reasoning_R
    torch.testing.assert_close(alone[reasoning].double(), together[reasoning].double(), rtol=2e-3, atol=1e-5)
    assert alone[reasoning].isfinite().all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_importance_of_the_package_is_an_estimator():
    own = {name for name, one in IMPORTANCES.items() if not one.contexts}
    assert {name.split()[0] for name in package_estimators()} == {*own, "attention"}


PASSES = {
    "fisher 1": (1, 1), "fisher 4": (4, 4), "oar_g 4": (5, 4), "decision 1": (1, 1), "entropy": (1, 0), "random": (0, 0)
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_work_counts_passes(name):
    model, batch = small_model(), batch_of(16, 16)
    ALL[name](model, batch)  # a model's first scores also run a trial
    with counted_work(model) as work:
        ALL[name](model, batch)
    assert [work[way] / batch.token_BT.numel() for way in ("forward", "backward")] == pytest.approx(PASSES[name])


def test_work_counts_what_copies_compute_behind_their_prefix():
    model, batch = small_model(), batch_of(16)
    ALL[REFERENCE](model, batch)  # with the trial
    with counted_work(model) as work:
        ALL[REFERENCE](model, batch)
    assert 1 < work["forward"] / batch.token_BT.numel() < len(batch.responses[0].reasoning_R)


@torch.no_grad()
def test_attention_patching_sees_no_pad_in_the_answer():
    """Its extra PAD token, whose key and value it uses, leaves all other logits as they were."""
    model, batch = small_model(), batch_of(16, 16)
    token, position, seen = with_pad(batch)
    beside = model(input_ids=token, position_ids=position, attention_mask=seen[:, None]).logits[:, :-1]
    torch.testing.assert_close(beside, model(input_ids=batch.token_BT).logits, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 1000), st.sampled_from([0.3, 3.0, 30.0]))
@settings(max_examples=25, deadline=None)
def test_the_effect_is_what_happens_when_key_and_value_are_replaced(seed, sharpness):
    """Where the softmax is saturated too, which a gradient cannot show."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, gradient, other_key, other_value = torch.randn(6, 2, 7, 4, generator=generator)
    query = query * sharpness

    def attend(key, value):
        return (query @ key.mT).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf).softmax(-1) @ value

    effect, bound = replaced_key_effect(query, key, value, gradient, other_key, other_value)
    for t in range(7):
        here = torch.arange(7)[:, None] == t
        change = (attend(key.where(~here, other_key), value.where(~here, other_value)) - attend(key, value))[:, t + 1 :]
        later = gradient[:, t + 1 :]
        torch.testing.assert_close(effect[:, t], (later * change).sum((1, 2)), rtol=1e-3, atol=1e-3)
        want = (later.square().sum(-1) * change.square().sum(-1)).sum(1)
        torch.testing.assert_close(bound[:, t], want, rtol=1e-3, atol=1e-3)


def test_directions_of_the_answer_make_up_its_fisher_matrix():
    """All directions together are the matrix; the last one has its largest eigenvalue."""
    logits = torch.randn(1, 17, len(VOCABULARY), generator=torch.Generator().manual_seed(3)).requires_grad_()
    scalars = answer_scalars(logits, batch_of(16), directions=len(VOCABULARY))
    got = torch.stack([torch.autograd.grad(scalar, logits, retain_graph=True)[0].sum((0, 1)) for scalar in scalars])
    p = logits.detach()[0, 12:14].mean(0).softmax(-1)  # the answer's two tokens stand at 13 and 14
    fisher = torch.diag(p) - p[:, None] * p
    torch.testing.assert_close(got.mT @ got, fisher, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(got[-1].square().sum(), torch.linalg.eigvalsh(fisher)[-1], rtol=1e-3, atol=1e-6)


def test_rank_correlation_overlap_and_recall():
    """Spearman's by hand: ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4."""
    score, reference = torch.tensor([0.0, 5.0, 5.0, 9.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert rank_correlation(score, reference) == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    assert rank_correlation(torch.ones(4), reference) == 0.0
    assert math.isnan(rank_correlation(score, torch.ones(4)))
    ten = torch.arange(10.0)
    assert top_overlap(ten.where(ten > 0, 99.0), ten) == 0.5
    assert top_overlap(torch.tensor([2.0, 1.0]), torch.tensor([3.0, 0.0])) == 1.0, "at least one token"
    keep, causal = torch.tensor([[True, True, True, True, False]]), torch.tensor([[False, True, True, False, False]])
    importance = torch.tensor([[0.1, 5.0, 0.2, 4.0, 9.0]])
    assert causal_recall(importance, keep, causal).item() == 0.5
    assert causal_recall(importance, keep, ~keep).isnan().all()
    three = np.array([0.0, 5.0, 5.0, 9.0])
    assert auc(three, np.array([False, True, False, False])) == pytest.approx((1 + 0.5 + 0) / 3)
    assert math.isnan(auc(three, np.ones(4, dtype=bool)))


@torch.no_grad()
def test_deletion_replaces_the_largest_scores():
    model, long = small_model(), response(40)
    score = torch.randn(32, generator=torch.Generator().manual_seed(0))
    curves = deletion_curves(model, long, {"best": score, "worst": -score})
    replaced = long.token_T.clone()
    replaced[long.reasoning_R[score.topk(13).indices]] = PAD

    def probability(token_T):
        logits = model(input_ids=token_T[None]).logits[0, 36:38]
        return logits.log_softmax(-1).gather(-1, token_T[37:39, None]).mean().exp()

    assert curves["best"][0] == curves["worst"][0] == 1.0
    assert curves["best"][-1] == pytest.approx(float(probability(replaced) / probability(long.token_T)), rel=1e-4)
    assert curves["best"][-1] != pytest.approx(curves["worst"][-1], rel=1e-4)


def test_intervals_hold_groups_together():
    """Two groups that differ a lot: the interval is about the scatter within them, not between."""
    mean = mean_over_groups([[0.0, 0.1, math.nan] * 20, [1.0, 0.9] * 20])
    assert (mean.value, mean.count) == (pytest.approx(0.5), 80)
    assert mean.high - mean.low < 0.05
    assert mean_over_groups([[0.0, 1.0], [0.5]]).high < 1
    assert math.isnan(mean_over_groups([[math.nan]]).value)


def test_the_report_holds_every_estimator_and_single_figure(report):
    text, page = report.markdown(None), report.extra["html"]
    for name in WORKING:
        assert f"| {name} |" in text
        assert f'<span class="who">{name}</span>' in page, "as docs/shaded_tokens.py reads it"
    exact = judged(report, task="made", model="model 0", dtype="float32", estimator=REFERENCE)
    assert [(row["overlap"], row["spearman"]) for row in exact] == [(1.0, 1.0)] * 3
    assert len(judged(report, dtype="bfloat16", estimator=BASELINE)) == 6
    assert all("reached" in row[-1] or "not judged" in row[-1] for row in report.tables[1].rows)
    assert [table.title.partition(", by ")[2] for table in report.tables[2:]] == [
        *["task"] * 2,
        *["answer"] * 2,
        *["model"] * 2,
    ]
    assert "http" not in page.replace("http-equiv", ""), "one file, no request"


def test_bfloat16_alone_is_held_against_float32(report):
    """The same figures as when float32 ran before it."""
    alone = report_on(replace(SMALL, dtypes=("bfloat16",)), [source()], silent)
    key = {"task": "made", "dtype": "bfloat16", "estimator": "attention"}
    assert judged(alone, **key) == judged(report, **key) != []


def test_an_estimator_of_ones_own_is_judged_and_a_broken_one_left_out(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def length(model, batch):\n    '''Later is better.'''\n"
        "    return torch.arange(batch.token_BT.shape[1]).expand(batch.token_BT.shape).float()\n"
        "ESTIMATORS = {'|later|': length, 'broken': lambda model, batch: torch.zeros(3)}\n"
    )
    report = report_on(replace(SMALL, also=(file,), dtypes=("float32",), curves=0), [source()], silent)
    assert r"| \|later\| |" in report.markdown(None), "a bar may not end a cell"
    assert "`|later|`: Later is better." in report.notes
    assert any("LEFT OUT: broken" in note and "expected (2, 17)" in note for note in report.notes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "needs a dictionary ESTIMATORS"),
        ("import nowhere_to_be_found", "cannot be run: ModuleNotFoundError"),
        ("ESTIMATORS = {'fisher 1': print}", "'fisher 1' is taken"),
        (None, "cannot be run: FileNotFoundError"),
    ],
)
def test_a_file_of_estimators_that_cannot_be_used_is_refused(tmp_path, text, complaint):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        loaded_estimators([file])


@pytest.mark.parametrize("faithful", [True, False])
def test_a_source_is_what_a_model_wrote(faithful, monkeypatch):
    """Demonstrations with wrong steps in place of samples; an unfaithful one answers with the digit after the right one."""
    task, rng = TASKS["lookup"], random.Random(0)

    def demonstrations(model, prompt_BP, copies, longest, generator):
        rows = [task.demonstration(problem, rng, 0.5) for problem in islice(task.problems(10**6), len(prompt_BP))]
        if not faithful:
            rows = [[*row[:-2], row[-2] + 1, row[-1]] for row in rows]
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, PAD)

    monkeypatch.setattr("benchmarks.fidelity.responses.warm_model", lambda name, number, progress: small_model(number))
    monkeypatch.setattr("benchmarks.fidelity.responses.sample", demonstrations)
    first, second = task_sources(["lookup"], 2, 8, 0, silent)
    assert (first.number, second.number, first.unusable, len(first.responses)) == (0, 1, 0, 8)
    assert first.faithful == faithful
    assert first.right == sum(row.right for row in first.responses) / 8 < 1
    for row in first.responses:
        assert (row.segments_T[: task.prompt_length] == Segment.OUTSIDE).all()
        assert row.causal_T[row.reasoning_R].sum() == row.causal_T.sum() == task.steps
        assert (row.token_T[row.causal_T][-1] == row.token_T[row.segments_T == Segment.ANSWER]) == faithful


def test_a_model_that_writes_no_answers_is_refused(monkeypatch):
    monkeypatch.setattr("benchmarks.fidelity.responses.warm_model", lambda name, number, progress: small_model(number))
    monkeypatch.setattr("benchmarks.fidelity.responses.sample", lambda model, prompt_BP, *_: prompt_BP[:, :3])
    with pytest.raises(ValueError, match="lookup: warm model 0 wrote 0 answers to 104 problems"):
        list(task_sources(["lookup"], 1, 8, 0, silent))


def test_the_command_writes_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.fidelity.study.task_sources", lambda *_: [source()])
    assert main(["fidelity", "--rounds", "1", "--device", "cpu", "--dtypes", "float32", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"fidelity_cpu.{x}" for x in ("md", "json", "html", "png")}


MARKED = [
    {"prompt": "? é", "response": "é is = 3 ; so 14 ok #### 3", "right": True, "causal": [[7, 8], [14, 16]]},
    {"prompt": "?", "response": "= 3 ; = 4 #### 4", "right": False, "causal": [[2, 3], [8, 9]], "wrong": [[8, 9]]},
    {"prompt": "?", "response": "3 and nothing else", "right": False},
]


def marked_file(tmp_path, *rows):
    file = tmp_path / "marked.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("by_bytes", [True, False])
def test_a_token_is_marked_where_it_shares_a_character_with_a_span(tmp_path, by_bytes):
    """A word contains the space before it, and a letter outside ASCII has several bytes."""
    tokenizer = make_tokenizer(400, by_bytes)
    marked = read_marked(marked_file(tmp_path, *MARKED), tokenizer)
    assert marked.unusable == 1
    right, wrong = marked.responses
    assert (right.right, wrong.right) == (True, False)
    assert tokenizer.decode(right.token_T[right.causal_T]).split() == ["3", "14"] or by_bytes
    assert tokenizer.decode(right.token_T[right.causal_T]).replace(" ", "") == "314"
    assert right.wrong_T.sum() == 0
    assert tokenizer.decode(wrong.token_T[wrong.wrong_T]).strip() == "4"
    assert bool((wrong.causal_T & ~wrong.wrong_T).any())
    for row in marked.responses:
        assert row.reasoning_R[row.causal_T[row.reasoning_R]].tolist() == row.causal_T.nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "?", "right": True}, "line 1: KeyError: 'response'"),
        (MARKED[0] | {"causal": [[0, 99]]}, r"line 1: ValueError: span \[0, 99\] is not inside of the response's 26"),
        (MARKED[0] | {"causal": [3]}, "line 1: TypeError"),
        (MARKED[2], "no response has reasoning and an answer"),
    ],
)
def test_a_file_without_marked_responses_is_refused(tmp_path, row, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_marked(marked_file(tmp_path, row), make_tokenizer(400))
    with pytest.raises(ValueError, match="No such file"):
        read_marked(tmp_path / "missing", make_tokenizer(400))


def test_the_command_judges_marked_responses(tmp_path):
    """With the package's estimators that make no copies, and with one that knows the wrong token."""
    model, out, also = tmp_path / "model", tmp_path / "out", tmp_path / "also.py"
    build_model(0, hidden=16, heads=2, vocab=400).save_pretrained(model)
    make_tokenizer(400).save_pretrained(model)
    also.write_text(
        "import torch\n"
        "def knows(model, batch):\n    return (batch.token_BT == 4).float()\n"
        "ESTIMATORS = {'knows': knows}\n"
    )
    command = ["fidelity", "--marked", str(marked_file(tmp_path, *MARKED)), "--model", str(model), "--out", str(out)]
    assert main([*command, "--also", str(also), "--device", "cpu"]) == 0
    runs = json.loads((out / "fidelity_marked_cpu.json").read_text(encoding="utf-8"))["runs"]["judged"]
    assert set(runs) == {*without_copies(), "knows"} >= {"fisher 1", "decision 1", "entropy"}
    assert runs["knows"] == {"causal recall": [0.0, 0.5], "causal AUC": [0.5, 0.75], "wrong AUC": [None, 1.0]}
    assert all(0 <= x <= 1 for x in runs["fisher 1"]["causal AUC"])
