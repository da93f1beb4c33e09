"""What the workers run, by name. A case is a table, a layout and a request, as "megatron tp2 sp onward last".

Each table says for a layout, which is built once, what is asked of it; results have the cases' names.
"""

import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from oar_plugin.hosts.verl.capabilities import host_version
from tests.hosts.engine import world

WORDS: dict[str, dict[str, Any]] = {
    **{name: {"importance": name} for name in ("fisher", "oar_g", "grail", "entropy", "random")},
    "onward": {"importance": "python:benchmarks.candidates.learning:Onward"},  # two backwards
    "own": {"importance": "python:tests.own_importance:Saliency"},
    "oar_p": {"importance": "oar_p", "replacement_token": world.PAD},
    "span": {"span": 4},
    "sampled": {"replacement_token": None},
    "last": {"probe": "last"},
    "joint": {"probe": "answer_joint"},
    "dynamic": {"dynamic": True},
    "only": {"only": True},
    "draws3": {"num_draws": 3},
    "loud": {"sigma": 0.2},  # changes routes
    "again": {},
    "shared": {"amortize": {"share": world.SHARE, "units": None}},
    "fails": {"answer_patterns": (f"python:{world.__name__}:fails_on_a_rank",)},
}
OTHERS = ["entropy", "random", "own", "grail"]
EVERYTHING = ["fisher", "oar_p"]


def _probed(*importances: str) -> list[str]:
    return [f"{name}{probe}" for name in importances for probe in ("", " last", " joint")]


SINGLE: dict[str, list[str]] = {
    "packed": [
        *_probed("fisher", "oar_g", "oar_p"),
        *(f"{name} {how}" for name in EVERYTHING for how in ("dynamic", "only")),
        *(*OTHERS, "entropy only", "fisher again", "onward", "onward last"),
        *("oar_p span", "oar_p sampled", "fisher shared", "fisher shared dynamic only", "oar_p shared"),
    ],
    **({"compiled": ["fisher"]} if shutil.which("g++") else {}),  # torch's compiler calls it on a CPU
    "offload": ["fisher"],
    "activations": ["fisher", "own"],
    **{key: [*EVERYTHING, "fisher shared"] for key in ("padded", "checkpointing", "lora", "bf16", "fsdp1")},
    "fp16": ["fisher"],
    "capped": ["fisher", "own", "oar_p"],  # a Gemma 2, with soft-capped logits
}
DOUBLE: dict[str, list[str]] = {
    "fsdp2": [*EVERYTHING, "fisher shared"],
    "checkpointing": ["fisher"],
    "padded": ["fisher"],
    "fsdp1": ["onward"],
    # verl's fused kernels. With FSDP2 they cannot train a model with an untied head: its weight is sharded by itself.
    "fused tied": [*EVERYTHING, "fisher joint", "fisher draws3 only", "own", "entropy", "onward", "fisher shared"],
    **{f"fused {how}": ["fisher"] for how in ("padded tied", "checkpointing tied", "fsdp1")},
    "wrapped": ["fisher", "fisher joint"],
    "ulysses fp16": ["fisher"],
    "ulysses": [
        *(*EVERYTHING, *OTHERS, "onward", "fisher joint", "fisher fails", "fisher shared", "oar_g"),
        *("oar_p joint", "oar_p sampled", "oar_p fails"),
    ],
    "ulysses fused tied": ["fisher", "oar_p", "oar_p shared"],
}
if host_version().startswith("0.8."):  # it cuts all rows of a padded micro-batch at the same place
    del DOUBLE["fused padded tied"]
MEGATRON: dict[str, list[str]] = {
    "tp2": ["fisher", "fisher joint", "onward"],
    "tp2 sp": [
        *_probed("fisher", "oar_g"),
        *(f"fisher {how}" for how in ("again", "dynamic", "only", "draws3")),
        *("onward", *OTHERS, "fisher shared", "fisher shared only"),
        *(*_probed("oar_p"), "oar_p sampled", "oar_p span", "oar_p shared only"),
    ],
    **{f"tp2 sp {how}": ["fisher"] for how in ("full", "selective", "padded")},
    "tp2 vocabulary": ["fisher", "onward", "oar_p", "oar_p joint"],
    "pp2": [
        *("fisher", "fisher fails", "fisher dynamic", "fisher only", "fisher draws3"),
        *("oar_g", "onward", "random", "fisher shared", "fisher shared dynamic"),
        *("oar_p", "oar_p sampled", "oar_p dynamic"),
    ],
    "pp2 full": ["fisher"],
    "pp2 vpp2": ["fisher", "fisher dynamic", "fisher joint", "oar_g", "onward", "fisher shared", "oar_p"],
    "cp2": [
        *_probed("fisher", "oar_g"),
        "fisher fails",
        "fisher dynamic",
        "onward",
        "random",
        "fisher shared",
        "oar_p",
    ],
    **{f"cp2 {how}": ["fisher"] for how in ("padded", "dropout")},
    "dp2": ["fisher", "fisher dynamic", "fisher shared", "oar_p", "oar_p shared"],
    "dp2 overlap": ["fisher"],
    # Last: mbridge remembers of a tied model, in its class, that it has no output layer.
    "tied tp2 sp": ["fisher"],
    "tied pp2": ["fisher", "onward"],
}
# Mixtures of experts. "dp2" splits the rows: tokens go to experts of another rank, which has other rows. Replay (r2, r3)
# comes last: verl's patch of the router stays.
MIXTURE: dict[str, list[str]] = {
    "dp2": ["fisher"],
    "ep2 dp2": ["fisher", "fisher dynamic", "oar_g", "onward"],
    "ep2 dp2 aux full": ["fisher", "oar_g"],
    "ep2 dp2 bias": ["fisher"],
    "tp2 sp": ["oar_g"],
    "ep2 tp2 sp etp1": ["fisher", "oar_g"],
    "ep2 dp2 r2": ["fisher", "fisher dynamic", "oar_g loud"],
    "ep2 dp2 r3": ["fisher", "fisher dynamic", "oar_g"],
}
FOUR = {
    "ep2 dp2 pp2": ["fisher", "oar_g"],
    "ep2 tp2 sp etp1 pp2 r2": ["fisher", "oar_g loud"],
    "ep2 tp2 sp etp1 pp2 r3 full": ["fisher", "oar_g"],
}
EIGHT = {
    "tp2 sp pp2 cp2": [
        "fisher",
        "fisher dynamic",
        "fisher joint",
        "oar_g",
        "onward",
        *OTHERS,
        "fisher shared",
        "oar_p sampled",
    ]
}
TABLES = {"single": SINGLE, "double": DOUBLE, "megatron": MEGATRON, "mixture": MIXTURE, "four": FOUR, "eight": EIGHT}


def request(words: str) -> dict[str, Any]:
    """Keyword arguments of a worker's `run`."""
    return {name: value for word in words.split() for name, value in WORDS[word].items()}


def named(*tables: str, without: tuple[str, ...] = ()) -> list[str]:
    """Cases of these tables, or of all, less those with one of the words."""
    cases = [
        f"{table} {layout} {asked}"
        for table in tables or TABLES
        for layout, several in TABLES[table].items()
        for asked in several
    ]
    return [case for case in cases if not {*case.split()} & {*without}]


def model_of(folder: Path | str, words: str) -> Path:
    """The model of a layout or case."""
    asked = {*words.split()}
    return Path(folder).joinpath(*({"tied", "capped"} & asked), *({"mixture"} if asked & {"mixture", "four"} else ()))


@cache
def want(root: Path, case: str) -> dict[int, torch.Tensor]:
    """Importance of each scored response in the plainest way. Not of what is random or drawn."""
    words = set(case.split())
    if "fails" in words:
        scored = want(root, case.replace(" fails", ""))
        return {row: scores for row, scores in scored.items() if row != world.FAILS}
    folder, dtype = model_of(root / "fsdp", case), torch.float32
    if words & {"megatron", "eight", "mixture", "four"}:
        folder, dtype = model_of(root / "megatron", case), torch.float64
    probe = request(" ".join(words & {"last", "joint"})).get("probe", "answer_mean")
    if "shared" in words:
        return world.predicted(folder, partial(want, root, case.replace(" shared", "")), dtype)
    if "oar_p" in words:
        columns = world.COLUMNS if "vocabulary" in words else None
        how = {"span": 4 if "span" in words else 1, "sampled": "sampled" in words, "columns": columns}
        return world.counterfactual(folder, probe, **how)
    (importance,) = words & {"fisher", "oar_g", "grail", "onward", "entropy", "own"}
    columns = world.COLUMNS if "vocabulary" in words else None
    sigma = request(" ".join(words & {"loud"})).get("sigma", world.SIGMA)
    replay = "".join(words & {"r2", "r3"})
    return world.reference(folder, importance, probe, columns=columns, dtype=dtype, sigma=sigma, replay=replay)


def tolerance(case: str) -> float:
    """Of errors relative to the response's largest score."""
    words = set(case.split())
    if "oar_g" in words:
        # float32's rounding of P_noisy - P at sigma = 1e-3 (see credit/test_golden.py), which the joint probe has not.
        return 1e-4 if "joint" in words else 5e-3
    if "shared" in words:
        return 1e-4  # the fit of few tokens
    if "own" in words:
        return 1e-4  # <g, e> adds up terms of both signs, and what is left of them has fewer digits than a norm
    if case == "megatron tp2 fisher joint":
        # Without sequence parallelism megatron-core's linear rounds in another way once weights are frozen, by as much as
        # 1.7e-5 in verl's own log-probs.
        return 2e-5
    return 1e-5
