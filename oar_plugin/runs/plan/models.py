"""A model's number of parameters, counted on the meta device, and its FLOPs, by verl's counter.

The dimensions of common models are built in, so no network is needed.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# Values of `_KEYS`, in their order, from each model's config.json on the hub.
_DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, True),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, False),
    "Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072, False),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, True),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, False),
    "Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, False),
    "Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, False),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, False),
    "Llama-3-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, 8192, False),
    "Llama-3-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, 8192, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, 131072, False),
    "Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, 131072, False),
    "Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 128256, 131072, True),
    "Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128256, 131072, True),
    "Llama-3.3-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, 131072, False),
    "Yi-1.5-34B": ("llama", 7168, 20480, 60, 56, 8, 64000, 4096, False),
}
_KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
_EXTRA = {
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
# Parts of a name that leave the dimensions as they are -> maximum positions of that variant of Qwen or Yi; None: unchanged.
_VARIANTS = {"Math": 4096, "Instruct": 32768, "Base": 32768, "16K": 16384, "32K": 32768, "Chat": None}


class PlanError(ValueError):
    """The model is unknown, or the configuration cannot run. The message has a line per fault, with the allowed values."""


class Model:
    """Sizes of a HuggingFace config's model, in elements; no weight is allocated.

    Raise PlanError if the planner does not support the model type.
    """

    def __init__(self, config: Any, name: str = "") -> None:
        from transformers import AutoModelForCausalLM

        if config.model_type not in FAMILIES:
            raise PlanError(f"{name}: model_type={config.model_type} is not supported; allowed: {', '.join(FAMILIES)}")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layers = model.get_decoder().layers
        linear = [m for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        self.name, self.config = name, config
        self.parameters = sum(p.numel() for p in model.parameters())
        # Parameters of the largest layer, and of all experts.
        self.layer = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
        self.experts = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
        # Parameters of rank-1 LoRA adapters on every linear layer except the vocabulary projection.
        self.adapters = sum(m.in_features + m.out_features for m in linear)
        self.visits: int = config.num_experts_per_tok if self.experts else 0  # experts per layer and token
        # Width of the MLP; in a mixture of experts, the summed width of one token's experts.
        self.inner: int = self.visits * config.moe_intermediate_size if self.experts else config.intermediate_size
        self.hidden, self.layers, self.vocab = config.hidden_size, config.num_hidden_layers, config.vocab_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.embedding: int = self.vocab * self.hidden

    def training_flops(self, length: float) -> float:
        """Return the FLOPs of one sequence's forward and backward.

        verl's counter counts the input embedding as a matrix product; it is a lookup, so its FLOPs are subtracted.
        """
        from verl.utils.flops_counter import FlopsCounter

        counted: float = FlopsCounter(self.config).estimate_flops([length], 1.0)[0] * 1e12
        return counted - 6.0 * self.embedding * length

    def head_flops(self, rows: float) -> float:
        """Return the FLOPs of the vocabulary projection of `rows` tokens, forward only."""
        return 2.0 * self.embedding * rows

    def layers_flops(self, length: float, start: float = 0.0) -> float:
        """Return the FLOPs of the layers' forward on tokens `start` to `length` of one sequence; earlier tokens are cached."""
        whole = self.training_flops(length) / 3 - self.head_flops(length)
        return whole - self.layers_flops(start) if start else whole

    def backward_flops(self, length: float) -> float:
        """Return the FLOPs of the layers' backward to the input embeddings, without weight gradients.

        Relative to the forward, matrix products count once and attention twice, as in verl's counter.
        """
        attention = (self.training_flops(2 * length) - 2 * self.training_flops(length)) / 6
        return self.layers_flops(length) + attention


@cache
def load_model(name: str) -> Model:
    """Return the model of a folder with `config.json`, or a built-in model. Raise PlanError if `name` is neither."""
    from transformers import AutoConfig

    if Path(name).is_dir():
        try:
            return Model(AutoConfig.from_pretrained(name, trust_remote_code=False), name)
        except (OSError, ValueError) as error:
            raise PlanError(f"{name}: no model that can be planned ({str(error).splitlines()[0]})") from None
    words = name.split("/")[-1].removeprefix("Meta-").split("-")
    dimensions = _DIMENSIONS.get("-".join(word for word in words if word not in _VARIANTS))
    if dimensions is None:
        raise PlanError(
            f"actor_rollout_ref.model.path={name}: neither a local folder nor a built-in model; nothing is downloaded. "
            f"Give --model DIR (a folder with its config.json) or one of {', '.join(_DIMENSIONS)}"
        )
    values = dict(zip(_KEYS, dimensions, strict=True)) | _EXTRA.get(dimensions[0], {})
    positions = [limit for word in words if (limit := _VARIANTS.get(word)) is not None]
    if positions and words[0] != "Llama":
        values["max_position_embeddings"] = min(positions)
    return Model(AutoConfig.for_model(**values), name)
