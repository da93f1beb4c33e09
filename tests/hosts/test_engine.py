"""verl's real FSDP engine with importance against a plain HuggingFace model: autograd, and a forward in float64 for each copy.

The engines run in torchrun processes on gloo (see engine/worker.py for what the CPU stands in for). Errors are relative
to the response's largest score.
"""

import pytest
import torch

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.request import IMPORTANCE, REPORT, SEGMENTS
from tests.hosts.engine import cases, world
from tests.hosts.engine.launch import error, launch, worst

pytestmark = pytest.mark.slow
pytest.importorskip("verl")

INEXACT = ("bf16", "draws64", "draws16", "random", "half", "hybrid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    world.make_model(path)
    return path


@pytest.fixture(scope="module")
def single(folder) -> dict:
    return launch("single", 1, folder)


@pytest.fixture(scope="module")
def double(folder) -> dict:
    return launch("double", 2, folder)


def test_the_padding_token_of_the_tests_is_the_tokenizers():
    assert world.make_tokenizer().pad_token_id == world.PAD


@pytest.mark.parametrize("case", cases.named(cases.SINGLE, *INEXACT))
def test_one_process_equals_a_plain_model(single, folder, case):
    """A fresh adapter (`lora`) changes nothing, so neither may the importance."""
    assert worst(single[case][0], cases.want(folder, case)) < cases.tolerance(case)


@pytest.mark.parametrize("case", cases.named(cases.DOUBLE, *INEXACT))
def test_two_processes_equal_a_plain_model(double, folder, case):
    for result in double[case]:
        assert worst(result, cases.want(folder, case)) < cases.tolerance(case)


def test_packed_equals_one_by_one(single):
    for row, alone in single["one by one"].items():
        assert error(alone[IMPORTANCE][0], single["packed fisher"][0][IMPORTANCE][row]) < 1e-5


def test_onward_reads_only_the_first_row_of_the_answer_with_the_probe_last(single, folder):
    assert worst(single["packed onward"][0], cases.want(folder, "onward last")) > 1e-3, "this case cannot tell"


@pytest.mark.parametrize(("case", "bound"), [("fisher", 0.2), ("onward", 0.2), ("oar_p", 0.5)])
def test_bf16_autocast_is_close(single, folder, case, bound):
    """bf16 has 8 bits: 2^-8 for each of the layers in between; ranks are what the gate uses."""
    assert 1e-5 < worst(single[f"bf16 {case}"][0], cases.want(folder, case)) < bound


def test_averaging_draws_averages(single, folder):
    """64 sign vectors: the mean differs from the first draw, and stays within what 64 draws can move."""
    many, one = (single[f"packed fisher{draws}"][0][IMPORTANCE] for draws in (" draws64", ""))
    for row in world.SCORED:
        assert error(many[row], one[row]) > 1e-3
        keep = many[row] > 0
        assert 0.05 < (many[row][keep].mean() / one[row][keep].mean()) < 20
    assert 1e-3 < worst(single["packed onward draws16"][0], cases.want(folder, "onward")) < 1.0


def test_random_importance_is_the_same_on_every_layout(single, double):
    (first,) = single["packed random"]
    for row in world.SCORED:
        one = first[IMPORTANCE][row]
        reasoning = first[SEGMENTS][row] == Segment.REASONING
        assert ((one > 0) & (one < 1) == reasoning).all()
        assert len(one[reasoning].unique()) == reasoning.sum()
        for result in [*single["packed random only"], *double["ulysses random"]]:
            assert torch.equal(result[IMPORTANCE][row], one)


@pytest.mark.parametrize(("case", "share"), [("packed oar_p half", 0.5), ("packed hybrid", 0.3)])
def test_a_budget_keeps_exact_scores_where_it_runs_copies(single, folder, case, share):
    """At least the most important token is found and exact; estimates stay below it, and none is zero."""
    exact = cases.want(folder, "oar_p")
    for row in world.SCORED:
        got, want = single[case][0][IMPORTANCE][row], exact[row]
        reasoning = want > 0
        hits = ((got - want).abs() < 1e-5 * want.max()) & reasoning
        assert 1 <= hits.sum() <= max(1, share * reasoning.sum() + 1)
        assert (got[reasoning] > 0).all()
        assert not got[~reasoning].any()


@pytest.mark.parametrize("case", ["oar_p half", "hybrid"])
def test_budgets_in_two_processes_equal_one(single, double, case):
    one = single[f"packed {case}"][0][IMPORTANCE]
    for result in double[f"fsdp2 {case}"]:
        for place, row in enumerate(result["rows"]):
            if row in world.SCORED:
                assert error(result[IMPORTANCE][place], one[row]) < 1e-5


def test_log_probs_and_entropy_equal_verls_own(single, double):
    """Exactly, where importance has passes of its own or none."""
    for case in cases.named(cases.SINGLE, "bf16"):
        (result,) = single[case]
        assert ("log_probs" in result) == ("only" not in case), case
        if "only" not in case:
            apart = "oar_p" in case or "random" in case
            assert result["log_probs_error"] <= (0 if apart else 2e-5), case
            assert result["entropy_error"] <= (0 if apart else 2e-5), case
    for case in cases.named(cases.DOUBLE):
        for result in double[case]:
            assert result["log_probs_error"] <= (0 if case == "fsdp2 oar_p" else 2e-5), case


def test_the_pass_is_deterministic(single):
    for a, b in zip(*(single[f"packed fisher{again}"][0][IMPORTANCE] for again in ("", " again")), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["fisher", "oar_p"])
def test_status_and_segments(single, case):
    (result,) = single[f"packed {case}"]
    assert [Status(int(report[0])).name for report in result[REPORT]] == world.STATUS
    for row in range(8):
        segments = result[SEGMENTS][row]
        if row in world.SCORED:
            assert torch.equal(segments.long(), world.segments_of(world.ROWS[row][1]))
        else:
            assert (segments == Segment.OUTSIDE).all()


def test_no_trace_is_left(single, double):
    """Weights, requires_grad, gradients, train mode, hooks, optimizer, scaler, three random states."""
    for results, table in ((single, cases.SINGLE), (double, cases.DOUBLE)):
        for case in cases.named(table):
            assert all(result["traces"] == [] for result in results[case]), case


def test_every_kind_of_trace_would_be_noticed(single):
    parts = ["grads", "hooks", "optimizer", "requires_grad", "scaler", "training", "weights"]
    assert single["noticed"] == sorted([*parts, "numpy_rng", "python_rng", "torch_rng"])


def test_training_goes_on_as_if_nothing_happened(single):
    after, fresh = single["grad_norms"]
    assert after == fresh > 0


def test_the_pass_reads_the_tensors_that_verl_moved_to_the_device(single):
    """On a GPU the micro-batch that comes in is on the CPU, and only verl's copy meets the model's hidden states."""
    assert single["moved"] == {"some": True, "same": True}


def test_the_engine_is_inert_without_a_request(single):
    """Losses, log-probs and weights of ordinary training are bit-identical to those of verl's own class."""
    plugin, host = single["inert"]["plugin"], single["inert"]["host"]
    assert plugin["class"].startswith("Oar")
    assert host["class"] == "HostEngine"
    assert plugin["norms"] == host["norms"]
    assert torch.equal(plugin["log_probs"], host["log_probs"])
    for name, weight in plugin["weights"].items():
        assert torch.equal(weight, host["weights"][name]), name
