"""Which of megatron-core's models `MegatronTaps` reads rightly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import get_model_config
from torch import nn

from oar_plugin.passes.megatron_taps import unwrapped
from oar_plugin.passes.tap import UnsupportedModelError


def check_chunks(chunks: Sequence[nn.Module]) -> None:
    """Refuse models that `MegatronTaps` would read wrongly.

    Raises:
        UnsupportedModelError: names what is not served, and what to change.
    """
    for chunk in chunks:
        model = unwrapped(chunk)
        if type(model) is not GPTModel:
            raise UnsupportedModelError(
                f"{type(model).__name__}: under Megatron, OAR serves megatron.core's GPTModel only (no vision-language, "
                "Mamba or otherwise derived models); use actor_rollout_ref.actor.strategy=fsdp2"
            )
        config: Any = get_model_config(model)
        refused = {
            "num_moe_experts": "mixture-of-experts layers were not tested; use another model",
            "mtp_num_layers": "set actor_rollout_ref.model.mtp.enable=False",
            "fp8": "a backward in fp8 moves its scaling history; leave override_transformer_config.fp8 out",
            "fp4": "leave override_transformer_config.fp4 out",
            "overlap_moe_expert_parallel_comm": "its schedule replaces the forward that OAR hooks; set it to False",
            "hybrid_context_parallel": "its schedule replaces the forward that OAR hooks; set it to False",
            "defer_embedding_wgrad_compute": "it keeps activations of every forward; set it to False",
            "experimental_attention_variant": "its context-parallel layout was not tested; use another model",
        }
        for name, advice in refused.items():
            value = getattr(config, name, None)
            if value not in (None, False, 0):
                raise UnsupportedModelError(
                    f"{name}={value} in Megatron's transformer config: not served by OAR; {advice}"
                )
        graphs = getattr(config, "cuda_graph_impl", "none")
        if graphs != "none":
            raise UnsupportedModelError(
                f"cuda_graph_impl={graphs} in Megatron's transformer config: hooks do not run inside captured graphs; "
                "set it to none"
            )
        if model.position_embedding_type == "learned_absolute":
            raise UnsupportedModelError(
                "position_embedding_type=learned_absolute: Megatron adds it inside the embedding that OAR differentiates; "
                "use a model with rotary positions"
            )
        if model.post_process and (
            type(model.output_layer) is not ColumnParallelLinear or model.output_layer.bias is not None
        ):
            raise UnsupportedModelError(
                f"{type(model.output_layer).__name__} as vocabulary projection: OAR serves megatron.core's plain "
                "ColumnParallelLinear without bias; use a model without adapters or transforms there"
            )
