"""The page with the responses that a run dumped."""

import html
import re

import pytest

from oar_plugin.page.tokens import shade, token_row, tokens_page

RECORD = {
    "step": 1,
    "uid": "u",
    "prompt": "3 + 4 = ?",
    "tokens": ["so", " 3", " =", " 7", " ####", " 7", "<eos>"],
    "segments": [1, 1, 1, 1, 2, 3, 4],
    "importance": [0.0, 0.1, 0.1, 2.0, 0.0, 0.0, 0.0],
    "weights": [0.4, 0.6, 0.7, 2.3, 1.0, 1.0, 1.0],
    "advantage": [0.5] * 7,
    "reward": 1.0,
    "status": "scored",
}


def page(*changes, title="t"):
    return tokens_page([token_row(RECORD | change) for change in changes], title)


def test_every_token_is_shown_and_escaped_and_nothing_comes_from_elsewhere():
    tokens = ["<b>", " &x", " =", "\n", " ", "", "</script><script>alert(1)"]
    made = page({"tokens": tokens}, title="Title <1>")
    assert "Title &lt;1&gt;" in made
    shown = [html.unescape(text) for text in re.findall(r'data-tip="[^"]*">([^<]*)</span>', made)]
    assert shown == ["<b>", "&x", "=", "⏎", "␣", "", "</script><script>alert(1)"]
    assert made.count("<script>") == 1
    assert not re.search(r"https?://|<link|src=|@import|url\(", made)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"advantage": [-0.25] * 7}, ["▼ advantage -0.25", "reward 1<", "weight 2.300\nimportance 2"]),
        ({"advantage": 0.75}, ["advantage +0.75"]),
        ({"status": "no_answer"}, ["no answer found: plain GRPO"]),
        ({"status": "NEW"}, ["new"]),
    ],
)
def test_advantage_reward_status_and_numbers_are_told(change, said):
    assert [part for part in said if part not in page(change)] == []


def test_responses_stand_by_step_in_order():
    assert re.findall(r"<h2>Step (\d+)", page({"step": 9}, {"step": 2})) == ["2", "9"]
    assert "Nothing to show" in page()


def test_rows_that_are_not_aligned_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        page({"weights": [1.0]})


def test_shade_is_white_at_one_and_turns_warm_above_and_cool_below():
    assert shade(1.0) == "#ffffff"
    (red, blue), (cool_red, cool_blue) = ((int(shade(w)[1:3], 16), int(shade(w)[5:7], 16)) for w in (3.0, 0.3))
    assert red > blue
    assert cool_blue > cool_red
    assert shade(0.0) == shade(1e-9)
    assert shade(float("nan")) == shade(float("inf")) == "#ddd"
