"""What the planner knows and assumes (`known.yaml`), sizes of models, GPUs (`gpus.json`)."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml

from oar_plugin.output import cause, did_you_mean

KNOWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
GIB = 2**30


class PlanError(ValueError):
    """The configuration cannot run on its GPUs."""


class NotPlannedError(PlanError):
    """It may run; the planner does not know its model, or the value of a key."""


class Gpu(NamedTuple):
    """One GPU and its links, from the vendor's datasheet (RTX 4090: Ada whitepaper); nothing here was measured."""

    name: str
    memory_gib: float  # total memory as CUDA reports it, a little less than the label says
    tflops: float  # dense bf16 arithmetic, 1e12 FLOPs per second
    bandwidth: float  # memory bandwidth, 1e9 bytes per second
    link: float  # between two GPUs of a node, 1e9 bytes per second and direction
    network: float  # between nodes, 1e9 bytes per second and direction, one adapter per GPU


GPUS = {key: Gpu(*of) for key, of in json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8")).items()}

_columns = zip(*KNOWN["efficiency"].values(), strict=True)
EXPECTED, GOOD, POOR = (SimpleNamespace(**dict(zip(KNOWN["efficiency"], one, strict=True))) for one in _columns)
ASSUMED = SimpleNamespace(**KNOWN["assumed"])


def choose_gpu(name: str = "H100-80", memory_gib: float | None = None) -> Gpu:
    """Return the GPU called `name` (`h100` if one matches), with `memory_gib` if given. ValueError: unknown or ambiguous."""
    matches = [gpu for key, gpu in GPUS.items() if name.lower() in (key.lower(), key.split("-")[0].lower())]
    if len(matches) != 1:
        hint = "" if matches else did_you_mean(name.upper(), [*GPUS, *(key.split("-")[0] for key in GPUS)])
        raise ValueError(f"--gpu {name}: unknown or ambiguous; allowed: {', '.join(GPUS)}, with any --gpu-memory{hint}")
    return matches[0]._replace(memory_gib=memory_gib or matches[0].memory_gib)


def load_model(name: str) -> SimpleNamespace:
    """Return the sizes of a model, as its config.json names them, in its folder or the hub's cache, or those of a known name.

    `source` says which. NotPlannedError: none of them is there, or the formulas do not describe this model.
    """
    words = name.rstrip("/").split("/")[-1].removeprefix("Meta-").split("-")
    short = "-".join(word for word in words if word not in KNOWN["variants"])
    key = f"actor_rollout_ref.model.path={name}"
    if (file := Path(name).expanduser() / "config.json").is_file() or short not in KNOWN["models"]:
        with contextlib.suppress(ImportError, ValueError):  # ValueError: a path is no name on the hub
            from huggingface_hub import try_to_load_from_cache

            file = file if file.is_file() else Path(str(try_to_load_from_cache(name, "config.json") or file))
        try:
            given, source = json.loads(file.read_text("utf-8")), str(file)
        except (OSError, ValueError) as error:
            absent = "no folder with a config.json, and not in the hub's cache (`hf download MODEL config.json`)"
            fault = absent if isinstance(error, FileNotFoundError) else cause(error)
            raise NotPlannedError(f"{key}: {fault}") from error
        if not isinstance(given, dict):
            raise NotPlannedError(f"{key}: {source} is not an object")
        given = {"num_experts": given.get("num_local_experts"), **given}  # its name since transformers 5
    else:
        given, source = dict(zip(KNOWN["columns"], KNOWN["models"][short], strict=False)), "known by name"
    if (kind := given.get("model_type")) not in KNOWN["families"]:
        raise NotPlannedError(f"{key}: model_type={kind} ({source}); only {', '.join(KNOWN['families'])}")
    values = {"num_key_value_heads": given.get("num_attention_heads"), **(family := KNOWN["families"][kind])}
    values |= {key: value for key, value in given.items() if value is not None}
    least = {one: 0 if family.get(one) == 0 else 1 for one in KNOWN["columns"][1:]}
    if wrong := [one for one in least if not (isinstance(values.get(one), int) and values[one] >= least[one])]:
        raise NotPlannedError(f"{key}: no number {', '.join(wrong)} in {source}")
    values = {"head_dim": values["hidden_size"] // values["num_attention_heads"], **values}
    m = SimpleNamespace(**values | {"name": name, "source": source})
    # Width of the MLP; in a mixture of experts, the summed width of one token's experts.
    m.inner = m.num_experts_per_tok * m.moe_intermediate_size or m.intermediate_size
    m.queries, m.keys = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    return m
