"""What counterfactual masking (OAR-P) costs: every candidate of `oar bench perturbation`, measured side by side.

Round by round each candidate takes all responses once, first those in PyTorch, then those on the engine, never two at a time;
the engine rests while PyTorch is timed. Before anything is timed, candidates that should agree are compared.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils import logging

from benchmarks.machine import Device, check_device, choose_device, describe_machine, load_average, threads, timed
from benchmarks.offload.beside import MOST_TOKENS, SHARES, Beside, generate_beside
from benchmarks.offload.engine import Engine, serving
from benchmarks.offload.scoring import SPAN, LocalScoring, OffloadedScoring, Run, Work
from benchmarks.responses import Response, made_responses
from benchmarks.step.passes import Passes
from benchmarks.tiny.random_models import SHAPES, Architecture, build_batch, build_model
from oar_plugin.config import OarConfig
from oar_plugin.credit.importance.hybrid import Hybrid
from oar_plugin.hosts.vllm.versions import installed
from oar_plugin.passes.request import Request

GENERATE, LOG_PROB, UPDATE = "generate", "log_prob", "update"
STEP = "step"
PUBLISHED = "published"
LOCAL, LOCAL_HYBRID, LOCAL_SPAN = "local", "local_hybrid", "local_span"
OFFLOADED, OFFLOADED_BUDGET, OFFLOADED_SPAN = "offloaded", "offloaded_budget", "offloaded_span"

LETTERS = {
    STEP: "g",
    GENERATE: "g1",
    LOG_PROB: "g2",
    UPDATE: "g3",
    PUBLISHED: "p",
    LOCAL: "l",
    LOCAL_HYBRID: "l30",
    LOCAL_SPAN: f"l{SPAN}",
    OFFLOADED: "o",
    OFFLOADED_BUDGET: "o30",
    OFFLOADED_SPAN: f"o{SPAN}",
}
EXACT = {key: LOCAL for key in (LOCAL, LOCAL_HYBRID, LOCAL_SPAN)} | {
    key: OFFLOADED for key in (OFFLOADED, OFFLOADED_BUDGET, OFFLOADED_SPAN)
}
"""What a candidate is a cheaper version of."""

TOLERANCE: dict[str, float] = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest difference of two candidates that should agree, over the largest score. In bfloat16 they agree roughly."""

COMPARED_COPIES = 32
"""Copies of one response that are compared."""

AUTO_SECONDS = 60.0
_PILOT_COPIES = 16
_WARM_UP_COPIES = 4
_MICRO_BATCH = 4


class DisagreementError(RuntimeError):
    """Candidates that should compute the same do not: nothing of the run is worth reporting."""


@dataclass(frozen=True)
class Settings:
    """The arguments of one run; `vocab` is None for "choose", `copies_at_most` for all, `published_copies` for what fits."""

    size: str = "10m"
    architecture: Architecture = "qwen2"
    vocab: int | None = None
    responses: int = 4
    response_length: tuple[int, ...] = (512,)
    prompt_length: int = 64
    answer_length: int = 8
    generating: int = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Device = "auto"
    rounds: int = 3
    copies_at_most: int | Literal["auto"] | None = None
    published_copies: int | None = None
    threads: int = 2
    seed: int = 0

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        for name in ("responses", "prompt_length", "answer_length", "generating", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if not self.response_length or len(set(self.response_length)) < len(self.response_length):
            raise ValueError(f"--response-length {self.response_length}: each length once, and at least one")
        if self.copies_at_most not in (None, "auto") and int(self.copies_at_most) < 1:
            raise ValueError(f'--copies-at-most {self.copies_at_most}: must be at least 1, or "auto"')
        if self.published_copies is not None and self.published_copies < 1:
            raise ValueError(f"--published-copies {self.published_copies}: must be at least 1")
        check_device(self.device)

    @property
    def vocabulary(self) -> int:
        return self.vocab or SHAPES[self.size].vocab


@dataclass
class Measured:
    """What a candidate took at one response length. Per response, and for all of its copies.

    Attributes:
        key: its name in the JSON.
        title: its name in tables.
        seconds: of each round.
        copies: that are scored.
        tokens: that are computed for them, references included.
        measured: share of the copies that were run; below 1 seconds, copies and tokens are scaled up.
        retried: requests that had to be made twice, of all responses in all rounds.
    """

    key: str
    title: str
    seconds: list[float] = field(default_factory=list)
    copies: float = 0.0
    tokens: float = 0.0
    measured: float = 1.0
    retried: int = 0

    @property
    def letter(self) -> str:
        """Its name in ratios."""
        return LETTERS[self.key]

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)

    def add(self, run: Run, seconds: float, responses: int) -> None:
        """Account for a round over that many responses."""
        self.seconds.append(run.all_seconds(seconds) / responses)
        self.copies, self.tokens = run.all_copies / responses, run.all_tokens / responses
        self.measured = 1 / run.every
        self.retried += run.retried


@dataclass
class _Candidate:
    """Something to measure, and how many copies of each response (None: all)."""

    measured: Measured
    work: Work
    at_most: int | None = None


@dataclass
class LengthResult:
    """What was measured at one response length.

    Attributes:
        response_length: tokens of a response.
        candidates: by key, `STEP` first.
        beside: generation beside scoring; empty without an engine.
        disagreement: largest difference of each candidate from `l`, over the largest score.
        at_once: copies in one forward of the published procedure.
    """

    response_length: int
    candidates: dict[str, Measured]
    beside: list[Beside]
    disagreement: dict[str, float]
    at_once: int


@dataclass
class Result:
    """A finished run.

    Attributes:
        engine_busy: processor seconds of the engine for each second in which PyTorch was timed; None without an engine.
    """

    settings: Settings
    lengths: list[LengthResult]
    machine: dict[str, Any]
    parameters: int
    engine_busy: float | None


Progress = Callable[[str], None]


def steps(settings: Settings) -> int:
    """How often `measure` will report progress."""
    engine = installed() is not None
    candidates, beside = (len(LETTERS) - 1, len(SHARES)) if engine else (len(LETTERS) - 5, 0)
    a_length = 1 + candidates + settings.rounds * (candidates + beside)
    return 1 + engine + len(settings.response_length) * a_length


def measure(settings: Settings, progress: Progress = lambda what: None) -> Result:
    """Build the model, start the engine where vLLM is installed, compare, and run every candidate.

    Args:
        settings: the run.
        progress: called with a description as each piece of work begins, `steps(settings)` times.

    Raises:
        ValueError: settings that cannot work.
        DisagreementError: candidates that should agree do not.
        RuntimeError: the engine could not score or generate.
    """
    settings.check()
    progress("building the model")
    device = choose_device(settings.device)
    with ExitStack() as stack:
        stack.enter_context(threads(settings.threads))
        machine = describe_machine(device) | {"vllm": installed()}
        # One for the prompt that is longest, and one for the token that a scoring request generates.
        context = settings.prompt_length + max(settings.response_length) + 1
        dtype = getattr(torch, settings.dtype)
        model = build_model(
            settings.size, settings.architecture, settings.vocabulary, context, dtype, device, settings.seed
        )
        lengths = [_Length(settings, length, model, device) for length in settings.response_length]
        engine = None
        if machine["vllm"] is not None:
            progress("starting the engine")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _save(model, folder)
            eager = device.type == "cpu"
            engine = stack.enter_context(
                serving(folder, settings.dtype, context, settings.threads, settings.seed, eager)
            )
        for length in lengths:  # all before the first update, which changes the weights that the engine does not see
            progress(f"{length.response_length} tokens: comparing")
            length.prepare(engine)
        for length in lengths:
            length.measure(progress)
        machine["load_average_after"] = load_average()
    return Result(
        settings,
        [length.result() for length in lengths],
        machine,
        parameters=sum(p.numel() for p in model.parameters()),
        engine_busy=sum(x.busy_s for x in lengths) / sum(x.torch_s for x in lengths) if engine else None,
    )


class _Length:
    """The run at one response length.

    Attributes:
        torch_s: seconds in which PyTorch was timed.
        busy_s: processor seconds of the engine meanwhile.
    """

    def __init__(self, settings: Settings, response_length: int, model: nn.Module, device: torch.device) -> None:
        self.settings = settings
        self.response_length = response_length
        self.device = device
        batch = build_batch(
            settings.responses,
            settings.prompt_length,
            response_length,
            settings.answer_length,
            settings.responses,
            device,
            settings.seed,
        )
        largest = int(batch.token_BL.max())
        if largest >= settings.vocabulary:
            raise ValueError(f"--vocab {settings.vocabulary}: must be more than {largest}, the tokenizer's largest id")
        config = OarConfig.parse({"importance": Hybrid.name, "seed": settings.seed})
        self.passes = Passes(model, batch, Request.from_config(config, 1, response_length), _MICRO_BATCH)
        self.responses = made_responses(batch, self.passes.segments_BL)
        self.padding = int(batch.token_BL[0, -1])  # the end-of-sequence token pads, as with most tokenizers
        self.local = LocalScoring(self.passes, self.padding, settings.published_copies)
        self.engine: Engine | None = None
        self.offloaded: OffloadedScoring | None = None
        self.beside: list[Beside] = []
        self.disagreement: dict[str, float] = {}
        self.candidates: list[_Candidate] = []
        self.torch_s = self.busy_s = 0.0

    def prepare(self, engine: Engine | None) -> None:
        """Meet the engine, if there is one, and see whether all compute the same."""
        self.engine = engine
        exact: dict[str, Work] = {PUBLISHED: self.local.published, LOCAL: self.local.exact}
        if engine is not None:
            self.offloaded = OffloadedScoring(engine, self.padding)
            exact[OFFLOADED] = self.offloaded.exact
            tokens = min(MOST_TOKENS, self.response_length)
            self.beside = [Beside(share, self.settings.generating, tokens) for share in SHARES]
        found = {key: work(self.responses[:1], COMPARED_COPIES).importance[0] for key, work in exact.items()}
        self.disagreement = disagreements(found, TOLERANCE[self.settings.dtype])
        self.candidates = self._make_candidates()

    def _make_candidates(self) -> list[_Candidate]:
        local, offloaded = self.local, self.offloaded
        works: dict[str, tuple[str, Work]] = {
            LOG_PROB: ("  log-prob forward", self._log_prob),
            UPDATE: ("  update", self._update),
            PUBLISHED: ("published OAR-P: whole copies, all logits", local.published),
            LOCAL: ("exact, in the actor: prefix shared, answer rows", local.exact),
            LOCAL_HYBRID: ("same, gradient and 30 % of the copies", local.hybrid),
            LOCAL_SPAN: (f"same, runs of {SPAN} tokens", lambda rs, n: local.exact(rs, n, SPAN)),
        }
        if offloaded is not None:
            works |= {
                GENERATE: ("  generation (vLLM)", self._generate),
                OFFLOADED: ("exact, on the idle engine (vLLM)", offloaded.exact),
                OFFLOADED_BUDGET: ("same, budget 0.3, by blocks", offloaded.budget),
                OFFLOADED_SPAN: (f"same, runs of {SPAN} tokens", lambda rs, n: offloaded.exact(rs, n, SPAN)),
            }
        return [_Candidate(Measured(key, works[key][0]), works[key][1]) for key in LETTERS if key in works]

    def measure(self, progress: Progress) -> None:
        """Warm up, then all rounds."""
        name = f"{self.response_length} tokens"
        for candidate in self.candidates:
            progress(f"{name}, warm-up: {candidate.measured.title.strip()}")
            self._warm_up(candidate)
        for number in range(self.settings.rounds):
            round_name = f"{name}, round {number + 1} of {self.settings.rounds}"
            for candidate in self.candidates:
                progress(f"{round_name}: {candidate.measured.title.strip()}")
                run, seconds = self._timed(candidate, self.responses, candidate.at_most)
                candidate.measured.add(run, seconds, len(self.responses))
            for beside in self.beside:
                progress(f"{round_name}: generation, scoring {beside.share or 0:.0%} of the time")
                assert self.engine is not None
                generate_beside(self.engine, beside, self.responses, self.padding)
        self.passes.optimizer.state.clear()  # the next length has its own

    def _warm_up(self, candidate: _Candidate) -> None:
        first = self.responses[:1]
        candidate.work(first, _WARM_UP_COPIES)
        if self.settings.copies_at_most != "auto":
            candidate.at_most = self.settings.copies_at_most
        elif candidate.measured.key not in (GENERATE, LOG_PROB, UPDATE):
            run, seconds = self._timed(candidate, first, _PILOT_COPIES)
            a_copy = max(1e-9, seconds - run.fixed_s) / run.copies
            candidate.at_most = max(_PILOT_COPIES, int(AUTO_SECONDS / (a_copy * len(self.responses))))

    def _timed(self, candidate: _Candidate, responses: Sequence[Response], at_most: int | None) -> tuple[Run, float]:
        in_torch = self.engine is not None and candidate.measured.key not in _ON_ENGINE
        if in_torch:
            assert self.engine is not None
            self.engine.rest()
            busy_s = self.engine.cpu_seconds()
        runs = []
        seconds, _ = timed(lambda: runs.append(candidate.work(responses, at_most)), self.device)
        if in_torch:
            assert self.engine is not None
            self.torch_s += seconds
            self.busy_s += self.engine.cpu_seconds() - busy_s
        return runs[0], seconds

    def _generate(self, responses: Sequence[Response], at_most: int | None) -> Run:
        engine = self.engine
        assert engine is not None

        async def all_of_them() -> None:
            await asyncio.gather(*[engine.generate(r.token_ids[: r.prompt_length], r.length) for r in responses])

        engine.run(all_of_them())
        return Run([])

    def _log_prob(self, responses: Sequence[Response], at_most: int | None) -> Run:
        self.passes.log_prob(self._micro_batches(responses))
        return Run([])

    def _update(self, responses: Sequence[Response], at_most: int | None) -> Run:
        self.passes.update(self._micro_batches(responses))
        return Run([])

    def _micro_batches(self, responses: Sequence[Response]) -> int | None:
        return None if len(responses) == len(self.responses) else 1

    def result(self) -> LengthResult:
        """With GRPO's step put together from its parts."""
        measured = {candidate.measured.key: candidate.measured for candidate in self.candidates}
        parts = [measured[key].seconds for key in (GENERATE, LOG_PROB, UPDATE) if key in measured]
        title = "GRPO's step: generation, log-probs, update"
        if self.engine is None:
            title = "GRPO's step WITHOUT generation: log-probs, update"
        step = Measured(STEP, title, [sum(seconds) for seconds in zip(*parts, strict=True)])
        at_once = self.local.at_once
        assert at_once is not None, "the published procedure has run"
        return LengthResult(self.response_length, {STEP: step} | measured, self.beside, self.disagreement, at_once)


_ON_ENGINE = (GENERATE, OFFLOADED, OFFLOADED_BUDGET, OFFLOADED_SPAN)


def disagreements(importance: dict[str, Tensor], tolerance: float) -> dict[str, float]:
    """How far each candidate is from `LOCAL`, over the largest score.

    Args:
        importance: `[L]` of the same response and units, by candidate.
        tolerance: what is allowed.

    Raises:
        DisagreementError: one is farther, or there is nothing to compare: all scores are zero.
    """
    reference_L = importance[LOCAL].double()
    largest = float(reference_L.max())
    if not largest > 0:
        raise DisagreementError("all scores are zero: replacing a token does not move this model's answer")
    found = {
        key: float((scores_L.double() - reference_L).abs().max()) / largest
        for key, scores_L in importance.items()
        if key != LOCAL
    }
    for key, difference in found.items():
        if not difference <= tolerance:
            raise DisagreementError(
                f"{LETTERS[key]} and {LETTERS[LOCAL]} differ by {difference:.2g} of the largest score, {tolerance:g} is "
                "allowed: nothing is reported"
            )
    return found


def _save(model: nn.Module, folder: Path) -> None:
    lm: Any = model
    logging.disable_progress_bar()
    try:
        lm.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()
