"""Colours of weights."""

from oar_plugin.page.shade import shade


def test_shade_is_white_at_one_and_turns_warm_above_and_cool_below():
    assert shade(1.0) == "#ffffff"
    (red, blue), (cool_red, cool_blue) = ((int(shade(w)[1:3], 16), int(shade(w)[5:7], 16)) for w in (3.0, 0.3))
    assert red > blue
    assert cool_blue > cool_red
    assert shade(0.0) == shade(1e-9)
    assert shade(float("nan")) == shade(float("inf")) == "#ddd"
