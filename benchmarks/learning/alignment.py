"""Which credit makes better steps, measured without training: how a batch's gradient lies to the expected policy gradient.

GRPO's gradient, averaged over many batches, is what all methods are estimates of, or ought to be. For each method and batch:

* `cosine` between the batch's reshaped gradient and that average;
* `progress`, what a step of Adam makes of it: every coordinate divided by its root mean square over batches (what Adam's second
  moment converges to), times the average. This one foretells learning runs; the cosine favours methods whose weights
  are large on few tokens.

Problems and noise are the same for all methods, so differences are paired.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.learning.measure import Run, method_of, reshaped_weights, training_loss
from benchmarks.learning.rollout import Rollout, roll_out
from benchmarks.tiny.tasks import TASKS


@dataclass(frozen=True)
class Alignment:
    """One method.

    Attributes:
        run: task, method and gate.
        cosine: mean over batches.
        progress: mean over batches, in units of the sum of the average's absolute values.
        against: `progress` minus that of the first method, mean over batches.
        error: standard error of it.
    """

    run: Run
    cosine: float
    progress: float
    against: float
    error: float


def align(
    runs: Sequence[Run],
    model: LlamaForCausalLM,
    reference_batches: int,
    batches: int,
    progress: Callable[[str], None] | None = None,
) -> list[Alignment]:
    """Measure some methods at one policy.

    Args:
        runs: one a method, of one task; the first is what the others are compared with. Their learning rate means nothing.
        model: the policy; left as it is.
        reference_batches: of the average, different ones than those that are measured.
        batches: that every method is measured on.
        progress: called as each batch begins.
    """
    first = runs[0]
    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for number, rollout in enumerate(_rollouts(first, model, reference_batches, seed=2 * first.seed + 1)):
        if progress is not None:
            progress(f"average: batch {number + 1} of {reference_batches}")
        total += _gradient(model, rollout, torch.ones(rollout.token_BL.shape))
    mean_P = total / reference_batches
    gradient_MKP = torch.zeros(len(runs), batches, len(mean_P))
    for number, rollout in enumerate(_rollouts(first, model, batches, seed=2 * first.seed + 2)):
        if progress is not None:
            progress(f"methods: batch {number + 1} of {batches}")
        for place, run in enumerate(runs):
            method = method_of(run.method)
            weight_BL = torch.ones(rollout.token_BL.shape)
            if method is not None:
                weight_BL = reshaped_weights(run, model, rollout, method, number, {})
            gradient_MKP[place, number] = _gradient(model, rollout, weight_BL)
    cosine_MK = torch.cosine_similarity(gradient_MKP, mean_P, -1)
    scale_M1P = gradient_MKP.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
    progress_MK = (gradient_MKP / scale_M1P) @ mean_P / mean_P.abs().sum()
    difference_MK = progress_MK - progress_MK[:1]
    error_M = difference_MK.std(-1) / batches**0.5
    return [
        Alignment(
            run,
            cosine_MK[place].mean().item(),
            progress_MK[place].mean().item(),
            difference_MK[place].mean().item(),
            error_M[place].item(),
        )
        for place, run in enumerate(runs)
    ]


def _rollouts(run: Run, model: LlamaForCausalLM, count: int, seed: int) -> Iterator[Rollout]:
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    found = 0
    while found < count:
        rollout = roll_out(model, TASKS[run.task], rng, noise, run.prompts, run.copies)
        if len(rollout):
            found += 1
            yield rollout


def _gradient(model: LlamaForCausalLM, rollout: Rollout, weight_BL: Tensor) -> Tensor:
    loss, _ = training_loss(model, rollout, weight_BL)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])
