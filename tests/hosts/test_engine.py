"""verl's real FSDP engine with importance against plain autograd on a plain HuggingFace model.

The engines run in torchrun processes on gloo (see engine/worker.py for what the CPU stands in for). Errors are relative
to the response's largest score.
"""

from pathlib import Path

import pytest
import torch

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.request import IMPORTANCE, REPORT, SEGMENTS
from tests.hosts.engine import world
from tests.hosts.engine.launch import error, launch, worst

pytestmark = pytest.mark.slow
pytest.importorskip("verl")

SINGLE = ["packed", "dynamic", "importance_only", "padded", "checkpointing", "offload", "fsdp1"]
DOUBLE = ["fsdp2", "fsdp2_checkpointing", "fsdp2_padded", "ulysses"]
ONWARD = [
    "onward",
    "onward_dynamic",
    "onward_only",
    "onward_padded",
    "onward_checkpointing",
    "onward_lora",
    "onward_fsdp1",
]
ONWARD_DOUBLE = ["fsdp2_onward", "fsdp1_onward", "ulysses_onward"]
# <g, e> adds up terms of both signs, and what is left of them has fewer digits than a norm.
OTHERS = {"entropy": 1e-5, "own": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    world.make_model(path)
    return path


@pytest.fixture(scope="module")
def single(folder) -> dict:
    return launch("single", 1, folder)


@pytest.fixture(scope="module")
def double(folder) -> dict:
    return launch("double", 2, folder)


@pytest.fixture(scope="module")
def fisher(folder):
    return world.reference(folder)


@pytest.mark.parametrize("case", SINGLE)
def test_one_process_equals_plain_autograd(single, fisher, case):
    assert worst(single[case], fisher) < 1e-5


def test_packed_equals_one_by_one(single):
    for row, alone in single["one_by_one"].items():
        assert error(alone[IMPORTANCE][0], single["packed"][IMPORTANCE][row]) < 1e-5


@pytest.mark.parametrize("case", DOUBLE)
def test_two_processes_equal_plain_autograd(double, fisher, case):
    for result in double[case]:
        assert worst(result, fisher) < 1e-5


@pytest.mark.parametrize("probe", ["last", "answer_joint"])
def test_other_probes(single, double, folder, probe):
    want = world.reference(folder, probe=probe)
    assert worst(single[f"fisher_{probe}"], want) < 1e-5
    if probe == "answer_joint":
        for result in double["ulysses_joint"]:
            assert worst(result, want) < 1e-5


@pytest.mark.parametrize("probe", ["last", "answer_mean", "answer_joint"])
def test_oar_g_equals_plain_autograd(single, double, folder, probe):
    """5e-3: float32's rounding of P_noisy - P at sigma = 1e-3 (see credit/test_golden.py); the reference is float64 there."""
    want = world.reference(folder, importance="oar_g", probe=probe)
    tolerance = 1e-4 if probe == "answer_joint" else 5e-3
    assert worst(single[f"oar_g_{probe}"], want) < tolerance
    if probe == "answer_mean":
        for result in double["ulysses_oar_g"]:
            assert worst(result, want) < tolerance


@pytest.mark.parametrize("case", ONWARD)
def test_onward_in_one_process_equals_plain_autograd(single, folder, case):
    """The chunked sum over the reasoning's rows against one over all logits; the cube root triples what float32 rounds."""
    assert worst(single[case], world.reference(folder, importance="onward")) < 1e-5


def test_onward_reads_only_the_first_row_of_the_answer_with_the_probe_last(single, folder):
    want = world.reference(folder, importance="onward", probe="last")
    assert worst(single["onward_last"], want) < 1e-5
    assert worst(single["onward"], want) > 1e-3, "this case cannot tell"


@pytest.mark.parametrize("case", ONWARD_DOUBLE)
def test_onward_in_two_processes_equals_plain_autograd(double, folder, case):
    want = world.reference(folder, importance="onward")
    for result in double[case]:
        assert worst(result, want) < 1e-5


def test_onward_is_close_in_bf16_and_averages_its_draws(single, folder):
    want = world.reference(folder, importance="onward")
    assert 1e-5 < worst(single["onward_bf16"], want) < 0.2
    assert 1e-3 < worst(single["onward_draws"], want) < 1.0


@pytest.mark.parametrize("name", OTHERS)
def test_entropy_and_an_importance_of_ones_own_equal_plain_autograd(single, double, folder, name):
    want = world.reference(folder, importance=name)
    for result in [single[name], single[f"{name}_only"], *double[f"ulysses_{name}"]]:
        assert worst(result, want) < OTHERS[name]


def test_random_importance_is_the_same_on_every_layout(single, double):
    for row in world.SCORED:
        one = single["random"][IMPORTANCE][row]
        reasoning = single["random"][SEGMENTS][row] == Segment.REASONING
        assert ((one > 0) & (one < 1) == reasoning).all()
        assert len(one[reasoning].unique()) == reasoning.sum()
        for result in [single["random_only"], *double["ulysses_random"]]:
            assert torch.equal(result[IMPORTANCE][row], one)


def test_random_importance_makes_no_forward_of_its_own(single):
    assert single["random"]["log_probs_error"] == 0
    assert "log_probs" not in single["random_only"]


def test_lora_before_training_equals_the_base_model(single, fisher):
    """A fresh adapter changes nothing, so neither may the importance."""
    assert worst(single["lora"], fisher) < 1e-5


def test_bf16_autocast_is_close(single, fisher):
    """bf16 has 8 bits: 2^-8 for each of the layers in between; ranks are what the gate uses."""
    assert worst(single["bf16"], fisher) < 0.2
    assert worst(single["bf16"], fisher) > 1e-5, "this case did not run in bf16"


def test_averaging_draws_averages(single, fisher):
    """64 sign vectors: the mean differs from the first draw, and stays within what 64 draws can move."""
    many, one = single["draws"][IMPORTANCE], single["packed"][IMPORTANCE]
    for row in world.SCORED:
        assert error(many[row], one[row]) > 1e-3
        keep = many[row] > 0
        assert 0.05 < (many[row][keep].mean() / one[row][keep].mean()) < 20


@pytest.mark.parametrize("case", ["packed", "dynamic", "padded", "checkpointing", "offload", "lora", *OTHERS])
def test_fused_log_probs_and_entropy_equal_verls_own(single, case):
    assert single[case]["log_probs_error"] < 2e-5
    assert single[case]["entropy_error"] < 2e-5


@pytest.mark.parametrize("case", DOUBLE)
def test_fused_log_probs_equal_verls_own_on_two_processes(double, case):
    for result in double[case]:
        assert result["log_probs_error"] < 2e-5


def test_importance_alone_returns_no_log_probs(single):
    assert "log_probs" not in single["importance_only"]


def test_the_pass_is_deterministic(single):
    for a, b in zip(single["packed"][IMPORTANCE], single["packed_again"][IMPORTANCE], strict=True):
        assert torch.equal(a, b)


def test_status_and_segments(single):
    status = [Status(int(report[0])).name for report in single["packed"][REPORT]]
    assert status == world.STATUS
    for row in world.SCORED:
        assert torch.equal(single["packed"][SEGMENTS][row].long(), world.segments_of(world.ROWS[row][1]))
    for row in set(range(8)) - set(world.SCORED):
        assert (single["packed"][SEGMENTS][row] == Segment.OUTSIDE).all()


def test_no_trace_is_left(single, double):
    """Weights, requires_grad, gradients, train mode, hooks, optimizer, scaler, three random states."""
    cases = [single[c] for c in [*SINGLE, *ONWARD, *OTHERS, "random", "lora", "bf16", "oar_g_answer_mean"]]
    cases += [result for case in [*DOUBLE, *ONWARD_DOUBLE] for result in double[case]]
    for case in cases:
        assert case["traces"] == []


def test_training_goes_on_as_if_nothing_happened(single):
    assert single["grad_norm"] == single["fresh_grad_norm"] > 0


def test_the_pass_reads_the_tensors_that_verl_moved_to_the_device(single):
    """On a GPU the micro-batch that comes in is on the CPU, and only verl's copy meets the model's hidden states."""
    assert single["moved"] == {"some": True, "same": True}


def test_every_kind_of_trace_would_be_noticed(single):
    kinds = [
        "grads",
        "hooks",
        "numpy_rng",
        "optimizer",
        "python_rng",
        "requires_grad",
        "scaler",
        "torch_rng",
        "training",
    ]
    assert single["noticed"] == sorted([*kinds, "weights"])


def test_the_engine_is_inert_without_a_request(single):
    """Losses, log-probs and weights of ordinary training are bit-identical to those of verl's own class."""
    plugin, host = single["inert"]["plugin"], single["inert"]["host"]
    assert plugin["class"].startswith("Oar")
    assert host["class"] == "HostEngine"
    assert plugin["norms"] == host["norms"]
    assert torch.equal(plugin["log_probs"], host["log_probs"])
    for name, weight in plugin["weights"].items():
        assert torch.equal(weight, host["weights"][name]), name
