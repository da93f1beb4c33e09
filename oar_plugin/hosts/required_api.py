"""Compares what a feature hooks, an explicit table, with the host that is installed: its modules are imported and inspected."""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

Hooks = Mapping[str, Sequence[str]]
"""A host's module or `module:Class` -> names that we override, replace or call there. `...` stands for any other parameters."""


def lacking(hooks: Hooks) -> Iterator[str]:
    """Yield a sentence for each hook that the installed host lacks, or whose parameters are not the expected ones.

    Nothing is said of a module that is there but cannot be imported in this process: the run may import it elsewhere.
    """
    for place, expected in hooks.items():
        module, _, name = place.partition(":")
        try:
            owner: Any = importlib.import_module(module)
            owner = attrgetter(name)(owner) if name else owner
        except Exception as error:  # a broken CUDA library raises OSError, for example
            absent = getattr(error, "name", None) or ""
            if isinstance(error, AttributeError) and absent == name.rpartition(".")[2]:
                yield f"{module}: {name} is not there"
            elif isinstance(error, ModuleNotFoundError) and "." in absent and f"{module}.".startswith(f"{absent}."):
                yield f"{absent} is not there"
            continue
        for hook in expected:
            attribute = hook.partition("(")[0]
            found = _written(attribute, getattr(owner, attribute, None))
            pattern = re.escape(hook).replace(r",\ \.\.\.", "(, .*)?").replace(r"\.\.\.", ".*")
            if not found or (hook != attribute and not re.fullmatch(pattern, found)):
                yield f"{module}: expected {name}{name and '.'}{hook}, found {found or 'nothing'}"


def _written(name: str, thing: Any) -> str:
    """A name with the parameters of what it stands for, as in `Hooks`; empty where that is None."""
    if not callable(thing):
        return name if thing is not None else ""
    parameters = [one for one in inspect.signature(thing).parameters.values() if one.name != "self"]
    return f"{name}({', '.join(str(one.replace(annotation=one.empty, default=one.empty)) for one in parameters)})"
