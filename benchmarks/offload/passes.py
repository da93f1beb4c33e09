"""What a step does beside masked copies: log-probs, the gradient pass, and the update. Plain PyTorch, one process.

All sequences have one length: no padding is masked, and packing would change nothing. `limit` is a number of micro-batches.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.workload import Batch
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.plain import gradient_importance
from oar_plugin.passes.request import Request

CHUNK = 256  # rows of logits at a time, as verl's entropy_from_logits_with_chunking


@torch.no_grad()
def log_probs(logits_BLV: Tensor, token_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the next tokens and entropies, `[B, L]`, in float32 and in chunks of rows."""
    found = []
    rows = zip(logits_BLV.flatten(0, 1).split(CHUNK), token_BL.roll(-1, 1).flatten().split(CHUNK), strict=True)
    for chunk, label in rows:
        chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        total = chunk.logsumexp(-1)
        entropy = total - (chunk.softmax(-1) * chunk).sum(-1)
        found.append((chunk.gather(-1, label[:, None])[:, 0] - total, entropy))
    log_prob_BL, entropy_BL = (torch.cat(parts).view_as(token_BL) for parts in zip(*found, strict=True))
    return log_prob_BL, entropy_BL


class LeanLogProb(torch.autograd.Function):
    """Log-prob of labels whose backward writes the gradient over the logits, as flash-attn's fused kernel does.

    The leanest update there is, so that copies are not compared with a wasteful one.
    """

    @staticmethod
    def forward(context: Any, logits_TV: Tensor, label_T: Tensor) -> Tensor:
        total_T = torch.cat([chunk.float().logsumexp(-1) for chunk in logits_TV.split(CHUNK)])
        context.save_for_backward(logits_TV, label_T, total_T)
        return logits_TV.gather(-1, label_T[:, None])[:, 0].float() - total_T

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_TV, label_T, total_T = context.saved_tensors
        parts = (x.split(CHUNK) for x in (logits_TV, label_T, total_T, gradients[0]))
        for logits, label, total, gradient in zip(*parts, strict=True):
            logits.sub_(total[:, None]).exp_().mul_(-gradient[:, None])
            logits.scatter_add_(-1, label[:, None], gradient[:, None].to(logits.dtype))
        return logits_TV, None


class Passes:
    """The passes over one batch, `micro_batch` sequences at a time."""

    def __init__(self, model: PreTrainedModel, batch: Batch, request: Request, micro_batch: int) -> None:
        self.model, self.batch, self.request, self.micro_batch = model, batch, request, micro_batch
        finder, found = make_finder(request.config.answer_patterns), []
        for response in batch.token_BL[:, batch.prompt_length :].tolist():
            segments = segment_tokens(batch.token_bytes.pieces(response), finder)
            assert segments is not None, "the planted answer was not found"
            found.append(segments)
        response_BL = torch.from_numpy(np.stack(found)).long().to(batch.token_BL.device)
        self.segments_BL = nn.functional.pad(response_BL, (batch.prompt_length, 0), value=int(Segment.OUTSIDE))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    @torch.no_grad()
    def log_prob(self, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs of the next tokens and entropies, `[B, L]`."""
        found = [log_probs(self._logits(token_bL), token_bL) for token_bL in self._micro_batches(limit)]
        log_prob_BL, entropy_BL = map(torch.cat, zip(*found, strict=True))
        return log_prob_BL, entropy_BL

    def importance(self, limit: int | None = None) -> Tensor:
        """By gradient, `[B, L]`; only the answer's rows are projected."""
        rows = zip(self._micro_batches(limit), self.segments_BL.split(self.micro_batch), strict=False)
        return torch.cat([gradient_importance(self.model, self.request, *one) for one in rows])

    def update(self, limit: int | None = None) -> None:
        """Policy-gradient forward and backward in micro-batches, gradient clipping, one AdamW step."""
        self.model.train()
        for token_bL in self._micro_batches(limit):
            self.loss(token_bL).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()

    def loss(self, token_bL: Tensor) -> Tensor:
        """On-policy PPO's: the ratio is one, and its gradient that of the log-prob. Advantages of both signs."""
        log_prob: Any = LeanLogProb.apply(self._logits(token_bL).flatten(0, 1), token_bL.roll(-1, 1).flatten())
        response_bL = log_prob.view_as(token_bL)[:, self.batch.prompt_length - 1 : -1]
        ratio_bL = (response_bL - response_bL.detach()).exp()
        sign_b1 = 1.0 - 2.0 * (torch.arange(len(token_bL), device=token_bL.device) % 2)[:, None]
        return -(ratio_bL * sign_b1).mean()

    def _micro_batches(self, limit: int | None) -> tuple[Tensor, ...]:
        return self.batch.token_BL.split(self.micro_batch)[:limit]

    def _logits(self, token_bL: Tensor) -> Tensor:
        return self.model(input_ids=token_bL, use_cache=False).logits
