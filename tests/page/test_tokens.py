import html
import re

import pytest

from oar_plugin.page.tokens import shade, token_row, tokens_page


def row(**changes):
    record = {
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
    return token_row({**record, **changes})


def test_shows_every_token_and_escapes_it():
    page = tokens_page(
        [row(tokens=["<b>", " &x", " =", " 7", " ####", " 7", "</script><script>alert(1)"])], "Title <1>"
    )
    assert "Title &lt;1&gt;" in page
    shown = [html.unescape(text) for text in re.findall(r'data-tip="[^"]*">([^<]*)</span>', page)]
    assert shown == ["<b>", "&x", "=", "7", "####", "7", "</script><script>alert(1)"]
    assert page.count("<script>") == 1


def test_needs_nothing_from_elsewhere():
    assert not re.search(r"https?://|<link|src=|@import|url\(", tokens_page([row()], "t"))


def test_tells_advantage_reward_status_and_numbers():
    page = tokens_page([row(advantage=[-0.25] * 7, status="no_answer")], "t")
    assert "▼ advantage -0.25" in page
    assert "reward 1<" in page
    assert "no answer found: plain GRPO" in page
    assert "weight 2.300\nimportance 2" in page


def test_groups_by_step_in_order():
    assert re.findall(r"<h2>Step (\d+)", tokens_page([row(step=9), row(step=2)], "t")) == ["2", "9"]


@pytest.mark.parametrize(("text", "shown"), [("\n", "⏎"), (" ", "␣"), ("", "")])
def test_makes_blank_tokens_visible(text, shown):
    assert f">{shown}</span>" in tokens_page([row(tokens=[text, " 3", " =", " 7", " ####", " 7", ""])], "t")


def test_without_rows_says_so():
    assert "Nothing to show" in tokens_page([], "t")


def test_rejects_misaligned_rows():
    with pytest.raises(ValueError, match="differ in length"):
        row(weights=[1.0])


def test_accepts_an_advantage_of_one_number_and_an_unknown_status():
    assert row(advantage=0.75).advantage == 0.75
    assert "new" in tokens_page([row(status="NEW")], "t")


def test_shade_is_white_at_one_and_turns_warm_above_and_cool_below():
    assert shade(1.0) == "#ffffff"
    (red, blue), (cool_red, cool_blue) = ((int(shade(w)[1:3], 16), int(shade(w)[5:7], 16)) for w in (3.0, 0.3))
    assert red > blue
    assert cool_blue > cool_red


def test_shade_survives_what_should_not_happen():
    assert shade(0.0) == shade(1e-9)
    assert shade(float("nan")) == shade(float("inf")) == "#ddd"
