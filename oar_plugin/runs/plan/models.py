"""A model's number of parameters, counted on the meta device, and its FLOPs, by verl's counter.

`known.yaml` has the dimensions of common models, so no network is needed.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

KNOWN: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "known.yaml").read_text(encoding="utf-8"))


class PlanError(ValueError):
    """The model is unknown, or the configuration cannot run. The message has a line per fault, with the allowed values."""


class Model:
    """Sizes of a HuggingFace config's model, in elements; no weight is allocated.

    Raise PlanError if the planner does not support the model type.
    """

    def __init__(self, config: Any, name: str = "") -> None:
        from transformers import AutoModelForCausalLM

        if config.model_type not in KNOWN["families"]:
            allowed = ", ".join(KNOWN["families"])
            raise PlanError(f"{name}: model_type={config.model_type} is not supported; allowed: {allowed}")
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

        Compared with the forward: equal FLOPs for matrix products, twice as many for attention, as in verl's counter.
        """
        attention = (self.training_flops(2 * length) - 2 * self.training_flops(length)) / 6
        return self.layers_flops(length) + attention


@cache
def load_model(name: str) -> Model:
    """Return the model of a folder with `config.json`, or a known model. Raise PlanError if `name` is neither."""
    from transformers import AutoConfig

    if Path(name).is_dir():
        try:
            return Model(AutoConfig.from_pretrained(name, trust_remote_code=False), name)
        except (OSError, ValueError) as error:
            raise PlanError(f"{name}: no model that can be planned ({str(error).splitlines()[0]})") from None
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
    return Model(AutoConfig.for_model(**values), name)
