"""verl's real Megatron engine with importance against plain autograd on a plain HuggingFace model.

The engines run in torchrun processes on gloo, with the stand-ins of
oar_plugin/hosts/verl/cpu/megatron.py for CUDA and TransformerEngine.
Errors are relative to the response's largest score; the reference is float64, the engines are float32.
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
pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")

# With pooled logits and the Fisher norm, each in one or two processes.
FISHER = [
    "tp2", "tp2_sp", "tp2_sp_dynamic", "tp2_sp_only", "tp2_sp_padded", "tp2_sp_recompute_full",
    "tp2_sp_recompute_selective", "pp2", "pp2_dynamic", "pp2_only", "pp2_recompute_full", "pp2_vpp2", "pp2_vpp2_dynamic",
    "cp2", "cp2_dynamic", "cp2_padded", "dp2", "dp2_dynamic",
]  # fmt: skip
JOINT = ["tp2_joint", "pp2_vpp2_joint"]
OAR_G = ["pp2_oar_g", "pp2_vpp2_oar_g"]
ONWARD = ["tp2_onward", "tp2_sp_onward", "tp2_sp_onward_only", "pp2_onward", "pp2_vpp2_onward", "cp2_onward"]
# <g, e> adds up terms of both signs, and what is left of them has fewer digits than a norm.
OTHERS = {"entropy": 1e-5, "own": 1e-4}
TIED = ["tp2_sp_tied", "pp2_tied"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    world.make_model(path, layers=4)
    world.make_model(path / "tied", tied=True, layers=4)
    return path


@pytest.fixture(scope="module")
def double(folder) -> dict:
    return launch("double", 2, folder, "megatron_worker")


@pytest.fixture(scope="module")
def eight(folder) -> dict:
    return launch("eight", 8, folder, "megatron_worker")


def reference(folder, **kwargs):
    return world.reference(folder, dtype=torch.float64, **kwargs)


def test_an_answer_crosses_a_context_parallel_border():
    """What `cp2` and `eight` are to show: rows of one answer in two chunks of the zigzag, of padded length 32."""
    prompt, response = world.encode()[3]
    assert len(prompt) + len(response) == 32
    answer = (world.segments_of(world.ROWS[3][1]) == Segment.ANSWER).nonzero()[:, 0] + len(prompt) - 1
    assert len({int(at) // (32 // 4) for at in answer}) == 2


@pytest.mark.parametrize("case", FISHER)
def test_every_rank_of_every_layout_equals_plain_autograd(double, folder, case):
    want = reference(folder)
    for result in double[case]:
        assert worst(result, want) < TOLERANCE


@pytest.mark.parametrize("probe", ["last", "answer_mean", "answer_joint"])
@pytest.mark.parametrize("layout", ["tp2_sp", "cp2"])
def test_all_probes(double, folder, layout, probe):
    want = reference(folder, probe=probe)
    for result in double[f"{layout}_fisher_{probe}"]:
        assert worst(result, want) < TOLERANCE


@pytest.mark.parametrize("case", JOINT)
def test_joint_probe_in_other_layouts(double, folder, case):
    want = reference(folder, probe="answer_joint")
    for result in double[case]:
        # Without sequence parallelism megatron-core's linear rounds in another way once weights are frozen, by as much as
        # 1.7e-5 in verl's own log-probs.
        assert worst(result, want) < (2e-5 if case == "tp2_joint" else TOLERANCE)


@pytest.mark.parametrize("probe", ["last", "answer_mean", "answer_joint"])
@pytest.mark.parametrize("layout", ["tp2_sp", "cp2"])
def test_oar_g_equals_plain_autograd(double, folder, layout, probe):
    """5e-3: float32's rounding of P_noisy - P at sigma = 1e-3 (see credit/test_golden.py); the joint probe has none."""
    want = reference(folder, importance="oar_g", probe=probe)
    for result in double[f"{layout}_oar_g_{probe}"]:
        assert worst(result, want) < (1e-4 if probe == "answer_joint" else 5e-3)


@pytest.mark.parametrize("case", OAR_G)
def test_oar_g_through_a_pipeline(double, folder, case):
    want = reference(folder, importance="oar_g")
    for result in double[case]:
        assert worst(result, want) < 5e-3


@pytest.mark.parametrize("case", ONWARD)
def test_onward_equals_plain_autograd(double, folder, case):
    want = reference(folder, importance="onward")
    for result in double[case]:
        assert worst(result, want) < TOLERANCE


@pytest.mark.parametrize("name", OTHERS)
def test_entropy_and_an_importance_of_ones_own_equal_plain_autograd(double, eight, folder, name):
    want = reference(folder, importance=name)
    for layout in ("tp2_sp", "pp2", "cp2"):
        for result in double[f"{layout}_{name}"]:
            assert worst(result, want) < OTHERS[name]
    for result in eight[name]:
        assert worst(result, want) < OTHERS[name]


def test_random_importance_is_the_same_on_every_layout(double, eight):
    one = double["pp2_random"][0][IMPORTANCE]
    assert all(row.any() for place, row in enumerate(one) if place in world.SCORED)
    for results in (double["tp2_sp_random"], double["pp2_random"], double["cp2_random"], eight["random"]):
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(result[IMPORTANCE], one, strict=True))


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings(double, folder, case):
    want = reference(folder / "tied")
    for result in double[case]:
        assert worst(result, want) < TOLERANCE
    for result in double["pp2_tied_onward"]:
        assert worst(result, reference(folder / "tied", importance="onward")) < TOLERANCE


def test_padding_of_the_vocabulary_is_no_outcome(double, folder):
    want = reference(folder, columns=200)
    for result in double["tp2_vocabulary"]:
        assert worst(result, want) < TOLERANCE
    assert worst(double["tp2"][0], want) > 1e-2, "this reference cannot tell"
    for result in double["tp2_vocabulary_onward"]:
        assert worst(result, reference(folder, importance="onward", columns=200)) < TOLERANCE


@pytest.mark.parametrize("case", ["fisher", "dynamic", "joint", "oar_g", "onward"])
def test_tensor_pipeline_and_context_parallelism_at_once(eight, folder, case):
    want = reference(
        folder,
        importance=case if case in ("oar_g", "onward") else "fisher",
        probe="answer_joint" if case == "joint" else "answer_mean",
    )
    for result in eight[case]:
        assert worst(result, want) < (5e-3 if case == "oar_g" else TOLERANCE)


def test_draws_are_averaged_alike_in_different_layouts(double):
    for row in world.SCORED:
        many = [double[f"{layout}_draws"][0][IMPORTANCE][row] for layout in ("tp2_sp", "pp2")]
        assert error(*many) < TOLERANCE
        assert error(many[0], double["tp2_sp"][0][IMPORTANCE][row]) > 1e-3


@pytest.mark.parametrize("case", [*FISHER, *JOINT, *OAR_G, *ONWARD, *TIED])
def test_log_probs_and_entropy_equal_verls_own(double, case):
    seen = [result for result in double[case] if "log_probs" in result]
    assert bool(seen) != case.endswith("_only")
    for result in seen:
        assert result["log_probs_error"] < 5e-5
        assert result["entropy_error"] < 5e-5


def test_status_and_segments_are_the_same_on_every_rank(double):
    for result in double["pp2"]:
        assert [Status(int(report[0])).name for report in result[REPORT]] == world.STATUS
        for row in world.SCORED:
            assert torch.equal(result[SEGMENTS][row].long(), world.segments_of(world.ROWS[row][1]))


def test_the_pass_is_deterministic(double):
    for a, b in zip(double["tp2_sp"][0][IMPORTANCE], double["tp2_sp_again"][0][IMPORTANCE], strict=True):
        assert torch.equal(a, b)


def test_activations_are_recomputed(double):
    """Attention runs again, once a layer, in the backward of each of the two scoring micro-batches."""
    assert double["calls_full"] == double["calls_selective"] == double["calls"] + 2 * 4


def test_no_trace_is_left(double, eight):
    """With sentinels in DDP's gradient buffers and a pending gradient, so that anything added to them shows."""
    cases = {name: results for name, results in [*double.items(), *eight.items()] if isinstance(results, list)}
    seen = {name: results for name, results in cases.items() if isinstance(results[0], dict)}
    assert len(seen) > 40
    for name, results in seen.items():
        for result in results:
            assert result["traces"] == [], name


def test_every_kind_of_trace_would_be_noticed(double):
    assert double["noticed"] == sorted(
        [
            "config", "grad_buffers", "grads", "hooks", "numpy_rng", "optimizer", "python_rng", "requires_grad", "torch_rng",
            "training", "weights",
        ]
    )  # fmt: skip


def test_without_freezing_the_gradient_buffers_would_be_written(double):
    assert "grad_buffers" in double["unfrozen"]


def test_training_goes_on_as_if_nothing_happened(double):
    """megatron-core's own optimizer, two updates (without clipping, which takes CUDA tensors only)."""
    assert double["grad_norms"] == double["fresh_grad_norms"]
    assert min(double["grad_norms"]) > 0


def test_the_engine_is_inert_without_a_request(double):
    assert double["ordinary"]["class"] == "OarMegatronEngineWithLMHead"
    assert double["ordinary_host"]["class"] == "MegatronEngineWithLMHead"
    assert torch.equal(double["ordinary"]["log_probs"], double["ordinary_host"]["log_probs"])


def test_what_is_not_served_is_refused_by_name(double):
    assert len(double["refusals"]) == 7
    for setting, message in double["refusals"].items():
        assert setting in message


def test_the_pass_moves_what_its_documentation_says(double, eight):
    """hosts/verl/MEGATRON.md, for rows 0, 1, 3, 4: B = 4 responses, N = 7 answer tokens, T = 105 tokens; H = 32, V = 258."""
    B, N, T, H, V = 4, 7, 105, 32, 258
    assert double["tp2_bytes"]["fisher"] == {"rows": 4 * N * H, "vocabulary": 12 * B, "sequence": 0, "scores": 4 * T}
    assert double["tp2_bytes"]["oar_g"] == {"rows": 4 * N * H, "vocabulary": 32 * B, "sequence": 0, "scores": 4 * T}
    R = sum(world.ROWS[row][1].index("####") for row in world.SCORED)  # one byte a token
    assert double["tp2_bytes"]["onward"] == {
        "rows": 4 * (N + R) * H,
        "vocabulary": 12 * N + 24 * R,
        "sequence": 0,
        "scores": 3 * 4 * T,
    }
    assert double["tp2_sp_bytes"]["fisher"] == {"rows": 8 * N * H, "vocabulary": 12 * B, "sequence": 0, "scores": 4 * T}
    assert double["cp2_bytes"]["fisher"] == {"rows": 0, "vocabulary": 0, "sequence": 4 * B * V, "scores": 4 * T}
    assert double["cp2_bytes"]["joint"] == {"rows": 0, "vocabulary": 0, "sequence": 0, "scores": 4 * T}
    # Everything at once: a context-parallel rank has a part of the answers' rows, a tensor-parallel one half the columns.
    moved = eight["bytes"]["fisher"]
    assert 0 < moved["rows"] <= 8 * N * H
    assert moved == {"rows": moved["rows"], "vocabulary": 12 * B, "sequence": 4 * B * V // 2, "scores": 8 * T}
