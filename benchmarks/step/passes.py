"""What an RL step does with a batch, with and without importance. Plain PyTorch, one process.

All sequences have one length: no padding is masked, and packing would change nothing. `limit` is a number of micro-batches
(of responses in `published`), so that memory can be measured without the whole batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.workload import Batch
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import reshape
from oar_plugin.passes.plain import gradient_importance
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
    """The passes over one batch, `micro_batch` sequences at a time in all but the published one."""

    def __init__(self, model: PreTrainedModel, batch: Batch, request: Request, micro_batch: int) -> None:
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
        scores = self.importance_only(limit, checkpointing, log_probs=True)
        with torch.no_grad():
            for token_BL in self._micro_batches(self.batch.scored) if limit is None else ():
                scores.add_logits(self._forward(token_BL), token_BL)
        return scores

    def importance_only(self, limit: int | None = None, checkpointing: bool = False, log_probs: bool = False) -> Scores:
        """(c) Importance when nobody needs log-probs (bypass mode): only the answer's rows are projected."""
        scores = Scores()
        self._set_checkpointing(checkpointing)
        segments = self.segments_BL[: self.batch.scored].split(self.micro_batch)
        for token_BL, segments_BL in zip(self._micro_batches(0, limit, self.batch.scored), segments, strict=False):
            on_logits = partial(scores.add_logits, token_BL=token_BL) if log_probs else None
            arguments = self.model, self.request, token_BL, segments_BL, None, on_logits, checkpointing
            scores.importance.append(gradient_importance(*arguments))
        return scores

    def published(self, limit: int | None = None, weight_gradients: bool = True) -> Scores:
        """(d) The published OAR-G on the scored responses, one at a time; leaves no gradient behind."""
        scores = Scores()
        self._set_checkpointing(False)
        scored = min(limit or self.batch.scored, self.batch.scored)
        for token_L, segments_L in zip(self.batch.token_BL[:scored], self.segments_BL[:scored], strict=True):
            arguments = self.model, token_L, segments_L, self.request.sigma
            scores.importance.append(published_importance(*arguments, weight_gradients=weight_gradients))
        self.model.zero_grad(set_to_none=True)
        return scores

    def update(self, limit: int | None = None, checkpointing: bool = False) -> None:
        """(e) Policy-gradient forward and backward in micro-batches, gradient clipping, one AdamW step."""
        self._set_checkpointing(checkpointing)
        self.model.train()
        for token_BL in self._micro_batches(0, limit):
            self.loss(token_BL).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()

    def loss(self, token_BL: Tensor) -> Tensor:
        """On-policy PPO's: the ratio is one, and its gradient that of the log-prob. Advantages of both signs."""
        log_prob: Any = LeanLogProb.apply(self._forward(token_BL).flatten(0, 1), token_BL.roll(-1, 1).flatten())
        response_BL = log_prob.view_as(token_BL)[:, self.batch.prompt_length - 1 : -1]
        ratio_BL = (response_BL - response_BL.detach()).exp()
        sign_B1 = 1.0 - 2.0 * (torch.arange(len(token_BL), device=token_BL.device) % 2)[:, None]
        return -(ratio_BL * sign_B1).mean()

    def bookkeeping(self, limit: int | None = None) -> None:
        """(f) Finding the answers; then gate and diagnostics of the whole batch, on the CPU as in the trainer."""
        self.find_answers()
        reasoning_BL = (self.segments_BL == Segment.REASONING)[:, self.batch.prompt_length :].cpu()
        importance_BL, status_B = torch.rand(reasoning_BL.shape), torch.full((len(self.batch),), int(Status.SCORED))
        reshape(torch.ones_like(importance_BL), importance_BL, reasoning_BL, status_B, self.config)

    def find_answers(self) -> list[np.ndarray]:
        """Segments of every response, from its tokens' bytes."""
        responses = []
        for response in self.batch.token_BL[:, self.batch.prompt_length :].tolist():
            segments = segment_tokens(self.batch.token_bytes.pieces(response), self.finder)
            assert segments is not None, "the planted answer was not found"
            responses.append(segments)
        return responses

    def _micro_batches(self, start: int, limit: int | None = None, end: int | None = None) -> Iterator[Tensor]:
        rows = self.batch.token_BL[start:end]
        yield from rows.split(self.micro_batch)[:limit] if len(rows) else ()

    def _forward(self, token_BL: Tensor) -> Tensor:
        return self.model(input_ids=token_BL, use_cache=False).logits

    def _set_checkpointing(self, on: bool) -> None:
        if on:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()


def published_importance(
    model: PreTrainedModel,
    token_L: Tensor,
    segments_L: Tensor,
    sigma: float = 1e-3,
    noise_RH: Tensor | None = None,
    weight_gradients: bool = True,
) -> Tensor:
    """OAR-G the way the published code goes about it (arXiv 2601.07408), of one response's reasoning tokens, `[R]`.

    `|<dJ/de_t, e_t>|` with `J = KL(P || P_noisy)` and the AS-Mean probe: a clean forward, a noisy forward, one backward, with
    float32 logits of the whole sequence. The backward is a plain `J.backward()`, so it also computes the gradient of every
    weight; the paper's text asks for the input embeddings' gradient only, and `weight_gradients=False` is that reading.

    Args:
        segments_L: `Segment` of each token, prompt and response.
        sigma: scale of the noise.
        noise_RH: the noise itself; drawn when None.
    """
    answer = (segments_L == Segment.ANSWER).nonzero()[:, 0]
    rows, end = answer - 1, int(answer[-1]) + 1
    reasoning_L = segments_L[:end] == Segment.REASONING
    token_1L = token_L[None, :end]

    def log_outcome(**inputs: Tensor) -> Tensor:
        logits_LV = model(**inputs, use_cache=False).logits[0]
        logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
        return logits_LV[rows].mean(0).log_softmax(-1)

    with torch.no_grad():
        clean_V = log_outcome(input_ids=token_1L)
    frozen = [] if weight_gradients else [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    embedding_1LH = model.get_input_embeddings()(token_1L).detach().requires_grad_(True)
    full_1LH = torch.zeros_like(embedding_1LH)
    full_1LH[0, reasoning_L] = torch.randn_like(full_1LH[0, reasoning_L]) * sigma if noise_RH is None else noise_RH
    noisy_V = log_outcome(inputs_embeds=embedding_1LH + full_1LH)
    (clean_V.exp() * (clean_V - noisy_V)).sum().backward()
    for parameter in frozen:
        parameter.requires_grad_(True)
    return (embedding_1LH.grad[0] * embedding_1LH.detach()[0]).sum(-1).abs()[reasoning_L]
