"""Whole small trainings with GRPO and with reshaped advantages, from the same start, on the same problems and noise.

One process, one update for each batch of rollouts, no KL term. Everything about credit is the package's own code; what is
here is a trainer small enough to run hundreds of times.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.fidelity.scores import causal_recall
from benchmarks.learning.credit import Method, is_importance, method_of
from benchmarks.learning.rollout import Rollout, roll_out
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.warm_start import WarmStart, accuracy, learned_model
from benchmarks.tiny.words import PAD
from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.probe import Probe
from oar_plugin.estimator import reshape
from oar_plugin.passes.request import Request

FORMAT = 2
"""Raised when training changes, so that runs of an older version are not taken for new ones."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_GRADIENT_NORM = 1.0
HELD_OUT = 256
UNSEEN = 2**31 - 1
"""A seed that no run has."""
_DEFAULT = OarConfig()


@dataclass(frozen=True)
class Run:
    """One training, and all that its outcome depends on.

    Attributes:
        task: a key of `TASKS`.
        method: see `benchmarks.learning.credit.method_of`.
        lr: of Adam.
        seed: of problems, sampling and signs; runs of one seed differ in nothing but their settings.
        steps: batches, each with one update.
        prompts: problems of a batch.
        copies: responses to each.
        warm_start: number of the model that is trained on, among those that learned the task.
        probe: see `OarConfig`.
        warmup_steps: see `OarConfig`.
        tau: see `OarConfig`.
        beta: see `OarConfig`.
        floor: see `OarConfig`.
        gate: see `OarConfig`.
        positive_only: reshape only responses with a positive advantage.
        evaluate_every: steps between measurements on held-out problems.
    """

    task: str
    method: str
    lr: float
    seed: int
    steps: int = 50
    prompts: int = 16
    copies: int = 8
    warm_start: int = 0
    probe: Probe = _DEFAULT.probe
    warmup_steps: int = _DEFAULT.warmup_steps
    tau: float | None = _DEFAULT.tau
    beta: float = _DEFAULT.beta
    floor: float = _DEFAULT.floor
    gate: str = _DEFAULT.gate
    positive_only: bool = False
    evaluate_every: int = 10

    def check(self) -> None:
        """Raises: ValueError for a task, method, gate or number that cannot be."""
        if self.task not in TASKS:
            raise ValueError(f"task {self.task!r} is unknown; allowed: {', '.join(TASKS)}")
        self.config()
        if self.lr <= 0 or min(self.steps, self.prompts, self.evaluate_every) < 1 or self.copies < 2:
            raise ValueError(
                "lr, steps and prompts must be positive, and a group has at least two responses (--copies 2)"
            )

    def config(self) -> OarConfig:
        """The settings of `algorithm.oar`.

        Raises:
            ValueError: they cannot work.
        """
        settings = {name: getattr(self, name) for name in (*CREDIT_SETTINGS, "seed") if name != "positive_only"}
        if is_importance(self.method):
            settings["importance"] = self.method
        return OarConfig.parse({**settings, "answer_patterns": ("hash",)})

    @property
    def arm(self) -> Run:
        """The same with seed 0: what runs of different seeds have in common."""
        return replace(self, seed=0, warm_start=0)

    def file(self, folder: Path) -> Path:
        """Where its record is kept."""
        text = json.dumps({**asdict(self), "warm": asdict(WarmStart()), "format": FORMAT}, sort_keys=True)
        method = self.method.rpartition(":")[2]
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return folder / f"{self.task}-{method}-lr{self.lr:g}-s{self.seed}-{digest}.json"


@dataclass
class Record:
    """What a training did.

    Attributes:
        run: its settings.
        steps: a dictionary a step: reward, entropy, weights, seconds of each part.
        held_out: accuracy on held-out problems by step, sampled.
        seconds: of everything, held-out measurements left out.
        importance_seconds: of the importance passes among them.
    """

    run: Run
    steps: list[dict[str, float]] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    importance_seconds: float = 0.0

    def series(self, name: str) -> list[float]:
        """One quantity by step; NaN where a step has none."""
        return [step.get(name, float("nan")) for step in self.steps]

    def to_json(self) -> str:
        """Everything."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        values = json.loads(text)
        held_out = {int(step): value for step, value in values["held_out"].items()}
        return cls(**{**values, "run": Run(**values["run"]), "held_out": held_out})


Progress = Callable[[str], None]
"""Called as each training begins, with its name."""


Trainer = Callable[[Run, Path | None], Record]


def study(
    runs: Sequence[Run],
    folder: Path,
    cache: Path | None = None,
    progress: Progress | None = None,
    finished_only: bool = False,
    trainer: Trainer | None = None,
) -> list[Record]:
    """All runs, those with a record in `folder` taken from there.

    Args:
        runs: what to train.
        folder: of the records; made when it is not there.
        cache: folder of warm models; None for the usual one.
        progress: called as each run begins.
        finished_only: leave out what has no record.
        trainer: given a run and `cache`, trains it; None for the one of this module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for run in runs:
        if progress is not None:
            progress(f"{run.task} {run.method} lr {run.lr:g} seed {run.seed}")
        file = run.file(folder)
        if file.exists():
            records.append(Record.from_json(file.read_text()))
            continue
        if finished_only:
            continue
        record = (trainer or _train_here)(run, cache)
        part = file.with_suffix(".part")
        part.write_text(record.to_json())
        part.replace(file)
        records.append(record)
    return records


def _train_here(run: Run, cache: Path | None) -> Record:
    return train(run, learned_model(TASKS[run.task], run.warm_start, cache))


def after_grpo(run: Run, steps: int, cache: Path | None = None) -> LlamaForCausalLM:
    """The policy of a run's task after some steps of GRPO at its learning rate, on problems that no other seed sees."""
    model = learned_model(TASKS[run.task], run.warm_start, cache)
    if steps:
        train(replace(run, method="grpo", seed=UNSEEN, steps=steps, evaluate_every=steps), model)
    return model


def train(run: Run, model: LlamaForCausalLM) -> Record:
    """Train `model` in place.

    Raises:
        ValueError: see `Run.check`.
    """
    run.check()
    task, method = TASKS[run.task], method_of(run.method)
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
        entry: dict[str, float] = {**asdict(rollout.graded), "used": len(rollout), "sample_seconds": sampled - begun}
        if len(rollout):
            weight_BL = torch.ones(rollout.token_BL.shape)
            if method is not None:
                weight_BL = reshaped_weights(run, model, rollout, method, step, entry)
            scored = time.perf_counter()
            entry |= _update(model, optimizer, rollout, weight_BL)
            record.importance_seconds += scored - sampled
            entry |= {"importance_seconds": scored - sampled, "update_seconds": time.perf_counter() - scored}
        record.seconds += time.perf_counter() - begun
        record.steps.append(entry)
    record.held_out[run.steps] = accuracy(model, task, HELD_OUT, greedy=False)
    return record


def reshaped_weights(
    run: Run, model: LlamaForCausalLM, rollout: Rollout, method: Method, step: int, entry: dict[str, float]
) -> Tensor:
    """Weights `[B, L]`; what they look like goes into `entry`."""
    config = run.config()
    request = Request.from_config(config, step + 1, rollout.token_BL.shape[1], replacement_token=PAD)
    importance_BL = method(model, rollout, request)
    status_B = rollout.status_B
    if run.positive_only:
        status_B = status_B.masked_fill(rollout.advantage_B <= 0, Status.NOT_NEEDED)
    advantage_BL = rollout.advantage_B[:, None].expand_as(importance_BL)
    _, weight_BL, status_B, metrics = reshape(advantage_BL, importance_BL, rollout.reasoning_BL, status_B, config)
    usable_BL = rollout.reasoning_BL & (status_B == Status.SCORED)[:, None]
    entry |= {name: value for name, value in metrics.items() if "/" not in name or name == "fallback/any"}
    entry |= describe_weights(weight_BL, importance_BL, usable_BL, rollout.causal_BL)
    return weight_BL


def describe_weights(
    weight_BL: Tensor, importance_BL: Tensor, usable_BL: Tensor, causal_BL: Tensor
) -> dict[str, float]:
    """Where the credit went, over the reasoning of the responses that were scored.

    Returns:
        `weight_causal` and `weight_other`, mean weights; `recall`, the share of each response's `k` results that are among
        its `k` highest scores, on average.
    """
    causal_BL = causal_BL & usable_BL
    some_B = causal_BL.any(-1)
    if not some_B.any():
        return {}
    return {
        "weight_causal": weight_BL[causal_BL].mean().item(),
        "weight_other": weight_BL[usable_BL & ~causal_BL].mean().item(),
        "recall": causal_recall(importance_BL, usable_BL, causal_BL)[some_B].mean().item(),
    }


def training_loss(model: LlamaForCausalLM, rollout: Rollout, weight_BL: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The clipped objective, averaged over the tokens of all responses; with it the policy's entropies."""
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
    loss = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).sum() / rollout.graded.tokens
    with torch.no_grad():
        entropy_N = -(log_prob_NV.exp() * log_prob_NV).sum(-1)
        causal_N = rollout.causal_BL[:, start:][keep_BR]
    found = {"entropy": entropy_N.mean().item()}
    if causal_N.any():
        found |= {
            "entropy_causal": entropy_N[causal_N].mean().item(),
            "entropy_other": entropy_N[~causal_N].mean().item(),
        }
    return loss, found


def _update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rollout: Rollout, weight_BL: Tensor
) -> dict[str, float]:
    """One step of Adam."""
    loss, found = training_loss(model, rollout, weight_BL)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**found, "gradient_norm": norm.item()}


def grid(
    base: Run, tasks: Sequence[str], methods: Sequence[str], rates: Sequence[float], seeds: Sequence[int]
) -> list[Run]:
    """Every combination, seeds outermost, so that a study that is cut short has whole seeds."""
    runs = []
    for seed, task, method, lr in itertools.product(seeds, tasks, methods, rates):
        run = replace(base, task=task, method=method, lr=lr, seed=seed)
        runs.append(run if method_of(method) is not None else replace(run, **CREDIT_DEFAULTS))
    return runs


CREDIT_SETTINGS = ("probe", "warmup_steps", "tau", "beta", "floor", "gate", "positive_only")
CREDIT_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Run) if f.name in CREDIT_SETTINGS}
"""Plain GRPO has no credit to set, and is the same baseline whatever the others are set to."""
