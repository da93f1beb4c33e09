"""What an RL step does with a batch, with and without importance. Plain PyTorch, one process.

All sequences have one length: no padding is masked, and packing would change nothing. `limit` is a number of micro-batches
(of responses in `published`), so that memory can be measured without the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.step.published import published_importance
from benchmarks.tiny.random_models import Batch
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import Reshaped, reshape
from oar_plugin.passes.plain import PlainPass
from oar_plugin.passes.request import Request

CHUNK = 256  # rows of logits at a time, as verl's entropy_from_logits_with_chunking


@dataclass
class Scores:
    """What a pass over the batch returned, `[B, L]` a micro-batch; a pass fills in what it computes."""

    log_prob: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    importance: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def add_logits(self, logits_BLV: Tensor, token_BL: Tensor) -> None:
        """Log-probs of the next tokens and entropies, in float32 and in chunks of rows."""
        log_probs, entropies = [], []
        rows = zip(logits_BLV.flatten(0, 1).split(CHUNK), token_BL.roll(-1, 1).flatten().split(CHUNK), strict=True)
        for chunk, label in rows:
            chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
            total = chunk.logsumexp(-1)
            log_probs.append(chunk.gather(-1, label[:, None])[:, 0] - total)
            entropies.append(total - (chunk.softmax(-1) * chunk).sum(-1))
        self.log_prob.append(torch.cat(log_probs).view_as(token_BL))
        self.entropy.append(torch.cat(entropies).view_as(token_BL))


class LeanLogProb(torch.autograd.Function):
    """Log-prob of labels whose backward writes the gradient over the logits, as flash-attn's fused kernel does.

    The leanest update there is, so that importance is not compared with a wasteful one.
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
    """The passes over one batch with one model.

    Args:
        model: causal LM of transformers.
        batch: the sequences.
        request: which importance.
        micro_batch: sequences at a time, for every pass but the published one.
    """

    def __init__(self, model: nn.Module, batch: Batch, request: Request, micro_batch: int) -> None:
        self.model, self.batch, self.request, self.micro_batch = model, batch, request, micro_batch
        self.finder = make_finder(request.answer_patterns)
        self.config = OarConfig.parse({"answer_patterns": request.answer_patterns, "importance": request.importance})
        response_BL = torch.from_numpy(np.stack(self.find_answers())).long().to(batch.token_BL.device)
        self.segments_BL = nn.functional.pad(response_BL, (batch.prompt_length, 0), value=int(Segment.OUTSIDE))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    @torch.no_grad()
    def log_prob(self, limit: int | None = None) -> Scores:
        """(a) What the step does anyway: log-probs and entropy."""
        scores = Scores()
        for token_BL in self._micro_batches(0, limit):
            scores.add_logits(self._forward(token_BL), token_BL)
        return scores

    def fused(self, limit: int | None = None, checkpointing: bool = False) -> Scores:
        """(b) Log-probs, entropy and importance; sequences that are not scored get the plain forward, as in the engine."""
        scores = self._score(limit, checkpointing, log_probs=True)
        with torch.no_grad():
            for token_BL in self._micro_batches(self.batch.scored) if limit is None else ():
                scores.add_logits(self._forward(token_BL), token_BL)
        return scores

    def importance_only(self, limit: int | None = None, checkpointing: bool = False) -> Scores:
        """(c) Importance when nobody needs log-probs (bypass mode): only the answer's rows are projected."""
        return self._score(limit, checkpointing, log_probs=False)

    def _score(self, limit: int | None, checkpointing: bool, log_probs: bool) -> Scores:
        scores = Scores()
        self._set_checkpointing(checkpointing)
        self.model.eval()
        segments = self.segments_BL[: self.batch.scored].split(self.micro_batch)
        with PlainPass(self.model, self.request, checkpoint_activations=checkpointing) as one:
            for token_BL, segments_BL in zip(self._micro_batches(0, limit, self.batch.scored), segments, strict=False):
                on_logits = partial(scores.add_logits, token_BL=token_BL) if log_probs else None
                scores.importance.append(one.importance(token_BL, segments_BL, on_logits=on_logits))
        return scores

    def published(self, limit: int | None = None, weight_gradients: bool = True) -> Scores:
        """(d) The published OAR-G on the scored responses, one at a time; leaves no gradient behind."""
        scores = Scores()
        self._set_checkpointing(False)
        self.model.eval()
        for row in range(min(limit or self.batch.scored, self.batch.scored)):
            token_L, segments_L = self.batch.token_BL[row], self.segments_BL[row]
            scored_R = published_importance(
                self.model, token_L, segments_L, self.request.sigma, weight_gradients=weight_gradients
            )
            scores.importance.append(scored_R)
        self.model.zero_grad(set_to_none=True)
        return scores

    def update(self, limit: int | None = None, checkpointing: bool = False) -> None:
        """(e) Policy-gradient forward and backward in micro-batches, gradient clipping, one AdamW step."""
        self._set_checkpointing(checkpointing)
        self.model.train()
        for token_BL in self._micro_batches(0, limit):
            self.loss(token_BL).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()

    def loss(self, token_BL: Tensor) -> Tensor:
        """On-policy PPO's: the ratio is one, and its gradient that of the log-prob. Advantages of both signs."""
        log_prob: Any = LeanLogProb.apply(self._forward(token_BL).flatten(0, 1), token_BL.roll(-1, 1).flatten())
        response_BL = log_prob.view_as(token_BL)[:, self.batch.prompt_length - 1 : -1]
        ratio_BL = (response_BL - response_BL.detach()).exp()
        sign_B1 = 1.0 - 2.0 * (torch.arange(len(token_BL), device=token_BL.device) % 2)[:, None]
        loss: Tensor = -(ratio_BL * sign_B1).mean()
        return loss

    def find_answers(self) -> list[np.ndarray]:
        """(f) Segments of every response, from its tokens' bytes."""
        found = []
        for response in self.batch.token_BL[:, self.batch.prompt_length :].tolist():
            segments = segment_tokens(self.batch.token_bytes.pieces(response), self.finder)
            assert segments is not None, "the planted answer was not found"
            found.append(segments)
        return found

    def reshape(self, importance_BL: Tensor) -> Reshaped:
        """(f) Gate and diagnostics for the whole batch, on the CPU as in the trainer."""
        reasoning_BL = (self.segments_BL == Segment.REASONING)[:, self.batch.prompt_length :].cpu()
        status_B = torch.full((len(self.batch),), int(Status.SCORED))
        return reshape(torch.ones_like(importance_BL), importance_BL, reasoning_BL, status_B, self.config)

    def _micro_batches(self, start: int, limit: int | None = None, end: int | None = None) -> Iterator[Tensor]:
        rows = self.batch.token_BL[start:end]
        yield from rows.split(self.micro_batch)[:limit] if len(rows) else ()

    def _forward(self, token_BL: Tensor) -> Tensor:
        logits_BLV: Tensor = self.model(input_ids=token_BL, use_cache=False).logits
        return logits_BLV

    def _set_checkpointing(self, on: bool) -> None:
        model: Any = self.model
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
