"""Tests of OAR in TRL. What must be so before TRL is imported, in each process."""

import importlib.util
import logging
import os
import sys
from importlib.metadata import version

if importlib.util.find_spec("trl"):
    if version("trl").startswith("1.15."):
        # Its log-probs are a Triton kernel's alone, on every device. Triton's own interpreter runs it without a GPU.
        os.environ["TRITON_INTERPRET"] = "1"
    # TRL imports it where it is, for six seconds; here nobody generates with it.
    sys.modules["vllm"] = None  # type: ignore[assignment]
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    logging.getLogger("transformers").setLevel(logging.ERROR)
