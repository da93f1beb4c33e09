"""Plots for reports, where matplotlib is installed (extra `[plots]`)."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files only; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
