import itertools
import json
import math
import random
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy import stats

from benchmarks import gate_edges
from benchmarks.__main__ import main
from benchmarks.candidates import learning as candidates
from benchmarks.learning import comparison, study, training
from benchmarks.learning.training import CONTROLS, Record, Run, credit, roll_out, update
from benchmarks.tiny.model import build_model
from benchmarks.tiny.tasks import TASKS, Parallel
from benchmarks.tiny.words import PAD
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import GATES, gate_of
from oar_plugin.credit.importance import IMPORTANCES
from tests.hosts.whole_run import LIMIT_S

PAGE = Path(gate_edges.__file__).parent / "results" / "gate_edges.md"
OWN = "python:oar_plugin.credit.importance.fisher:Fisher"
RUN = Run(task="parallel", method="grpo", lr=1e-3, seed=0, steps=2, prompts=2, copies=2, evaluate_every=2)
ASKED = {}


class Remembering(Parallel):
    def problem(self, rng):
        problem = super().problem(rng)
        return ASKED.setdefault(problem.prompt, problem)


TASK = Remembering("parallel", steps=2, filler=(1, 2), error_rate=0.2)


def demonstrations(model, prompt_BP, copies, max_new_tokens, generator):
    """In place of `sample`, every other one right: a model with random weights writes no answers."""
    rng, prompts = random.Random(0), [tuple(ids) for ids in prompt_BP.tolist() for _ in range(copies)]
    rows = [TASK.demonstration(ASKED[prompt], rng, 1.0 - number % 2) for number, prompt in enumerate(prompts)]
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


@pytest.fixture
def model():
    return build_model(0, hidden=16, layers=1)


@pytest.fixture
def rollout(model, monkeypatch):
    monkeypatch.setitem(TASKS, "parallel", TASK)
    monkeypatch.setattr(training, "sample", demonstrations)
    return roll_out(model, TASK, random.Random(0), torch.Generator(), prompts=2, copies=2)


def test_rollout_lays_out_segments_and_results(rollout):
    assert rollout.graded["reward"] == 0.5
    assert (rollout.advantage_B > 0).sum() == 2
    assert (rollout.segments_BL[:, : rollout.prompt_length] == Segment.OUTSIDE).all()
    assert ((rollout.segments_BL == Segment.ANSWER).sum(-1) == TASK.steps).all()
    assert (rollout.causal_BL.sum(-1) == TASK.steps).all()
    assert not (rollout.causal_BL & ~rollout.reasoning_BL).any()
    assert torch.equal(rollout.response_BL, rollout.segments_BL != Segment.OUTSIDE)
    assert torch.equal(rollout.mask_BL, rollout.token_BL != PAD)


@pytest.mark.parametrize("method", [*CONTROLS, *IMPORTANCES, OWN, f"python:{candidates.__name__}:FisherUndecided"])
def test_every_method_trains(method, model, rollout):
    """Its weights keep the mass of the reasoning, and importance leaves the model alone."""
    before = [parameter.clone() for parameter in model.parameters()]
    weight_BL, described = credit(replace(RUN, method=method), model, rollout, 0)
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert (weight_BL[~rollout.reasoning_BL] == 1).all()
    assert weight_BL[rollout.reasoning_BL].mean().item() == pytest.approx(1, rel=1e-4)
    assert (weight_BL.std() > 0) == (method not in ("grpo", "uniform"))
    if method == OWN:
        assert torch.equal(weight_BL, credit(replace(RUN, method="fisher"), model, rollout, 0)[0])
    if method == "oracle":
        others_BL = rollout.reasoning_BL & ~rollout.causal_BL
        assert described["weight_causal"] == weight_BL[rollout.causal_BL].mean() > described["weight_other"]
        assert described["weight_other"] == weight_BL[others_BL].mean() > 0
        assert described["recall"] == 1
    record = training.train(replace(RUN, method=method), model)
    assert [step["reward"] for step in record.steps] == [0.5, 0.5]
    assert set(record.held_out) == {0, 2}
    assert not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_update_raises_what_was_good(model, rollout):
    def gap():
        with torch.no_grad():
            row = model(rollout.token_BL).logits[:, :-1].log_softmax(-1)
        chosen = row.gather(-1, rollout.token_BL[:, 1:, None])[..., 0] * rollout.response_BL[:, 1:]
        return (chosen.sum(-1) * rollout.advantage_B).sum()

    before, optimizer = gap(), torch.optim.SGD(model.parameters(), lr=0.1)
    assert update(model, optimizer, rollout, torch.zeros(rollout.token_BL.shape))["gradient_norm"] == 0
    assert update(model, optimizer, rollout, rollout.causal_BL.float())["gradient_norm"] > 0
    assert gap() > before


def flat_gate(importance_BL, reasoning_BL, tau, beta, floor):
    return torch.ones(importance_BL.shape)


def test_settings_reach_the_package(model, rollout, monkeypatch):
    requests, importance_BL, fisher = [], rollout.causal_BL.float(), replace(RUN, method="fisher")
    monkeypatch.setattr(training, "batch_importance", lambda _, request, *__: requests.append(request) or importance_BL)
    for step in range(3):
        credit(replace(fisher, warmup_steps=2), model, rollout, step)
    assert [request.probe for request in requests] == ["last", "last", "answer_mean"]
    assert (credit(replace(fisher, gate=f"python:{__name__}:flat_gate"), model, rollout, 0)[0] == 1).all()
    reshaped_BL, _ = credit(replace(fisher, positive_only=True), model, rollout, 0)
    assert (reshaped_BL[rollout.advantage_B < 0] == 1).all()
    assert (reshaped_BL[rollout.advantage_B > 0] != 1).any()
    assert {name: replace(RUN, gate=name).config().quantile for name in GATES} == {n: g.tau for n, g in GATES.items()}
    runs = study.Settings(tau=0.7, gate="bi_level", warm_starts=3).grid((5,))
    assert [(run.tau, run.gate, run.warm_start) for run in runs] == [(None, OarConfig().gate, 2), (0.7, "bi_level", 2)]


def test_a_record_is_found_by_all_that_it_depends_on(tmp_path):
    assert RUN.file(tmp_path).name == "parallel-grpo-lr0.001-s0-a62d016e09.json", "records of this format are kept"
    assert replace(RUN, beta=1.0).file(tmp_path) != RUN.file(tmp_path)


def trained(run, model):
    """Rewards that rise: faster for the oracle and with its seed, fastest at 1e-3."""
    gain = 0.01 + 0.0012 * (run.method == "oracle") * (10 + run.seed) - abs(run.lr - 1e-3)
    seconds = {"sample_seconds": 1.0, "importance_seconds": 0.5, "update_seconds": 2.0}
    steps = [{"reward": 0.3 + gain * step, **seconds} for step in range(run.steps)]
    return Record(run, steps, {0: 0.3, run.steps: 0.5})


def against_grpo(seeds):
    differences = [9.5 * 0.0012 * (10 + seed) for seed in seeds]
    low, high = stats.ttest_1samp(differences, 0).confidence_interval()
    count = f"{len(differences)} of {len(differences)}"
    return f"| oracle | 0.001 | {np.mean(differences):.3g} ({low:.3g} to {high:.3g}) | {count} | "


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", trained)
    monkeypatch.setattr(study, "learned_model", lambda *_: None)
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    return lambda arguments: main(["learning", *arguments.split(), *folders])


@pytest.mark.slow
def test_rates_are_chosen_and_judged_on_different_seeds(bench, tmp_path, monkeypatch):
    small = "--methods grpo oracle --steps 20 --lr 1e-3 2e-3 --choose-seeds 0 1 --seeds 2 3 4"
    assert bench(small) == 0
    runs = [study.read(file).run for file in (tmp_path / "runs").iterdir()]
    at_all_rates = [(seed, lr) for seed in (0, 1) for lr in (1e-3, 2e-3)]
    wanted = [*at_all_rates, *((seed, 1e-3) for seed in (2, 3, 4))]
    assert sorted((run.seed, run.lr) for run in runs if run.method == "oracle") == wanted
    page = tmp_path / "out" / "learning_two_level.md"
    assert against_grpo((2, 3, 4)) in page.read_text()
    said = "chosen by mean reward on seeds [0, 1]; methods are judged on seeds [2, 3, 4]."
    for text in ("| faster |", said, "Every method had the same grid"):
        assert text in page.read_text()
    assert page.with_suffix(".png").stat().st_size > 10_000
    written = json.loads(page.with_suffix(".json").read_text())["runs"]
    kept = {of: [(one["run"]["seed"], len(one["steps"])) for one in every] for of, every in written.items()}
    assert kept["chosen_on"] == [(seed, 20) for seed in (0, 1) for _ in range(4)]
    assert kept["judged_on"] == [(seed, 20) for seed in (2, 3, 4) for _ in range(2)]

    monkeypatch.setattr(comparison, "draw", lambda *_: Figure())
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    found = page.read_text().partition("## ")[2]
    assert bench(small) == 0
    assert page.read_text().partition("## ")[2] == found

    for file in (tmp_path / "runs").glob("*oracle-lr0.002*"):
        file.unlink()
    assert bench(f"{small} --finished") == 0
    for text in ("did not have the same grid", "the records do not say on what machine"):
        assert text in page.read_text()
    same_scale = "--variants --steps 20"
    assert bench(same_scale) == 0
    assert against_grpo(range(5)) in page.with_name("learning_variants.md").read_text()
    assert bench("--variants --steps 21") == bench(f"{same_scale} --prompts 3") == 2


def test_finished_runs_of_two_gates_with_one_name_are_not_taken_for_one(bench, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    run = replace(RUN, gate="python:oar_plugin.credit.gate:bi_level")
    run.file(tmp_path / "runs").write_text(json.dumps(asdict(trained(run, None))))
    assert bench("--variants --steps 2 --prompts 2 --copies 2 --evaluate-every 2") == 2
    said = f"--results, gates: a page would take bi_level and {run.gate} for one"
    assert said in " ".join(capsys.readouterr().err.split())


def test_help_offers_every_task_and_method(capsys):
    with pytest.raises(SystemExit):
        main(["learning", "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert {*CONTROLS, *IMPORTANCES, *GATES} <= words
    assert words & set(TASKS) == set(TASKS) - {"lookup", "tracking"}


def learned(method, rewards, seeds=range(3), lr=1e-3):
    run = replace(RUN, method=method, steps=len(rewards), lr=lr)
    return [Record(replace(run, seed=seed), [{"reward": x * (1 + seed / 64)} for x in rewards]) for seed in seeds]


def runs_of(*records):
    return comparison.by_run(comparison.by_step(itertools.chain(*records)))


def lines(*records):
    fisher, grpo = (("parallel", method, 1e-3) for method in ("fisher", "grpo"))
    return comparison.compared("", runs_of(*records), [(fisher, grpo)]).rows


def test_steps_are_compared_at_the_highest_threshold_that_both_reach():
    slow, fast = learned("grpo", [0.3, 0.5, 0.5, 0.9, 0.9, 0.9, 0.9]), learned("fisher", [0.3, *[0.9] * 6])
    assert runs_of(slow)["to 60%"].tolist() == [5, 5, 5], "the mean of up to five steps, not the step's own reward"
    assert runs_of(learned("grpo", [0.3, 0.4]))["to 60%"].tolist() == [math.inf] * 3
    ((_, _, _, ahead, steps, _, _, p_steps, _),) = lines(slow, fast)
    assert (ahead, steps, p_steps) == ("3 of 3", "-1 to 80%", f"{stats.wilcoxon([-1, -1, -1]).pvalue:.2g}")


def test_only_runs_of_one_seed_are_compared():
    assert lines(learned("fisher", [0.4]), learned("grpo", [0.3], seeds=[7])) == []
    (one_pair,) = lines(learned("fisher", [0.4], seeds=[0]), learned("grpo", [0.3]))
    assert one_pair[2:] == ["0.1", "1 of 1", "-", "-", "-", "-", "not judged"]


def test_a_rate_that_was_run_less_often_is_not_chosen():
    lucky, usual = learned("grpo", [0.9], seeds=[0], lr=4e-3), learned("grpo", [0.5], lr=2e-3)
    assert comparison.best(runs_of(lucky, usual, learned("grpo", [0.4]))) == [("parallel", "grpo", 2e-3)]


def test_verl_is_told_what_the_small_trainer_does(tmp_path):
    pytest.importorskip("verl")
    from benchmarks.learning import verl

    run = Run(task="chain", method="onward", lr=6e-4, seed=3, prompts=4, copies=2, tau=0.85, gate="two_level")
    assert {
        "algorithm.adv_estimator=oar",
        "algorithm.oar.importance=onward",
        "algorithm.oar.gate=two_level",
        "algorithm.oar.tau=0.85",
        "actor_rollout_ref.actor.optim.lr=0.0006",
        "actor_rollout_ref.rollout.n=2",
        "data.train_batch_size=4",
    } <= set(verl.overrides(run, tmp_path))
    plain = verl.overrides(replace(run, method="grpo"), tmp_path)
    assert not [override for override in plain if "algorithm.oar" in override]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_a_run_through_verl(tmp_path, monkeypatch):
    """One step of real verl, Ray and vLLM. The model is a random one, so no reward differs and nothing is scored: what
    importance does there is seen in tests/recipes."""
    pytest.importorskip("vllm")
    monkeypatch.setattr(study, "learned_model", lambda *_: build_model(0, heads=2))
    monkeypatch.setattr("benchmarks.learning.verl.HELD_OUT", 4)
    small = "--tasks chain --methods onward --seeds 1 --steps 1 --prompts 4 --copies 2 --gate two_level"
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(["learning", "--through-verl", *small.split(), *folders]) == 0
    (record,) = (study.read(file) for file in (tmp_path / "runs" / "verl").glob("*.json"))
    (step,) = record.steps
    assert sorted(record.held_out) == [0, 1]
    assert step["sample_seconds"] > 0 < step["update_seconds"]
    assert step["length"] > 1
    assert "Real verl, Ray and vLLM on a CPU" in (tmp_path / "learning_verl.md").read_text()


@pytest.mark.parametrize("gate", ["ranked", "winsorised", "bounded"])
@settings(max_examples=50)
@given(scores=st.lists(st.floats(0, 1e6), min_size=1, max_size=8), beta=st.floats(0, 5), tau=st.floats(0, 1))
def test_candidate_gates_keep_the_mass_and_the_order(gate, scores, beta, tau):
    importance_BL = torch.tensor([[7.0, *scores, 9.0]] * 2, dtype=torch.float64)
    keep_BL = torch.tensor([[False, *[True] * len(scores), False], [False] * (len(scores) + 2)])
    weight_BL = gate_of(f"python:{candidates.__name__}:{gate}").weights(importance_BL, keep_BL, tau, beta, 0.1)
    assert (weight_BL[~keep_BL] == 1).all()
    weight, score = weight_BL[keep_BL], importance_BL[keep_BL]
    assert (weight > 0).all()
    assert weight.sum().item() == pytest.approx(len(scores), rel=1e-4)
    assert (weight[score.argsort()].diff() >= -1e-4).all()


def test_one_large_score_does_not_silence_the_others():
    scores = torch.tensor([[1e6, *map(float, range(1, 20))]]), torch.ones(1, 20, dtype=torch.bool), 0.4, 2.0, 0.1
    assert candidates.ranked(*scores)[0, -1] > 1
    assert candidates.winsorised(*scores)[0, -1] > 1
    largest = GATES["bi_level"].weights(*scores).max()
    assert candidates.bounded(*scores).max() < largest
    for bound in (1.5, 2.0, 3.0):
        assert candidates.bounded(*scores, largest=bound).max() <= bound < largest


def test_the_page_of_edges_is_made(capsys):
    """Other processors round otherwise, and among equal weights chance decides what is recalled."""
    gate_edges.main()
    (made, figures), (kept, committed) = (
        (re.sub(r"\d\.\d\d|nan", "", page), [float(x) for x in re.findall(r"\d\.\d\d|nan", page)])
        for page in (capsys.readouterr().out, PAGE.read_text())
    )
    assert made == kept
    assert figures == pytest.approx(committed, abs=0.05, nan_ok=True)
