"""Token credit for reasoning models: Outcome-grounded Advantage Reshaping (OAR, arXiv 2601.07408).

`importance` and `reshape` are the front door, for any HuggingFace causal LM. In a verl run nothing of this is called:
`algorithm.adv_estimator=oar` is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oar_plugin.front_door import Credit, importance, reshape

__all__ = ["Credit", "importance", "reshape"]
__version__ = "0.4.0"


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    # Imported when asked for: verl loads this package in every process of a cluster.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oar_plugin import front_door

    return getattr(front_door, name)
