import inspect
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy import stats

from benchmarks import gate_edges
from benchmarks.__main__ import main
from benchmarks.candidates.learning import gates, importance
from benchmarks.learning import alignment, comparison, study, training
from benchmarks.learning.training import CONTROLS, Record, Run, credit, describe_weights, update
from benchmarks.study import silent
from benchmarks.tiny.model import build_model
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.words import PAD
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import GATES, gate_of
from oar_plugin.credit.importance import IMPORTANCES
from tests.benchmarks.rollouts import TASK, demonstrated, demonstrations

RESULTS = Path(gate_edges.__file__).parent / "results"
OWN = "python:oar_plugin.credit.importance.fisher:Fisher"
RUN = Run(task="parallel", method="grpo", lr=1e-3, seed=0, steps=2, prompts=2, copies=2, evaluate_every=2)


def named(module, kind):
    """What a candidate's module defines, as a setting names it."""
    own = [name for name, value in vars(module).items() if kind(value) and value.__module__ == module.__name__]
    return [f"python:{module.__name__}:{name}" for name in own if not name.startswith("_")]


@pytest.fixture
def model():
    return build_model(0, hidden=16, layers=1)


@pytest.fixture
def rollout(model):
    return demonstrated(model)


@pytest.fixture
def demonstrating(monkeypatch):
    monkeypatch.setitem(TASKS, "parallel", TASK)
    monkeypatch.setattr("benchmarks.learning.rollout.sample", demonstrations)


def test_rollout_lays_out_segments_and_results(rollout):
    assert rollout.graded["reward"] == 0.5
    assert (rollout.advantage_B > 0).sum() == 2
    assert (rollout.segments_BL[:, : rollout.prompt_length] == Segment.OUTSIDE).all()
    assert ((rollout.segments_BL == Segment.ANSWER).sum(-1) == TASK.steps).all()
    assert (rollout.causal_BL.sum(-1) == TASK.steps).all()
    assert not (rollout.causal_BL & ~rollout.reasoning_BL).any()
    assert torch.equal(rollout.response_BL, rollout.segments_BL != Segment.OUTSIDE)
    assert torch.equal(rollout.mask_BL, rollout.token_BL != PAD)


@pytest.mark.parametrize("method", [*CONTROLS, *IMPORTANCES, OWN, *named(importance, inspect.isclass)])
def test_every_method_trains(method, model, rollout, demonstrating):
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
        assert described["weight_causal"] > described["weight_other"] > 0
    record = training.train(replace(RUN, method=method), model)
    assert [step["reward"] for step in record.steps] == [0.5, 0.5]
    assert set(record.held_out) == {0, 2}
    assert not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert Record.from_values({**asdict(record), "seconds": 1.0}) == record


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


def test_recall_counts_results_among_the_highest_scores():
    importance_BL, usable_BL = torch.tensor([[0.1, 0.9, 0.5, 0.8]]), torch.ones(1, 4, dtype=torch.bool)
    described = describe_weights(importance_BL, importance_BL, usable_BL, torch.tensor([[False, True, True, False]]))
    assert described == pytest.approx({"weight_causal": 0.7, "weight_other": 0.45, "recall": 0.5})


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
    gain = 0.01 + 0.001 * (run.method == "oracle") * (10 + run.seed) - abs(run.lr - 1e-3)
    seconds = {"sample_seconds": 1.0, "importance_seconds": 0.5, "update_seconds": 2.0}
    return Record(
        run, [{"reward": 0.3 + gain * step, **seconds} for step in range(run.steps)], {0: 0.3, run.steps: 0.5}
    )


def against_grpo(seeds):
    differences = [9.5 * 0.001 * (10 + seed) for seed in seeds]
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

    monkeypatch.setattr(comparison, "draw", lambda *_: Figure())
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    found = page.read_text().partition("## ")[2]
    for again in (small, f"--from {page.with_suffix('.json')}"):
        assert bench(again) == 0
        assert page.read_text().partition("## ")[2] == found

    for file in (tmp_path / "runs").glob("*oracle-lr0.002*"):
        file.unlink()
    assert bench(f"{small} --finished") == 0
    assert "did not have the same grid" in page.read_text()
    assert bench("--variants --steps 20") == 0
    assert against_grpo(range(5)) in page.with_name("learning_variants.md").read_text()
    assert bench("--variants --steps 21") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--methods magic", "--methods magic: unknown; allowed: fisher, .* or grpo, uniform, oracle"),
        ("--methods python:oar_plugin.config:nothing", "--methods python:.*: cannot be imported"),
        ("--methods python:oar_plugin.config:OarConfig", "derived from"),
        ("--tasks lookup", "--tasks lookup: allowed are parallel, "),  # too hard for a warm start of two minutes
        ("--gate magic", "gate='magic': unknown; allowed: two_level, bi_level"),
        ("--copies 1", "--copies must be at least 2"),
        ("--warm-starts 0", "--warm-starts 0: must be at least 1"),
        ("--alignment 1", "--alignment 1: must be at least 2"),
        ("--lr 1e-3 2e-3", "--lr: of several rates one is chosen on --choose-seeds"),
        ("--lr 1e-3 2e-3 --choose-seeds 1 2 --seeds 2 3", "--choose-seeds and --seeds share 2"),
        ("--through-verl --methods oracle", "--through-verl: uniform, oracle"),
        ("--through-verl --positive-only", "--through-verl: .*--positive-only"),
        ("--finished", "leave --finished out"),
        (f"--from {RESULTS / 'run_cpu.json'}", "holds no runs"),
        ("--from nowhere.json", "--from nowhere.json: there is no such file"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_trained(bench, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained"))
    assert bench(arguments) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_help_offers_every_task_and_method(capsys):
    with pytest.raises(SystemExit):
        main(["learning", "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert {*CONTROLS, *IMPORTANCES, *GATES} <= words
    assert words & set(TASKS) == set(TASKS) - {"lookup", "tracking"}


def test_a_committed_page_is_shown_again(capsys):
    assert main(["learning", "--from", str(RESULTS / "learning_cpu.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "did not have the same grid of learning rates on the same seeds (parallel, parallel_wordy, chain," in shown


def arm(method, rewards, seeds=range(3), **changes):
    run = replace(RUN, method=method, steps=len(rewards), **changes)
    records = [Record(replace(run, seed=seed), [{"reward": x * (1 + seed / 64)} for x in rewards]) for seed in seeds]
    return comparison.arms(records, "parallel")[0]


def test_steps_are_compared_at_the_highest_threshold_that_both_reach():
    slow, fast = arm("grpo", [0.3, 0.5, 0.5, 0.9, 0.9, 0.9, 0.9]), arm("fisher", [0.3, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    assert slow.reached(0.6).tolist() == [5, 5, 5], "the mean of up to five steps, not the step's own reward"
    assert slow.reached(0.95).tolist() == [math.inf] * 3
    found = comparison.compare(fast, slow)
    assert (found.steps, found.ahead) == ("-1 to 80%", "3 of 3")
    assert found.p_steps == pytest.approx(stats.wilcoxon([-1, -1, -1]).pvalue)
    assert comparison.compare(fast, arm("grpo", [0.3], seeds=[7])) is None
    assert math.isnan(comparison.compare(arm("fisher", [0.3], seeds=[0]), arm("grpo", [0.4])).p)


def test_a_rate_that_was_run_less_often_is_not_chosen():
    lucky, usual = arm("grpo", [0.9], seeds=[0], lr=4e-3), arm("grpo", [0.5], lr=2e-3)
    assert comparison.best([lucky, usual, arm("grpo", [0.4])]) == [usual]


def test_alignment_of_known_gradients(monkeypatch):
    """Two coordinates: the average is (3, 4); a method that turns one of them round makes 3 - 4 of 7 of the progress."""
    model, rollout = torch.nn.Linear(2, 1, bias=False), SimpleNamespace(token_BL=torch.zeros(1, 1))
    monkeypatch.setattr(alignment, "_rollouts", lambda run, model, count, seed: [rollout] * count)
    monkeypatch.setattr(alignment, "_gradient", lambda *of: torch.tensor([3.0, 4.0 * of[-1].item()]))
    monkeypatch.setattr(alignment, "credit", lambda run, *_: (torch.tensor(1.0 if run.method == "grpo" else -1.0), {}))
    aligned = alignment.align([RUN, replace(RUN, method="random")], model, 2, silent)
    assert aligned["grpo"] == {"cosine": pytest.approx([1.0, 1.0]), "progress": pytest.approx([1.0, 1.0])}
    assert aligned["random"] == {"cosine": pytest.approx([-7 / 25] * 2), "progress": pytest.approx([-1 / 7] * 2)}


def test_alignment_trains_nothing(model, demonstrating, tmp_path, monkeypatch, capsys):
    before = [parameter.clone() for parameter in model.parameters()]
    monkeypatch.setattr(study, "learned_model", lambda *_: model)
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained"))
    small = "--methods grpo random --alignment 2 --prompts 2 --copies 2 --lr 1e-3 2e-3"
    assert main(["learning", *small.split(), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" random ") == 1
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("gate", named(gates, inspect.isfunction))
@settings(max_examples=50)
@given(scores=st.lists(st.floats(0, 1e6), min_size=1, max_size=8), beta=st.floats(0, 5), tau=st.floats(0, 1))
def test_candidate_gates_keep_the_mass_and_the_order(gate, scores, beta, tau):
    importance_BL = torch.tensor([[7.0, *scores, 9.0]] * 2, dtype=torch.float64)
    keep_BL = torch.tensor([[False, *[True] * len(scores), False], [False] * (len(scores) + 2)])
    weight_BL = gate_of(gate).weights(importance_BL, keep_BL, tau, beta, 0.1)
    assert (weight_BL[~keep_BL] == 1).all()
    weight, score = weight_BL[keep_BL], importance_BL[keep_BL]
    assert (weight > 0).all()
    assert weight.sum().item() == pytest.approx(len(scores), rel=1e-4)
    assert (weight[score.argsort()].diff() >= -1e-4).all()


def test_one_large_score_does_not_silence_the_others():
    importance_BL, keep_BL = torch.tensor([[1e6, *map(float, range(1, 20))]]), torch.ones(1, 20, dtype=torch.bool)
    assert gates.ranked(importance_BL, keep_BL)[0, -1] > 1
    assert gates.winsorised(importance_BL, keep_BL)[0, -1] > 1
    assert gates.bounded(importance_BL, keep_BL).max() < gates.bi_level(importance_BL, keep_BL).max()


def test_the_table_of_edges_is_made(capsys):
    gate_edges.main()
    pages = capsys.readouterr().out, (RESULTS / "gate_edges.md").read_text()
    made, kept = ([line.rsplit("|", 6)[0] for line in page.split("\n") if line.startswith("|")] for page in pages)
    assert made == kept
