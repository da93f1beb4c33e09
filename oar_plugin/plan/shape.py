"""What a planner needs to know of a model: its dimensions, and how many parameters stand where.

From a HuggingFace config (dense or mixture of experts, tied or not, grouped-query attention, head size of its own). The
dimensions of the models that recipes use are kept here, so that planning needs no network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


class ShapeError(ValueError):
    """A model whose dimensions cannot be had; the message says what to do."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder of the Llama family (RMSNorm, rotary positions, gated MLP).

    Attributes:
        name: how it was asked for.
        hidden: H.
        layers: L.
        heads: query heads.
        kv_heads: key and value heads (grouped-query attention).
        head_dim: size of a head.
        intermediate: of the dense MLP.
        vocab: V.
        tied: whether the vocabulary projection is the input embedding.
        qkv_bias: whether query, key and value projections have biases.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        experts: of a layer; 0 for a dense model.
        experts_per_token: of a layer that a token visits.
        expert_intermediate: of one expert.
        dense_layers: layers of a mixture-of-experts model that have the dense MLP.
        max_positions: longest sequence; None where it is not known.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    max_positions: int | None = None

    @property
    def query(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of the keys of all heads; the values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_weights(self) -> int:
        """Matrix elements of a layer's attention: each takes one multiplication and one addition a token."""
        return self.hidden * (self.query + 2 * self.key) + self.query * self.hidden

    @property
    def mlp_weights(self) -> int:
        """Matrix elements of a dense MLP (gate, up, down)."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_weights(self) -> int:
        """Matrix elements of all experts of a layer."""
        return self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def active_expert_weights(self) -> int:
        """Matrix elements that one token meets in a layer with experts, the router's among them."""
        return self.hidden * (self.experts_per_token * 3 * self.expert_intermediate + self.experts)

    @property
    def small_parameters(self) -> int:
        """Parameters of a layer that are no matrices: norms and biases."""
        biases = self.query + 2 * self.key if self.qkv_bias else 0
        return 2 * self.hidden + biases + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of a layer with a dense MLP."""
        return self.attention_weights + self.mlp_weights + self.small_parameters

    @property
    def moe_layer_parameters(self) -> int:
        """Parameters of a layer with experts."""
        return self.attention_weights + self.expert_weights + self.hidden * self.experts + self.small_parameters

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return self.moe_layer_parameters if self.moe_layers else self.dense_layer_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers."""
        dense = self.layers - self.moe_layers
        return dense * self.dense_layer_parameters + self.moe_layers * self.moe_layer_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers: what expert parallelism divides."""
        return self.moe_layers * self.expert_weights

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding; an untied vocabulary projection has as many."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; exact."""
        return self.layer_parameters + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def active_weights(self) -> int:
        """Matrix elements that a token meets in all layers, the vocabulary projection not among them."""
        mlp = (self.layers - self.moe_layers) * self.mlp_weights + self.moe_layers * self.active_expert_weights
        return self.layers * self.attention_weights + mlp

    def lora_parameters(self, rank: int) -> int:
        """Parameters of adapters of this rank on every linear layer but the vocabulary projection (`all-linear`).

        Experts are left out: PEFT does not adapt them where they are one stacked parameter.
        """
        attention = 2 * self.hidden + 2 * self.query + 2 * (self.hidden + self.key)
        mlp = 3 * (self.hidden + self.intermediate)
        return rank * (self.layers * attention + (self.layers - self.moe_layers) * mlp)


def _qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool, vocab: int
) -> ModelShape:
    return ModelShape(
        "",
        hidden,
        layers,
        heads,
        kv_heads,
        hidden // heads,
        intermediate,
        vocab,
        tied,
        qkv_bias=True,
        max_positions=131072,
    )


# As their config.json on the hub has them. Instruct versions have the same dimensions and 32768 positions, Math versions 4096.
_QWEN2_5 = {
    "0.5B": _qwen2(896, 4864, 24, 14, 2, True, 151936),
    "1.5B": _qwen2(1536, 8960, 28, 12, 2, True, 151936),
    "3B": _qwen2(2048, 11008, 36, 16, 2, True, 151936),
    "7B": _qwen2(3584, 18944, 28, 28, 4, False, 152064),
    "14B": _qwen2(5120, 13824, 48, 40, 8, False, 152064),
    "32B": _qwen2(5120, 27648, 64, 40, 8, False, 152064),
    "72B": _qwen2(8192, 29568, 80, 64, 8, False, 152064),
}
_OTHERS = {
    "01-ai/Yi-1.5-34B-Chat-16K": ModelShape("", 7168, 60, 56, 8, 128, 20480, 64000, False, max_positions=16384),
    "Qwen/Qwen3-30B-A3B": ModelShape(
        "",
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        vocab=151936,
        tied=False,
        qk_norm=True,
        experts=128,
        experts_per_token=8,
        expert_intermediate=768,
        max_positions=40960,
    ),
}
_OTHERS["Qwen/Qwen3-30B-A3B-Base"] = replace(_OTHERS["Qwen/Qwen3-30B-A3B"], max_positions=32768)
_QWEN2_5_NAME = re.compile(r"Qwen/Qwen2\.5-(?P<math>Math-)?(?P<size>[\d.]+B)(?P<instruct>-Instruct)?")


def load_shape(model: str) -> ModelShape:
    """The shape of a model.

    Args:
        model: a folder with a `config.json`, the name of a bundled shape (`known_models`, or `bench:<size>` for the models
            of `oar bench`), or a name on the hub.

    Raises:
        ShapeError: no such model, no network, or an architecture that is not a decoder of the Llama family.
    """
    if not Path(model).expanduser().is_dir():
        bundled = _bundled(model)
        if bundled is not None:
            return replace(bundled, name=model)
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
        )
    except (OSError, ValueError, ImportError) as error:
        raise ShapeError(
            f"actor_rollout_ref.model.path={model}: its config cannot be read ({str(error).splitlines()[0]}); give --model "
            f"a folder with a config.json, or one of {', '.join(known_models())}"
        ) from None
    return shape_of(config, model)


def known_models() -> list[str]:
    """Names whose shapes are bundled."""
    return [f"Qwen/Qwen2.5-{size}" for size in _QWEN2_5] + list(_OTHERS)


def _bundled(model: str) -> ModelShape | None:
    if model in _OTHERS:
        return _OTHERS[model]
    found = _QWEN2_5_NAME.fullmatch(model)
    if found and found["size"] in _QWEN2_5:
        positions = 4096 if found["math"] else 32768 if found["instruct"] else 131072
        return replace(_QWEN2_5[found["size"]], max_positions=positions)
    if model.startswith("bench:"):
        from benchmarks.tiny.random_models import SHAPES

        size = SHAPES.get(model.removeprefix("bench:"))
        if size is None:
            raise ShapeError(f"model {model}: no such size; allowed: {', '.join('bench:' + name for name in SHAPES)}")
        return replace(
            _qwen2(
                size.hidden, size.intermediate, size.layers, size.heads, size.key_value_heads, size.tied, size.vocab
            ),
            max_positions=None,
        )
    return None


def shape_of(config: Any, name: str = "") -> ModelShape:
    """The shape that a HuggingFace config describes.

    Args:
        config: of a causal LM.
        name: to remember it by.

    Raises:
        ShapeError: a field that every decoder of the family has is missing, or experts are built in another way.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def field(*names: str, default: Any = None) -> Any:
        return next((getattr(config, n) for n in names if getattr(config, n, None) is not None), default)

    required = {n: field(n) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    missing = [n for n, value in required.items() if value is None]
    if missing or field("n_shared_experts", "shared_expert_intermediate_size", "kv_lora_rank"):
        what = f"has no {', '.join(missing)}" if missing else "has shared experts or latent attention"
        raise ShapeError(
            f"{name or type(config).__name__}: its config {what}; the planner knows decoders like Llama, Qwen2 and Qwen3 "
            "(dense or mixture of experts)"
        )
    layers, heads = required["num_hidden_layers"], required["num_attention_heads"]
    experts = field("num_experts", "num_local_experts", default=0)
    every = field("decoder_sparse_step", default=1)
    plain = set(field("mlp_only_layers", default=()))
    dense = sum(1 for i in range(layers) if i in plain or (i + 1) % every) if experts else 0
    model_type = str(field("model_type", default=""))
    return ModelShape(
        name=name,
        hidden=required["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=field("num_key_value_heads", default=heads),
        head_dim=field("head_dim", default=required["hidden_size"] // heads),
        intermediate=field("intermediate_size", default=0),
        vocab=required["vocab_size"],
        tied=bool(field("tie_word_embeddings", default=False)),
        qkv_bias=model_type.startswith("qwen2") or bool(field("attention_bias", default=False)),
        qk_norm=model_type.startswith("qwen3"),
        experts=experts,
        experts_per_token=field("num_experts_per_tok", default=0) if experts else 0,
        expert_intermediate=field("moe_intermediate_size", "intermediate_size", default=0) if experts else 0,
        dense_layers=dense,
        max_positions=field("max_position_embeddings"),
    )
