"""The marks study: scores against slow formulas, figures by hand, and its page."""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.candidates.learning.marks import MARKS, Sight
from benchmarks.learning.tasks import TASKS
from benchmarks.learning.training import forward, roll_out
from benchmarks.marks.study import IMPORTANCES, KINDS, first_hit, judged, responses, scores, tables
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD, encode, text
from oar_plugin.credit.answer import Segment

TASK = TASKS["parallel"]


def written(model, prompt_BP, copies, longest, generator):
    """Demonstrations in place of samples; in every second one half of the steps are wrong."""
    rng, rows = random.Random(int(generator.initial_seed())), []
    for prompt in prompt_BP.tolist():
        facts = tuple((prompt[at + 1], "+-"[prompt[at + 2] - encode("+")[0]], prompt[at + 3]) for at in range(0, 20, 5))
        problem = replace(TASK.problem(random.Random(0)), content=facts)
        rows += [torch.tensor(TASK.demonstration(problem, rng, 0.5 * (copy % 2))) for copy in range(copies)]
    return torch.nn.utils.rnn.pad_sequence(rows, True, PAD)


@pytest.fixture(scope="module")
def model():
    return build_model(0, heads=2)


@pytest.fixture(autouse=True, scope="module")
def _no_sampling(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.learning.training.sample", written)
        patch.setattr("benchmarks.marks.study.PROMPTS", 4)
        patch.setattr("benchmarks.marks.study.warm_model", lambda task, number, progress: model)
        yield


@pytest.fixture(scope="module")
def rollout(model):
    return roll_out(model, TASK, random.Random(0), torch.Generator().manual_seed(0), 4, 4)


def test_one_response_a_problem_is_printed_with_its_wrong_results_in_bold(rollout):
    token_BL, wrong_BL = rollout.token_BL.flip(0), rollout.wrong_BL.flip(0)  # the last copies have errors
    prompt_B = [text(ids) for ids in token_BL[:, : rollout.prompt_length].tolist()]
    printed = responses("parallel", replace(rollout, token_BL=token_BL, wrong_BL=wrong_BL)).rows
    assert [problem for problem, _ in printed] == list(dict.fromkeys(prompt_B))
    assert any("**" in written for _, written in printed)
    for problem, written in printed:
        row = prompt_B.index(problem)
        assert written.replace("**", "") == text(token_BL[row, rollout.prompt_length :].tolist())
        assert re.findall(r"\*\*(\S+?)\*\*", written) == [
            text([token]) for token in token_BL[row][wrong_BL[row]].tolist()
        ]


def slow(model, rollout, row):
    """Gradients `[L, H]` of the gold contrast after 1, 2, 4 and 8 backwards, and logits, with the model's own forward."""
    length = int(rollout.length_B[row])
    token_L, segments_L = rollout.token_BL[row, :length], rollout.segments_BL[row, :length]
    table_VH = model.get_input_embeddings().weight.detach()
    embedding_1LH = table_VH[token_L][None].requires_grad_()
    logits_LV = model(inputs_embeds=embedding_1LH).logits[0]
    answer = (segments_L == Segment.ANSWER).nonzero()[:, 0].tolist()
    scalar = torch.zeros(())
    for at, gold in zip(answer, rollout.gold_Bm[row].tolist(), strict=True):
        own = int(token_L[at])
        others_V = logits_LV[at - 1].detach().softmax(-1)
        others_V[own] = 0
        mean = (others_V / others_V.sum() * logits_LV[at - 1]).sum()
        wrong = rollout.advantage_B[row] < 0
        scalar = scalar + logits_LV[at - 1, own] - (logits_LV[at - 1, gold] if wrong else mean)
    gradients, worth = [], 0.0
    for _ in range(8):
        (gradient_1LH,) = torch.autograd.grad(scalar + worth, embedding_1LH, retain_graph=True)
        gradients.append(gradient_1LH[0])
        # The next sweep adds the value of the policy's mean embedding at each reasoning token, as its distribution moves.
        mean_LH = logits_LV[:-1].softmax(-1) @ table_VH
        worth = (mean_LH * gradients[-1][1:])[segments_L[1:] == Segment.REASONING].sum()
    return {backwards: gradients[backwards - 1] for backwards in (1, 2, 4, 8)}, logits_LV.detach()


def test_scores_are_their_formulas(model, rollout):
    """In a right and in a wrong response, at some of the reasoning tokens."""
    got, table_VH = scores(model, rollout, seed=0), model.get_input_embeddings().weight.detach()
    for row in (int(rollout.advantage_B.argmax()), int(rollout.advantage_B.argmin())):
        gradients, logits_LV = slow(model, rollout, row)
        for place in rollout.reasoning_BL[row].nonzero()[:, 0].tolist()[1::11]:
            for backwards, gradient_LH in gradients.items():
                worth_V = table_VH @ gradient_LH[place]
                policy_V = logits_LV[place - 1].softmax(-1)
                mean = (policy_V * worth_V).sum()
                by_hand = {
                    "norm": gradient_LH[place].square().sum(),
                    "signed": worth_V[rollout.token_BL[row, place]] - mean,
                    "variance": (policy_V * (worth_V - mean).square()).sum(),
                }
                prefix = "gold " if backwards == 1 else f"gold sweep {backwards} "
                for name in by_hand.keys() & {mark.removeprefix(prefix) for mark in MARKS if mark.startswith(prefix)}:
                    score = got[prefix + name][row, place]
                    torch.testing.assert_close(score, by_hand[name], rtol=2e-3, atol=1e-6, msg=prefix + name)


def test_margin_variance_is_how_far_alternatives_move_the_margin(model, rollout):
    """The variance over sampled alternatives of what each of them changes in the answer's margins, to first order."""
    sight = Sight(forward(model, rollout)[0], rollout)
    score_bL = MARKS["margin variance"](sight)
    gradient_bLH = sight.gradient(sight.margin())
    for row, place in sight.reasoning_bL.nonzero()[::97].tolist():
        worth_V = sight.table_VH @ gradient_bLH[row, place]
        policy_V = sight.policy_bLV[row, place]
        sampled = worth_V[policy_V.multinomial(20_000, True, generator=torch.Generator().manual_seed(0))]
        assert score_bL[row, place] == pytest.approx(float(sampled.var()), rel=0.1)


def test_every_credit_scores_every_response(model, rollout):
    got = scores(model, rollout, seed=0)
    assert {*IMPORTANCES, *MARKS, "surprisal", "decision x (1 - p)", "onward x (1 - p)"} < set(got)
    assert "entropy x (1 - p)" not in got
    for name, score_BL in got.items():
        assert score_BL.shape == rollout.token_BL.shape
        assert score_BL[rollout.reasoning_BL].isfinite().all(), name
        assert score_BL[rollout.reasoning_BL].unique().numel() > 1, name


def test_kinds_and_figures_by_hand(rollout):
    """A credit that knows the wrong results ranks them first, its negative ranks them last; every token has one kind."""
    best, worst = ([*judged(sign * rollout.wrong_BL.float(), rollout)] for sign in (1, -1))
    asked = [row for row in best if "wrong AUC" in row]
    assert 0 < len(asked) < len(best) == len(rollout.token_BL)
    for row in asked:
        assert row["wrong AUC"] == 1
        assert row["wrong results, wrong answer, rank"] > 0.9
        assert row["wrong results, wrong answer, weight"] > row["filler, weight"] == pytest.approx(row["form, weight"])
        others = row.get("right results, wrong answer, weight", row["form, weight"])
        assert others == pytest.approx(row["form, weight"]), "none of the wrong ones is among them"
    assert {row["wrong AUC"] for row in worst if "wrong AUC" in row} == {0.0}
    assert all(row["results AUC"] == 1 for row in judged(rollout.causal_BL.float(), rollout))
    right, wrong = best[int(rollout.advantage_B.argmax())], best[int(rollout.advantage_B.argmin())]
    assert {kind for kind in KINDS if f"{kind}, rank" in right} == {KINDS[2], *KINDS[3:]}
    assert {kind for kind in KINDS if f"{kind}, rank" in wrong} >= {KINDS[0], *KINDS[3:]}


def test_the_first_wrong_step_is_hit_where_the_highest_token_stands_in_it():
    """Steps are `x r ;`: of three the second and the third are wrong."""
    result_R, wrong_R = np.array([0, 1, 0, 0, 1, 0, 0, 1, 0], bool), np.array([0, 0, 0, 0, 1, 0, 0, 1, 0], bool)
    hits = [first_hit(np.eye(9)[place], result_R, wrong_R) for place in range(9)]
    assert hits == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert first_hit(np.zeros(9), result_R, wrong_R) == pytest.approx(3 / 9), "all equal: chance"


def test_tables_are_means_over_models_of_their_responses():
    rows = [("a", 0, 1.0), ("a", 1, 0.0), ("a", 1, 0.5), ("b", 0, float("nan")), ("b", 0, 0.25)]
    judgements = pd.DataFrame(
        [{"task": t, "model": m, "credit": "c", "wrong AUC": x, "first hit": x, "results AUC": x} for t, m, x in rows]
    )
    judgements[[f"{kind}, {what}" for kind in KINDS for what in ("weight", "rank")]] = 0.5
    first = tables(judgements)[0]
    assert first.columns == ("credit", "all tasks", "a", "b")
    assert [cell.split()[0] for cell in first.rows[0]] == ["c", "0.50", "0.62", "0.25"]


def test_the_command_writes_a_page(tmp_path):
    assert main(["marks", "--tasks", "parallel", "--models", "1", "--batches", "1", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"marks_cpu.md", "marks_cpu.json"}
    page, runs = (tmp_path / "marks_cpu.md").read_text(), json.loads((tmp_path / "marks_cpu.json").read_text())["runs"]
    assert all(f"| {name} |" in page for name in (*IMPORTANCES, *MARKS))
    assert {(row["task"], row["model"]) for row in runs["means"]} == {("parallel", 0)}
