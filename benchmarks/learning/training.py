"""Whole small trainings with GRPO and with reshaped advantages, from the same start, on the same problems and noise.

One process, one update for each batch of rollouts, no KL term. Everything about credit is the package's own code; what is
here is a trainer small enough to run hundreds of times.
"""

import hashlib
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.fidelity.scores import causal_recall
from benchmarks.tiny.model import sample
from benchmarks.tiny.tasks import TASKS, Task
from benchmarks.tiny.warm_start import WarmStart, accuracy
from benchmarks.tiny.words import PAD
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
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


@dataclass(frozen=True)
class Rollout:
    """The responses whose advantage is not zero: `B` of them, prompt and response in `L` positions.

    `graded` is of the whole batch, rows without an advantage included: reward (share of right responses), length (mean tokens
    of a response) and tokens (of all responses).
    """

    prompt_length: int  # of every row
    graded: dict[str, float]
    advantage_B: Tensor  # group-relative
    token_BL: Tensor  # int64 ids, padded at the end
    response_BL: Tensor  # bool, tokens that the policy wrote
    segments_BL: Tensor  # int64 of `Segment`, OUTSIDE at prompt and padding, and in a response that is not scored
    status_B: Tensor  # int64 of `Status`
    causal_BL: Tensor  # bool, the results that the answer follows from

    @property
    def reasoning_BL(self) -> Tensor:
        """Bool, the tokens to reshape: the reasoning of responses that have an answer."""
        return self.segments_BL == Segment.REASONING

    @property
    def mask_BL(self) -> Tensor:
        """Bool, false at padding."""
        return self.response_BL | (torch.arange(self.token_BL.shape[1]) < self.prompt_length)


def train(run: Run, model: PreTrainedModel) -> Record:
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


def roll_out(
    model: PreTrainedModel, task: Task, rng: random.Random, noise: torch.Generator, prompts: int, copies: int
) -> Rollout:
    """Sample `copies` responses to each of `prompts` new problems; `rng` draws the problems, `noise` the tokens.

    The advantage is `(r - mean) / (std + 1e-6)` over the responses to a problem, as verl's GRPO has it.
    """
    problems = [task.problem(rng) for _ in range(prompts)]
    prompt_BP = torch.tensor([problem.prompt for problem in problems])
    response_BR = sample(model, prompt_BP, copies, task.max_response_length, noise)
    readings = [task.read(problems[row // copies], ids) for row, ids in enumerate(response_BR.tolist())]
    reward_PG = torch.tensor([float(reading.right) for reading in readings]).view(prompts, copies)
    advantage_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-6)
    tokens = sum(reading.length for reading in readings)
    graded = {"reward": reward_PG.mean().item(), "length": tokens / len(readings), "tokens": tokens}
    token_BL = torch.cat([prompt_BP.repeat_interleave(copies, 0), response_BR], 1)
    response_BL, causal_BL = (torch.zeros(token_BL.shape, dtype=torch.bool) for _ in range(2))
    segments_BL = torch.full_like(token_BL, int(Segment.OUTSIDE))
    start = prompt_BP.shape[1]
    status_B = torch.full((len(readings),), int(Status.SCORED))
    for row, reading in enumerate(readings):
        written = slice(start, start + reading.length)
        response_BL[row, written] = True
        causal_BL[row, [start + position for position in reading.causal]] = True
        if not reading.ended:
            status_B[row] = Status.TRUNCATED
        elif reading.segments is None:
            status_B[row] = Status.NO_ANSWER
        elif not (reading.segments == Segment.REASONING).any():
            status_B[row] = Status.NO_REASONING
        else:
            segments_BL[row, written] = torch.from_numpy(reading.segments).long()
    advantage_B = advantage_PG.flatten()
    rows = (advantage_B, token_BL, response_BL, segments_BL, status_B, causal_BL)
    return Rollout(start, graded, *(x[advantage_B != 0] for x in rows))


def credit(run: Run, model: PreTrainedModel, rollout: Rollout, step: int) -> tuple[Tensor, dict[str, float]]:
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
    causal_BL = rollout.causal_BL & usable_BL
    some_B = causal_BL.any(-1)
    if some_B.any():
        # Of as many of the highest scores as a response has results.
        described["recall"] = causal_recall(importance_BL, usable_BL, causal_BL)[some_B].mean().item()
        described["weight_causal"] = weight_BL[causal_BL].mean().item()
        described["weight_other"] = weight_BL[usable_BL & ~causal_BL].mean().item()
    return weight_BL, described


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollout: Rollout, weight_BL: Tensor
) -> dict[str, float]:
    """One step along the clipped objective, averaged over the tokens of all responses."""
    parts: Any = model
    start = rollout.prompt_length
    token_BR, keep_BR = rollout.token_BL[:, start:], rollout.response_BL[:, start:]
    hidden_BLH = parts.model(input_ids=rollout.token_BL[:, :-1], use_cache=False).last_hidden_state
    log_prob_NV = parts.lm_head(hidden_BLH[:, start - 1 :][keep_BR]).log_softmax(-1)
    log_prob_N = log_prob_NV.gather(-1, token_BR[keep_BR][:, None])[:, 0]
    advantage_N = (rollout.advantage_B[:, None] * weight_BL[:, start:])[keep_BR]
    ratio_N = (log_prob_N - log_prob_N.detach()).exp()
    clipped_N = ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    # Rows without an advantage add nothing to the sum, but their tokens count in the mean.
    loss = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).sum() / rollout.graded["tokens"]
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    entropy_N = -(log_prob_NV.detach().exp() * log_prob_NV.detach()).sum(-1)
    return {"entropy": entropy_N.mean().item(), "gradient_norm": norm.item()}
