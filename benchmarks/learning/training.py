"""Whole small trainings with GRPO and with reshaped advantages, from the same start, on the same problems and noise.

One process, one update for each batch of rollouts, no KL term. Everything about credit is the package's own code; what is
here is a trainer small enough to run hundreds of times.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.fidelity.scores import causal_recall
from benchmarks.learning.rollout import Rollout, roll_out
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.warm_start import WarmStart, accuracy
from benchmarks.tiny.words import PAD
from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.gate import GATES
from oar_plugin.credit.probe import Probe
from oar_plugin.estimator import reshape
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request

FORMAT = 2
"""Raised when training changes, so that runs of an older version are not taken for new ones."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_GRADIENT_NORM = 1.0
HELD_OUT = 256
CONTROLS = ("grpo", "uniform", "oracle")
"""Plain GRPO; even credit through the gate; a gate that is told which tokens are causal."""
CREDIT = ("probe", "warmup_steps", "tau", "beta", "floor", "gate", "positive_only")
"""The settings of `Training` that say how credit is spread."""
_OURS = OarConfig()
_TAU = ", ".join(f"{gate.tau} for {name}" for name, gate in GATES.items())


@dataclass(frozen=True, kw_only=True)
class Training:
    steps: int = 50
    """Batches, one update each."""
    prompts: int = 16
    """Problems of a batch."""
    copies: int = 8
    """Responses to each problem, the group that they are compared in."""
    evaluate_every: int = 10
    """Steps between measurements on held-out problems."""
    probe: Probe = _OURS.probe
    """What the answer's distribution is."""
    warmup_steps: int = _OURS.warmup_steps
    """Steps with the probe `last` before --probe takes over."""
    gate: Annotated[str, tyro.conf.arg(help=f"{', '.join(GATES)}, or python:MODULE:FUNCTION.")] = _OURS.gate
    tau: Annotated[float | None, tyro.conf.arg(help=f"Quantile of the gate. None: {_TAU}.")] = _OURS.tau
    beta: float = _OURS.beta
    """Boost above the quantile."""
    floor: float = _OURS.floor
    """Smallest weight below it (bi_level only)."""
    positive_only: bool = False
    """Reshape only responses that are better than their group."""


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """One training, and all that its outcome depends on."""

    task: str
    method: str  # of `CONTROLS`, or an importance as `importance_of` takes it
    lr: float
    seed: int  # of problems, sampling and signs
    warm_start: int = 0  # number of the model that is trained on, among those that learned the task

    def config(self) -> OarConfig:
        """The settings of `algorithm.oar`. Raises ValueError where they cannot work."""
        settings = {name: getattr(self, name) for name in (*CREDIT, "seed") if name != "positive_only"}
        if self.method not in CONTROLS:
            settings["importance"] = self.method
        return OarConfig.parse({**settings, "answer_patterns": ("hash",)})

    @property
    def arm(self) -> Run:
        """The same with seed 0: what runs of different seeds have in common."""
        return replace(self, seed=0, warm_start=0)

    @property
    def baseline(self) -> Run:
        """Plain GRPO has no credit to set, and is the same whatever the others are set to."""
        return replace(self, method="grpo", **{name: getattr(Training, name) for name in CREDIT})

    @property
    def name(self) -> str:
        """The method, and the settings of its credit that are not the defaults."""
        changed = [name for name in CREDIT if getattr(self, name) != getattr(Training, name)]
        settings = [f"{name}={str(getattr(self, name)).rpartition(':')[2]}" for name in changed]
        return " ".join([self.method.rpartition(":")[2], *settings])

    def file(self, folder: Path) -> Path:
        """Where its record is kept."""
        text = json.dumps({**asdict(self), "warm": asdict(WarmStart()), "format": FORMAT}, sort_keys=True)
        method = self.method.rpartition(":")[2]
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return folder / f"{self.task}-{method}-lr{self.lr:g}-s{self.seed}-{digest}.json"


@dataclass
class Record:
    """Of each step reward, entropy, weights, seconds of its parts; and by step the accuracy on held-out problems."""

    run: Run
    steps: list[dict[str, float]] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Record:
        """From what `asdict` and JSON made of it. Older files hold sums of the seconds too."""
        held_out = {int(step): value for step, value in values["held_out"].items()}
        return cls(Run(**values["run"]), values["steps"], held_out)


def train(run: Run, model: LlamaForCausalLM) -> Record:
    """Train `model` in place."""
    task = TASKS[run.task]
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    problems, noise = random.Random(1000 + run.seed), torch.Generator()
    record = Record(run)
    for step in range(run.steps):
        if step % run.evaluate_every == 0:
            record.held_out[step] = accuracy(model, task, HELD_OUT, greedy=False)
        begun = time.perf_counter()
        noise.manual_seed(100_000 * run.seed + step)
        rollout = roll_out(model, task, problems, noise, run.prompts, run.copies)
        sampled = time.perf_counter()
        entry = {**rollout.graded, "used": len(rollout.token_BL), "sample_seconds": sampled - begun}
        if len(rollout.token_BL):
            weight_BL, described = credit(run, model, rollout, step)
            scored = time.perf_counter()
            entry |= described | update(model, optimizer, rollout, weight_BL)
            entry |= {"importance_seconds": scored - sampled, "update_seconds": time.perf_counter() - scored}
        record.steps.append(entry)
    record.held_out[run.steps] = accuracy(model, task, HELD_OUT, greedy=False)
    return record


def credit(run: Run, model: LlamaForCausalLM, rollout: Rollout, step: int) -> tuple[Tensor, dict[str, float]]:
    """Weights `[B, L]` of a batch, ones for plain GRPO, and what they look like."""
    if run.method == "grpo":
        return torch.ones(rollout.token_BL.shape), {}
    config = run.config()
    request = Request.from_config(config, step + 1, rollout.token_BL.shape[1], replacement_token=PAD)
    if run.method == "uniform":
        importance_BL = torch.ones(rollout.token_BL.shape)
    elif run.method == "oracle":
        importance_BL = rollout.causal_BL.float()
    else:
        importance_BL = batch_importance(model, request, rollout.token_BL, rollout.segments_BL, rollout.mask_BL)
    status_B = rollout.status_B
    if run.positive_only:
        status_B = status_B.masked_fill(rollout.advantage_B <= 0, Status.NOT_NEEDED)
    advantage_BL = rollout.advantage_B[:, None].expand_as(importance_BL)
    _, weight_BL, status_B, metrics = reshape(advantage_BL, importance_BL, rollout.reasoning_BL, status_B, config)
    usable_BL = rollout.reasoning_BL & (status_B == Status.SCORED)[:, None]
    described = {name: value for name, value in metrics.items() if "/" not in name or name == "fallback/any"}
    return weight_BL, described | describe_weights(weight_BL, importance_BL, usable_BL, rollout.causal_BL)


def describe_weights(
    weight_BL: Tensor, importance_BL: Tensor, usable_BL: Tensor, causal_BL: Tensor
) -> dict[str, float]:
    """Mean weights of results and other reasoning; the share of each response's `k` results among its `k` highest scores."""
    causal_BL = causal_BL & usable_BL
    some_B = causal_BL.any(-1)
    if not some_B.any():
        return {}
    return {
        "weight_causal": weight_BL[causal_BL].mean().item(),
        "weight_other": weight_BL[usable_BL & ~causal_BL].mean().item(),
        "recall": causal_recall(importance_BL, usable_BL, causal_BL)[some_B].mean().item(),
    }


def objective(model: LlamaForCausalLM, rollout: Rollout, weight_BL: Tensor) -> tuple[Tensor, float]:
    """The clipped loss, averaged over the tokens of all responses, and the policy's mean entropy."""
    start = rollout.prompt_length
    token_BR, keep_BR = rollout.token_BL[:, start:], rollout.response_BL[:, start:]
    base: Any = model.model
    hidden_BLH = base(input_ids=rollout.token_BL[:, :-1], use_cache=False).last_hidden_state
    log_prob_NV = model.lm_head(hidden_BLH[:, start - 1 :][keep_BR]).log_softmax(-1)
    log_prob_N = log_prob_NV.gather(-1, token_BR[keep_BR][:, None])[:, 0]
    advantage_N = (rollout.advantage_B[:, None] * weight_BL[:, start:])[keep_BR]
    ratio_N = (log_prob_N - log_prob_N.detach()).exp()
    clipped_N = ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    # Rows without an advantage add nothing to the sum, but their tokens count in the mean.
    loss = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).sum() / rollout.graded["tokens"]
    with torch.no_grad():
        entropy_N = -(log_prob_NV.exp() * log_prob_NV).sum(-1)
    return loss, entropy_N.mean().item()


def update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rollout: Rollout, weight_BL: Tensor
) -> dict[str, float]:
    loss, entropy = objective(model, rollout, weight_BL)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"entropy": entropy, "gradient_norm": norm.item()}
