"""What a user brings: `python:<module>:<name>` in a setting."""

import importlib
import operator
from typing import Any


def imported(name: str, allowed: str) -> Any:
    """The object that `python:<module>:<name>` stands for.

    Args:
        name: as the user wrote it.
        allowed: for the message.

    Raises:
        ValueError: it is not of that form, or cannot be imported.
    """
    kind, _, path = name.partition(":")
    module, _, attribute = path.partition(":")
    if kind != "python" or not module or not attribute:
        raise ValueError(f"unknown; {allowed}")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # a user's module runs code of its own
        raise ValueError(
            f"cannot be imported: {error!r}; the module must be on PYTHONPATH in the driver and on every worker"
        ) from error
