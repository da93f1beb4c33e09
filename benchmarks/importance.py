"""Which importance a benchmark measures."""

from __future__ import annotations

from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import importance_of, without_copies

DEFAULT: str = OarConfig.model_fields["importance"].default


def check_importance(name: str, copies: bool = False) -> None:
    """That `--importance` can be measured.

    Args:
        name: as for `importance_of`.
        copies: masked copies are measured too.

    Raises:
        ValueError: it cannot.
    """
    try:
        importance = importance_of(name)
    except ValueError as error:
        raise ValueError(f"--importance {name}: {error}") from None
    if importance.copies is not None and not copies:
        raise ValueError(f"--importance {name}: it runs masked copies, not measured here; allowed: {without_copies()}")
