"""The importances, one per file, and their table. Nothing outside this folder compares their names.

To add one: its file, its class in the table, a test. To bring one of your own, without touching the package:
`algorithm.oar.importance=python:my_package.my_module:MyImportance` (a class derived from `Importance`).
"""

import functools
from typing import Any

from oar_plugin.credit import imported
from oar_plugin.credit.importance.base import Backward, Forward, Importance, Parts, Rows
from oar_plugin.credit.importance.check import check
from oar_plugin.credit.importance.entropy import Entropy
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.credit.importance.grail import Grail
from oar_plugin.credit.importance.oar_g import OarG
from oar_plugin.credit.importance.oar_p import OarP
from oar_plugin.credit.importance.random import Random

__all__ = ["IMPORTANCES", "Backward", "Forward", "Importance", "Parts", "Rows", "importance_of"]

IMPORTANCES: dict[str, Importance] = {kind.name: kind() for kind in (Fisher, OarG, OarP, Grail, Entropy, Random)}


def importance_of(name: str) -> Importance:
    """Returns the importance with this name. ValueError: there is none, or a user's own class cannot be used."""
    if name in IMPORTANCES:
        return IMPORTANCES[name]
    kind = imported(name, f"allowed: {', '.join(IMPORTANCES)}, or python:<module>:<class>")
    return _built(name, kind if isinstance(kind, type) else None)


@functools.cache
def _built(name: str, kind: Any) -> Importance:
    # The key holds the class, not only its name: a notebook can define a class anew.
    try:
        check(kind)
    except ValueError as fault:
        raise ValueError(f"{name} cannot be used: {fault}") from fault
    return kind()


def named(copies: bool) -> str:
    """Names of the importances with masked copies, or of those without, for messages."""
    return ", ".join(name for name, importance in IMPORTANCES.items() if importance.copies == copies)
