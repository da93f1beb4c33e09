"""The marks study by continuation: values that are known beforehand, correlations by hand, vLLM's part, and its page."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.learning.training import roll_out
from benchmarks.marks import continuation, engine, study
from benchmarks.tiny.data import write_problems
from benchmarks.tiny.model import build_model
from benchmarks.tiny.tasks import Problem
from benchmarks.tiny.words import EOS, MARK, PAD, encode, make_tokenizer
from tests.benchmarks.test_marks import TASK, written


def test_the_value_falls_at_the_first_wrong_result(monkeypatch):
    """Continuations give the right answer in three of four cases, unless a wrong result stands before them."""
    monkeypatch.setattr("benchmarks.learning.training.sample", written)
    rollout = roll_out(build_model(0, heads=2), TASK, random.Random(0), torch.Generator().manual_seed(0), 4, 4)
    rows, start = rollout.token_BL.tolist(), rollout.prompt_length

    def sample(model, prefix_BL, copies, longest, noise):
        of = [next(row for row, ids in enumerate(rows) if ids[: len(p)] == p) for p in prefix_BL.tolist()]
        gold = [[MARK, *rollout.gold_Bm[row].tolist(), EOS] for row in of]
        lost = rollout.wrong_BL[of, : prefix_BL.shape[1]].any(-1).tolist()
        ends = [
            [MARK, EOS] if out or n % 4 == 3 else end
            for out, end in zip(lost, gold, strict=True)
            for n in range(copies)
        ]
        return torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, ends)], True, PAD)

    monkeypatch.setattr(continuation, "sample", sample)
    fine, coarse = ([*continuation.continued(None, TASK, rollout, spans, seed=0)] for spans in (64, 10))
    for row, (one, other) in enumerate(zip(fine, coarse, strict=True)):
        assert one.prompt + one.ids == rows[row][: int(rollout.length_B[row])]
        assert one.right == bool(rollout.advantage_B[row] > 0)
        wrong = rollout.wrong_BL[row, start:].nonzero()[:1, 0].tolist()  # the first, if there is one
        assert one.places == [*range(int(rollout.reasoning_BL[row].sum()) + 1)]
        assert one.advantage_S().nonzero()[0].tolist() == wrong
        assert one.advantage_S()[wrong].tolist() == [-0.75] * len(wrong)
        assert len(other.places) <= 11
        for span, at in zip(other.advantage_S().nonzero()[0], wrong, strict=True):
            assert other.places[span] <= at < other.places[span + 1]


def test_correlations_by_hand():
    """Values 0.5, 0.625, 0.125, 0.5: advantages 0.125, -0.5, 0.375, drops of rank 1, 3, 2."""
    right_PN = np.array([[n < 16 * value for n in range(16)] for value in (0.5, 0.625, 0.125, 0.5)])
    good = continuation.Continued([0], [0] * 5, True, [0, 1, 2, 3], right_PN)
    scores = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([0.5, 0.5, 2.0])
    found = continuation.agreement("x", good, *scores) | continuation.agreement(
        "x", replace(good, right=False), *scores
    )
    assert found["drop, right"] == found["drop, wrong"] == pytest.approx(1)
    assert found["advantage, right"] == pytest.approx(np.corrcoef([1.5, 1.5, 3], [2, 1, 3])[0, 1])
    assert found["advantage, wrong"] == pytest.approx(np.corrcoef([1.5, 1.5, 3], [2, 3, 1])[0, 1])
    spans = replace(good, places=[0, 2, 3], right_PN=right_PN[:3])  # mean scores 2.5 and 2, drops 0.125 and 0.5
    assert continuation.agreement("x", spans, *scores)["drop, right"] == pytest.approx(-1)
    assert np.isnan(continuation.agreement("x", replace(good, right_PN=right_PN[[0] * 4]), *scores)["drop, right"])


A_VLLM = """
from types import SimpleNamespace
from benchmarks.tiny.words import EOS, encode

GOOD, BAD = encode(["so", "3", "####", "3"]), encode(["so", "4", "####", "4"])
SamplingParams = SimpleNamespace

def LLM(model, **given):
    assert (given["dtype"], given["max_model_len"]) == ("float32", 6 + 20)
    return SimpleNamespace(generate=generate)

def generate(prompts, settings, use_tqdm):
    for prompt, one in zip(prompts, settings):
        ids = prompt["prompt_token_ids"]
        assert one.max_tokens == 20 - len(ids[6:])
        sure = (BAD if ids[-1] == BAD[1] else GOOD) if len(ids) == 8 else None
        ends = [sure or (BAD if n % 2 or ids[:1] == encode("B") else GOOD) for n in range(one.n)]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[*end[len(ids[6:]):], EOS]) for end in ends])
"""


def test_responses_of_an_engine_are_continued_and_judged(tmp_path, monkeypatch):
    """Half of the responses to the first problem are right, none to the second. What stands behind `so` decides."""
    (tmp_path / "vllm.py").write_text(A_VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    build_model(0, heads=2).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    problems = [Problem(tuple(encode([name, "3", "+", "0", "=", "?"])), tuple(encode("3")), None) for name in "AB"]
    write_problems(data := tmp_path / "two.parquet", problems)
    settings = study.Settings(model=str(tmp_path), data=data, max_tokens=20, by="continuation")
    settings.check()
    sizes = settings.problems, study.COPIES, settings.max_tokens, settings.spans, settings.seed
    found = engine.continued(str(tmp_path), data, *sizes)  # hangs where the child does not close what it started
    assert [one.right for one in found] == [True, False] * 4
    assert [one.ids for one in found[:2]] == [encode(["so", n, "####", n, "<eos>"]) for n in "34"]
    assert [one.right_PN.mean(1).tolist() for one in found[:2]] == [[0.5, 0.5, 1], [0.5, 0.5, 0]]
    assert {one.right_PN.shape for one in found} == {(3, 16)}
    with pytest.raises(ValueError, match="--by continuation"):
        replace(settings, by="known").check()


def test_the_command_writes_a_page(tmp_path, monkeypatch):
    """On a right and a wrong response whose continuations end by chance."""
    rng, coin, made = random.Random(0), np.random.default_rng(0), []
    for right in (True, False):
        ids = TASK.demonstration(problem := TASK.problem(rng), rng, 0.0)
        places = [*range(ids.index(MARK) + 1)]
        outcome, known = coin.random((len(places), 16)) < 0.5, {"oracle": torch.rand(places[-1])}
        made.append(continuation.Continued([*problem.prompt], ids, right, places, outcome, known))
    monkeypatch.setattr(continuation, "continued", lambda *_: made)
    monkeypatch.setattr(study, "PROMPTS", 1)
    monkeypatch.setattr("benchmarks.learning.training.sample", written)
    monkeypatch.setattr(study, "warm_model", lambda *_: build_model(0, heads=2))
    words = "marks --by continuation --tasks parallel --models 1 --batches 1 --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    tables = json.loads((tmp_path / "continuation_cpu.json").read_text())["tables"]
    names = {*study.Settings.importances, "oracle", continuation.CEILING, continuation.OPEN}
    assert [{row["credit"] for row in rows} for rows in tables.values()] == [names] * 4
    assert all(f"## {title}" in (tmp_path / "continuation_cpu.md").read_text() for title in tables)
