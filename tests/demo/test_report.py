"""The page, the curve and the summary."""

import html
import io
import json
import re

import pytest
from rich.console import Console

from oar_plugin.page.tokens import TokenRow, shade, token_row, tokens_page
from recipes.cpu_demo.report import (
    CAVEAT,
    Accuracy,
    MethodResult,
    Share,
    draw_curve,
    load_rows,
    print_summary,
    weights_by_kind,
    write_tokens_page,
)


def record(step=1, advantage=0.5, **changes):
    plain = {
        "step": step,
        "uid": f"u_{step}",
        "prompt": "3 + 4 = ?",
        "tokens": ["so", " 3", " =", " 7", " ####", " 7", "<|im_end|>"],
        "segments": [1, 1, 1, 1, 2, 3, 4],
        "importance": [0.0, 0.1, 0.1, 2.0, 0.0, 0.0, 0.0],
        "weights": [0.4, 0.6, 0.7, 2.3, 1.0, 1.0, 1.0],
        "advantage": [advantage] * 7,
        "reward": 1.0,
        "status": "scored",
    }
    return {**plain, **changes}


class TestPage:
    def test_shows_every_token_and_escapes_it(self):
        row = token_row(record(tokens=["<b>", " &x", " =", " 7", " ####", " 7", "</script><script>alert(1)"]))
        page = tokens_page([row], "Title <1>")
        assert "Title &lt;1&gt;" in page
        shown = [html.unescape(text) for text in re.findall(r'data-tip="[^"]*">([^<]*)</span>', page)]
        assert shown == ["<b>", "&x", "=", "7", "####", "7", "</script><script>alert(1)"]
        assert page.count("<script>") == 1

    def test_needs_nothing_from_elsewhere(self):
        page = tokens_page([token_row(record())], "t")
        assert not re.search(r"https?://|<link|src=|@import|url\(", page)

    def test_tells_advantage_reward_status_and_numbers(self):
        page = tokens_page([token_row(record(advantage=-0.25, status="no_answer"))], "t")
        assert "▼ advantage -0.25" in page
        assert "reward 1<" in page
        assert "no answer found: plain GRPO" in page
        assert "weight 2.300\nimportance 2" in page

    def test_groups_by_step_in_order(self):
        page = tokens_page([token_row(record(step=9)), token_row(record(step=2))], "t")
        assert re.findall(r"<h2>Step (\d+)", page) == ["2", "9"]

    @pytest.mark.parametrize(("text", "shown"), [("\n", "⏎"), (" ", "␣"), ("", "")])
    def test_makes_blank_tokens_visible(self, text, shown):
        row = token_row(record(tokens=[text, " 3", " =", " 7", " ####", " 7", ""]))
        assert f">{shown}</span>" in tokens_page([row], "t")

    def test_without_rows_says_so(self):
        assert "Nothing to show" in tokens_page([], "t")

    def test_rejects_misaligned_rows(self):
        with pytest.raises(ValueError, match="differ in length"):
            token_row(record(weights=[1.0]))

    def test_accepts_an_advantage_of_one_number_and_an_unknown_status(self):
        row = token_row(record(advantage=0.0) | {"advantage": 0.75, "status": "NEW"})
        assert row.advantage == 0.75
        assert "new" in tokens_page([row], "t")


class TestShade:
    def test_is_white_at_one_and_turns_warm_above_and_cool_below(self):
        assert shade(1.0) == "#ffffff"
        r, _, b = (int(shade(3.0)[i : i + 2], 16) for i in (1, 3, 5))
        assert r > b
        r, _, b = (int(shade(0.3)[i : i + 2], 16) for i in (1, 3, 5))
        assert b > r

    def test_survives_what_should_not_happen(self):
        assert shade(0.0) == shade(1e-9)
        assert shade(float("nan")) == shade(float("inf")) == "#ddd"


class TestShare:
    def test_interval_is_wilsons(self):
        low, high = Share(30, 100).interval()
        assert (low, high) == pytest.approx((0.2189, 0.3958), abs=1e-3)

    @pytest.mark.parametrize("right", [0, 50])
    def test_interval_stays_between_zero_and_one(self, right):
        low, high = Share(right, 50).interval()
        assert 0 <= low < high <= 1


def accuracy(right):
    return Accuracy(Share(right, 256), Share(right + 5, 256))


def method_result(steps=6):
    metrics = [{"step": s, "critic/score/mean": 0.3 + 0.05 * s, "timing_s/step": 2.0} for s in range(1, steps + 1)]
    return MethodResult(accuracy(180), metrics, seconds=100.0, start_up_seconds=60.0, peak_bytes=3 * 1024**3)


@pytest.fixture
def dumped(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    for step in range(1, 8):
        lines = [json.dumps(record(step=step, advantage=sign * 0.5)) for sign in (1, 1, 1, -1, -1)]
        (folder / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


class TestReport:
    def test_reads_what_the_plugin_dumps(self, dumped):
        rows = load_rows(dumped)
        assert len(rows) == 35
        assert isinstance(rows[0], TokenRow)

    def test_shows_first_middle_and_last_step_with_both_signs(self, dumped, tmp_path):
        path = tmp_path / "tokens.html"
        write_tokens_page(path, load_rows(dumped))
        page = path.read_text(encoding="utf-8")
        assert re.findall(r"<h2>Step (\d+)", page) == ["1", "4", "7"]
        assert page.count("▲") == page.count("▼") == 6

    def test_averages_weights_by_what_a_token_is(self, dumped):
        assert weights_by_kind(load_rows(dumped)) == pytest.approx({"results": 2.3, "sums": 0.65, "filler words": 0.4})

    @pytest.mark.parametrize("methods", [("oar",), ("oar", "grpo")])
    def test_draws_a_curve(self, tmp_path, methods):
        pytest.importorskip("matplotlib")
        path = tmp_path / "curve.png"
        draw_curve(path, accuracy(70), {name: method_result() for name in methods})
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_summary_has_the_numbers_the_files_and_the_caveat(self, tmp_path):
        console = Console(file=io.StringIO(), width=200)
        files = {"curve": tmp_path / "curve.png"}
        print_summary(console, accuracy(70), {"oar": method_result()}, {"results": 2.3}, 321.0, files)
        text = console.file.getvalue()
        for expected in (
            "27 %  [22, 33]",
            "70 %  [64, 76]",
            "after 6 steps of OAR",
            "2.0 s",
            "3.0 GB",
            "done in 5:21",
            CAVEAT,
        ):
            assert expected in text
        assert str(files["curve"]) in text
