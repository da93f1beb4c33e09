"""Whether a module is here, without importing it."""

from importlib.util import find_spec


def importable(module: str) -> bool:
    """Whether Python finds a module, dotted or not; False too where a package above it is missing or broken."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
