"""Which credit makes better steps, measured without training: how a batch's gradient lies to the expected policy gradient.

GRPO's gradient, averaged over many batches, is what all methods are estimates of, or ought to be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.learning.rollout import Rollout, roll_out
from benchmarks.learning.training import Run, credit, objective
from benchmarks.report import Table
from benchmarks.statistics import mean_difference
from benchmarks.study import Progress
from benchmarks.tiny.tasks import TASKS

NOTES = (
    "Cosine: between the reshaped gradient of a batch and the average gradient of GRPO. Progress: what a step of Adam makes of "
    "it, every coordinate divided by its root mean square over batches (what Adam's second moment converges to), times the "
    "average, in units of the sum of the average's absolute values.",
    "Progress foretells learning runs; the cosine favours methods whose weights are large on few tokens.",
    "Problems and noise are the same for all methods, so differences are paired; 95 % by Student's t, not corrected for the "
    "number of methods.",
)
Aligned = Mapping[str, Mapping[str, list[float]]]
"""`cosine` and `progress`, a value a batch, by the method's name."""


def align(runs: Sequence[Run], model: LlamaForCausalLM, batches: int, progress: Progress) -> Aligned:
    """Measure methods of one task at one policy, which is left as it is; the average is over five times as many other batches.

    `runs` are one a method; their learning rates mean nothing.
    """
    first, of = runs[0], 6 * batches
    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for number, rollout in enumerate(_rollouts(first, model, 5 * batches, seed=2 * first.seed + 1)):
        progress(f"{first.task}: average", number, of)
        total += _gradient(model, rollout, torch.ones(rollout.token_BL.shape))
    mean_P = total / (5 * batches)
    gradient_MKP = torch.zeros(len(runs), batches, len(mean_P))
    for number, rollout in enumerate(_rollouts(first, model, batches, seed=2 * first.seed + 2)):
        progress(f"{first.task}: methods", 5 * batches + number, of)
        for place, run in enumerate(runs):
            gradient_MKP[place, number] = _gradient(model, rollout, credit(run, model, rollout, number)[0])
    cosine_MK = torch.cosine_similarity(gradient_MKP, mean_P, -1)
    scale_M1P = gradient_MKP.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
    progress_MK = (gradient_MKP / scale_M1P) @ mean_P / mean_P.abs().sum()
    measured = zip(runs, cosine_MK.tolist(), progress_MK.tolist(), strict=True)
    return {run.name: {"cosine": cosine_K, "progress": progress_K} for run, cosine_K, progress_K in measured}


def table(task: str, aligned: Aligned, after: int) -> Table:
    """Against the first method."""
    first, *_ = aligned
    rows = []
    for name, each in aligned.items():
        mean, base = np.mean(each["progress"]), aligned[first]["progress"]
        difference, _ = mean_difference(each["progress"], base)
        cells = [f"{mean:.4f}", f"{mean / np.mean(base):.2f}", str(difference), f"{np.mean(each['cosine']):.3f}"]
        rows.append([name, *cells])
    title = f"{task}: a batch's gradient and the policy gradient, after {after} steps of GRPO"
    return Table(title, ("method", "progress", f"of {first}'s", "difference (95 %)", "cosine"), rows)


def _rollouts(run: Run, model: LlamaForCausalLM, count: int, seed: int) -> Iterator[Rollout]:
    """Batches with an advantage in them."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    while count:
        rollout = roll_out(model, TASKS[run.task], rng, noise, run.prompts, run.copies)
        if len(rollout.token_BL):
            count -= 1
            yield rollout


def _gradient(model: LlamaForCausalLM, rollout: Rollout, weight_BL: Tensor) -> Tensor:
    loss, _ = objective(model, rollout, weight_BL)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])
