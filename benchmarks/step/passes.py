"""What an RL step does with a batch, with and without importance. Plain PyTorch, one process.

Sequences have one length, so no padding is masked and packing would change nothing. A limit on micro-batches lets
the memory be measured without the whole batch.
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
    """What a pass over the batch returned, `[B, L]` each; a pass fills in what it computes."""

    log_prob: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    importance: list[Tensor] = field(default_factory=list)

    def add_logits(self, logits: Tensor, token_BL: Tensor) -> None:
        """Log-probs of the next tokens and entropies, from logits without a graph."""
        log_prob, entropy = log_prob_and_entropy(logits.flatten(0, 1), token_BL.roll(-1, 1).flatten())
        self.log_prob.append(log_prob.view_as(token_BL))
        self.entropy.append(entropy.view_as(token_BL))


@torch.no_grad()
def log_prob_and_entropy(logits_TV: Tensor, label_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each row, float32 `[T]`, in chunks of rows."""
    log_probs, entropies = [], []
    for chunk, label in zip(logits_TV.split(CHUNK), label_T.split(CHUNK), strict=True):
        chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        total = chunk.logsumexp(-1)
        log_probs.append(chunk.gather(-1, label[:, None])[:, 0] - total)
        entropies.append(total - (chunk.softmax(-1) * chunk).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


class _LogProb(torch.autograd.Function):
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
        (gradient_T,) = gradients
        parts = (x.split(CHUNK) for x in (logits_TV, label_T, total_T, gradient_T))
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
        self.segments_BL = self._pad_prompt(self.find_answers())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    # ---- (a) what the step does anyway

    @torch.no_grad()
    def log_prob(self, limit: int | None = None) -> Scores:
        """No-gradient forward: log-probs and entropy."""
        scores = Scores()
        for token_BL in self._micro_batches(0, limit):
            scores.add_logits(self._forward(token_BL).logits, token_BL)
        return scores

    # ---- (b) and (c): ours

    def fused(self, limit: int | None = None, checkpointing: bool = False) -> Scores:
        """Log-probs, entropy and importance; sequences that are not scored get the plain forward, as in the engine."""
        scores = self._score(limit, checkpointing, importance_only=False)
        plain = [] if limit is not None else self._micro_batches(self.batch.scored, None)
        with torch.no_grad():
            for token_BL in plain:
                scores.add_logits(self._forward(token_BL).logits, token_BL)
        return scores

    def importance_only(self, limit: int | None = None, checkpointing: bool = False) -> Scores:
        """Importance when nobody needs log-probs (bypass mode): only the answer's rows are projected."""
        return self._score(limit, checkpointing, importance_only=True)

    def _score(self, limit: int | None, checkpointing: bool, importance_only: bool) -> Scores:
        scores = Scores()
        self._set_checkpointing(checkpointing)
        self.model.eval()
        segments = iter(self.segments_BL[: self.batch.scored].split(self.micro_batch))
        with PlainPass(self.model, self.request, checkpoint_activations=checkpointing) as one:
            for token_BL in self._micro_batches(0, limit, self.batch.scored):
                on_logits = None if importance_only else partial(scores.add_logits, token_BL=token_BL)
                scores.importance.append(one.importance(token_BL, next(segments), on_logits=on_logits))
        return scores

    # ---- (d) the published procedure

    def published(self, limit: int | None = None, weight_gradients: bool = True) -> Scores:
        """The published OAR-G on the first `limit` (all) scored responses, one at a time; leaves no gradient behind."""
        scores = Scores()
        self._set_checkpointing(False)
        self.model.eval()
        for token_L, segments_L in zip(self.batch.token_BL, self.segments_BL, strict=True):
            if len(scores.importance) == min(limit or self.batch.scored, self.batch.scored):
                break
            reasoning = (segments_L == Segment.REASONING).nonzero()[:, 0]
            answer = (segments_L == Segment.ANSWER).nonzero()[:, 0]
            scored_R = published_importance(
                self.model,
                token_L,
                int(reasoning[0]),
                int(reasoning[-1]) + 1,
                int(answer[0]),
                int(answer[-1]) + 1,
                sigma=self.request.sigma,
                weight_gradients=weight_gradients,
            )
            scores.importance.append(scored_R)
        self.model.zero_grad(set_to_none=True)
        return scores

    # ---- (e) the actor's update

    def update(self, limit: int | None = None, checkpointing: bool = False) -> None:
        """Policy-gradient forward and backward in micro-batches, gradient clipping, one AdamW step."""
        self._set_checkpointing(checkpointing)
        self.model.train()
        for token_BL in self._micro_batches(0, limit):
            self._loss(token_BL).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()

    def _loss(self, token_BL: Tensor) -> Tensor:
        logits_TV = self._forward(token_BL).logits.flatten(0, 1)
        log_prob: Any = _LogProb.apply(logits_TV, token_BL.roll(-1, 1).flatten())
        # On-policy PPO: the ratio is one, and its gradient that of the log-prob. Advantages of both signs.
        response_BL = log_prob.view_as(token_BL)[:, self.batch.prompt_length - 1 : -1]
        ratio_BL = (response_BL - response_BL.detach()).exp()
        sign_B1 = 1.0 - 2.0 * (torch.arange(len(token_BL), device=token_BL.device) % 2)[:, None]
        loss: Tensor = -(ratio_BL * sign_B1).mean()
        return loss

    # ---- (f) what surrounds it

    def find_answers(self) -> list[np.ndarray]:
        """Segments of every response, from its tokens' bytes."""
        found = []
        for response in self.batch.token_BL[:, self.batch.prompt_length :].tolist():
            segments = segment_tokens(self.batch.token_bytes.pieces(response), self.finder)
            assert segments is not None, "the planted answer was not found"
            found.append(segments)
        return found

    def reshape(self, importance_BL: Tensor) -> Reshaped:
        """Gate and diagnostics for the whole batch, on the CPU as in the trainer."""
        size = len(self.batch)
        reasoning_BL = (self.segments_BL == Segment.REASONING)[:, self.batch.prompt_length :].cpu()
        advantage_BL = torch.ones_like(importance_BL)
        status_B = torch.full((size,), int(Status.SCORED))
        return reshape(advantage_BL, importance_BL, reasoning_BL, status_B, self.config)

    # ----

    def _micro_batches(self, start: int, limit: int | None, end: int | None = None) -> Iterator[Tensor]:
        for number, token_BL in enumerate(self.batch.token_BL[start:end].split(self.micro_batch)):
            if number == limit or not len(token_BL):
                return
            yield token_BL

    def _forward(self, token_BL: Tensor) -> Any:
        return self.model(input_ids=token_BL, use_cache=False)

    def _set_checkpointing(self, on: bool) -> None:
        model: Any = self.model
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()

    def _pad_prompt(self, segments: list[np.ndarray]) -> Tensor:
        rows_BL = torch.from_numpy(np.stack(segments)).long()
        padded_BL = nn.functional.pad(rows_BL, (self.batch.prompt_length, 0), value=int(Segment.OUTSIDE))
        return padded_BL.to(self.batch.token_BL.device)
