"""What the workers run. A case is a table's name, a layout's and a request's, as "megatron tp2 sp fisher last": only a name.

`CASES` says what it is. A worker builds each layout of its table once and asks it all requests.
"""

import shutil
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from oar_plugin.hosts.verl.capabilities import host_version
from tests.hosts.engine import world
from verl_cpu import ulysses

FISHER, OAR_G = {"importance": "fisher"}, {"importance": "oar_g"}
OAR_P = {"importance": "oar_p", "replacement_token": world.PAD}
ONWARD = {"importance": "python:benchmarks.candidates.learning:Onward"}  # two backwards
OWN = {"importance": "python:tests.own_importance:Saliency"}
LAST, JOINT, DYNAMIC, ONLY = {"probe": "last"}, {"probe": "answer_joint"}, {"dynamic": True}, {"only": True}
DRAWS = {"num_draws": 3}
SHARED = {"amortize": {"share": world.SHARE, "units": None}}
FAILS = {"answer_patterns": (f"python:{world.__name__}:fails_on_a_rank",)}

REQUESTS: dict[str, dict[str, Any]] = {
    "fisher": FISHER,
    "fisher again": FISHER,
    "fisher last": FISHER | LAST,
    "fisher joint": FISHER | JOINT,
    "fisher dynamic": FISHER | DYNAMIC,
    "fisher only": FISHER | ONLY,
    "fisher draws3": FISHER | DRAWS,
    "fisher draws3 only": FISHER | DRAWS | ONLY,
    "fisher fails": FISHER | FAILS,
    "fisher shared": FISHER | SHARED,
    "fisher shared dynamic": FISHER | SHARED | DYNAMIC,
    "fisher shared only": FISHER | SHARED | ONLY,
    "fisher shared dynamic only": FISHER | SHARED | DYNAMIC | ONLY,
    "oar_g": OAR_G,
    "oar_g last": OAR_G | LAST,
    "oar_g joint": OAR_G | JOINT,
    "oar_g loud": OAR_G | {"sigma": 0.2},  # changes routes
    "oar_p": OAR_P,
    "oar_p last": OAR_P | LAST,
    "oar_p joint": OAR_P | JOINT,
    "oar_p dynamic": OAR_P | DYNAMIC,
    "oar_p only": OAR_P | ONLY,
    "oar_p fails": OAR_P | FAILS,
    "oar_p sampled": OAR_P | {"replacement_token": None},
    "oar_p shared": OAR_P | SHARED,
    "oar_p shared only": OAR_P | SHARED | ONLY,
    "oar_p span": OAR_P | {"span": 4},
    "onward": ONWARD,
    "onward last": ONWARD | LAST,
    "own": OWN,
    "grail": {"importance": "grail"},
    "random": {"importance": "random"},
    "entropy": {"importance": "entropy"},
    "entropy only": {"importance": "entropy"} | ONLY,
}
"""Keyword arguments of a worker's `run`."""


@dataclass(frozen=True)
class Layout:
    engine: dict[str, Any] = field(default_factory=dict)  # settings of verl's engine
    transformer: dict[str, Any] = field(default_factory=dict)  # settings of megatron-core's model
    model: str = ""  # the folder: "tied", "capped", or "" for the plain one
    columns: int | None = None  # of the vocabulary; the others are taken for padding
    replay: str = ""  # of the routes of experts: "R2" or "R3"
    counts: bool = False  # routers count tokens, as those with an expert bias

    @property
    def half(self) -> bool:
        return self.engine.get("param_dtype", "fp32") != "fp32"


FP16, FSDP1, PADDED = {"param_dtype": "fp16"}, {"strategy": "fsdp"}, {"use_remove_padding": False}
CHECKPOINTING = {"enable_gradient_checkpointing": True}
ON_ULYSSES = {"override_config": {"attn_implementation": ulysses.ATTENTION}}
ULYSSES = {"ulysses_sequence_parallel_size": 2, "model": ON_ULYSSES}
FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
LORA = {"model": {"lora_rank": 4, "lora_alpha": 16, "target_modules": "all-linear"}}
TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, VPP = TP | {"sequence_parallel": True}, PP | {"virtual_pipeline_model_parallel_size": 2}
CP, EP = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
ETP1 = SP | EP | {"expert_tensor_parallel_size": 1}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
DROPOUT = {"attention_dropout": 0.5}
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_z_loss_coeff": 0.1}
OVERLAP = {"override_ddp_config": {"use_distributed_optimizer": True, "overlap_param_gather": True}}

PROBES = {name: [name, f"{name} last", f"{name} joint"] for name in ("fisher", "oar_g", "oar_p")}
OTHERS = ["entropy", "random", "own", "grail"]
TAUGHT = ["fisher", "oar_p", "fisher shared"]
Table = dict[str, tuple[Layout, list[str]]]
SINGLE: Table = {
    "packed": (
        Layout(),
        [
            *(*PROBES["fisher"], *PROBES["oar_g"], *PROBES["oar_p"]),
            *("fisher dynamic", "fisher only", "oar_p dynamic", "oar_p only"),
            *(*OTHERS, "entropy only", "fisher again", "onward", "onward last"),
            *("oar_p span", "oar_p sampled", "fisher shared", "fisher shared dynamic only", "oar_p shared"),
        ],
    ),
    "compiled": (Layout({"use_torch_compile": True}), ["fisher"]),
    "offload": (Layout({"param_offload": True}), ["fisher"]),
    "activations": (Layout({"model": CHECKPOINTING | {"enable_activation_offload": True}}), ["fisher", "own"]),
    "padded": (Layout(PADDED), TAUGHT),
    "checkpointing": (Layout({"model": CHECKPOINTING}), TAUGHT),
    "lora": (Layout(LORA), TAUGHT),
    "bf16": (Layout({"param_dtype": "bf16"}), TAUGHT),
    "fsdp1": (Layout(FSDP1), TAUGHT),
    "fp16": (Layout(FP16), ["fisher"]),
    "capped": (Layout(model="capped"), ["fisher", "own", "oar_p"]),  # a Gemma 2, with soft-capped logits
}
if shutil.which("g++") is None:  # torch's compiler calls it on a CPU
    del SINGLE["compiled"]
DOUBLE: Table = {
    "fsdp2": (Layout(), TAUGHT),
    "checkpointing": (Layout({"model": CHECKPOINTING}), ["fisher"]),
    "padded": (Layout(PADDED), ["fisher"]),
    "fsdp1": (Layout(FSDP1), ["onward"]),
    # verl's fused kernels. With FSDP2 they cannot train a model with an untied head: its weight is sharded by itself.
    "fused tied": (
        Layout({"model": FUSED}, model="tied"),
        [*TAUGHT, "fisher joint", "fisher draws3 only", "own", "entropy", "onward"],
    ),
    "fused padded tied": (Layout(PADDED | {"model": FUSED}, model="tied"), ["fisher"]),
    "fused checkpointing tied": (Layout({"model": CHECKPOINTING | FUSED}, model="tied"), ["fisher"]),
    "fused fsdp1": (Layout(FSDP1 | {"model": FUSED}), ["fisher"]),
    # The vocabulary projection by itself.
    "wrapped": (Layout(FSDP1 | {"wrap_policy": {"min_num_params": 8000}}), ["fisher", "fisher joint"]),
    "ulysses fp16": (Layout(ULYSSES | FP16), ["fisher"]),
    "ulysses": (
        Layout(ULYSSES),
        [
            *(*TAUGHT, *OTHERS, "onward", "fisher joint", "fisher fails", "oar_g"),
            *("oar_p joint", "oar_p sampled", "oar_p fails"),
        ],
    ),
    "ulysses fused tied": (
        Layout(ULYSSES | {"model": ON_ULYSSES | FUSED}, model="tied"),
        ["fisher", "oar_p", "oar_p shared"],
    ),
}
if host_version().startswith("0.8."):  # it cuts all rows of a padded micro-batch at the same place
    del DOUBLE["fused padded tied"]
MEGATRON: Table = {
    "tp2": (Layout(TP), ["fisher", "fisher joint", "onward"]),
    "tp2 sp": (
        Layout(SP),
        [
            *(*PROBES["fisher"], *PROBES["oar_g"]),
            *("fisher again", "fisher dynamic", "fisher only", "fisher draws3"),
            *("onward", *OTHERS, "fisher shared", "fisher shared only"),
            *(*PROBES["oar_p"], "oar_p sampled", "oar_p span", "oar_p shared only"),
        ],
    ),
    "tp2 sp full": (Layout(SP, FULL), ["fisher"]),
    "tp2 sp selective": (Layout(SP, SELECTIVE), ["fisher"]),
    "tp2 sp padded": (Layout(SP | PADDED), ["fisher"]),
    "tp2 vocabulary": (Layout(TP, columns=world.COLUMNS), ["fisher", "onward", "oar_p", "oar_p joint"]),
    "pp2": (
        Layout(PP),
        [
            *("fisher", "fisher fails", "fisher dynamic", "fisher only", "fisher draws3"),
            *("oar_g", "onward", "random", "fisher shared", "fisher shared dynamic"),
            *("oar_p", "oar_p sampled", "oar_p dynamic"),
        ],
    ),
    "pp2 full": (Layout(PP, FULL), ["fisher"]),
    "pp2 vpp2": (Layout(VPP), [*TAUGHT, "fisher dynamic", "fisher joint", "oar_g", "onward"]),
    "cp2": (
        Layout(CP),
        [
            *(*PROBES["fisher"], *PROBES["oar_g"]),
            *("fisher fails", "fisher dynamic", "onward", "random", "fisher shared", "oar_p"),
        ],
    ),
    "cp2 padded": (Layout(CP | PADDED), ["fisher"]),
    "cp2 dropout": (Layout(CP, DROPOUT), ["fisher"]),
    "dp2": (Layout(), [*TAUGHT, "fisher dynamic", "oar_p shared"]),
    "dp2 overlap": (Layout(OVERLAP), ["fisher"]),
    # Last: mbridge remembers of a tied model, in its class, that it has no output layer.
    "tied tp2 sp": (Layout(SP, model="tied"), ["fisher"]),
    "tied pp2": (Layout(PP, model="tied"), ["fisher", "onward"]),
}
# Mixtures of experts. "dp2" splits the rows: tokens go to experts of another rank, which has other rows. Replay (r2, r3)
# comes last: verl's patch of the router stays.
MIXTURE: Table = {
    "dp2": (Layout(), ["fisher"]),
    "ep2 dp2": (Layout(EP), ["fisher", "fisher dynamic", "oar_g", "onward"]),
    "ep2 dp2 aux full": (Layout(EP, FULL | AUXILIARY), ["fisher", "oar_g"]),
    "ep2 dp2 bias": (Layout(EP, counts=True), ["fisher"]),
    "tp2 sp": (Layout(SP), ["oar_g"]),
    "ep2 tp2 sp etp1": (Layout(ETP1), ["fisher", "oar_g"]),
    "ep2 dp2 r2": (Layout(EP, replay="R2"), ["fisher", "fisher dynamic", "oar_g loud"]),
    "ep2 dp2 r3": (Layout(EP, replay="R3"), ["fisher", "fisher dynamic", "oar_g"]),
}
FOUR: Table = {
    "ep2 dp2 pp2": (Layout(EP | PP), ["fisher", "oar_g"]),
    "ep2 tp2 sp etp1 pp2 r2": (Layout(ETP1 | PP, replay="R2"), ["fisher", "oar_g loud"]),
    "ep2 tp2 sp etp1 pp2 r3 full": (Layout(ETP1 | PP, FULL, replay="R3"), ["fisher", "oar_g"]),
}
EIGHT: Table = {
    "tp2 sp pp2 cp2": (
        Layout(SP | PP | CP),
        ["fisher", "fisher dynamic", "fisher joint", "oar_g", "onward", *OTHERS, "fisher shared", "oar_p sampled"],
    ),
}
TABLES = {"single": SINGLE, "double": DOUBLE, "megatron": MEGATRON, "mixture": MIXTURE, "four": FOUR, "eight": EIGHT}
MEGATRON_LAYOUTS = {
    # Of `tests/gpu` alone.
    "one": Layout(),
    "one dropout": Layout(transformer=DROPOUT),
    "cp2 a2a": Layout(CP, {"cp_comm_type": "a2a"}),
    **{name: layout for table in (MEGATRON, MIXTURE, FOUR, EIGHT) for name, (layout, _) in table.items()},
}


@dataclass(frozen=True)
class Case:
    table: str
    layout: Layout
    request: dict[str, Any]

    @property
    def importance(self) -> str:
        """As `world.gradient_importance` calls it."""
        name = self.request["importance"]
        return {ONWARD["importance"]: "onward", OWN["importance"]: "own"}.get(name, name)

    @property
    def exact(self) -> bool:
        """Whether a plain model says what the result is, in full precision."""
        return not (self.layout.half or self.importance == "random" or "num_draws" in self.request)


CASES = {
    f"{table} {name} {request}": Case(table, layout, REQUESTS[request])
    for table, layouts in TABLES.items()
    for name, (layout, requests) in layouts.items()
    for request in requests
}
# Of `tests/gpu`, which has more layouts.
PLAIN = {
    f"{table} {name}": Case(table, Layout(), REQUESTS[name]) for table in ("single", "megatron") for name in REQUESTS
}


@cache
def want(root: Path, name: str) -> dict[int, torch.Tensor]:
    """Importance of each scored response in the plainest way. Not of what is random or drawn."""
    return _want(root, (CASES | PLAIN)[name])


def _want(root: Path, case: Case) -> dict[int, torch.Tensor]:
    request, layout, fsdp = dict(case.request), case.layout, case.table in ("single", "double")
    if request.pop("answer_patterns", None):
        scores = _want(root, replace(case, request=request))
        return {row: one for row, one in scores.items() if row != world.FAILS}
    mixture = "mixture" if case.table in ("mixture", "four") else ""
    folder = root / ("fsdp" if fsdp else "megatron") / layout.model / mixture
    dtype = torch.float32 if fsdp else torch.float64
    if request.pop("amortize", None):
        return world.predicted(folder, partial(_want, root, replace(case, request=request)), dtype)
    probe = request.get("probe", "answer_mean")
    if case.importance == "oar_p":
        sampled = request["replacement_token"] is None
        return world.counterfactual(folder, probe, request.get("span", 1), sampled, layout.columns)
    more = {"sigma": request.get("sigma", world.SIGMA), "replay": layout.replay}
    return world.reference(folder, case.importance, probe, columns=layout.columns, dtype=dtype, **more)


def tolerance(name: str) -> float:
    """Of errors relative to the response's largest score."""
    case = CASES[name]
    if case.importance == "oar_g":
        # float32's rounding of P_noisy - P at sigma = 1e-3 (see credit/test_golden.py), which the joint probe has not.
        return 1e-4 if case.request.get("probe") == "answer_joint" else 5e-3
    if "amortize" in case.request:
        return 1e-4  # the fit of few tokens
    if case.importance == "own":
        return 1e-4  # <g, e> adds up terms of both signs, and what is left of them has fewer digits than a norm
    if name == "megatron tp2 fisher joint":
        # Without sequence parallelism megatron-core's linear rounds in another way once weights are frozen, by as much as
        # 1.7e-5 in verl's own log-probs.
        return 2e-5
    return 1e-5
