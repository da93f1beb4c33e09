"""What the planner's figures become, for a recipe on several numbers of GPUs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from benchmarks.scaling import projection
from benchmarks.scaling.projection import MEASURED, STEP
from benchmarks.study import silent
from oar_plugin.plan.seconds import GATE, IMPORTANCE, LOG_PROB, UPDATE


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection.project, "__defaults__", ((8, 64, 128),))
        return projection.measure(SimpleNamespace(project=("qwen2_5_32b_megatron",), project_gpu="H100-80"), silent)


@pytest.fixture(scope="module")
def rows(report):
    return {(row["mode"], row["gpus"]): row for row in report.runs["recipes"]["qwen2_5_32b_megatron"]}


def test_weak_grows_the_batch_with_the_gpus_and_strong_shrinks_the_time(rows):
    weak, strong = (tuple(rows[mode, gpus] for gpus in (64, 128)) for mode in ("weak", "strong"))
    assert weak[1]["sequences"] == 2 * weak[0]["sequences"]
    assert strong[1]["sequences"] == strong[0]["sequences"]
    assert weak[1]["data"] == 2 * weak[0]["data"]
    assert weak[1]["seconds"][UPDATE] == pytest.approx(weak[0]["seconds"][UPDATE], rel=0.05)
    assert strong[1]["seconds"][UPDATE] < 0.75 * strong[0]["seconds"][UPDATE]
    assert weak[1]["seconds"][GATE] == 2 * weak[0]["seconds"][GATE]
    assert strong[1]["seconds"][GATE] == strong[0]["seconds"][GATE] > 0


def test_the_ratio_is_of_what_the_study_measures(rows):
    row = rows["strong", 64]
    oar = sum(row["seconds"][phase] for phase in (LOG_PROB, IMPORTANCE, GATE, UPDATE))
    assert row[MEASURED] == pytest.approx(oar / (row["seconds"][LOG_PROB] + row["seconds"][UPDATE]))
    assert 1 < row[STEP] < row[MEASURED]


def test_the_page_cannot_be_taken_for_a_measurement_and_says_what_does_not_go(report, tmp_path):
    report.write(tmp_path)
    text = (tmp_path / "scaling_projection.md").read_text()
    assert text.startswith("# PROJECTION")
    assert "**Nothing on this page was measured.**" in text
    assert all("PROJECTED" in table.title for table in report.tables)
    assert '"projection": true' in (tmp_path / "scaling_projection.json").read_text()
    assert "must divide the 8 GPUs" in text
    assert (tmp_path / "scaling_projection.png").is_file()


def test_no_such_recipe():
    with pytest.raises(ValueError, match="recipes: qwen2_5_14b_deepmath"):
        projection.measure(SimpleNamespace(project=("nothing",), project_gpu="H100-80"), silent)
