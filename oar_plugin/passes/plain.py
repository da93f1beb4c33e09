"""Importance of a padded batch from a HuggingFace model, for hosts with padded batches, notebooks and benchmarks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed, importance_of_scores
from oar_plugin.passes.host import Work
from oar_plugin.passes.masked_copies import MaskedCopies
from oar_plugin.passes.request import Request
from oar_plugin.passes.schedule import Schedule
from oar_plugin.passes.taps import ModelTaps, to_device
from oar_plugin.passes.trial import Reading, check_by_trial

NOTHING = Packed(torch.zeros(1).long(), torch.zeros(1).long(), torch.tensor([0, 1]))
"""One token, for a rank with fewer micro-batches than others."""


class PlainHost:
    """The `Host` of a batch whose model is called here. Where weights are sharded, all ranks run equal numbers of forwards.

    `max_tokens`, `max_over_ranks` and `sum_over_ranks` are those of `TokenCredit.importance`.
    """

    prefixes, gives_log_probs = True, False

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        packed: Packed,
        max_tokens: int,
        checkpoint_activations: bool = False,
        max_over_ranks: Callable[[int], int] = lambda count: count,
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.model, self.request, self.packed, self.max_tokens = model, request, packed, max_tokens
        self.checkpoint_activations, self.largest, self.total = checkpoint_activations, max_over_ranks, sum_over_ranks
        self.device = next(model.parameters()).device

    def read(self, rows: Sequence[int], work: Work | None) -> bool:
        if work is not None:
            self._run(rows, work)
        return True

    def gradient(self, rows: Sequence[int], work: Work) -> bool:
        self._run(rows, work)
        return True

    def masked_copies(self, packed: Packed) -> Tensor:
        rows = packed.response_T[packed.reasoning_T].unique().tolist()
        parts = {row: packed.select([row]) for row in rows}
        wanted = {row: (one.token_T.to(self.device), one.segments_T) for row, one in parts.items()}
        if self.largest(len(wanted)):
            self._check()
        importance_T = torch.zeros(len(packed.token_T))
        copies = MaskedCopies(self.model, self.request, self.max_tokens)
        for row, importance_t in copies.importance(wanted, self.largest).items():
            importance_T[packed.at([row])] = importance_t
        return importance_T

    def share(self, tensor: Tensor) -> Tensor:
        return tensor

    def copies(self, copies: Packed, like: Sequence[int], work: Work) -> None:
        raise NotImplementedError("copies run behind cached prefixes")

    def whole(self, count: int) -> int:
        return count

    def _run(self, rows: Sequence[int], work: Work) -> None:
        groups = of_like_length(torch.tensor(rows, dtype=torch.long), self.packed.offsets.diff(), self.max_tokens)
        # Called before the first forward, because forwards gather weights, and two collective operations must not overlap.
        most = self.largest(len(groups))
        if most:
            self._check()
        for group in groups:
            self._forward(group.tolist(), self.packed.select(group.tolist()), work)
        for _ in range(most - len(groups)):
            self._forward([], NOTHING, work)

    def _check(self) -> None:
        read = partial(_read, self.model)
        check_by_trial(self.model, self.request, self.packed.token_T.to(self.device), read, self.largest)

    def _forward(self, rows: Sequence[int], packed: Packed, work: Work) -> None:
        """One micro-batch. Padding behind each row needs no mask and no positions: models count these in different ways."""
        length_B = packed.offsets.diff()
        keep_BL = torch.arange(max(1, int(length_B.max()))) < length_B[:, None]
        input_BL = torch.zeros(keep_BL.shape, dtype=torch.long).masked_scatter(keep_BL, packed.token_T)
        layout = packed_rows(input_BL, input_BL, keep_BL, self.device)[1]
        micro_batch = work.begin(rows, layout) if rows else MicroBatchPass(self.request, packed, layout)
        (input_BL,) = to_device(self.device, input_BL)
        with ModelTaps(self.model, self.checkpoint_activations, reads_only=work.reads_only) as taps:
            for forward in work.forwards:
                with taps.running(forward):
                    taps.tap = micro_batch.tap(forward)
                    self.model(input_ids=input_BL, use_cache=False)
        if rows:
            work.end(micro_batch, None)


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
    packed, given = packed_rows(token_BL, segments_BL, mask_BL, next(model.parameters()).device)
    flat = torch.zeros(token_BL.numel())

    def begin(rows: Sequence[int], layout: Layout) -> MicroBatchPass:
        return MicroBatchPass(request, packed, layout)

    def end(micro_batch: MicroBatchPass, log_prob_T: Tensor | None) -> None:
        flat[given.local_T] = importance_of_scores(request, packed, micro_batch.scores)

    host = PlainHost(model, request, packed, token_BL.numel(), checkpoint_activations)
    host._forward(range(len(packed.offsets) - 1), packed, Work(request.forwards(), begin, end))
    return flat.view(token_BL.shape).to(token_BL.device)


def batch_importance(
    model: nn.Module,
    request: Request,
    token_BL: Tensor,
    segments_BL: Tensor,
    mask_BL: Tensor,
    max_tokens: int = 2**13,
    checkpoint_activations: bool = False,
    max_over_ranks: Callable[[int], int] = lambda count: count,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    schedule: Schedule | None = None,
) -> Tensor:
    """Importance of a batch, float32 `[B, L]` on the device of the tokens; 0 at tokens that are not scored.

    `max_tokens`, `max_over_ranks` and `sum_over_ranks` are those of `TokenCredit.importance`, the first arguments those of
    `gradient_importance`. `schedule`: that of the run; None: a new one.
    """
    # On the CPU from here on: what to do with a micro-batch is then known without waiting for the one before it.
    packed, layout = packed_rows(token_BL, segments_BL, mask_BL)
    scored_B = (segments_BL == Segment.REASONING).any(-1).cpu()
    status_B = torch.where(scored_B, int(Status.SCORED), int(Status.NOT_NEEDED))
    how = max_tokens, checkpoint_activations, max_over_ranks, sum_over_ranks
    host, schedule = PlainHost(model, request, packed, *how), schedule or Schedule(request.config)
    answer = schedule.run(host, request, packed, status_B)
    # Some FSDP2 modules keep frozen weights gathered until a backward.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    flat = torch.zeros(token_BL.numel())
    flat[layout.local_T] = answer.importance_T
    return flat.view(token_BL.shape).to(token_BL.device)


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
