"""The actor's side: log-probs from OpenRLHF's own `Actor`, and importance from a pass of its own over the rows that need it."""

from typing import Any

import torch
from torch import Tensor, distributed

from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request


def actor_pass(
    actor: Any,
    request: Request,
    args: Any,
    token_BT: Tensor,
    segments_BT: Tensor,
    action_mask_BA: Tensor,
    mask_BT: Tensor,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Log-probs as `actor`, in eval mode, returns them, and importance (0 where nothing is scored), `[B, A]`, on the CPU.

    Rows run in micro-batches as large as the update's. `more`: other arguments of the actor's call.
    """
    with torch.no_grad():
        log_prob_BA = actor(token_BT, action_mask_BA, mask_BT, **more)
    # DeepSpeed's engine takes every backward for one of training, and reduces gradients at the end of it. ZeRO-3's hooks, which
    # gather weights, are on the HuggingFace model's modules and still run.
    model, train = getattr(actor.model, "module", actor.model), args.train
    most = train.max_tokens_per_gpu if train.dynamic_batch_enable else train.micro_batch_size * token_BT.shape[1]

    def max_over_ranks(count: int) -> int:
        """The maximum over ranks if weights are sharded, else the count."""
        if args.ds.zero_stage < 3:
            return count
        counts = torch.tensor(count, device=token_BT.device)
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)
        return int(counts)

    how = most, args.actor.gradient_checkpointing_enable, max_over_ranks
    importance_BT = batch_importance(model, request, token_BT, segments_BT, mask_BT, *how)
    return log_prob_BA.cpu(), importance_BT[:, -action_mask_BA.shape[1] :].cpu()
