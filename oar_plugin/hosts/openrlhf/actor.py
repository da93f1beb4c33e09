"""The actor's side: one forward of OpenRLHF's own `Actor` gives log-probs and importance."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Forward
from oar_plugin.passes.gradient import Layout, MicroBatchPass, importance_of_scores
from oar_plugin.passes.plain import copies_importance, packed_rows
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps


class ActorPass:
    """The forward of one micro-batch, of OpenRLHF's `Actor` in eval mode. All its calls take OpenRLHF's arguments `more`."""

    def __init__(self, actor: Any, request: Request, args: Any, more: dict[str, Any]) -> None:
        self.actor, self.request, self.args, self.more = actor, request, args, more

    def run(
        self, token_BT: Tensor, segments_BT: Tensor, action_mask_BA: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs as `actor` returns them and importance (0 where nothing is scored), `[B, A]`, on the CPU.

        Rows to score come in the update's micro-batches, the others in one forward without a graph. Under ZeRO-3 the ranks make
        equal numbers of forwards: OpenRLHF gives them equally many micro-batches, and a rank with less to do here repeats its
        first row, before that row's own turn.
        """
        train, needed_B = self.args.train, (segments_BT == Segment.REASONING).any(-1)
        scored, rest, first = needed_B.nonzero()[:, 0], (~needed_B).nonzero()[:, 0], token_BT.new_zeros(1)
        size_S, most = mask_BT[scored].sum(-1), train.max_tokens_per_gpu
        if not train.dynamic_batch_enable:
            size_S, most = torch.full_like(scored, token_BT.shape[1]), train.micro_batch_size * token_BT.shape[1]
        parts = filled(scored, size_S, most)
        log_prob_BA, importance_BT = torch.zeros_like(action_mask_BA).float(), torch.zeros_like(token_BT).float()
        if self._in_step(int(len(rest) > 0)):
            rows = rest if len(rest) else first
            with torch.no_grad():
                log_prob_BA[rows] = self.actor(token_BT[rows], action_mask_BA[rows], mask_BT[rows], **self.more)
        if count := self._in_step(len(parts)):
            with self._without_engine() as model:
                for rows in [first] * (count - len(parts)) + parts:
                    inputs = token_BT[rows], segments_BT[rows], action_mask_BA[rows], mask_BT[rows]
                    log_prob_BA[rows], importance_BT[rows] = self._score(model, *inputs)
                if self.request.importance_object.copies is not None:
                    inputs = token_BT, segments_BT, mask_BT.bool(), importance_BT
                    importance_BT = copies_importance(model, self.request, *inputs, most, self._in_step)
        return log_prob_BA.cpu(), importance_BT[:, -action_mask_BA.shape[1] :].cpu()

    def _score(
        self, model: nn.Module, token_RT: Tensor, segments_RT: Tensor, action_mask_RA: Tensor, mask_RT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs `[R, A]` and importance `[R, T]` of some rows."""
        request, log_prob_RA, importance_RT = self.request, torch.zeros(0), torch.zeros_like(token_RT).float()
        packed, padded = packed_rows(token_RT, segments_RT, mask_RT)
        at_T = torch.arange(len(packed.token_T), device=token_RT.device)
        # With --ds.packing_samples the model sees the rows behind one another, without their padding.
        one = MicroBatchPass(request, packed, Layout(at_T, at_T, len(at_T)) if self.actor.packing_samples else padded)
        forwards = request.importance_object.forwards(request.num_draws, log_probs=True)
        with ModelTaps(model, self.args.actor.gradient_checkpointing_enable) as taps:
            for forward in forwards or [Forward(None, log_probs=True)]:
                tap = taps.tap = one.tap(forward)
                with torch.set_grad_enabled(forward.backward is not None):
                    if forward.log_probs:
                        log_prob_RA = self.actor(token_RT, action_mask_RA, mask_RT, **self.more).detach()
                    else:  # without an action mask it returns before it needs the logits of every row
                        self.actor(token_RT, None, mask_RT, return_output=True, **self.more)
                if tap.scalar is not None:
                    tap.scalar.backward()
        importance_RT.view(-1)[padded.local_T] = importance_of_scores(request, packed, one.scores)
        return log_prob_RA, importance_RT

    @contextmanager
    def _without_engine(self) -> Iterator[nn.Module]:
        """The HuggingFace model in the place of DeepSpeed's engine, which takes a backward for one of training and reduces
        gradients at its end. What ZeRO-3 gathers weights with hangs on the model's modules, and stays.
        """
        engine = self.actor.model
        self.actor.model = getattr(engine, "module", engine)
        try:
            yield self.actor.model
        finally:
            self.actor.model = engine

    def _in_step(self, count: int) -> int:
        """The largest of the ranks' counts where weights are sharded."""
        if self.args.ds.zero_stage < 3:
            return count
        counts = torch.tensor(count, device=next(self.actor.parameters()).device)
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)
        return int(counts)


def filled(rows: Tensor, size_R: Tensor, most: int) -> list[Tensor]:
    """Rows in parts whose sizes add up to `most` or less, the largest first. A row that is larger has a part of its own."""
    parts, room = list[list[int]](), 0
    for at in size_R.argsort(descending=True, stable=True).tolist():
        if (size := int(size_R[at])) > room:
            parts, room = [*parts, []], most
        parts[-1].append(at)
        room -= size
    return [rows[part] for part in parts]
