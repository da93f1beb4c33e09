"""Student's t, for 95 % intervals."""

import math

# At 97.5 % for 1, 2, ... 10 degrees of freedom; beyond, its expansion is right to two digits.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t_975(freedom: float) -> float:
    """Half a 95 % interval, in standard errors; between whole degrees of freedom in a straight line."""
    if freedom <= len(_T_975):
        low = max(1, math.floor(freedom))
        at, following = _T_975[low - 1], _T_975[min(low, len(_T_975) - 1)]
        return at + (following - at) * max(0.0, freedom - low)
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2
