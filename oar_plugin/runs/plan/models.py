"""A model's number of parameters and its FLOPs, computed from the dimensions in its config.json. Tests compare the numbers with
those of transformers' models and of verl's counter; neither is imported, because each takes seconds.

`known.yaml` has the dimensions of common models, so no network is needed.
"""

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
    """Sizes of a model, in elements. `config` has the keys of its config.json.

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
            self._count(self.config)
            if min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.inner, self.vocab) < 1:
                raise TypeError("sizes must be at least 1")
        except (AttributeError, TypeError, ZeroDivisionError) as error:
            raise PlanError(f"{name}: no model that can be planned: its config.json is incomplete ({error})") from None

    def _count(self, c: SimpleNamespace) -> None:
        self.hidden, self.layers, self.vocab = c.hidden_size, c.num_hidden_layers, c.vocab_size
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.head_dim: int = getattr(c, "head_dim", None) or self.hidden // self.heads
        self.embedding: int = self.vocab * self.hidden
        # Newer configs have `num_local_experts`.
        c.num_experts = number = getattr(c, "num_experts", getattr(c, "num_local_experts", 0))
        self.visits: int = c.num_experts_per_tok if number else 0  # experts per layer and token
        # Width of the MLP; in a mixture of experts, the summed width of one token's experts.
        self.inner: int = self.visits * c.moe_intermediate_size if self.visits else c.intermediate_size
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if getattr(c, "mlp_only_layers", None) or getattr(c, "decoder_sparse_step", 1) != 1:
            raise PlanError(f"{self.name}: layers with and without experts are not supported by the planner")
        biased = getattr(c, "attention_bias", False)
        attention, router = 2 * self.hidden * (query + key), self.hidden * number
        experts = 3 * self.hidden * c.moe_intermediate_size * number if number else 0
        other = 2 * self.hidden + (2 * self.head_dim if c.model_type.startswith("qwen3") else 0)  # norms, then biases
        other += query + 2 * key if c.model_type == "qwen2" or biased else 0
        other += (self.hidden if biased else 0) + (2 * self.inner + self.hidden if getattr(c, "mlp_bias", False) else 0)
        # Parameters of a layer, of all experts, of all.
        self.layer: int = attention + other + router + (experts or 3 * self.hidden * self.inner)
        self.experts: int = self.layers * experts
        self.parameters: int = self.layers * self.layer + self.hidden
        self.parameters += self.embedding * (1 if c.tie_word_embeddings else 2)
        # Parameters of rank-1 LoRA adapters on every linear layer except experts, routers and the vocabulary projection.
        mlp = 0 if number else 3 * (self.hidden + self.inner)
        self.adapters: int = self.layers * (2 * (2 * self.hidden + query + key) + mlp)
        # Products of a token with weights in all layers, and of two tokens in attention; forward.
        self._products: int = self.layers * (attention + 3 * self.hidden * self.inner + router)
        self._attention: int = self.layers * query

    def training_flops(self, length: float) -> float:
        """Return the FLOPs of one sequence's forward and backward, as verl counts them, without the lookup of embeddings."""
        return 6.0 * (self._products + self.embedding) * length + 6.0 * self._attention * length**2

    def head_flops(self, rows: float) -> float:
        """Return the FLOPs of the vocabulary projection of `rows` tokens, forward only."""
        return 2.0 * self.embedding * rows

    def layers_flops(self, length: float, start: float = 0.0) -> float:
        """Return the FLOPs of the layers' forward on tokens `start` to `length` of one sequence; earlier tokens are cached."""
        whole = self.training_flops(length) / 3 - self.head_flops(length)
        return whole - self.layers_flops(start) if start else whole

    def backward_flops(self, length: float) -> float:
        """Return the FLOPs of the layers' backward to the input embeddings, without weight gradients.

        Compared with the forward: equal FLOPs for matrix products, twice as many for attention, as in verl's counter.
        """
        attention = (self.training_flops(2 * length) - 2 * self.training_flops(length)) / 6
        return self.layers_flops(length) + attention


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
