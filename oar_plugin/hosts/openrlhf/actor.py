"""The actor's side: one forward of OpenRLHF's own `Actor` returns log-probs and measures importance."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Forward
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed, importance_of_scores
from oar_plugin.passes.plain import copies_importance, packed_rows
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps
from oar_plugin.passes.trial import Reading, check_by_trial


class ActorPass:
    """The log-prob pass over one micro-batch by OpenRLHF's `Actor` in eval mode. Each call of the actor also gets `more`."""

    def __init__(self, actor: Any, request: Request, args: Any, more: dict[str, Any]) -> None:
        self.actor, self.request, self.args, self.more = actor, request, args, more

    def run(
        self, token_BT: Tensor, segments_BT: Tensor, action_mask_BA: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs as `actor` returns them and importance (0 where nothing is scored), `[B, A]`, on the CPU.

        Rows to score run in the update's micro-batches, the others in one forward without a graph. Under ZeRO-3 all ranks must
        run equal numbers of forwards. OpenRLHF gives them equal numbers of micro-batches; a rank with fewer rows to score first
        repeats its first row.
        """
        train, needed_B = self.args.train, (segments_BT == Segment.REASONING).any(-1)
        scored, rest, first = needed_B.nonzero()[:, 0], (~needed_B).nonzero()[:, 0], token_BT.new_zeros(1)
        size_S, most = mask_BT[scored].sum(-1), train.max_tokens_per_gpu
        if not train.dynamic_batch_enable:
            size_S, most = torch.full_like(scored, token_BT.shape[1]), train.micro_batch_size * token_BT.shape[1]
        parts = filled(scored, size_S, most)
        log_prob_BA, importance_BT = torch.zeros_like(action_mask_BA).float(), torch.zeros_like(token_BT).float()
        if self._max_over_ranks(int(len(rest) > 0)):
            rows = rest if len(rest) else first
            with torch.no_grad():
                log_prob_BA[rows] = self.actor(token_BT[rows], action_mask_BA[rows], mask_BT[rows], **self.more)
        if count := self._max_over_ranks(len(parts)):
            with self._without_engine() as model:
                read = partial(self._read, model)
                check_by_trial(model, self.request, token_BT[mask_BT.bool()], read, self._max_over_ranks)
                for rows in [first] * (count - len(parts)) + parts:
                    inputs = token_BT[rows], segments_BT[rows], action_mask_BA[rows], mask_BT[rows]
                    log_prob_BA[rows], importance_BT[rows] = self._score(model, *inputs)
                if self.request.importance_object.copies:
                    batch = token_BT.cpu(), segments_BT.cpu(), mask_BT.cpu().bool()
                    importance_BT = copies_importance(model, self.request, *batch, most, self._max_over_ranks)
        return log_prob_BA.cpu(), importance_BT[:, -action_mask_BA.shape[1] :].cpu()

    def _score(
        self, model: nn.Module, token_RT: Tensor, segments_RT: Tensor, action_mask_RA: Tensor, mask_RT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs `[R, A]` and importance `[R, T]` of some rows."""
        request, log_prob_RA, importance_RT = self.request, torch.zeros(0), torch.zeros(token_RT.shape)
        packed, layout, at_T = self._packed(token_RT, segments_RT, mask_RT)
        micro_batch = MicroBatchPass(request, packed, layout)
        with ModelTaps(model, self.args.actor.gradient_checkpointing_enable) as taps:
            for forward in request.forwards() or [Forward(None, log_probs=True)]:
                with taps.running(forward):
                    taps.tap = micro_batch.tap(forward)
                    if forward.log_probs:
                        log_prob_RA = self.actor(token_RT, action_mask_RA, mask_RT, **self.more).detach()
                    else:  # without an action mask the actor returns before it needs the logits of every row
                        self.actor(token_RT, None, mask_RT, return_output=True, **self.more)
        importance_RT.view(-1)[at_T] = importance_of_scores(request, packed, micro_batch.scores)
        return log_prob_RA, importance_RT.to(token_RT.device)

    def _packed(self, token_RT: Tensor, segments_RT: Tensor, mask_RT: Tensor) -> tuple[Packed, Layout, Tensor]:
        """Packed rows, where the model has them, and each packed token's position in the flattened padded rows."""
        packed, padded = packed_rows(token_RT, segments_RT, mask_RT)
        at_T = torch.arange(len(packed.token_T))
        # With --ds.packing_samples the model sees the rows concatenated, without their padding.
        layout = Layout(at_T, at_T, len(at_T), token_RT.device) if self.actor.packing_samples else padded
        return packed, layout, padded.local_T

    def _read(self, model: nn.Module, sequences: list[Tensor]) -> list[Reading]:
        ones = [torch.ones_like(sequence) for sequence in sequences]
        token_RT, mask_RT = (pad_sequence(rows, True, padding_side="left") for rows in (sequences, ones))
        with torch.no_grad(), ModelTaps(model) as taps:
            taps.tap = reading = Reading(self._packed(token_RT, token_RT, mask_RT)[1])
            self.actor(token_RT, None, mask_RT, return_output=True, **self.more)
        return [reading]

    @contextmanager
    def _without_engine(self) -> Iterator[nn.Module]:
        """Replace DeepSpeed's engine by its HuggingFace model: the engine takes every backward for one of training, and reduces
        gradients at the end of it. ZeRO-3's hooks, which gather weights, are on the model's modules and still run.
        """
        engine = self.actor.model
        self.actor.model = getattr(engine, "module", engine)
        try:
            yield self.actor.model
        finally:
            self.actor.model = engine

    def _max_over_ranks(self, count: int) -> int:
        """The maximum of a count over ranks if weights are sharded, else the count."""
        if self.args.ds.zero_stage < 3:
            return count
        counts = torch.tensor(count, device=next(self.actor.parameters()).device)
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)
        return int(counts)


def filled(rows: Tensor, size_R: Tensor, most: int) -> list[Tensor]:
    """Rows in parts whose sizes sum to at most `most`, the largest row first. A row larger than `most` is a part by itself."""
    parts, room = list[list[int]](), 0
    for at in size_R.argsort(descending=True, stable=True).tolist():
        if (size := int(size_R[at])) > room:
            parts, room = [*parts, []], most
        parts[-1].append(at)
        room -= size
    return [rows[part] for part in parts]
