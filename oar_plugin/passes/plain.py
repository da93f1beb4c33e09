"""Importance of a batch under a HuggingFace model in one process: notebooks, benchmarks, studies."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Forward
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed, importance_of_scores
from oar_plugin.passes.masked_copies import MaskedCopies
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps


def gradient_importance(
    model: nn.Module,
    request: Request,
    token_BL: Tensor,
    segments_BL: Tensor,
    mask_BL: Tensor | None = None,
    on_logits: Callable[[Tensor], None] | None = None,
    checkpoint_activations: bool = False,
) -> Tensor:
    """Importance of one micro-batch from the gradient pass alone, float32 `[B, L]`; 0 outside the reasoning.

    Args:
        model: causal LM in eval mode; left as it is.
        request: what to compute.
        token_BL: int64, prompts and responses, padded on any side.
        segments_BL: `Segment` of each token; OUTSIDE everywhere in a response that is not scored.
        mask_BL: bool, false at padding. None: there is none, or it stands on the right, where causal attention does not see
            it; each row then counts as long as it is.
        on_logits: called with the model's logits `[B, L, V]`, without a graph. None: nobody wants them, and only rows that
            matter are projected.
        checkpoint_activations: see `ModelTaps`.

    Raises:
        UnsupportedModelError: see `check_model`.
    """
    packed, layout = packed_rows(token_BL, segments_BL, mask_BL)
    one = MicroBatchPass(request, packed, layout)
    arguments = {"input_ids": token_BL, "use_cache": False}
    if mask_BL is not None and not mask_BL[:, 0].all():  # causal attention does not see padding on the right
        position_BL = (mask_BL.long().cumsum(-1) - 1).clamp_min(0)
        arguments |= {"attention_mask": mask_BL.long(), "position_ids": position_BL}
    forwards = one.importance.forwards(request.num_draws, log_probs=on_logits is not None)
    if on_logits is not None and not forwards:  # an importance that looks at no model
        forwards = [Forward(None, log_probs=True)]
    with ModelTaps(model, checkpoint_activations) as taps:
        for forward in forwards:
            tap = taps.tap = one.tap(forward)
            with torch.set_grad_enabled(forward.backward is not None):
                logits = model(**arguments).logits
            if forward.log_probs and on_logits is not None:
                on_logits(logits.detach())
            del logits  # before the backward
            if tap.scalar is not None:
                tap.scalar.backward()
    importance_T = importance_of_scores(request, packed, one.scores)
    flat = importance_T.new_zeros(token_BL.numel())
    flat[layout.local_T] = importance_T
    return flat.view_as(token_BL)


def batch_importance(
    model: nn.Module, request: Request, token_BL: Tensor, segments_BL: Tensor, mask_BL: Tensor, max_tokens: int = 2**13
) -> Tensor:
    """The importance that `request` names, float32 `[B, L]`, for padding on the right.

    The other arguments are those of `gradient_importance`; `max_tokens`: of one forward of masked copies.
    """
    importance_BL = gradient_importance(model, request, token_BL, segments_BL, mask_BL)
    if request.importance_object.copies is None:
        return importance_BL
    rows = (segments_BL == Segment.REASONING).any(-1).nonzero()[:, 0].tolist()
    wanted = {row: (token_BL[row], segments_BL[row], importance_BL[row]) for row in rows}
    found = MaskedCopies(model, request, max_tokens).importance(wanted)
    importance_BL = torch.zeros_like(importance_BL)
    for row, importance_L in found.items():
        importance_BL[row] = importance_L
    return importance_BL


def packed_rows(token_BL: Tensor, segments_BL: Tensor, mask_BL: Tensor | None) -> tuple[Packed, Layout]:
    """A padded batch as packed sequences, and where their tokens are in it."""
    keep_BL = torch.ones_like(token_BL, dtype=torch.bool) if mask_BL is None else mask_BL.bool()
    at_T = keep_BL.flatten().nonzero()[:, 0]
    offsets = torch.nn.functional.pad(keep_BL.sum(-1).cumsum(0), (1, 0))
    packed = Packed(token_BL.flatten()[at_T], segments_BL.flatten()[at_T].long(), offsets)
    return packed, Layout(at_T, at_T, token_BL.numel())
