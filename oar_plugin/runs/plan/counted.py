"""Counts of the package, of the user's cache folder, or made now."""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from oar_plugin.output import say, write_whole
from oar_plugin.runs.plan.count import Counts, Memory, Polynomial, Work
from oar_plugin.runs.plan.models import PlanError

PACKAGE = Path(__file__).parents[2]
SHIPPED = Path(__file__).parent / "counts.json"
LIBRARIES = "torch", "transformers", "peft", "verl"


class NotCountedError(PlanError):
    """The shape is not among the shipped counts, and cannot be counted here. The message says why."""


@cache
def counts(key: Work | Memory) -> Counts:
    """Return the counts of `key`: shipped, from the cache, or counted now, which takes some seconds.

    Raises:
        NotCountedError: they must be counted, and cannot be here.
    """
    if (name := name_of(key)) in (shipped := _shipped()):
        return parsed(shipped[name])
    # A change of the passes or of a library can change the counts.
    source = (file.read_bytes() for part in ("passes", "runs/plan") for file in sorted((PACKAGE / part).glob("*.py")))
    made_by = hashlib.sha256(b"".join([name.encode(), *(_version(one).encode() for one in LIBRARIES), *source]))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "oar_plugin" / "counts"
    file = folder / f"{made_by.hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # no cache, or a broken one
        return parsed(json.loads(file.read_text(encoding="utf-8")))
    say("counting a step of this model on tensors without data, once: some seconds", sys.stderr)
    try:
        from oar_plugin.runs.plan.fake_step import count

        counted = count(key)
    except Exception as error:
        needs = "it takes torch, transformers, and peft for LoRA, and no process group may exist"
        raise NotCountedError(f"this model's step cannot be counted here ({needs}): {error}") from error
    with contextlib.suppress(OSError):
        write_whole(file, json.dumps(counted))
    return counted


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def name_of(key: Work | Memory) -> str:
    """Return the name of a count in files."""
    return hashlib.sha256(f"{type(key).__name__} {json.dumps(asdict(key), sort_keys=True)}".encode()).hexdigest()[:16]


def parsed(values: Mapping[str, Mapping[str, Any]]) -> Counts:
    return {
        section: {name: Polynomial(*map(tuple, parts)) for name, parts in of.items()} for section, of in values.items()
    }


@cache
def _shipped() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return values
