"""Whole small trainings with GRPO and with reshaped advantages, from the same start, on the same problems and noise.

One process, one update for each batch of rollouts, no KL term. Everything about credit is the package's own code; what is
here is a trainer small enough to run hundreds of times.
"""

import copy
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, with_config
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel

from benchmarks.fidelity.scores import causal_recall
from benchmarks.learning.copies import masked_importance
from benchmarks.learning.predicted import labelled, with_predictions
from benchmarks.learning.tasks import TASKS, wrong_results
from benchmarks.tiny.fast import head_of, micro_batches, rows_of
from benchmarks.tiny.model import sample
from benchmarks.tiny.tasks import Task
from benchmarks.tiny.warm_start import accuracy
from benchmarks.tiny.words import PAD
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.probe import Probe
from oar_plugin.estimator import reshape
from oar_plugin.passes.gradient import MicroBatchPass, importance_of_scores
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.prediction import Predictor, predictor_of
from oar_plugin.passes.request import Request

MAX_GRADIENT_NORM = 1.0
HELD_OUT = 512
BOOST = 3.0
"""What the oracle pays for a result, before the mass of a response is restored; other tokens get 1."""
BLAME = "blame"
"""As an importance: the oracle that knows the results, and pays nothing for those of a wrong response that are right."""
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION = {
    getattr(torch.ops.aten, _CPU_ATTENTION): lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
    getattr(torch.ops.aten, f"{_CPU_ATTENTION}_backward"): lambda gradient, query, key, value, *_, **__: (
        sdpa_backward_flop_count(gradient, query, key, value)
    ),
}
"""torch's counter knows no attention on a CPU."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class Credit:
    """How credit is spread; what is None is the package's default."""

    importance: str | None = None  # None: plain GRPO; `BLAME`; or as `importance_of` takes it
    gate: str = OarConfig().gate
    tau: float | None = None
    beta: float = 2.0
    floor: float = 0.1
    probe: Probe = "answer_mean"
    share: float | None = None  # of the responses whose importance is computed, to predict that of all
    units: int | None = None  # of each of these that are scored
    labels: int | None = None  # of each step at least, in place of the package's number
    replacement: Literal["pad", "sampled"] = "pad"  # what stands in place of a masked token
    surface: bool = False  # a control: predicted from position and doubt alone
    inverted: bool = False  # a control: what is important is not, and the other way round

    def config(self, seed: int) -> OarConfig:
        """Raises ValueError where it cannot work."""
        settings = {name: getattr(self, name) for name in ("gate", "tau", "beta", "floor", "probe")}
        importance: dict[str, str | float | None] = {"amortize.share": self.share, "amortize.units": self.units}
        if self.importance not in (None, BLAME):
            importance["importance"] = self.importance
        return OarConfig.parse({**settings, **importance, "seed": seed, "answer_patterns": ("hash",)})


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, and all that its outcome depends on."""

    task: str
    credit: Credit
    lr: float
    warm: int  # number of the model that is trained on
    seed: int  # of problems, sampling and signs
    steps: int = 40
    prompts: int = 16
    copies: int = 8

    @property
    def draw(self) -> int:
        """Seed of problems and sampling noise, of its own for each pair: what models have in common would be in no interval."""
        return 1000 * (self.warm + 1) + self.seed


@dataclass
class Record:
    """Of each step what `train` measures, and the accuracy on held-out problems at the end.

    Attributes:
        start: digest of the weights that it began with: a number names other ones on another machine.
    """

    run: Run
    start: str
    steps: list[dict[str, float]] = field(default_factory=list)
    held_out: float = float("nan")


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
    wrong_BL: Tensor  # bool, those of them that are wrong

    @property
    def reasoning_BL(self) -> Tensor:
        """Bool, the tokens to reshape: the reasoning of responses that have an answer."""
        return self.segments_BL == Segment.REASONING

    @property
    def mask_BL(self) -> Tensor:
        """Bool, false at padding."""
        return torch.arange(self.token_BL.shape[1]) < self.length_B[:, None]

    @property
    def length_B(self) -> Tensor:
        return self.prompt_length + self.response_BL.sum(-1)

    @property
    def negative_B1(self) -> Tensor:
        """Bool, the responses that are worse than their group."""
        return (self.advantage_B < 0)[:, None]

    @property
    def right_in_wrong_BL(self) -> Tensor:
        """Bool, the right results of responses that are worse than their group."""
        return self.causal_BL & ~self.wrong_BL & self.negative_B1


def train(run: Run, model: PreTrainedModel) -> Record:
    """Train `model` in place."""
    task = TASKS[run.task]
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr, fused=True)
    problems, noise = random.Random(run.draw), torch.Generator()
    record, predictor, counted_at = Record(run, digest_of(model)), predictor_for(run), None
    for step in range(run.steps):
        begun = time.perf_counter()
        noise.manual_seed(1000 * run.draw + step)
        rollout = roll_out(model, task, problems, noise, run.prompts, run.copies)
        sampled = time.perf_counter()
        entry = {**rollout.graded, "used": len(rollout.token_BL), "sample_seconds": sampled - begun}
        if len(rollout.token_BL):
            labelled_BL = labelled(predictor, request_of(run, step), rollout)
            passes = forward(model, rollout, labelled_BL)  # the update's own: importance costs what it adds
            state = predictor is None or predictor.ready
            before = None if state == counted_at else copy.deepcopy(predictor)
            begun = time.perf_counter()
            importance_BL = importance(run, rollout, passes, step, predictor, labelled_BL)
            scored = time.perf_counter()
            weight_BL, described = weights(run, rollout, importance_BL)
            entry |= described | update(model, optimizer, rollout, passes, weight_BL)
            entry |= {"importance_seconds": scored - begun}
            entry |= {"update_seconds": begun - sampled + time.perf_counter() - scored}
            if state != counted_at:  # from here on, another number of units is scored
                entry |= counted(run, model, rollout, step, before, labelled_BL)
                counted_at = state
        record.steps.append(entry)
    record.held_out = accuracy(model, task, HELD_OUT, greedy=False)
    return record


def counted(
    run: Run, model: PreTrainedModel, rollout: Rollout, step: int, predictor: Predictor | None, labelled_BL: Tensor
) -> dict[str, float]:
    """FLOPs of a step's forward, importance and update, on a copy of the model. Sampling is not among them.

    Attention is counted as if no half of it were masked, as torch does.
    """
    model = copy.deepcopy(model)
    marks = []
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        passes = forward(model, rollout, labelled_BL)
        marks.append(counter.get_total_flops())
        importance(run, rollout, passes, step, predictor, labelled_BL)
        marks.append(counter.get_total_flops())
        update(model, torch.optim.Adam(model.parameters()), rollout, passes, torch.ones(rollout.token_BL.shape))
    names = "forward_flops", "importance_flops", "update_flops"
    return dict(zip(names, np.diff([0, *marks, counter.get_total_flops()]).astype(float).tolist(), strict=True))


def digest_of(model: PreTrainedModel) -> str:
    """Of its weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def roll_out(
    model: PreTrainedModel, task: Task, rng: random.Random, noise: torch.Generator, prompts: int, copies: int
) -> Rollout:
    """Sample `copies` responses to each of `prompts` new problems; `rng` draws the problems, `noise` the tokens.

    The advantage is `(r - mean) / (std + 1e-6)` over the responses to a problem, as verl's GRPO has it.
    """
    problems = [task.problem(rng) for _ in range(prompts)]
    prompt_BP = torch.tensor([problem.prompt for problem in problems])
    response_BR = sample(model, prompt_BP, copies, task.max_response_length, noise)
    rows = response_BR.tolist()
    readings = [task.read(problems[row // copies], ids) for row, ids in enumerate(rows)]
    reward_PG = torch.tensor([float(reading.right) for reading in readings]).view(prompts, copies)
    advantage_B = ((reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-6)).flatten()
    lengths = [reading.length for reading in readings]
    graded = {"reward": reward_PG.mean().item(), "length": sum(lengths) / len(lengths), "tokens": float(sum(lengths))}
    token_BL = torch.cat((prompt_BP.repeat_interleave(copies, 0), response_BR), 1)
    response_BL, causal_BL, wrong_BL = (torch.zeros_like(token_BL, dtype=torch.bool) for _ in range(3))
    segments_BL = torch.full_like(token_BL, int(Segment.OUTSIDE))
    start = prompt_BP.shape[1]
    status_B = torch.full((len(readings),), int(Status.SCORED))
    for row, reading in enumerate(readings):
        written = slice(start, start + reading.length)
        response_BL[row, written] = True
        causal_BL[row, [start + at for at in reading.causal]] = True
        wrong = wrong_results(task, problems[row // copies], rows[row], reading)
        wrong_BL[row, [start + at for at in wrong]] = True
        if not reading.ended:
            status_B[row] = Status.TRUNCATED
        elif reading.segments is None:
            status_B[row] = Status.NO_ANSWER
        elif not (reading.segments == Segment.REASONING).any():
            status_B[row] = Status.NO_REASONING
        else:
            segments_BL[row, written] = torch.from_numpy(reading.segments).long()
    tensors = (advantage_B, token_BL, response_BL, segments_BL, status_B, causal_BL, wrong_BL)
    return Rollout(start, graded, *(x[advantage_B != 0] for x in tensors))


@dataclass
class Forward:
    """One micro-batch and its forward, whose graph serves importance and update both."""

    model: PreTrainedModel
    rows: Tensor  # int64 `[b]`, of the rollout
    token_bL: Tensor
    embedding_bLH: Tensor
    hidden_bLH: Tensor
    head_VH: Tensor

    @cached_property
    def log_prob_blV(self) -> Tensor:
        """Of each token but the first, `[b, L - 1, V]` at the columns of all tokens, with a graph."""
        return F.linear(self.hidden_bLH[:, :-1], self.head_VH).log_softmax(-1)


def forward(model: PreTrainedModel, rollout: Rollout, labelled_BL: Tensor | None = None) -> list[Forward]:
    """Micro-batches of rows of which something is scored, and of others. None: all in the first ones."""
    found, head_VH = [], head_of(model)
    scored_B = rollout.advantage_B != 0 if labelled_BL is None else labelled_BL.any(-1)
    for part in (scored_B.nonzero()[:, 0], (~scored_B).nonzero()[:, 0]):
        for index, longest in micro_batches(rollout.length_B[part]) if len(part) else ():
            rows = part[index]
            token_bL = rollout.token_BL[rows, :longest]
            embedding_bLH = model.get_input_embeddings()(token_bL)
            found.append(Forward(model, rows, token_bL, embedding_bLH, rows_of(model, embedding_bLH), head_VH))
    return found


def predictor_for(run: Run) -> Predictor | None:
    """What learns importance during a training, if anything does."""
    predictor = predictor_of(run.credit.config(run.seed))
    if predictor is not None and run.credit.labels is not None:
        predictor.fewest = run.credit.labels
    return predictor


def request_of(run: Run, step: int) -> Request:
    masked = PAD if run.credit.replacement == "pad" else None
    return Request.of_step(run.credit.config(run.seed), step + 1, replacement_token=masked)


def importance(
    run: Run,
    rollout: Rollout,
    passes: Sequence[Forward],
    step: int,
    predictor: Predictor | None = None,
    labelled_BL: Tensor | None = None,
) -> Tensor:
    """Of the package, `[B, L]`; of the oracle, its weights before mass is restored; zeros for plain GRPO."""
    if run.credit.importance == BLAME:
        return torch.where(rollout.causal_BL, BOOST, 1.0).masked_fill(rollout.right_in_wrong_BL, 0.0)
    if run.credit.importance is None:
        return torch.zeros(rollout.token_BL.shape)
    labelled_BL = rollout.reasoning_BL if labelled_BL is None else labelled_BL
    computed = partial(_computed, request_of(run, step), rollout, passes, labelled_BL)
    found = (rollout, passes, labelled_BL, computed, run.credit.surface)
    importance_BL = computed() if predictor is None else with_predictions(predictor, *found)
    return 1 / importance_BL.clamp_min(1e-30) if run.credit.inverted else importance_BL


def _computed(request: Request, rollout: Rollout, passes: Sequence[Forward], labelled_BL: Tensor) -> Tensor:
    """Importance of the tokens of `labelled_BL`, `[B, L]`; an importance without copies scores whole rows."""
    importance_BL, scored_B = torch.zeros(rollout.token_BL.shape), labelled_BL.any(-1)
    if request.importance_object.copies:
        segments_BL = rollout.segments_BL.masked_fill(rollout.reasoning_BL & ~labelled_BL, int(Segment.OUTSIDE))
        rows = rollout.token_BL[scored_B], segments_BL[scored_B]
        importance_BL[scored_B] = masked_importance(passes[0].model, request, *rows)
        return importance_BL
    for one in (one for one in passes if scored_B[one.rows].all()):
        length = one.token_bL.shape[1]
        segments_bL, mask_bL = rollout.segments_BL[one.rows, :length], rollout.mask_BL[one.rows, :length]
        importance_BL[one.rows, :length] = _importance(request, one, segments_bL, mask_bL)
    return importance_BL


def _importance(request: Request, one: Forward, segments_bL: Tensor, mask_bL: Tensor) -> Tensor:
    """The package's gradient pass on a graph that the update goes through as well."""
    packed, layout = packed_rows(one.token_bL, segments_bL, mask_bL)
    pass_ = MicroBatchPass(request, packed, layout)

    def project(hidden_NH: Tensor) -> Tensor:
        return F.linear(hidden_NH, one.head_VH.detach())

    for planned in pass_.importance.forwards(request.config.num_draws):
        tap = pass_.tap(planned)
        leaf_bLH, hidden_bLH = one.embedding_bLH, one.hidden_bLH
        if tap.noise is not None:  # a forward of its own
            leaf_bLH = leaf_bLH.detach().requires_grad_(True)
            hidden_bLH = rows_of(one.model, leaf_bLH + tap.noise(leaf_bLH.detach()))
        scalar = tap.probe(project, hidden_bLH.flatten(0, 1)[tap.row_position_N])
        if scalar is not None and tap.receive is not None:
            (gradient_bLH,) = torch.autograd.grad(scalar, leaf_bLH, retain_graph=tap.noise is None)
            tap.receive(gradient_bLH, leaf_bLH.detach())
    flat = torch.zeros(one.token_bL.numel())
    flat[layout.local_T] = importance_of_scores(request, packed, pass_.scores)
    return flat.view_as(one.token_bL)


def log_probs(rollout: Rollout, passes: Sequence[Forward]) -> Tensor:
    """Of each token, `[B, L]`; 0 for the first."""
    found_BL = torch.zeros(rollout.token_BL.shape)
    for one in passes:
        chosen_bl = one.log_prob_blV.detach().gather(-1, one.token_bL[:, 1:, None])[..., 0]
        found_BL[one.rows, 1 : one.token_bL.shape[1]] = chosen_bl
    return found_BL


def weights(run: Run, rollout: Rollout, importance_BL: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Weights `[B, L]` of a batch, ones for plain GRPO, and what they look like."""
    credit, reasoning_BL = run.credit, rollout.reasoning_BL
    metrics: dict[str, float] = {}
    if credit.importance is None:
        return torch.ones(rollout.token_BL.shape), {}
    if credit.importance == BLAME:
        weight_BL = _restored(importance_BL, reasoning_BL)
    else:
        advantage_BL = rollout.advantage_B[:, None].expand_as(importance_BL)
        config = credit.config(run.seed)
        made = reshape(advantage_BL, importance_BL, reasoning_BL, rollout.status_B, config)
        weight_BL, metrics = made.weight_BL, made.metrics
        reasoning_BL = reasoning_BL & (made.status_B == Status.SCORED)[:, None]
    described = {name: value for name, value in metrics.items() if "/" not in name or name == "fallback/any"}
    return weight_BL, described | _paid(rollout, weight_BL, importance_BL, reasoning_BL)


def _restored(weight_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """Weights that average 1 over each response's reasoning, 1 elsewhere."""
    kept_BL = weight_BL.masked_fill(~reasoning_BL, 0.0)
    mean_B1 = kept_BL.sum(-1, keepdim=True) / reasoning_BL.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(reasoning_BL, kept_BL / mean_B1.clamp_min(1e-9), 1.0)


def _paid(rollout: Rollout, weight_BL: Tensor, importance_BL: Tensor, usable_BL: Tensor) -> dict[str, float]:
    """Mean weights by what a token is and how its response did, and the recall of results."""
    causal_BL, wrong_BL = rollout.causal_BL & usable_BL, rollout.wrong_BL & usable_BL
    negative_BL = rollout.negative_B1.expand_as(causal_BL)
    kinds = {
        "wrong_in_wrong": wrong_BL & negative_BL,
        "right_in_wrong": rollout.right_in_wrong_BL & usable_BL,
        "other_in_wrong": usable_BL & ~causal_BL & negative_BL,
        "result_in_right": causal_BL & ~negative_BL,
        "other_in_right": usable_BL & ~causal_BL & ~negative_BL,
    }
    found = {name: weight_BL[of_BL].mean().item() for name, of_BL in kinds.items() if of_BL.any()}
    some_B = causal_BL.any(-1)
    if some_B.any():
        # Of as many of the highest scores as a response has results.
        found["recall"] = causal_recall(importance_BL, usable_BL, causal_BL)[some_B].mean().item()
    return found


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    passes: Sequence[Forward],
    weight_BL: Tensor,
) -> dict[str, float]:
    """One step along the policy gradient, averaged over the tokens of all responses.

    With one update a batch no ratio is clipped. Rows without an advantage add nothing to the sum, but their tokens count in
    the mean.
    """
    loss, entropy = torch.zeros(()), 0.0
    advantage_BL = rollout.advantage_B[:, None] * weight_BL
    for one in passes:
        length = one.token_bL.shape[1]
        keep_bl = rollout.response_BL[one.rows, 1:length]
        log_prob_NV = one.log_prob_blV[keep_bl]
        log_prob_N = log_prob_NV.gather(-1, one.token_bL[:, 1:][keep_bl][:, None])[:, 0]
        loss = loss - (log_prob_N * advantage_BL[one.rows, 1:length][keep_bl]).sum() / rollout.graded["tokens"]
        with torch.no_grad():
            entropy -= (log_prob_NV.exp() * log_prob_NV).sum().item() / int(rollout.response_BL.sum())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    return {"entropy": entropy, "gradient_norm": norm.item()}
