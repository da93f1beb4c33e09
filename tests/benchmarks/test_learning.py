import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.nn.utils.rnn import pad_sequence

from benchmarks import gate_edges
from benchmarks.__main__ import main
from benchmarks.candidates.learning import spare
from benchmarks.learning import comparison, study, training, warm_start
from benchmarks.learning.plan import PLANS, Pairs, Plan, read_plan
from benchmarks.learning.sentences import Sentences
from benchmarks.learning.tasks import BLANK, QUIET, TASKS, NamedParallel, OrderedLookup, showing, wrong_results
from benchmarks.learning.training import Credit, Record, Rollout, Run, forward, roll_out
from benchmarks.statistics import holm, mean_over_clusters
from benchmarks.tiny.fast import head_of, micro_batches, rows_of
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import MARK, NAMES, PAD, VOCABULARY, encode, text
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.gate import gate_of
from oar_plugin.credit.importance import Importance
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request
from tests.hosts.whole_run import LIMIT_S
from tests.limits import PROCESS_S

EDGES = Path(gate_edges.__file__).parent / "results" / "gate_edges.md"
TASK = NamedParallel("parallel", steps=2, filler=(1, 2), error_rate=0.2)
RUN = Run(task="parallel", credit=Credit(), lr=1e-3, warm=0, seed=0, steps=2, prompts=4, copies=2)
CANDIDATES = "python:benchmarks.candidates.learning"


class Uniform(Importance):
    name = "Uniform"
    help = "Every token matters as much."

    def combine(self, parts):
        return torch.ones(parts.reasoning_BL.shape)


UNIFORM = f"python:{__name__}:Uniform"


# ---- tasks


def planted(task, problem, seed):
    """The last word of each step's results, and whether it is wrong, in the `demonstration` of the same seed."""
    steps, _ = task.solution(problem.content, random.Random(seed), task.error_rate)
    for step in steps:
        if isinstance(task, Sentences):
            (*_, a, op, b), (written,) = step.copied, step.results
            yield written, int(written) != (int(a) + int(b) if op == "+" else int(a) - int(b))
        elif isinstance(task, OrderedLookup):
            name, written = step.results
            yield written, int(written) != problem.content[1][NAMES.index(name)]
        else:
            (_, a, *b), (written,) = step.copied, step.results
            yield written, int(written) != (int(a) + int("".join(b))) % 10


@given(name=st.sampled_from(sorted(TASKS)), seed=st.integers(0, 10**6))
def test_the_errors_that_were_planted_are_found_and_no_others(name, seed):
    task = TASKS[name]
    problem = task.problem(random.Random(seed))
    response = task.demonstration(problem, random.Random(seed), task.error_rate)
    reading, steps = task.read(problem, response), list(planted(task, problem, seed))
    assert text([response[at] for at in reading.causal]).split() == [word for word, _ in steps]
    wrong = [at for at, (_, is_wrong) in zip(reading.causal, steps, strict=True) if is_wrong]
    assert list(wrong_results(task, problem, response, reading)) == wrong
    perfect = task.demonstration(problem, random.Random(seed), 0.0)
    assert not wrong_results(task, problem, perfect, task.read(problem, perfect))


@given(st.data())
def test_whatever_a_model_writes_is_read(data):
    task = TASKS[data.draw(st.sampled_from(sorted(TASKS)))]
    response = data.draw(st.lists(st.sampled_from([*range(len(VOCABULARY)), task.VOCAB - 1]), max_size=40))
    problem = task.problem(random.Random(0))
    reading = task.read(problem, response)
    assert set(wrong_results(task, problem, response, reading)) <= set(reading.causal)


@pytest.mark.parametrize("name", ["chain_quiet", "parallel_quiet"])
def test_quiet_filler_has_the_entropy_of_results(name):
    task, rng, off, filler = TASKS[name], random.Random(0), Counter(), Counter()
    for seed in range(500):
        problem = task.problem(rng)
        steps, _ = task.solution(problem.content, random.Random(seed), task.error_rate)
        off.update((int(step.results[0]) - int(step.copied[1]) - int("".join(step.copied[2:]))) % 10 for step in steps)
        filler.update(word for word in text(task.demonstration(problem, rng, 0.0)).split() if word in QUIET)
    results, words = (sorted((n / counts.total() for n in counts.values()), reverse=True) for counts in (off, filler))
    assert words == pytest.approx([0.8] + [0.05] * 4, abs=0.02)
    assert results == pytest.approx(words, abs=0.03)


@pytest.mark.parametrize("name", ["parallel_2_shown", "chain_2_shown"])
def test_a_shown_answer_is_that_of_the_demonstration_and_problems_show_none(name):
    task, rng = TASKS[name], random.Random(0)
    blank = encode([BLANK] * len(task.problem(rng).answer))
    examples = [task.example(rng, None) for _ in range(400)]
    assert {len(prompt) for prompt, _ in examples} == {task.prompt_length}
    shown = [([*prompt[-len(blank) :]], response[response.index(MARK) + 1 : -1]) for prompt, response in examples]
    assert all(given in (answer, blank) for given, answer in shown)
    assert 0.4 < sum(given != blank for given, _ in shown) / 400 < 0.6
    problem = task.problem(rng)
    assert list(problem.prompt[-len(blank) :]) == blank
    assert showing(problem.prompt, problem.answer) == [*problem.prompt[: -len(blank)], *problem.answer]


# ---- the trainer


@pytest.mark.parametrize("tied", [True, False])
def test_the_fast_forward_is_the_models_own(tied):
    """Logits, and the gradients of all parameters."""
    token_BL = torch.randint(0, 40, (3, 11))
    gradients, logits = [], []
    for fast in (True, False):
        model = build_model(0, heads=2, tied=tied)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):  # the norms' weights are ones otherwise
                parameter *= 1 + 0.1 * torch.sin(torch.arange(parameter.shape[-1]) + number)
        hidden_BLH = rows_of(model, model.get_input_embeddings()(token_BL)) if fast else None
        logits.append(model(token_BL).logits if hidden_BLH is None else F.linear(hidden_BLH, head_of(model)))
        logits[-1].log_softmax(-1)[..., 3].sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def writes(task, problems):
    """A `sample` of demonstrations to what `problems` draws: every other response has nothing but errors, but for the third
    problem, where all are right; the very last one does not end. A model with random weights would write no answers."""

    def sample(model, prompt_BP, copies, *_):
        rng, rows = random.Random(0), []
        for number, _ in enumerate(prompt_BP):
            problem = task.problem(problems)
            rows += [task.demonstration(problem, rng, copy % 2 * (number != 2)) for copy in range(copies)]
        rows[-1] = (rows[-1][:-1] + encode(["so"]) * 99)[: task.max_response_length]
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)

    return sample


@pytest.fixture
def model():
    return build_model(0, hidden=16, layers=1)


@pytest.fixture
def rollout(model, monkeypatch):
    monkeypatch.setattr(training, "sample", writes(TASK, random.Random(0)))
    return roll_out(model, TASK, random.Random(0), torch.Generator(), RUN.prompts, RUN.copies)


def trained(run, monkeypatch, **settings):
    """The model after `run`, on demonstrations, and its record."""
    model = build_model(0, hidden=16, layers=1)
    monkeypatch.setitem(TASKS, "parallel", TASK)
    monkeypatch.setattr(training, "sample", writes(TASK, random.Random(run.draw)))
    monkeypatch.setattr(training, "HELD_OUT", 4)
    return model, training.train(replace(run, **settings), model)


def test_a_rollout_has_the_responses_that_teach_something(rollout):
    """The third of four problems has no advantage; the last response has no end."""
    assert rollout.graded["reward"] == 5 / 8
    assert rollout.advantage_B.sign().tolist() == [1, -1] * 3
    assert rollout.advantage_B.abs().tolist() == pytest.approx([0.5**0.5] * 6, abs=1e-5), "(r - mean) / (std + 1e-6)"
    assert rollout.status_B.tolist() == [Status.SCORED] * 5 + [Status.TRUNCATED]
    assert (rollout.segments_BL[-1] == Segment.OUTSIDE).all()
    assert ((rollout.segments_BL == Segment.ANSWER).sum(-1) == torch.tensor([TASK.steps] * 5 + [0])).all()
    assert (rollout.causal_BL.sum(-1) == TASK.steps).all()
    assert torch.equal(rollout.wrong_BL, rollout.causal_BL & rollout.negative_B1)
    written_BL = rollout.token_BL != PAD
    written_BL[:, : rollout.prompt_length] = False
    assert torch.equal(rollout.response_BL, written_BL)


@pytest.mark.parametrize("name", ["fisher", "decision", "entropy", "oar_g", f"{CANDIDATES}:Onward"])
def test_importance_of_the_shared_graph_is_the_packages(name, model, rollout, monkeypatch):
    monkeypatch.setattr(training, "micro_batches", partial(micro_batches, rows=4))
    run = replace(RUN, credit=Credit(importance=name))
    request = Request.from_config(run.credit.config(run.seed), 1, rollout.token_BL.shape[1])
    there_BL = batch_importance(model, request, rollout.token_BL, rollout.segments_BL, rollout.token_BL != PAD)
    here_BL = training.importance(run, rollout, forward(model, rollout), 0)
    assert (here_BL > 0).sum() > 20
    torch.testing.assert_close(here_BL, there_BL, rtol=1e-3, atol=1e-5 * there_BL.max().item())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["contrast", "contrast_own"])
@torch.no_grad()
def test_contrast_is_that_of_plain_forwards(name, model, rollout):
    """Behind prompts whose last two tokens are the answer. A right response and the last have no wrong answer of their own."""

    def log_prob(ids):
        return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    def behind(ids, answer):
        return log_prob(torch.cat([ids[: rollout.prompt_length - 2], answer, ids[rollout.prompt_length :]]))

    run = replace(RUN, credit=Credit(importance=name))
    with torch.enable_grad():
        importance_BL = training.importance(run, rollout, forward(model, rollout), 0)
    for row, (ids, gold) in enumerate(zip(rollout.token_BL, rollout.gold_Bm, strict=True)):
        reasoning, own = rollout.reasoning_BL[row], ids[rollout.segments_BL[row] == Segment.ANSWER]
        if name == "contrast_own" and (torch.equal(own, gold) or not len(own)):
            assert importance_BL[row].isnan().all()
            continue
        other = behind(ids, own) if name == "contrast_own" else log_prob(ids)
        want = (rollout.advantage_B[row].sign() * (behind(ids, gold) - other)).clamp(0, 5)
        torch.testing.assert_close(importance_BL[row, reasoning], want[reasoning[1:]], rtol=1e-3, atol=1e-5)
        assert importance_BL[row, ~reasoning].abs().sum() == 0
    assert importance_BL.isnan().all(1).tolist() == [
        name == "contrast_own" and row != 1 and row != 3 for row in range(6)
    ]


def textbook(model, rollout, weight_BL=1.0):
    """REINFORCE, a mean over the tokens of all responses: backward, and the clipped norm."""
    log_prob_BLV = model(rollout.token_BL).logits[:, :-1].log_softmax(-1)
    log_prob_BL = log_prob_BLV.gather(-1, rollout.token_BL[:, 1:, None])[..., 0]
    gain_BL = (rollout.advantage_B[:, None] * weight_BL).expand_as(rollout.token_BL)[:, 1:]
    loss = -(log_prob_BL * gain_BL)[rollout.response_BL[:, 1:]].sum() / rollout.graded["tokens"]
    model.zero_grad()
    loss.backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), training.MAX_GRADIENT_NORM)


def test_an_update_is_the_textbooks(model, rollout, monkeypatch):
    monkeypatch.setattr(training, "MAX_GRADIENT_NORM", 0.01)
    weight_BL, other = torch.rand(rollout.token_BL.shape), build_model(0, hidden=16, layers=1)
    norm = textbook(other, rollout, weight_BL)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    told = training.update(model, optimizer, rollout, forward(model, rollout), weight_BL)
    assert told["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        row_BLV = other(rollout.token_BL).logits[:, :-1].log_softmax(-1)[rollout.response_BL[:, 1:]]
    assert told["entropy"] == pytest.approx(-(row_BLV.exp() * row_BLV).sum(-1).mean().item(), rel=1e-4)


def test_a_training_is_steps_of_adam_along_it(monkeypatch):
    other, rollouts = build_model(0, hidden=16, layers=1), []
    monkeypatch.setattr(training, "roll_out", lambda *args: rollouts.append(roll_out(*args)) or rollouts[-1])
    model, record = trained(RUN, monkeypatch)
    optimizer = torch.optim.Adam(other.parameters(), lr=RUN.lr)
    for rollout in rollouts:
        textbook(other, rollout)
        optimizer.step()
    off = torch.cat([(a - b).abs().flatten() for a, b in zip(model.parameters(), other.parameters(), strict=True)])
    assert off.max() < 0.02 * RUN.lr * RUN.steps
    assert [step["reward"] for step in record.steps] == [5 / 8] * RUN.steps
    assert 0 <= record.held_out <= 1


def test_uniform_credit_is_grpo_bit_for_bit(monkeypatch):
    grpo, uniform, entropy = (
        trained(RUN, monkeypatch, credit=Credit(importance=name)) for name in (None, UNIFORM, "entropy")
    )
    assert torch.equal(flat(grpo[0]), flat(uniform[0]))
    assert not torch.equal(flat(grpo[0]), flat(entropy[0]))
    assert [step["fallback/any"] for step in uniform[1].steps] == [1.0] * RUN.steps


def flat(model):
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def by_hand():
    """Two responses to one problem; prompt and answer have one token. The second result makes the first response wrong."""
    mask = torch.tensor([[True] * 6] * 2)
    R = int(Segment.REASONING)
    return Rollout(
        prompt_length=1,
        graded={},
        advantage_B=torch.tensor([-1.0, 1.0]),
        token_BL=mask.long(),
        response_BL=mask,
        segments_BL=torch.tensor([[int(Segment.OUTSIDE), R, R, R, R, int(Segment.ANSWER)]] * 2),
        status_B=torch.full((2,), int(Status.SCORED)),
        causal_BL=torch.tensor([[0, 1, 1, 0, 0, 0]] * 2).bool(),
        wrong_BL=torch.tensor([[0, 0, 1, 0, 0, 0], [0] * 6]).bool(),
        gold_Bm=torch.zeros(2, 1),
    )


WEIGHTS = {
    "decides": ([1.5, 1.5, 0.5, 0.5], [1.5, 1.5, 0.5, 0.5]),
    "blame": ([0, 2.4, 0.8, 0.8], [1.5, 1.5, 0.5, 0.5]),
    "signed": ([-1.5, 1.5, 0.5, 0.5], [1.5, 1.5, 0.5, 0.5]),
    "": ([2 / 3] * 3 + [2], [2 / 3] * 3 + [2]),
    "boost": ([0.8] * 3 + [1.6], [0.8] * 3 + [1.6]),
    "suppress": ([8 / 9] * 3 + [4 / 3], [8 / 9] * 3 + [4 / 3]),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_by_hand(name):
    """Weights of oracles, and of the scores 0 to 3: the gate boosts the last one, 3 against 1 before mass is restored."""
    credit = Credit(importance=name) if name in training.ORACLES else Credit(importance="entropy", tau=0.75, only=name)
    run, rollout = replace(RUN, credit=credit), by_hand()
    scores_BL = torch.tensor([[9.0, 0.0, 1.0, 2.0, 3.0, 9.0]] * 2)
    if name in training.ORACLES:
        scores_BL = training.importance(run, rollout, [], 0)
    weight_BL, told = training.weights(run, rollout, scores_BL, torch.zeros(2, 6))
    wanted_BL = torch.tensor([[1.0, *row, 1.0] for row in WEIGHTS[name]])
    torch.testing.assert_close(weight_BL, wanted_BL)
    if name == "blame":
        kinds = {"wrong_in_wrong": 2.4, "right_in_wrong": 0, "other_in_wrong": 0.8}
        kinds |= {"result_in_right": 1.5, "other_in_right": 0.5, "recall": 0.75}
        assert told == pytest.approx(kinds)


def test_spare_by_hand():
    """In the wrong response two tokens of importance 1 nat have probability 1/4 and 1/2; all others have importance 0."""
    importance_BL = torch.tensor([[5.0, 0.0, 1.0, 0.0, 1.0, 5.0]] * 2)
    log_prob_BL = torch.tensor([[1.0, 1.0, 0.25, 1.0, 0.5, 1.0]] * 2).log()
    run = replace(RUN, credit=Credit(importance="decision", gate="spare", beta=2.0))
    weight_BL, _ = training.weights(run, by_hand(), importance_BL, log_prob_BL)
    raw_BL = torch.tensor([[1, 0.5 + 0.5 * 3 * 0.75, 1, 0.5 + 0.5 * 3 * 0.5], [1, 2, 1, 2]])
    torch.testing.assert_close(weight_BL[:, 1:-1], raw_BL / raw_BL.mean())
    assert (weight_BL[:, [0, -1]] == 1).all()
    assert torch.equal(weight_BL[:, 1], weight_BL[:, 3]), "what decides nothing weighs the same in right and wrong"
    known = replace(run, credit=replace(run.credit, importance="decides"))
    importance_BL = training.importance(known, by_hand(), [], 0)
    weight_BL, _ = training.weights(known, by_hand(), importance_BL, log_prob_BL)
    raw_BL = torch.tensor([[3 * 0.0, 3 * 0.75, 1, 1], [3, 3, 1, 1]])
    torch.testing.assert_close(weight_BL[:, 1:-1], raw_BL / raw_BL.mean(), atol=1e-5, rtol=1e-5)
    nothing_BL = torch.zeros(1, 2)
    assert (spare(nothing_BL, nothing_BL.bool(), nothing_BL, nothing_BL[:, :1].bool()) == 1).all()


def test_inverted_damps_what_the_default_gate_boosts():
    gate, importance_BL = gate_of(f"{CANDIDATES}:inverted"), torch.arange(10.0)[None]
    reasoning_BL = importance_BL > 0
    weight_BL = gate.weights(importance_BL, reasoning_BL, tau=0.85, beta=2.0, floor=0.1)
    raw_T = torch.tensor([1.0] * 7 + [1 / 3] * 2)  # two of nine tokens are above the quantile
    torch.testing.assert_close(weight_BL[0, 1:], raw_T / raw_T.mean())
    assert weight_BL[0, 0] == 1


# ---- warm models


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Lessons of two tests of the model, one after every second step."""
    for name, value in {"EVERY": 2, "LONGEST": 6, "BATCH": 2, "IMITATION": 1}.items():
        monkeypatch.setattr(warm_start, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(warm_start, "warm_weights", warm_start.warm_weights.__wrapped__)  # nothing is remembered
    monkeypatch.setitem(warm_start.SIZES, "0.1M", (32, 1))
    return lambda shares: monkeypatch.setattr(warm_start, "accuracy", lambda *_, greedy: shares.pop(0))


def test_a_lesson_is_over_at_its_share(quick):
    quick([0.5, 0.95, 0.94, 0.94, 1.0])
    assert warm_start.teach(build_model(0, hidden=16, layers=1), TASK, 0) == [4, 6]


def test_a_model_that_is_stuck_says_so_and_a_taught_one_is_kept(quick, tmp_path, monkeypatch):
    quick([0.5] * 100)
    with pytest.raises(warm_start.StuckError, match="parallel"):
        warm_start.warm_model("parallel", 0)
    assert not list(tmp_path.rglob("*.pt*"))
    quick([1.0] * 3)
    first = warm_start.warm_model("parallel", 0)
    monkeypatch.setattr(warm_start, "teach", lambda *_: pytest.fail("taught again"))
    again = warm_start.warm_model("parallel", 0)
    assert torch.equal(flat(first), flat(again))
    with torch.no_grad():
        next(again.parameters()).zero_()
    assert torch.equal(flat(first), flat(warm_start.warm_model("parallel", 0))), "a copy of its own"

    monkeypatch.setattr(warm_start, "teach", lambda *_: [1])
    quick([1.0] * 2)
    warm_start.warm_model("parallel", 1)
    monkeypatch.setitem(TASKS, "parallel", replace(TASKS["parallel"], error_rate=0.5))
    warm_start.warm_model("parallel", 0)
    assert len(list(tmp_path.rglob("*.pt"))) == 3, "another number and another task are taught"


# ---- plans

METHODS = {"grpo": {}, "fisher": {"importance": "fisher"}, "blame": {"importance": "blame"}}
SMALL = {
    "title": "Made up",
    "tasks": ["chain", "parallel"],
    "methods": METHODS,
    "named": ["fisher"],
    "rates": [0.001, 0.002],
    "choose": {"warm": [0], "seeds": [0, 1]},
    "judge": {"warm": [1, 2, 3], "seeds": [2, 3]},
    "steps": 2,
}
REFUSED = {
    "rates: Field required": {"rates": None},
    "rates=[]: Tuple should have at least 1 item": {"rates": []},
    "rates.0='fast': Input should be a valid number": {"rates": ["fast"]},
    "colour='red': Unexpected keyword argument; allowed: title, tasks, methods": {"colour": "red"},
    "methods.grpo.tauu=1: Unexpected keyword argument; allowed: importance, gate,": {"methods": {"grpo": {"tauu": 1}}},
    "methods.grpo.only='some': Input should be '', 'boost' or": {"methods": {"grpo": {"only": "some"}}},
    "methods.x: algorithm.oar.importance='magic': unknown; allowed: fisher": {
        "methods": METHODS | {"x": {"importance": "magic"}}
    },
    "or decides, blame, signed; gate: or spare": {"methods": METHODS | {"x": {"gate": "magic"}}},
    "methods.x: gate=spare with importance=blame; allowed: importance in nats, or decides": {
        "methods": METHODS | {"x": {"importance": "blame", "gate": "spare"}}
    },
    "methods.x: importance=hybrid: copies that a gradient": {"methods": METHODS | {"x": {"importance": "hybrid"}}},
    "tasks: none, and no factors": {"tasks": []},
    "methods: no grpo": {"methods": {"fisher": {}}},
    "named: random; allowed: grpo, fisher, blame": {"named": ["random"]},
    "tasks: sums; allowed: parallel, chain, lookup": {"tasks": ["sums"]},
    "choose.seeds: Field required": {"choose": {"warm": [0]}},
    "choose and judge share warm model 1": {"choose": {"warm": [0, 1], "seeds": [0]}},
    "rates: of several one is chosen on the pairs of choose": {"choose": {"warm": [], "seeds": []}},
    "judge: no pair": {"judge": {"warm": [], "seeds": [1]}},
    "tasks: chain_32k: its further words have no tokenizer": {"tasks": ["chain_32k"], "through_verl": True},
    "methods.blame: verl serves no oracle": {"through_verl": True},
}


def written(path, **changes):
    values = {key: value for key, value in (SMALL | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("said", REFUSED)
def test_a_plan_that_cannot_work_is_refused(said, tmp_path):
    file = written(tmp_path / "mine.yaml", **REFUSED[said])
    with pytest.raises(ValueError, match=re.escape(said)) as told:
        read_plan(file)
    assert str(told.value).startswith(f"{file}: ")


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: [", "\tb"])
def test_a_file_that_is_no_plan_is_refused(content, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"{file}: ")):
        read_plan(file)


@pytest.mark.parametrize("file", sorted(PLANS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_plans_are_read(file):
    runs = read_plan(file).grid()
    assert {run.warm for _, run in runs} == set(read_plan(file).choose.warm)


def test_a_plan_trains_whole_pairs_and_every_method_has_every_rate(tmp_path):
    one = read_plan(written(tmp_path / "mine.yaml"))
    assert (one.name, one.steps, one.methods["blame"]) == ("mine", 2, Credit(importance="blame"))
    grid = one.grid()
    assert [(run.warm, run.seed) for _, run in grid] == [(0, 0)] * 12 + [(0, 1)] * 12
    every = itertools.product(SMALL["tasks"], METHODS, SMALL["rates"])
    assert {(run.task, name, run.lr) for name, run in grid} == set(every)


# ---- what a page says


def made_up(run, model=None):
    """Better with fisher, best with blame; fisher likes the higher rate, the others the lower one; models and seeds differ."""
    named = {None: 0.0, "fisher": 0.02, "blame": 0.08}[run.credit.importance]
    liked = (run.lr > 1.5e-3) == (run.credit.importance == "fisher")
    luck = math.sin(run.warm * 7 + run.seed * 3 + 11 * named) / 500
    reward = 0.5 + named + 0.1 * liked + luck + 0.1 * (run.warm == 2)
    seconds = {"sample_seconds": 1.0, "importance_seconds": 1.0, "update_seconds": 2.0}
    return Record(run, str(run.warm), [{"reward": reward, **seconds}] * 2, reward)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The command, with trainings that are made up, in this process; and the runs that it trained."""
    done = []
    monkeypatch.setattr(training, "train", lambda run, model: done.append(run) or made_up(run))
    monkeypatch.setattr(study, "warm_model", lambda *_: None)
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers))
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    plan_file = str(written(tmp_path / "mine.yaml"))
    return (lambda *more: main(["learning", "--plan", plan_file, *folders, *more])), done


def test_rates_are_chosen_on_some_pairs_and_methods_judged_on_others(bench, tmp_path):
    command, done = bench
    assert command("--part", "choose") == 0
    assert len(done) == 24
    assert {run.warm for run in done} == {0}
    assert command() == 0
    judged = done[24:]
    assert {(run.credit.importance, run.lr) for run in judged} == {(None, 1e-3), ("fisher", 2e-3), ("blame", 1e-3)}
    assert Counter((run.warm, run.seed) for run in judged) == dict.fromkeys(itertools.product((1, 2, 3), (2, 3)), 6)

    page = (tmp_path / "out" / "learning_mine.md").read_text(encoding="utf-8")
    gains = {
        (task, name): [
            [by(name, rate, warm, seed, task) - by(None, 1e-3, warm, seed, task) for seed in (2, 3)]
            for warm in (1, 2, 3)
        ]
        for task in SMALL["tasks"]
        for name, rate in (("fisher", 2e-3), ("blame", 1e-3))
    }
    for task in SMALL["tasks"]:
        means = [sum(values) / 2 for values in gains[task, "fisher"]]
        test = stats.ttest_1samp(means, 0)
        low, high = test.confidence_interval()
        gain, most = sum(means) / 3, sum(map(sum, gains[task, "blame"])) / 6
        # Named once on each of two tasks, with p alike: Holm doubles it.
        line = f"{gain:+.3f} ({low:+.3f} to {high:+.3f}) | 6 of 6 | {gain / most:.2f} | {2 * test.pvalue:.2g} | **faster** |"
        assert line in page.partition(f"## {task}: mean reward over")[2].partition("\n## ")[0]
    assert "| control or explored |" in page
    assert "6 of 6 pairs are finished" in page
    written_runs = json.loads((tmp_path / "out" / "learning_mine.json").read_text(encoding="utf-8"))["runs"]
    assert {key: len(of) for key, of in written_runs.items()} == {"chosen_on": 24, "judged_on": 36}


def by(name, lr, warm, seed, task):
    return made_up(Run(task=task, credit=Credit(importance=name), lr=lr, warm=warm, seed=seed)).held_out


def test_an_interrupted_study_goes_on(bench, tmp_path, monkeypatch, capsys):
    command, done = bench
    go_on = training.train
    monkeypatch.setattr(training, "train", lambda *args: go_on(*args) if len(done) < 9 else ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        command()
    files = list((tmp_path / "runs").glob("*"))
    assert len(files) == len(done) == 9
    assert {study.read(file).run for file in files} == set(done)
    assert command("--finished") == 0
    assert "0 of 6 pairs are finished" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(training, "train", go_on)
    assert command() == 0
    assert len(done) == len(set(done)) == 24 + 36, "none was trained twice"


def ctrl_c():
    raise KeyboardInterrupt


def test_a_model_that_is_stuck_ends_the_study_with_its_words(bench, monkeypatch, capsys):
    def stuck(*_):
        raise warm_start.StuckError("task chain: it is stuck")

    monkeypatch.setattr(study, "warm_model", stuck)
    assert bench[0]() == 1
    assert "benchmarks learning: task chain: it is stuck" in capsys.readouterr().err


def test_a_record_is_found_by_all_that_it_depends_on(tmp_path):
    other = {"task": "chain", "lr": 1.0, "warm": 1, "seed": 1, "steps": 3, "prompts": 5, "copies": 3, "flips": 0.1}
    changed = [replace(RUN, **{key: value}) for key, value in other.items()]
    credits = {"importance": "fisher", "gate": "spare", "tau": 0.5, "beta": 1.0, "floor": 0.2, "probe": "last"}
    credits |= {"warmup_steps": 1, "only": "boost"}
    changed += [replace(RUN, credit=Credit(**{key: value})) for key, value in credits.items()]
    assert set(other) | {"credit"} == set(RUN.__dict__)
    assert set(credits) == set(RUN.credit.__dict__)
    files = {study.run_file(run, tmp_path) for run in [RUN, *changed]}
    assert len(files) == 1 + len(changed)
    study._keep(study.run_file(changed[-1], tmp_path), Record(changed[-1], "abc", [{"reward": 0.5}], 0.25))
    (kept,) = tmp_path.glob("*")
    assert study.read(kept) == Record(changed[-1], "abc", [{"reward": 0.5}], 0.25)


TWO_RATES = Plan(
    "x", "x", ("chain",), {"grpo": Credit()}, (1e-3, 2e-3), Pairs((0,), (0, 1)), Pairs((1,), (0, 1)), steps=2
)


def records_of(rewards):
    """Records of GRPO; `rewards` maps (rate, seed) to the mean reward."""
    return [
        ("grpo", Record(Run(task="chain", credit=Credit(), lr=lr, warm=0, seed=seed), "", [{"reward": reward}], reward))
        for (lr, seed), reward in rewards.items()
    ]


def test_a_rate_counts_where_all_of_its_pairs_are_finished():
    lucky = {(1e-3, 0): 0.4, (1e-3, 1): 0.5, (2e-3, 0): 0.9}
    assert comparison.chosen_rates(TWO_RATES, records_of(lucky)) == {("chain", "grpo"): 1e-3}
    assert comparison.chosen_rates(TWO_RATES, records_of(lucky | {(2e-3, 1): 0.1})) == {("chain", "grpo"): 2e-3}
    assert comparison.chosen_rates(TWO_RATES, []) == {("chain", "grpo"): 1e-3}


def test_what_began_with_other_weights_is_no_pair():
    """Kept models may have been lost, or made on another machine."""
    run = Run(task="chain", credit=Credit(), lr=1e-3, warm=0, seed=0)
    fisher, steps = replace(run, credit=Credit(importance="fisher")), [{"reward": 0.5}]
    for start, pairs in (("a", 1), ("b", 0)):
        records = [("grpo", Record(run, "a", steps, 0.0)), ("fisher", Record(fisher, start, steps, 0.0))]
        assert len(comparison.paired(comparison.by_run(records), "chain", "fisher")) == pairs
        plan = replace(TWO_RATES, methods={"grpo": Credit(), "fisher": fisher.credit})
        assert [note for note in comparison.notes(plan, [], records) if "not compared" in note] == [
            "1 trainings stand beside none of GRPO that began with the same weights: not compared."
        ][pairs:]


def test_no_two_pairs_see_the_same_problems():
    runs = [replace(RUN, warm=warm, seed=seed) for warm in range(9) for seed in range(9)]
    assert len({run.draw for run in runs}) == len(runs)


def test_steps_are_counted_on_a_mean_of_five():
    run = Run(task="chain", credit=Credit(), lr=1e-3, warm=0, seed=0)
    rewards = [0.3, 0.9, 0.9, 0.9, 0.9, 0.9], [0.3, 0.4]
    rows = comparison.by_run([("grpo", Record(run, "", [{"reward": x} for x in of], 0.0)) for of in rewards])
    assert rows["steps"].tolist() == [3, math.inf]


def test_p_is_over_models_and_corrected_for_their_number():
    estimate, p = mean_over_clusters([[1, 3], [4], [5, 6, 7]])
    low, high = stats.ttest_1samp([2, 4, 6], 0).confidence_interval()
    assert (estimate.value, estimate.low, estimate.high) == (4, low, high)
    assert p == stats.ttest_1samp([2, 4, 6], 0).pvalue
    for few in ([], [[1.0, 2.0]]):
        assert math.isnan(mean_over_clusters(few)[1])
    assert holm([0.01, math.nan, 0.04, 0.03]) == pytest.approx([0.03, math.nan, 0.06, 0.06], nan_ok=True)


@pytest.mark.slow
def test_two_workers_train_what_one_does(tmp_path, monkeypatch):
    """In processes of their own, from kept models that were never taught."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(warm_start, "teach", lambda *_: [1])
    monkeypatch.setattr(warm_start, "accuracy", lambda *_, greedy: 1.0)
    models = {warm: warm_start.warm_model("parallel", warm) for warm in (100, 101)}
    runs = [("grpo", replace(RUN, warm=warm, prompts=2)) for warm in models]
    settings = study.Settings(results=tmp_path / "runs", workers=2)
    records = study.records(settings, TWO_RATES, runs, lambda *_: None)
    assert [record.run for _, record in records] == [run for _, run in runs]
    for _, record in records:
        here = training.train(record.run, models[record.run.warm])
        assert (here.held_out, here.steps[0]["length"]) == (record.held_out, record.steps[0]["length"])


A_STUDY = """
import multiprocessing, os, pathlib, sys, time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from benchmarks.learning import study, verl
from verl_cpu.session import session

def train(run, model, folder):
    with session():  # turns the signal into SystemExit
        pathlib.Path(sys.argv[-1]).write_text(str(os.getpid()) + "\\n")
        time.sleep(600)

def work(file):
    sys.argv.append(file)
    study.warm_model, verl.train = (lambda *_: None), train
    study._train_through_verl(SimpleNamespace(task="chain", warm=0), pathlib.Path(file))

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), study._begin) as pool:
        [future.result() for future in [pool.submit(work, sys.argv[1]) for _ in range(3)]]
"""


@pytest.mark.slow
def test_a_worker_ends_with_a_study_that_was_killed(tmp_path):
    """Otherwise it waits for work, or continues a run of verl, for ever."""
    (tmp_path / "study.py").write_text(A_STUDY)
    told = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "study.py"), str(tmp_path / "pid")], env=told)
    while not (tmp_path / "pid").exists() or not (text := (tmp_path / "pid").read_text()).endswith("\n"):
        assert parent.poll() is None
        time.sleep(0.1)
    worker = psutil.Process(int(text))
    parent.kill()
    parent.wait()
    psutil.wait_procs([worker], timeout=PROCESS_S)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


# ---- through verl


def test_verl_is_told_what_the_small_trainer_does(tmp_path):
    pytest.importorskip("verl")
    from benchmarks.learning import verl

    run = replace(RUN, task="chain", credit=Credit(importance="decision", tau=0.85), lr=6e-4)
    assert {
        "algorithm.adv_estimator=oar",
        "algorithm.oar.importance=decision",
        "algorithm.oar.gate=two_level",
        "algorithm.oar.tau=0.85",
        "actor_rollout_ref.actor.optim.lr=0.0006",
        "actor_rollout_ref.rollout.n=2",
        "data.train_batch_size=4",
    } <= set(verl.overrides(run, tmp_path))
    plain = verl.overrides(replace(run, credit=Credit()), tmp_path)
    assert not [override for override in plain if "algorithm.oar" in override]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_a_run_through_verl(tmp_path, monkeypatch):
    """One step of real verl, Ray and vLLM. The model is random, so no reward differs and nothing is scored."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(warm_start, "teach", lambda *_: [1])
    monkeypatch.setattr(warm_start, "accuracy", lambda *_, greedy: 1.0)
    warm_start.warm_model("chain", 0)  # kept for the process that trains it
    methods = {"grpo": {}, "decision": {"importance": "decision"}}
    pairs = {"choose": {"warm": [], "seeds": []}, "judge": {"warm": [0], "seeds": [1]}}
    changes = {"tasks": ["chain"], "methods": methods, "named": ["decision"], "rates": [1e-3], "steps": 1, **pairs}
    file = written(tmp_path / "mine.yaml", through_verl=True, **changes)
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(["learning", "--plan", str(file), *folders]) == 0
    records = [study.read(file) for file in (tmp_path / "runs" / "verl").glob("*.json")]
    assert {record.run.credit.importance for record in records} == {None, "decision"}
    for record in records:
        (step,) = record.steps
        assert step["sample_seconds"] > 0 < step["update_seconds"]
        assert step["length"] > 1
    assert (tmp_path / "learning_mine.md").is_file()


def test_the_page_of_edges_is_made(capsys):
    """Processors round differently, and chance decides which of several equal weights is recalled."""
    gate_edges.main()
    pages = capsys.readouterr().out, EDGES.read_text(encoding="utf-8")
    made, committed = ([float(figure) for figure in re.findall(r"\d\.\d\d|nan", page)] for page in pages)
    assert made == pytest.approx(committed, abs=0.05, nan_ok=True)
