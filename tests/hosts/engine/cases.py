"""What the workers run, by name. A case is a layout and a request: "padded oar_p" and "tp2 sp onward only".

Each table says for a layout, which is built once, what is asked of it; results have the cases' names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oar_plugin.passes.request import Perturbation
from tests.hosts.engine import world

COPIES = Perturbation(budget=1.0, span=1, replacement_token=world.PAD)
WORDS: dict[str, dict[str, Any]] = {
    **{name: {"importance": name} for name in ("fisher", "oar_g", "onward", "entropy", "random")},
    "own": {"importance": "python:tests.own_importance:Saliency"},
    "oar_p": {"importance": "oar_p", "perturbation": COPIES},
    "hybrid": {"importance": "hybrid", "perturbation": replace(COPIES, budget=0.3)},
    "half": {"perturbation": replace(COPIES, budget=0.5)},
    "span": {"perturbation": replace(COPIES, span=4)},
    "sampled": {"perturbation": replace(COPIES, replacement_token=None)},
    "last": {"probe": "last"},
    "joint": {"probe": "answer_joint"},
    "dynamic": {"dynamic": True},
    "only": {"only": True},
    **{f"draws{number}": {"num_draws": number} for number in (3, 16, 64)},
    "again": {},
}
PROBES = ["", " last", " joint"]
OTHERS = ["entropy", "random", "own"]
EVERYTHING = ["fisher", "onward", "oar_p"]

SINGLE: dict[str, list[str]] = {
    "packed": [
        *(f"{name}{probe}" for name in ("fisher", "oar_g", "oar_p") for probe in PROBES),
        *(f"{name} {how}" for name in EVERYTHING for how in ("dynamic", "only")),
        *(f"{name}{only}" for name in OTHERS for only in ("", " only")),
        *("fisher again", "fisher draws64", "onward", "onward last", "onward draws16"),
        *("oar_p span", "oar_p sampled", "oar_p half", "hybrid"),
    ],
    "offload": ["fisher"],
    **dict.fromkeys(("padded", "checkpointing", "lora", "bf16", "fsdp1"), EVERYTHING),
}
DOUBLE: dict[str, list[str]] = {
    "fsdp2": [*EVERYTHING, "oar_p half", "hybrid"],
    "checkpointing": ["fisher"],
    "padded": ["fisher"],
    "fsdp1": ["onward"],
    "ulysses": [*EVERYTHING, "fisher joint", "oar_g", *OTHERS, "oar_p joint", "oar_p sampled"],
}
_PROBED = [f"{name}{probe}" for name in ("fisher", "oar_g") for probe in PROBES]
MEGATRON: dict[str, list[str]] = {
    "tp2": ["fisher", "fisher joint", "onward"],
    "tp2 sp": [
        *_PROBED,
        "fisher again",
        "fisher dynamic",
        "fisher only",
        "fisher draws3",
        "onward",
        "onward only",
        *OTHERS,
    ],
    "tp2 sp full": ["fisher"],
    "tp2 sp selective": ["fisher"],
    "tp2 sp padded": ["fisher"],
    "tp2 vocabulary": ["fisher", "onward"],
    "pp2": ["fisher", "fisher dynamic", "fisher only", "fisher draws3", "oar_g", "onward", *OTHERS],
    "pp2 full": ["fisher"],
    "pp2 vpp2": ["fisher", "fisher dynamic", "fisher joint", "oar_g", "onward"],
    "cp2": [*_PROBED, "fisher dynamic", "onward", *OTHERS],
    "cp2 padded": ["fisher"],
    "dp2": ["fisher", "fisher dynamic"],
    # Last: mbridge remembers of a tied model, in its class, that it has no output layer.
    "tied tp2 sp": ["fisher"],
    "tied pp2": ["fisher", "onward"],
}
EIGHT = {"tp2 sp pp2 cp2": ["fisher", "fisher dynamic", "fisher joint", "oar_g", "onward", *OTHERS]}


def request(words: str) -> dict[str, Any]:
    """Keyword arguments of a worker's `run`."""
    return {name: value for word in words.split() for name, value in WORDS[word].items()}


def named(table: dict[str, list[str]], *without: str) -> list[str]:
    """Cases of a table, less those with one of these words."""
    cases = [f"{layout} {asked}" for layout, several in table.items() for asked in several]
    return [case for case in cases if not {*case.split()} & {*without}]


def want(folder: Path, case: str, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    """Importance of each scored response in the plainest way. Not of what is random, drawn, or within a budget."""
    words = set(case.split())
    folder = folder / "tied" if "tied" in words else folder
    probe = request(" ".join(words & {"last", "joint"})).get("probe", "answer_mean")
    if "oar_p" in words:
        return world.counterfactual(folder, probe, span=4 if "span" in words else 1, sampled="sampled" in words)
    (importance,) = words & {"fisher", "oar_g", "onward", "entropy", "own"}
    columns = world.COLUMNS if "vocabulary" in words else None
    return world.reference(folder, importance, probe, columns=columns, dtype=dtype)


def tolerance(case: str) -> float:
    """Of errors relative to the response's largest score."""
    words = set(case.split())
    if "oar_g" in words:
        # float32's rounding of P_noisy - P at sigma = 1e-3 (see credit/test_golden.py), which the joint probe has not.
        return 1e-4 if "joint" in words else 5e-3
    if "own" in words:
        return 1e-4  # <g, e> adds up terms of both signs, and what is left of them has fewer digits than a norm
    if case == "tp2 fisher joint":
        # Without sequence parallelism megatron-core's linear rounds in another way once weights are frozen, by as much as
        # 1.7e-5 in verl's own log-probs.
        return 2e-5
    return 1e-5
