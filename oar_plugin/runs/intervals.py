"""95 % intervals of means, from Student's t."""

import math
from collections.abc import Sequence

# At 97.5 % for 1, 2, ... 10 degrees of freedom; beyond, its expansion is right to two digits.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def half_95(parts: Sequence[tuple[float, float]]) -> float:
    """Half the 95 % interval of a mean, or of a difference of means, after Welch and Satterthwaite.

    Args:
        parts: what the variance of the mean is the sum of, each with its degrees of freedom; 0 degrees: not estimated.
    """
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / freedom for part, freedom in parts if freedom > 0)
    return _t_975(variance**2 / spread if spread > 0 else math.inf) * math.sqrt(variance)


def _t_975(freedom: float) -> float:
    """Half a 95 % interval, in standard errors; between whole degrees of freedom in a straight line."""
    if freedom <= len(_T_975):
        low = max(1, math.floor(freedom))
        at, following = _T_975[low - 1], _T_975[min(low, len(_T_975) - 1)]
        return at + (following - at) * max(0.0, freedom - low)
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2
