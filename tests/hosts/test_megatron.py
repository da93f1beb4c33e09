"""verl's real Megatron engine with importance against plain autograd on a plain HuggingFace model.

The engines run in torchrun processes on gloo, with the stand-ins of
oar_plugin/hosts/verl/cpu/megatron.py for CUDA and TransformerEngine.
Errors are relative to the response's largest score; the reference is float64, the engines are float32.
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
pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")

DOUBLE, EIGHT = cases.named(cases.MEGATRON), cases.named(cases.EIGHT)
INEXACT = ("random", "draws3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    world.make_model(path, num_hidden_layers=4)
    world.make_model(path / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    return path


@pytest.fixture(scope="module")
def double(folder) -> dict:
    return launch("double", 2, folder, "megatron_worker")


@pytest.fixture(scope="module")
def eight(folder) -> dict:
    return launch("eight", 8, folder, "megatron_worker")


def test_an_answer_crosses_a_context_parallel_border():
    """What `cp2` and `eight` are to show: rows of one answer in two chunks of the zigzag, of padded length 32."""
    prompt, response = world.encode()[3]
    assert len(prompt) + len(response) == 32
    answer = (world.segments_of(world.ROWS[3][1]) == Segment.ANSWER).nonzero()[:, 0] + len(prompt) - 1
    assert len({int(at) // (32 // 4) for at in answer}) == 2


@pytest.mark.parametrize("case", cases.named(cases.MEGATRON, *INEXACT))
def test_every_rank_of_every_layout_equals_plain_autograd(double, folder, case):
    for result in double[case]:
        assert worst(result, cases.want(folder, case, torch.float64)) < cases.tolerance(case)


@pytest.mark.parametrize("case", cases.named(cases.EIGHT, *INEXACT))
def test_tensor_pipeline_and_context_parallelism_at_once(eight, folder, case):
    for result in eight[case]:
        assert worst(result, cases.want(folder, case, torch.float64)) < cases.tolerance(case)


def test_padding_of_the_vocabulary_is_no_outcome(double, folder):
    """`tp2 vocabulary` above; here, that its reference can tell."""
    assert worst(double["tp2 fisher"][0], cases.want(folder, "vocabulary fisher", torch.float64)) > 1e-2


def test_random_importance_is_the_same_on_every_layout(double, eight):
    one = double["pp2 random"][0][IMPORTANCE]
    assert all(row.any() for place, row in enumerate(one) if place in world.SCORED)
    for results in (
        *(double[f"{layout} random"] for layout in ("tp2 sp", "pp2", "cp2")),
        eight["tp2 sp pp2 cp2 random"],
    ):
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(result[IMPORTANCE], one, strict=True))


def test_draws_are_averaged_alike_in_different_layouts(double):
    for row in world.SCORED:
        many = [double[f"{layout} fisher draws3"][0][IMPORTANCE][row] for layout in ("tp2 sp", "pp2")]
        assert error(*many) < 1e-5
        assert error(many[0], double["tp2 sp fisher"][0][IMPORTANCE][row]) > 1e-3


@pytest.mark.parametrize("case", DOUBLE)
def test_log_probs_and_entropy_equal_verls_own(double, case):
    seen = [result for result in double[case] if "log_probs" in result]
    assert bool(seen) != case.endswith("only")
    for result in seen:
        assert result["log_probs_error"] < 5e-5
        assert result["entropy_error"] < 5e-5


def test_status_and_segments_are_the_same_on_every_rank(double):
    for result in double["pp2 fisher"]:
        assert [Status(int(report[0])).name for report in result[REPORT]] == world.STATUS
        for row in world.SCORED:
            assert torch.equal(result[SEGMENTS][row].long(), world.segments_of(world.ROWS[row][1]))


def test_the_pass_is_deterministic(double):
    for a, b in zip(*(double[f"tp2 sp fisher{again}"][0][IMPORTANCE] for again in ("", " again")), strict=True):
        assert torch.equal(a, b)


def test_activations_are_recomputed(double):
    """Attention runs again, once a layer, in the backward of each of the two scoring micro-batches."""
    plain, full, selective = (double[f"tp2 sp{how} fisher"][0]["attention"] for how in ("", " full", " selective"))
    assert full == selective == plain + 2 * 4


def test_no_trace_is_left(double, eight):
    """With sentinels in DDP's gradient buffers and a pending gradient, so that anything added to them shows."""
    assert len(DOUBLE + EIGHT) > 40
    for results, names in ((double, DOUBLE), (eight, EIGHT)):
        for case in names:
            assert all(result["traces"] == [] for result in results[case]), case


def test_every_kind_of_trace_would_be_noticed(double):
    parts = ["config", "grad_buffers", "grads", "hooks", "optimizer", "requires_grad", "training", "weights"]
    assert double["noticed"] == sorted([*parts, "numpy_rng", "python_rng", "torch_rng"])


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
    """docs/megatron.md, for rows 0, 1, 3, 4: B = 4 responses, N = 7 answer tokens, T = 105 tokens; H = 32, V = 258."""
    B, N, T, H, V = 4, 7, 105, 32, 258
    R = sum(world.ROWS[row][1].index("####") for row in world.SCORED)  # one byte a token
    for case, rows, vocabulary, sequence, scores in [
        ("tp2 fisher", 4 * N * H, 12 * B, 0, 4 * T),
        ("tp2 oar_g", 4 * N * H, 32 * B, 0, 4 * T),
        ("tp2 onward", 4 * (N + R) * H, 12 * N + 24 * R, 0, 3 * 4 * T),
        ("tp2 sp fisher", 8 * N * H, 12 * B, 0, 4 * T),
        ("cp2 fisher", 0, 0, 4 * B * V, 4 * T),
        ("cp2 fisher joint", 0, 0, 0, 4 * T),
    ]:
        want = {"rows": rows, "vocabulary": vocabulary, "sequence": sequence, "scores": scores}
        assert double[f"{case} bytes"] == want, case
    # Everything at once: a context-parallel rank has a part of the answers' rows, a tensor-parallel one half the columns.
    moved = eight["bytes"]
    assert 0 < moved["rows"] <= 8 * N * H
    assert moved == {"rows": moved["rows"], "vocabulary": 12 * B, "sequence": 4 * B * V // 2, "scores": 8 * T}
