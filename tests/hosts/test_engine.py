"""verl's real FSDP and Megatron engines with importance against a plain HuggingFace model: autograd, and a forward in float64
for each copy.

The engines' workers name the stand-ins for GPUs. Errors are relative to the response's largest score.
"""

import pytest
import torch
from transformers import Gemma2Config, Qwen3MoeConfig

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl.capabilities import missing
from oar_plugin.passes.request import IMPORTANCE, SEGMENTS, STATUS
from tests.hosts.engine import cases, world
from tests.hosts.engine.compare import differences, error, worst
from tests.limits import PROCESS_S
from tests.processes import ranks
from verl_cpu.megatron import has_megatron_bridge

pytestmark = pytest.mark.slow
pytest.importorskip("verl")

every_table = pytest.mark.parametrize("table", cases.TABLES)
assert len(cases.CASES) > 100, "a table lost its cases, and every test that goes through them would pass"


def named(choose):
    return pytest.mark.parametrize("case", [name for name, case in cases.CASES.items() if choose(case)])


each_engine = pytest.mark.parametrize("table", ["single", "megatron", "mixture"])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    world.make_model(path / "fsdp")
    world.make_model(path / "fsdp" / "tied", tie_word_embeddings=True)
    world.make_model(path / "fsdp" / "capped", Gemma2Config, **world.CAPPED)
    world.make_model(path / "megatron", num_hidden_layers=4)
    world.make_model(path / "megatron" / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    world.make_model(path / "megatron" / "mixture", Qwen3MoeConfig, num_hidden_layers=4, **world.EXPERTS)
    return path


def _table(name):
    @pytest.fixture(scope="module", name=name)
    def launched(root):
        """A case -> its results on every rank; other names of a worker's results -> that of the first rank."""
        module, folder = "worker", root / "fsdp"
        if name not in ("single", "double"):
            variant = "mixture" if name in ("mixture", "four") else ""
            module, folder = "megatron_worker", root / "megatron" / variant
            pytest.importorskip("megatron.core")
            if lacking := missing("megatron"):
                pytest.skip("; ".join(lacking))
            if not has_megatron_bridge():
                pytest.importorskip("mbridge")
        processes = {"single": 1, "double": 2, "megatron": 2, "mixture": 2, "four": 4, "eight": 8}[name]
        every = ranks(f"tests.hosts.engine.{module}", name, folder, processes=processes, limit_s=2 * PROCESS_S)
        asked = {f"{layout} {request}" for layout, (_, requests) in cases.TABLES[name].items() for request in requests}
        return {key: [one[key] for one in every] if key in asked else value for key, value in every[0].items()}

    return launched


single, double, megatron, mixture, four, eight = map(_table, cases.TABLES)


@pytest.fixture
def results(request):
    """Results of a case, on every rank; the table's worker is started when it is asked for the first time."""

    def of(case):
        table, _, rest = case.partition(" ")
        return request.getfixturevalue(table)[rest]

    return of


@named(lambda case: case.exact)
def test_every_rank_of_every_layout_equals_a_plain_model(results, root, case):
    """A fresh adapter (`lora`) changes nothing, so neither may the importance."""
    for result in results(case):
        assert worst(result, cases.want(root, case)) < cases.tolerance(case)


def test_a_model_with_other_logits_than_its_configuration_or_its_kernels_say_is_refused_on_every_rank(double):
    assert all("changes its logits after the vocabulary projection" in text for text in double["refused"])
    assert "use_fused_kernels=True" in double["refused"][2]
    assert "use_fused_kernels=True with a bias" in double["biased"]


def test_prompt_and_response_together_may_be_cut(single):
    assert single["lengths"] == [Status.TRUNCATED, Status.SCORED]


def test_rows_of_text_are_tried_in_a_class_that_sees_images(single):
    """Packed rows mix in linear attention without its kernels. Of rows with images the first logits alone are compared."""
    assert single["seeing"]["full_attention"] == [[Status.SCORED] * 4] * 3
    assert single["seeing copies"] == [[Status.SCORED] * 4] * 3, "copies carry their row's images"
    *with_text, images_alone = single["seeing"]["linear_attention"]
    assert all("logits depend on padding, other rows" in said for said in with_text)
    assert images_alone == [Status.SCORED] * 4


@pytest.mark.parametrize("words", ["fisher", "oar_p", "fisher only"])
def test_a_padded_batch_of_ray_ppo_trainer_gets_the_same_scores(results, words):
    packed, padded = results(f"single packed {words}")[0], results("single to padded")[words]
    for name in (IMPORTANCE, SEGMENTS, STATUS):
        assert [len(row) for row in padded[name]] == [max(map(len, packed[name]))] * len(packed[name])
        for row, (score, same) in enumerate(zip(packed[name], padded[name], strict=True)):
            assert score.equal(same[: len(score)]), (name, row)
            assert not same[len(score) :].any()


@named(lambda case: case.layout.half and "amortize" not in case.request)
def test_half_precision_is_close_and_scaled_alike_on_ranks_that_share_sequences(results, root, case):
    """bf16 has 8 bits: 2^-8 for each of the layers in between; ranks are what the gate uses. What scaling of fp16 is for, see
    tests/passes/test_fp16.py."""
    bound = {"single bf16 fisher": 0.2, "single bf16 oar_p": 0.5}.get(case, 0.1)
    assert all(1e-5 < worst(result, cases.want(root, case)) < bound for result in results(case))


def test_draws_are_averaged_alike_in_different_layouts(results):
    layouts = ("tp2 sp fisher", "tp2 sp fisher draws3", "pp2 fisher draws3")
    one, *many = (results(f"megatron {layout}")[0][IMPORTANCE] for layout in layouts)
    for row in world.SCORED:
        assert error(many[0][row], many[1][row]) < 1e-5
        assert error(many[0][row], one[row]) > 1e-3


@named(lambda case: case.importance == "random")
def test_random_importance_is_the_same_on_every_layout(results, case):
    (first,) = results("single packed random")
    for row in world.SCORED:
        one = first[IMPORTANCE][row]
        assert ((one > 0) & (one < 1) == (first[SEGMENTS][row] == Segment.REASONING)).all()
        assert all(torch.equal(result[IMPORTANCE][row], one) for result in results(case))


def test_what_rollout_engines_have_scored_teaches_the_actor_as_its_own_scores_do(results):
    (own,) = results("single packed oar_p shared")
    for row in world.SCORED:
        assert error(results("single given")[row], own[IMPORTANCE][row]) < 1e-4


@every_table
def test_log_probs_and_entropy_equal_verls_own(results, table):
    """Exactly: they are those of verl's own call."""
    for name, case in cases.CASES.items():
        if case.table == table and not case.layout.half:
            seen = [
                result for result in results(name) if "log_probs" in result
            ]  # of a pipeline, the last stage has them
            assert bool(seen) == ("only" not in case.request), name
            assert all(result["log_probs_error"] == result["entropy_error"] == 0 for result in seen), name


@named(lambda case: case.layout.replay == "R2")
def test_the_update_gets_the_routes_that_verl_records(results, case):
    """Of all rows, scored or not; of a pipeline, the last stage has them."""
    assert any("same_routes" in result for result in results(case))
    assert all(result.get("same_routes", True) for result in results(case))


@pytest.mark.parametrize("case", ["single packed fisher", "megatron tp2 sp fisher"])
def test_the_pass_is_deterministic(results, case):
    for a, b in zip(*(results(case + again)[0][IMPORTANCE] for again in ("", " again")), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["single packed fisher", "single packed oar_p", "megatron pp2 fisher"])
def test_status_and_segments(results, case):
    for result in results(case):
        assert {status.dtype for status in result[STATUS]} == {torch.int64}
        assert [Status(int(status)).name for status in result[STATUS]] == world.STATUS
        for row, segments in enumerate(result[SEGMENTS]):
            if row in world.SCORED:
                assert torch.equal(segments.long(), world.segments_of(world.ROWS[row][1]))
            else:
                assert (segments == Segment.OUTSIDE).all()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["packed", "checkpointing", "bf16", "offload"])
def test_without_memory_a_batch_is_plain_grpo_and_updates_are_those_of_a_fresh_engine(results, layout, where):
    (behind, without), starved = results("single out of memory")[f"{layout} {where}"]
    names = [Status(int(status)).name for status in starved[STATUS]]
    assert names == [name.replace("SCORED", "OUT_OF_MEMORY") for name in world.STATUS]
    assert all((importance == 0).all() for importance in starved[IMPORTANCE])
    assert starved["traces"] == []
    assert starved["log_probs_error"] == starved["entropy_error"] == 0
    assert behind == without
    assert min(without) > 0


@pytest.mark.parametrize("case", ["double out of memory", "single no way back"])
def test_a_process_that_others_wait_for_and_one_without_a_way_back_say_what_to_lower(results, case):
    assert "algorithm.oar.importance=fisher: out of memory" in results(case)
    assert "ppo_max_token_len_per_gpu" in results(case)


@named(lambda case: "answer_patterns" in case.request)
def test_a_search_that_fails_on_one_rank_falls_back_on_all_that_hold_the_response(results, case):
    for result in results(case):
        assert int(result[STATUS][world.FAILS]) == Status.SEARCH_FAILED
        assert (result[SEGMENTS][world.FAILS] == Segment.OUTSIDE).all()


@every_table
def test_no_trace_is_left(results, table):
    """Weights, requires_grad, gradients, train mode, hooks, optimizer, scaler, three random states. Under Megatron with
    sentinels in DDP's gradient buffers and a pending gradient, so that anything added to them shows."""
    for name, case in cases.CASES.items():
        assert case.table != table or all(result["traces"] == [] for result in results(name)), name


@each_engine
def test_training_goes_on_as_if_nothing_happened(results, table):
    """Two updates; with megatron-core's own optimizer without clipping, which takes CUDA tensors only."""
    after, fresh = results(f"{table} grad_norms")
    assert after == fresh
    assert min(fresh) > 0


@pytest.mark.parametrize("layout", ["bf16", "fsdp1", "lora"])
def test_a_pass_may_be_the_first_forward_of_all(results, layout):
    """As in a run. FSDP2 reads what dtype gradients have off the parameters that are trainable then."""
    behind, without = results("single behind a pass")[layout]
    assert behind == without
    assert min(without) > 0


@each_engine
def test_the_engine_is_inert_without_a_request(results, table):
    """Two updates, their weights and log-probs afterwards are those of verl's own class, bit by bit."""
    plugin, host = results(f"{table} inert")
    assert plugin.pop("class").startswith("Oar")
    assert not host.pop("class").startswith("Oar")
    assert len(plugin["log_probs"]) > 0
    assert differences(plugin, host) == []


def test_activations_are_recomputed_where_the_update_does_not_keep_them(results):
    """Once in each of the two scoring micro-batches; verl's activation offload acts in training only."""
    assert results("single recomputed") == {"packed": 0, "checkpointing": 2, "activations": 2}


def test_megatron_recomputes_activations(results):
    """Attention runs again, once a layer, in the backward of each of the two scoring micro-batches."""
    how = ("", " full", " selective")
    plain, full, selective = (results(f"megatron tp2 sp{one} fisher")[0]["attention"] for one in how)
    assert full == selective == plain + 2 * 4


def test_what_megatron_does_not_serve_is_refused_by_name(results):
    refusals = results("megatron refusals")
    assert len(refusals) > 11
    for setting, message in refusals.items():
        assert f"{setting}=" in message


def test_the_pass_moves_what_its_documentation_says(results):
    """docs/evidence/megatron.md, for rows 0, 1, 3, 4: B = 4 responses, N = 7 answer tokens, T = 105 tokens; H = 32, V = 258."""
    B, N, T, H, V = 4, 7, 105, 32, 258
    for case, rows, vocabulary, sequence, scores in [
        ("tp2 fisher", 4 * N * H, 12 * B, 0, 4 * T),
        ("tp2 oar_g", 4 * N * H, 32 * B, 0, 4 * T),
        ("tp2 sp fisher", 8 * N * H, 12 * B, 0, 4 * T),
        ("cp2 fisher", 0, 0, 4 * B * V, 4 * T),
        ("cp2 fisher joint", 0, 0, 0, 4 * T),
    ]:
        want = {"rows": rows, "vocabulary": vocabulary, "sequence": sequence, "scores": scores}
        assert results(f"megatron {case} bytes") == want, case
    # Everything at once: a context-parallel rank has a part of the answers' rows, a tensor-parallel one half the columns.
    moved = results("eight tp2 sp pp2 cp2 fisher bytes")
    assert 0 < moved["rows"] <= 8 * N * H
    assert moved == {"rows": moved["rows"], "vocabulary": 12 * B, "sequence": 4 * B * V // 2, "scores": 8 * T}
