"""Dimensions of a model from its config.json. `known.yaml` has those of common models, so no network is needed."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

KNOWN: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "known.yaml").read_text(encoding="utf-8"))


class PlanError(ValueError):
    """The model is unknown, or the configuration cannot run. The message has a line per fault, with the allowed values."""


class Model:
    """`config` has the keys of a model's config.json.

    Raise PlanError if the planner does not support the model type, or if a key is missing.
    """

    def __init__(self, config: Mapping[str, Any], name: str = "") -> None:
        if (kind := str(config.get("model_type"))) not in KNOWN["families"]:
            allowed = ", ".join(KNOWN["families"])
            raise PlanError(f"{name}: model_type={kind} is not supported; allowed: {allowed}")
        defaults = {"tie_word_embeddings": False, "num_key_value_heads": config.get("num_attention_heads")}
        given = {key: value for key, value in config.items() if value is not None}
        self.name, self.config = name, SimpleNamespace(**defaults | given)
        try:
            self._read(self.config)
            if min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.inner, self.vocab) < 1:
                raise TypeError("sizes must be at least 1")
        except (AttributeError, TypeError, ZeroDivisionError) as error:
            raise PlanError(f"{name}: no model that can be planned: its config.json is incomplete ({error})") from None

    def _read(self, c: SimpleNamespace) -> None:
        self.hidden, self.layers, self.vocab = c.hidden_size, c.num_hidden_layers, c.vocab_size
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        c.head_dim = self.head_dim = getattr(c, "head_dim", None) or self.hidden // self.heads
        # Newer configs have `num_local_experts`.
        c.num_experts = self.experts = getattr(c, "num_experts", getattr(c, "num_local_experts", 0))
        self.visits: int = c.num_experts_per_tok if self.experts else 0  # experts per layer and token
        # Width of the MLP; in a mixture of experts, the summed width of one token's experts.
        self.inner: int = self.visits * c.moe_intermediate_size if self.visits else c.intermediate_size
        if getattr(c, "mlp_only_layers", None) or getattr(c, "decoder_sparse_step", 1) != 1:
            raise PlanError(f"{self.name}: layers with and without experts are not supported by the planner")


@cache
def load_model(name: str) -> Model:
    """Return the model of a folder with `config.json`, or a known model. Raise PlanError if `name` is neither."""
    if Path(name).is_dir():
        try:
            config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError("config.json is no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(f"{name}: no model that can be planned ({str(error).splitlines()[0]})") from None
        return Model(config, name)
    words = name.split("/")[-1].removeprefix("Meta-").split("-")
    dimensions = KNOWN["models"].get("-".join(word for word in words if word not in KNOWN["variants"]))
    if dimensions is None:
        raise PlanError(
            f"actor_rollout_ref.model.path={name}: neither a local folder nor a built-in model; nothing is downloaded. "
            f"Give --model DIR (a folder with its config.json) or one of {', '.join(KNOWN['models'])}"
        )
    values = dict(zip(KNOWN["columns"], dimensions, strict=True)) | KNOWN["families"][dimensions[0]]
    positions = [limit for word in words if (limit := KNOWN["variants"].get(word)) is not None]
    if positions and words[0] != "Llama":
        values["max_position_embeddings"] = min(positions)
    return Model(values, name)
