"""Requests by the settings that a test is about, and cases that several hosts share."""

import json
from pathlib import Path
from typing import Any

from oar_plugin.config import LEFT, OarConfig
from oar_plugin.passes.request import Request

OF_REQUEST = ("max_response_length", "max_length", "temperature", "importance_only", "replacement_token")
CASES = Path(__file__).with_name("hosts") / "cases.json"
GIVEN: dict[str, list[dict[str, Any]]] = json.loads(CASES.read_text())
# What left the package, as a user would still write it. `oar=decision` is verl's: tests/hosts/test_settings.py.
PAIRS = [setting.partition("=") for setting in LEFT if not setting.startswith("oar=")]
GONE: list[dict[str, Any]] = [{key: value or "x"} for key, _, value in PAIRS]


def asked(importance: str = "fisher", probe: str = "answer_mean", seed: int = 0, **more: Any) -> Request:
    """A request with these settings of `algorithm.oar` (`span`: of `perturbation`) and fields of `Request`.

    Without `amortize` nothing is predicted.
    """
    fields = {name: more.pop(name) for name in OF_REQUEST if name in more}
    copies = {"span": more.pop("span")} if "span" in more else {}
    more = {"amortize": {"share": None}} | more
    config = OarConfig(importance=importance, probe=probe, perturbation=copies, **more)
    return Request(config, config.probe, seed, **fields)
