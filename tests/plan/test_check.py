"""The formulas against counted and measured figures."""

import pytest

from oar_plugin.plan import check
from oar_plugin.plan.collectives import compare_collectives


@pytest.mark.slow
def test_flops_and_peaks_of_a_dense_model_are_within_the_limit():
    # `oar plan --check` does the other models; the two tests below have untied embeddings.
    comparisons = list(check.compare_dense("qwen2, tied, 4k tokens"))
    assert len(comparisons) == 11
    assert [c for c in comparisons if not c.passed] == []


@pytest.mark.slow
def test_flops_and_peaks_with_experts_are_within_the_limit():
    assert [c for c in check.compare_experts() if not c.passed] == []


@pytest.mark.slow
def test_two_processes_send_what_the_formulas_say():
    for _, what, predicted, counted in compare_collectives():
        assert predicted == pytest.approx(counted, rel=check.LIMIT), what


def test_a_figure_over_the_limit_fails_the_check():
    good = check.Comparison("m", "FLOPs, update", 1.1, 1.0)
    bad = check.Comparison("m", "FLOPs, update", 1.2, 1.0)
    inexact = check.Comparison("m", "parameters", 1001, 1000)
    assert good.passed
    assert not bad.passed
    assert not inexact.passed
    machine = {"cpu": "c", "torch": "2", "transformers": "5", "python": "3"}
    result = check.CheckResult([good, bad], machine)
    assert not result.passed
    assert result.worst is bad
    assert "over the limit" in check.markdown(result)
