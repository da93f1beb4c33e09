"""The method: outcome-grounded token credit as pure functions on tensors (arXiv 2601.07408). Nothing here knows a host.

Shape suffixes: T tokens (packed), N rows of logits, B responses, L longest response, V vocabulary, H hidden size.
"""

import importlib
import operator
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch


def imported(name: str, allowed: str) -> Any:
    """The object that a setting names as `python:<module>:<name>`. ValueError: another form, or it cannot be imported."""
    kind, _, path = name.partition(":")
    module, _, attribute = path.partition(":")
    if kind != "python" or not module or not attribute:
        raise ValueError(f"unknown; {allowed}")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # a user's module runs code of its own
        fault = "the module must be on PYTHONPATH in the driver and on every worker"
        raise ValueError(f"cannot be imported: {error!r}; {fault}") from error


def called(name: str, call: Callable[[], Any]) -> Any:
    """Returns the result of `call()`, a user's code. ValueError: it raised; the message has the error, file and line."""
    try:
        return call()
    except Exception as error:  # a user's code may raise anything
        not_theirs = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(not_theirs)]
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        raise ValueError(f"{name} failed: {error!r}{place}") from error
