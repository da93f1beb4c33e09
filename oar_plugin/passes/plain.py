"""Importance of a padded batch from a HuggingFace model, for hosts with padded batches, notebooks and benchmarks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.credit.answer import Segment
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed, Scores, importance_of_scores
from oar_plugin.passes.masked_copies import MaskedCopies
from oar_plugin.passes.predicted_batch import PredictedBatch
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps, to_device
from oar_plugin.passes.trial import Reading, check_by_trial

NOTHING_11 = torch.zeros(1, 1, dtype=torch.long)  # token 0, OUTSIDE: for a rank with fewer micro-batches than others


def gradient_importance(
    model: nn.Module,
    request: Request,
    token_BL: Tensor,
    segments_BL: Tensor,
    mask_BL: Tensor | None = None,
    checkpoint_activations: bool = False,
) -> Tensor:
    """Importance of one micro-batch from the gradient pass alone, float32 `[B, L]`; 0 outside the reasoning.

    Args:
        model: causal LM in eval mode. The call does not change the model.
        token_BL: int64, prompts and responses, padded on any side. From the CPU no copy waits for the device.
        segments_BL: `Segment` per token; OUTSIDE at all tokens of a response that is not scored.
        mask_BL: bool, false at padding. None: padding counts as tokens. This is correct without padding, and also if padding is
            on the right, because causal attention does not look to the right.
        checkpoint_activations: recompute activations in the backward, to save memory.

    Raises:
        UnsupportedModelError: importance cannot be computed with this model (see `check_model`).
    """
    packed, given, scores = _run(model, request, (token_BL, segments_BL, mask_BL), checkpoint_activations)
    importance_T = importance_of_scores(request, packed, scores)
    flat = importance_T.new_zeros(token_BL.numel())
    flat[given.local_T] = importance_T
    return flat.view(token_BL.shape).to(token_BL.device)


def _run(
    model: nn.Module, request: Request, rows: tuple[Tensor, Tensor, Tensor | None], checkpoint_activations: bool
) -> tuple[Packed, Layout, Scores]:
    """The forwards and backwards of one micro-batch: `token_BL`, `segments_BL` and `mask_BL` of `gradient_importance`.

    Returns the packed rows, where they are in the padded ones, and their scores, by packed token.
    """
    token_BL, _, mask_BL = rows
    device = next(model.parameters()).device
    packed, given = packed_rows(*rows, device)
    input_BL, layout = token_BL.cpu(), given
    if mask_BL is not None:
        # Padding behind each row needs no mask and no positions: models count these in different ways.
        length_B = packed.offsets.diff()
        keep_BL = torch.arange(max(1, int(length_B.max()))) < length_B[:, None]
        input_BL = torch.zeros_like(keep_BL, dtype=torch.long).masked_scatter(keep_BL, packed.token_T)
        layout = packed_rows(input_BL, input_BL, keep_BL, device)[1]
    (input_BL,) = to_device(device, input_BL)
    micro_batch = MicroBatchPass(request, packed, layout, reads_log_prob=request.reads_hidden)
    with ModelTaps(model, checkpoint_activations) as taps:
        for forward in request.forwards(log_probs=False):
            with taps.running(forward):
                taps.tap = micro_batch.tap(forward)
                model(input_ids=input_BL, use_cache=False)
    return packed, given, micro_batch.scores


def batch_importance(
    model: nn.Module,
    request: Request,
    token_BL: Tensor,
    segments_BL: Tensor,
    mask_BL: Tensor,
    max_tokens: int = 2**13,
    checkpoint_activations: bool = False,
    max_over_ranks: Callable[[int], int] = lambda count: count,
    predicted: PredictedBatch | None = None,
) -> Tensor:
    """Importance of a batch, float32 `[B, L]` on the device of the tokens; 0 at tokens that are not scored.

    `max_tokens` and `max_over_ranks` are those of `TokenCredit.importance`, the other arguments those of `gradient_importance`.
    With `predicted`, made from these rows, it learns from some units, and predicts all tokens.
    """
    # On the CPU from here on: what to do with a micro-batch is then known without waiting for the one before it.
    token, segments, mask = token_BL.cpu(), segments_BL.cpu(), mask_BL.cpu().bool()
    importance_BL, usable_B = torch.zeros(token.shape), (segments == Segment.REASONING).any(-1)

    def run(asked: Request, wanted_B: Tensor) -> None:
        groups = of_like_length(wanted_B.nonzero()[:, 0], mask.sum(-1), max_tokens)
        # Called before the first forward, because forwards gather weights, and two collective operations must not overlap.
        most = max_over_ranks(len(groups))
        if most:
            sequence = token[mask].to(next(model.parameters()).device)
            check_by_trial(model, request, sequence, partial(_read, model), max_over_ranks)
        for group in groups:
            rows = token[group], segments[group], mask[group]
            packed, _, scores = _run(model, asked, rows, checkpoint_activations)
            part_KL = torch.zeros(rows[0].shape)
            if predicted is None:
                part_KL[mask[group]] = importance_of_scores(asked, packed, scores)
            else:
                part_KL[mask[group]] = predicted.field(packed, scores, scores.log_prob_T, group.tolist())
            importance_BL[group] = part_KL
        for _ in range(most - len(groups)):
            _run(model, asked, (NOTHING_11, NOTHING_11, None), checkpoint_activations)

    scored_B = usable_B if predicted is None else predicted.scored_B
    run(request if predicted is None else predicted.scoring, scored_B)
    if request.importance_object.copies:
        scored = segments
        if predicted is not None:
            other_BL = ~torch.zeros_like(mask).masked_scatter(mask, predicted.labelled_T)
            scored = segments.masked_fill((segments == Segment.REASONING) & other_BL, int(Segment.OUTSIDE))
        importance_BL = copies_importance(model, request, token, scored, mask, max_tokens, max_over_ranks)
    if predicted is not None:
        own = [row[keep] for row, keep in zip(importance_BL, mask, strict=True)]
        importance_BL[mask] = torch.cat([torch.zeros(0), *predicted.learn(torch.arange(len(token)), own)])
        run(predicted.predicting, usable_B & ~scored_B)
    # Some FSDP2 modules keep frozen weights gathered until a backward.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return importance_BL.to(token_BL.device)


def copies_importance(
    model: nn.Module,
    request: Request,
    token_BL: Tensor,
    segments_BL: Tensor,
    mask_BL: Tensor,
    max_tokens: int,
    max_over_ranks: Callable[[int], int],
) -> Tensor:
    """Importance from masked copies, float32 `[B, L]`. All tensors are on the CPU; for the arguments see `batch_importance`."""
    device, wanted, importance_BL = next(model.parameters()).device, {}, torch.zeros(token_BL.shape)
    for row in (segments_BL == Segment.REASONING).any(-1).nonzero()[:, 0].tolist():
        keep_L = mask_BL[row]
        wanted[row] = token_BL[row][keep_L].to(device), segments_BL[row][keep_L]
    for row, importance_L in MaskedCopies(model, request, max_tokens).importance(wanted, max_over_ranks).items():
        importance_BL[row, mask_BL[row]] = importance_L
    return importance_BL


def _read(model: nn.Module, sequences: list[Tensor]) -> list[Reading]:
    token_BL, mask_BL = pad_sequence(sequences, True), pad_sequence([torch.ones_like(one) for one in sequences], True)
    with torch.no_grad(), ModelTaps(model) as taps:
        taps.tap = reading = Reading(packed_rows(token_BL, token_BL, mask_BL)[1])
        model(input_ids=token_BL, use_cache=False)
    return [reading]


def of_like_length(rows: Tensor, length_B: Tensor, max_tokens: int) -> list[Tensor]:
    """Splits rows into micro-batches of similar length; returns the row indices of each."""
    groups: list[list[int]] = []
    for row in rows[length_B[rows].argsort(stable=True)].tolist():
        if groups and (len(groups[-1]) + 1) * int(length_B[row]) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [torch.tensor(group) for group in groups]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode. At the end, each module returns to its previous mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True  # not .train(), which also changes the children


def packed_rows(
    token_BL: Tensor, segments_BL: Tensor, mask_BL: Tensor | None, device: torch.device | None = None
) -> tuple[Packed, Layout]:
    """Packs a padded batch. The `Layout` says where its tokens are for a model on `device`; None: where the tokens are."""
    keep_BL = torch.ones(token_BL.shape, dtype=torch.bool) if mask_BL is None else mask_BL.cpu().bool()
    at_T = keep_BL.flatten().nonzero()[:, 0]
    offsets = torch.nn.functional.pad(keep_BL.sum(-1).cumsum(0), (1, 0))
    packed = Packed(token_BL.cpu().flatten()[at_T], segments_BL.cpu().flatten()[at_T].long(), offsets)
    return packed, Layout(at_T, at_T, token_BL.numel(), device or token_BL.device)
