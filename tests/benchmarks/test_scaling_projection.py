"""What the planner's figures become, for a recipe on several numbers of GPUs."""

from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("verl")

from benchmarks.scaling import projection as projection
from oar_plugin.hosts.verl.recipe import RecipeError

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def megatron() -> projection.Projection:
    return projection.project(RECIPES / "qwen2_5_32b_megatron", sizes=(8, 64, 128))


def by_size(made: projection.Projection, mode: str) -> dict[int, projection.Projected]:
    return {row.gpus: row for row in made.rows if row.mode == mode}


def test_weak_grows_the_batch_with_the_gpus_and_strong_keeps_it(megatron):
    weak, strong = by_size(megatron, "weak"), by_size(megatron, "strong")
    assert weak[128].sequences == 2 * weak[64].sequences
    assert strong[128].sequences == strong[64].sequences
    assert weak[128].data == 2 * weak[64].data


def test_weak_phases_stay_and_strong_ones_shrink(megatron):
    weak, strong = by_size(megatron, "weak"), by_size(megatron, "strong")
    assert weak[128].seconds["update"] == pytest.approx(weak[64].seconds["update"], rel=0.05)
    assert strong[128].seconds["update"] < 0.75 * strong[64].seconds["update"]


def test_the_gate_grows_with_the_batch_and_does_not_shrink_with_the_gpus(megatron):
    weak, strong = by_size(megatron, "weak"), by_size(megatron, "strong")
    assert weak[128].seconds["gate"] == 2 * weak[64].seconds["gate"]
    assert strong[128].seconds["gate"] == strong[64].seconds["gate"] > 0


def test_the_ratio_is_of_what_the_bench_measures(megatron):
    row = by_size(megatron, "strong")[64]
    oar = sum(row.seconds[phase] for phase in ("log_prob", "importance", "gate", "update"))
    assert row.measured_ratio == pytest.approx(oar / (row.seconds["log_prob"] + row.seconds["update"]))
    assert 1 < row.step_ratio < row.measured_ratio


def test_a_size_that_does_not_go_says_why(megatron):
    assert "must divide the 8 GPUs" in by_size(megatron, "weak")[8].problem
    assert "must divide the 8 GPUs" in projection.markdown([megatron], "oar bench scaling")


def test_the_page_cannot_be_taken_for_a_measurement(megatron):
    text = projection.markdown([megatron], "oar bench scaling")
    assert text.startswith("# PROJECTION")
    assert "**Nothing on this page was measured.**" in text
    assert all("PROJECTED" in str(table.title) for table in projection.tables(megatron))
    assert '"projection": true' in projection.to_json([megatron], "x")


def test_no_such_recipe():
    with pytest.raises(RecipeError):
        projection.project(RECIPES / "nothing")
