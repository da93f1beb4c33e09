"""The colour of a weight: orange is above 1, blue below, told apart with every common form of colour-blindness."""

import math

ABOVE, BELOW = (224, 122, 31), (96, 158, 230)
"""Colours of the largest and the smallest weight; weight 1 is white."""


def shade(weight: float) -> str:
    """CSS colour of a weight: blue below 1, white at 1, orange above; on a log scale, full at 0.25 and at 4."""
    if not math.isfinite(weight):
        return "#ddd"
    amount = max(-1.0, min(1.0, math.log(max(weight, 1e-6)) / math.log(4.0)))
    target = ABOVE if amount > 0 else BELOW
    r, g, b = (round(255 + (channel - 255) * abs(amount) * 0.85) for channel in target)
    return f"#{r:02x}{g:02x}{b:02x}"
