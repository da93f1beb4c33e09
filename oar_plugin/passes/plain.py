"""Importance of a padded batch from a HuggingFace model, for hosts with padded batches, notebooks and benchmarks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed
from oar_plugin.passes.host import MicroBatch, Work
from oar_plugin.passes.prefix import Prefixes, groups_behind
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

    gives_log_probs = False

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
            self._run(rows, self.packed, work)
        return True

    def gradient(self, rows: Sequence[int], work: Work) -> bool:
        self._run(rows, self.packed, work)
        return True

    def share(self, tensor: Tensor) -> Tensor:
        return tensor

    def copies(self, copies: Packed, like: Sequence[int], work: Work) -> None:
        """Copies of one response share a forward behind a cached prefix, where that works."""
        answer_T, response_T = copies.segments_T == Segment.ANSWER, copies.response_T
        numbers = response_T[answer_T].unique().tolist()  # other rows only fill up
        prefixes, token_T = Prefixes(self.model), self.packed.token_T.to(self.device)
        if not prefixes.usable(token_T, self.request.replacement_token, self.largest):
            self._run(numbers, copies, work)
            return
        original_T = self.packed.token_T[self.packed.offsets[torch.tensor(like)][response_T] + copies.place_T]
        # The first row that is read is before the answer.
        computed_T = (copies.token_T != original_T) | answer_T.roll(-1)
        begin_B = torch.full((len(like),), len(original_T))
        begin_B = begin_B.scatter_reduce(0, response_T[computed_T], copies.place_T[computed_T], "amin")
        groups_of, length_B = dict[int, list[list[int]]](), copies.offsets.diff()
        for row, some in groupby(numbers, like.__getitem__):
            of_row = list(some)
            groups = groups_behind(begin_B[of_row].tolist(), int(length_B[of_row[0]]), self.max_tokens)
            groups_of[row] = [[of_row[index] for index in group] for group in groups]
        count = sum(1 + len(groups) for groups in groups_of.values())  # one fills the cache
        idle = self.largest(count) - count
        for row, groups in groups_of.items():
            start, last = int(self.packed.offsets[row]), int(begin_B[groups[-1][-1]])
            cache = prefixes.of(token_T[start : start + max(1, last)])
            for group in groups:
                begin = int(begin_B[group[0]])
                self._forward(group, copies.select(group), work, begin, prefixes.behind(cache, begin))
        for _ in range(idle):
            self._forward([], NOTHING, work)

    def whole(self, count: int) -> int:
        return count

    def _run(self, rows: Sequence[int], packed: Packed, work: Work) -> None:
        groups = of_like_length(rows, packed.offsets.diff(), self.max_tokens)
        # Called before the first forward, because forwards gather weights, and two collective operations must not overlap.
        most = self.largest(len(groups))
        if most:
            token_T = self.packed.token_T.to(self.device)
            check_by_trial(self.model, self.request, token_T, partial(_read, self.model), self.largest)
        for group in groups:
            self._forward(group, packed.select(group), work)
        for _ in range(most - len(groups)):
            self._forward([], NOTHING, work)

    def _forward(
        self, rows: Sequence[int], packed: Packed, work: Work, begin: int = 0, cached: dict[str, Any] | None = None
    ) -> None:
        """One micro-batch. `cached`: the model's arguments with a cache of each row's first `begin` tokens, which are left out.

        Padding after each row needs no mask and no positions: models count these in different ways.
        """
        length_B = packed.offsets.diff()
        keep_BL = torch.arange(max(1, int(length_B.max()))) < length_B[:, None]
        input_BL = torch.zeros(keep_BL.shape, dtype=torch.long).masked_scatter(keep_BL, packed.token_T)[:, begin:]
        row_T, place_T = keep_BL.nonzero().T
        local_T = (row_T * input_BL.shape[1] + place_T - begin).where(place_T >= begin, -1)
        layout = Layout(local_T, local_T, input_BL.numel(), self.device)
        micro_batch = work.begin(rows, layout) if rows else MicroBatch(MicroBatchPass(self.request, packed, layout).tap)
        (input_BL,) = to_device(self.device, input_BL)
        with ModelTaps(self.model, self.checkpoint_activations, reads_only=work.reads_only) as taps:
            for forward in work.forwards:
                with taps.running(forward):
                    taps.tap = micro_batch.tap(forward)
                    self.model(input_ids=input_BL, **(cached or {"use_cache": False}))
        micro_batch.end(None)


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

    Args:
        model: causal LM in eval mode. The call does not change the model.
        token_BL: int64, prompts and responses, padded on any side. From the CPU no copy waits for the device.
        segments_BL: `Segment` per token; OUTSIDE at all tokens of a response that is not scored.
        mask_BL: bool, false at padding.
        checkpoint_activations: recompute activations in a backward, to save memory.
        max_tokens, max_over_ranks, sum_over_ranks: those of `TokenCredit.importance`.
        schedule: that of the run; None: a new one.

    Raises:
        UnsupportedModelError: importance cannot be computed with this model (see `check_model`).
    """
    # On the CPU from here on: what to do with a micro-batch is then known without waiting for the one before it.
    packed, layout = packed_rows(token_BL, segments_BL, mask_BL)
    scored_B = (segments_BL == Segment.REASONING).any(-1).cpu()
    status_B = torch.where(scored_B, int(Status.SCORED), int(Status.NOT_NEEDED))
    how = max_tokens, checkpoint_activations, max_over_ranks, sum_over_ranks
    host, schedule = PlainHost(model, request, packed, *how), schedule or Schedule(request.config)
    result = schedule.run(host, request, packed, status_B)
    # Some FSDP2 modules keep frozen weights gathered until a backward.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    flat = torch.zeros(token_BL.numel())
    flat[layout.local_T] = result.importance_T
    return flat.view(token_BL.shape).to(token_BL.device)


def _read(model: nn.Module, sequences: list[Tensor]) -> list[Reading]:
    token_BL, mask_BL = pad_sequence(sequences, True), pad_sequence([torch.ones_like(one) for one in sequences], True)
    with torch.no_grad(), ModelTaps(model) as taps:
        taps.tap = reading = Reading(packed_rows(token_BL, token_BL, mask_BL)[1])
        model(input_ids=token_BL, use_cache=False)
    return [reading]


def of_like_length(rows: Sequence[int], length_B: Tensor, max_tokens: int) -> list[list[int]]:
    """Splits row indices into micro-batches of similar length. A row of more than `max_tokens` is alone."""
    groups, lengths = list[list[int]](), length_B.tolist()
    for row in sorted(rows, key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[row] <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


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
    token_BL: Tensor, segments_BL: Tensor, mask_BL: Tensor, device: torch.device | None = None
) -> tuple[Packed, Layout]:
    """Packs a padded batch. The `Layout` says where its tokens are for a model on `device`; None: where the tokens are."""
    keep_BL = mask_BL.cpu().bool()
    at_T = keep_BL.flatten().nonzero()[:, 0]
    offsets = torch.nn.functional.pad(keep_BL.sum(-1).cumsum(0), (1, 0))
    packed = Packed(token_BL.cpu().flatten()[at_T], segments_BL.cpu().flatten()[at_T].long(), offsets)
    return packed, Layout(at_T, at_T, token_BL.numel(), device or token_BL.device)
