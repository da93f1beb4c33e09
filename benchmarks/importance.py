"""Which importance a benchmark measures."""

from __future__ import annotations

from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import importance_of, without_copies

DEFAULT: str = OarConfig.model_fields["importance"].default


def check_importance(name: str, copies: bool = False) -> None:
    """Raises: ValueError, when `--importance NAME` is unknown, or runs masked copies where they are not measured."""
    try:
        importance = importance_of(name)
    except ValueError as error:
        raise ValueError(f"--importance {name}: {error}") from None
    if importance.copies is not None and not copies:
        raise ValueError(f"--importance {name}: it runs masked copies, not measured here; allowed: {without_copies()}")
