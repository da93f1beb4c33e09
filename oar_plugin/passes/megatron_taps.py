"""Hooks on Megatron's model chunks that act on a `Tap`: the counterpart of `taps.py` for megatron-core.

The leaf is the output of `GPTModel.embedding` on the first stage; the last stage projects rows, to `[N, V / TP]`.
Hidden states are `[s, b, H]`, flattened `[s * b, H]`; under sequence parallelism each tensor-parallel rank holds one
contiguous slice of them. Ranks exchange rows (`N * H` numbers each way), not logits.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, mappings
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from oar_plugin.passes.taps import Taps


def unwrapped(chunk: Any) -> GPTModel:
    """The model inside DDP's and the mixed-precision wrappers."""
    while not isinstance(chunk, GPTModel) and isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    return chunk


class MegatronTaps(Taps):
    """`Taps` of the model chunks of this rank, wrapped or not; several under an interleaved pipeline.

    With `reads_only` no backward is run, and nothing but hooks is added: with frozen weights megatron-core's linear rounds in
    another way.
    """

    def __init__(self, chunks: Sequence[Any], reads_only: bool = False) -> None:
        super().__init__()
        self.chunks, self.reads_only = chunks, reads_only

    def install(self) -> None:
        if not self.reads_only:
            self._prepare()
        for model in map(unwrapped, self.chunks):
            if model.pre_process:
                self.callback(model.embedding.register_forward_hook(self._make_leaf).remove)
            if model.post_process:
                hook = model.output_layer.register_forward_pre_hook(self._project_rows, with_kwargs=True)
                self.callback(hook.remove)

    def _prepare(self) -> None:
        for chunk in self.chunks:
            # Chunks may share a config: callbacks run in reverse order, so its original values are restored last.
            config: TransformerConfig = get_model_config(chunk)
            # A schedule calls these functions at a backward: they scale the loss or reduce gradients.
            for function in ("finalize_model_grads", "grad_scale", "grad_sync", "no_sync", "param_sync"):
                self.change(config, f"{function}_func", None)
            # With `overlap_param_gather`, DDP gathers a module's weights in a hook before its forward, and the hook refuses
            # frozen weights. Like Megatron's evaluation, this gathers all weights at once.
            if isinstance(chunk, DistributedDataParallel) and chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook()
                self.callback(chunk.enable_forward_pre_hook)
            self.freeze(chunk)
            for module in chunk.modules():
                # Some modules keep nothing for a backward in eval mode: Megatron's recomputation of activations, and
                # TransformerEngine's attention, with cuDNN's kernels or flash-attention with `cp_comm_type=a2a`.
                drops = isinstance(getattr(module, "attention_dropout", None), int | float)
                if drops:
                    self.change(module, "attention_dropout", 0.0)
                recomputes = config.recompute_granularity is not None
                if drops or (recomputes and isinstance(module, TransformerBlock | Attention)):
                    self.change(module, "training", True)
                # A router with expert bias counts its tokens in every forward with a graph, and the update uses the counts.
                counts = getattr(module, "local_tokens_per_expert", None)
                if counts is not None:
                    self.callback(counts.copy_, counts.clone())

    def _make_leaf(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return None if self.tap is None else self.tap.leaf(output)

    def _project_rows(
        self, module: ColumnParallelLinear, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tap = self.tap
        if tap is None:
            return None
        hidden: Tensor = args[0]
        weight = kwargs.get("weight")  # the embedding's, where the two are tied
        weight_VH = (module.weight if weight is None else weight)[: tap.columns]
        rows_NH = self._rows(hidden.flatten(0, 1), tap.row_position_N, module.sequence_parallel)
        tap.scalar = tap.probe(lambda chosen_NH: nn.functional.linear(chosen_NH, weight_VH), rows_NH)
        # The model must project something; with `rows_only`, one position, whose logits are not used.
        return ((hidden[:1] if tap.rows_only else hidden).detach(), *args[1:]), kwargs

    @staticmethod
    def _rows(hidden_TH: Tensor, position_N: Tensor, scattered: bool) -> Tensor:
        """Rows of the hidden states, `[N, H]`, on all tensor-parallel ranks. The backward sums their gradients over ranks."""
        group = parallel_state.get_tensor_model_parallel_group()
        if scattered:
            local_N = position_N - parallel_state.get_tensor_model_parallel_rank() * len(hidden_TH)
            here_N = (local_N >= 0) & (local_N < len(hidden_TH))
            # Without `nonzero`, for which the CPU would wait. 0 in place of rows on other ranks.
            mine_NH = hidden_TH[local_N.where(here_N, 0)].where(here_N[:, None], 0.0)
            rows_NH = mappings.reduce_from_tensor_model_parallel_region(mine_NH, group=group)
        else:
            rows_NH = hidden_TH[position_N]
        return mappings.copy_to_tensor_model_parallel_region(rows_NH, group=group)
