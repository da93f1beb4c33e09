"""Every candidate of counterfactual masking, measured side by side.

Round by round each candidate takes all responses once, first those in PyTorch, then those on the engine, never two at a time;
the engine rests while PyTorch is timed. Before anything is timed, candidates that should agree are compared.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers.utils import logging

from benchmarks.machine import Device, check_device, choose_device, describe_machine, load_average, threads, timed
from benchmarks.offload.engine import BLOCK_SIZE, MAX_REQUESTS, STEP_TOKENS, Engine, serving
from benchmarks.offload.on_engine import MOST_TOKENS, SHARES, OnEngine, generate_beside
from benchmarks.offload.scoring import (
    BUDGET,
    FORWARD_TOKENS,
    SPAN,
    InTorch,
    Response,
    Run,
    Work,
    copies_that_fit,
    made_responses,
)
from benchmarks.ratios import Ratio, ratio_table
from benchmarks.report import Report, Table, subplots
from benchmarks.step.passes import Passes
from benchmarks.study import Progress, check_at_least_one, silent
from benchmarks.tiny.random_models import SHAPES, build_batch, build_model
from oar_plugin.config import OarConfig, PerturbationConfig
from oar_plugin.hosts.vllm.versions import installed, unsupported
from oar_plugin.passes.request import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "g": "GRPO's step: generation, log-probs, update",
    "g1": "generation (vLLM)",
    "g2": "log-prob forward",
    "g3": "update",
    "p": "published OAR-P: whole copies, all logits",
    "l": "exact, in the actor: prefix shared, answer rows",
    "l30": "same, gradient and 30 % of the copies",
    "l8": f"same, runs of {SPAN} tokens",
    "o": "exact, on the idle engine (vLLM)",
    "o30": "same, budget 0.3, by blocks",
    "o8": f"same, runs of {SPAN} tokens",
    "t0": "a batch generated alone",
    "t15": f"same beside scoring, share {SHARES['t15']:g} (default)",
    "t100": "same beside scoring, share 1",
}
ON_ENGINE = ("g1", "o", "o30", "o8", *SHARES)
RATIOS = (
    Ratio("p / o", "published over exact on the engine", 3.0, at_most=False),
    Ratio("p / l", "published over exact in the actor"),
    Ratio("l30 / l", "30 % by gradient, of exact in the actor", 0.4),
    Ratio("o30 / o", "30 % by blocks, of exact on the engine", 0.4),
    Ratio("l8 / l", "eight tokens a copy, of exact in the actor"),
    Ratio("o8 / o", "eight tokens a copy, of exact on the engine"),
    *(Ratio(f"{letter} / g", "over a GRPO step") for letter in ("o", "o30", "l", "l30", "p")),
    Ratio("t0 / t15", "tokens a second beside scoring, default share, of those alone", 0.85, at_most=False),
    Ratio("t0 / t100", "same, copies without a limit in time"),
)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest difference of two candidates that should agree, over the largest score. In bfloat16 they agree roughly."""

COMPARED_COPIES = 32
"""Copies of one response that are compared."""

AUTO_SECONDS = 60.0
PILOT_COPIES = 16


@dataclass(frozen=True)
class Settings:
    size: str = "10m"
    """Parameters of the model, about: 1m, 10m, 50m, 0.1b, 0.5b, 1.5b, 7b."""
    responses: int = 4
    """Sequences."""
    response_length: tuple[int, ...] = (512,)
    """Tokens each; several lengths are measured one after the other."""
    prompt_length: int = 64
    """Tokens before them."""
    answer_length: int = 8
    """Tokens in the box."""
    generating: int = 16
    """Requests that generate at a time, alone and beside scoring."""
    rounds: int = 6
    """Rounds, after a short warm-up; verdicts need six."""
    copies_at_most: int | Literal["auto"] | None = None
    """Run so many copies of each response, evenly spaced, and scale up, which the report then says; auto: as many as take about
    a minute a candidate and round (default: all of them)."""
    published_copies: int | None = None
    """Copies in one forward of p; on a CPU a few may be faster than many (default: all that fit into memory)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation."""
    device: Device = "auto"
    """auto takes CUDA where there is one."""
    threads: int = 2
    """CPU threads of torch and of vLLM."""
    out: Path | None = None
    """Write perturbation_DEVICE_SIZE.md, .json and .png into this folder (default: only the terminal)."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        if self.size not in SHAPES or self.size == "tiny":  # whose heads vLLM does not serve on a CPU
            raise ValueError(f"--size {self.size}: allowed: {', '.join(size for size in SHAPES if size != 'tiny')}")
        check_at_least_one(self, "responses", "prompt_length", "answer_length", "generating", "rounds", "threads")
        if not self.response_length or len(set(self.response_length)) < len(self.response_length):
            raise ValueError(f"--response-length {self.response_length}: each length once, and at least one")
        if self.copies_at_most not in (None, "auto"):
            check_at_least_one(self, "copies_at_most")
        if self.published_copies is not None:
            check_at_least_one(self, "published_copies")
        check_device(self.device)


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Build the model, start the engine where vLLM is installed, compare, and run every candidate.

    Raises:
        ValueError: settings that cannot work.
        RuntimeError: candidates that should agree do not; the engine could not score or generate.
    """
    settings.check()
    progress("building the model")
    device = choose_device(settings.device)
    with ExitStack() as stack:
        stack.enter_context(threads(settings.threads))
        machine = describe_machine(device) | {"vllm": installed()}
        # One for the token that a scoring request generates.
        context = settings.prompt_length + max(settings.response_length) + 1
        dtype = getattr(torch, settings.dtype)
        model: Any = build_model(settings.size, "qwen2", SHAPES[settings.size].vocab, context, dtype, device, 0)
        lengths = [Length(settings, length, model, device) for length in settings.response_length]
        engine = None
        if machine["vllm"] is not None:
            progress("starting the engine")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            logging.disable_progress_bar()
            model.save_pretrained(folder)
            logging.enable_progress_bar()
            eager = device.type == "cpu"
            engine = stack.enter_context(serving(folder, settings.dtype, context, settings.threads, eager))
        for length in lengths:  # all before the first update, which changes the weights that the engine does not see
            progress(f"{length.tokens} tokens: comparing")
            length.compare(engine)
        for length in lengths:
            length.measure(progress)
        machine["load_average_after"] = load_average()
    return report_of(settings, lengths, machine, sum(p.numel() for p in model.parameters()))


class Length:
    """What is measured at one response length, `tokens`.

    Attributes:
        disagreement: largest difference from l, over the largest score, by letter.
        seconds: of each round by letter, per response and for all of its copies; t0, t15 and t100 per batch.
        runs: what each round computed, by letter.
        torch_s: seconds in which PyTorch was timed.
        busy_s: processor seconds of the engine meanwhile.
    """

    def __init__(self, settings: Settings, tokens: int, model: nn.Module, device: torch.device) -> None:
        self.settings, self.tokens, self.device = settings, tokens, device
        lengths = (settings.prompt_length, tokens, settings.answer_length)
        batch = build_batch(settings.responses, *lengths, settings.responses, device, 0)
        request = Request.from_config(OarConfig.parse({"importance": "hybrid"}), 1, tokens)
        self.passes = Passes(model, batch, request, micro_batch=4)
        self.responses = made_responses(self.passes)
        self.engine: Engine | None = None
        self.works: dict[str, Work] = {}
        self.disagreement: Mapping[str, float] = {}
        self.seconds, self.runs = defaultdict[str, list[float]](list), defaultdict[str, list[Run]](list)
        self.torch_s = self.busy_s = 0.0

    def compare(self, engine: Engine | None) -> None:
        """Meet the engine, if there is one, and see whether all compute the same."""
        self.engine = engine
        padding = int(self.passes.batch.token_BL[0, -1])  # the end-of-sequence token pads, as with most tokenizers
        longest = self.settings.prompt_length + self.tokens
        self.at_once = self.settings.published_copies or copies_that_fit(self.passes.model, longest)
        local = InTorch(self.passes, padding, self.at_once).score
        self.works = {
            "g2": partial(self._grpo, self.passes.log_prob),
            "g3": partial(self._grpo, self.passes.update),
            "p": partial(local, published=True),
            "l": local,
            "l30": partial(local, hybrid=True),
            "l8": partial(local, span=SPAN),
        }
        if engine is not None:
            there = OnEngine(engine, padding).score
            self.works |= {"g1": self._generate, "o": there}
            self.works |= {"o30": partial(there, budget=BUDGET), "o8": partial(there, span=SPAN)}
            self.works |= {letter: partial(self._beside, share, padding) for letter, share in SHARES.items()}
        exact = {letter: work for letter, work in self.works.items() if letter in ("p", "l", "o")}
        found = {letter: work(self.responses[:1], COMPARED_COPIES).importance[0] for letter, work in exact.items()}
        self.disagreement = disagreements(found, TOLERANCE[self.settings.dtype])

    def measure(self, progress: Progress) -> None:
        """Warm up, then all rounds."""
        at_most = {}
        for letter in self.works:
            progress(f"{self.tokens} tokens, warm-up: {TITLES[letter]}")
            at_most[letter] = self._warm_up(letter)
        pieces = [(number, letter) for number in range(self.settings.rounds) for letter in self.works]
        for done, (number, letter) in enumerate(pieces):
            progress(f"{self.tokens} tokens, round {number + 1}: {TITLES[letter]}", done, len(pieces))
            run, seconds = self._timed(letter, self.responses, at_most[letter])
            self.runs[letter].append(run)
            self.seconds[letter].append(run.all_seconds(seconds) / self.sharing(letter))
        parts = [self.seconds[letter] for letter in ("g1", "g2", "g3") if letter in self.works]
        self.seconds["g"] = [sum(seconds) for seconds in zip(*parts, strict=True)]
        self.passes.optimizer.state.clear()  # the next length has its own

    def sharing(self, letter: str) -> int:
        """Responses that the seconds are shared out over."""
        return 1 if letter in SHARES else len(self.responses)

    def _warm_up(self, letter: str) -> int | None:
        """Returns how many copies of each response to run."""
        if letter not in SHARES:
            self.works[letter](self.responses[:1], 4)
        if self.settings.copies_at_most != "auto":
            return self.settings.copies_at_most
        if letter[0] in "gt":
            return None
        run, seconds = self._timed(letter, self.responses[:1], PILOT_COPIES)
        a_copy = max(1e-9, seconds - run.fixed_s) / run.copies
        return max(PILOT_COPIES, int(AUTO_SECONDS / (a_copy * len(self.responses))))

    def _timed(self, letter: str, responses: Sequence[Response], at_most: int | None) -> tuple[Run, float]:
        engine = None if letter in ON_ENGINE else self.engine
        if engine is not None:
            engine.rest()
        busy_s, runs = engine.cpu_seconds() if engine else 0.0, list[Run]()
        seconds, _ = timed(lambda: runs.append(self.works[letter](responses, at_most)), self.device)
        if engine is not None:
            self.torch_s += seconds
            self.busy_s += engine.cpu_seconds() - busy_s
        return runs[0], runs[0].timed_s or seconds

    def _beside(self, share: float | None, padding: int, responses: Sequence[Response], at_most: int | None) -> Run:
        assert self.engine is not None
        requests, tokens = self.settings.generating, min(MOST_TOKENS, self.tokens)
        work = generate_beside(self.engine, share, requests, tokens, responses, padding)
        seconds, copies = self.engine.run(work)
        return Run(copies=copies, all_copies=copies, timed_s=seconds)

    def _generate(self, responses: Sequence[Response], at_most: int | None) -> Run:
        engine = self.engine
        assert engine is not None

        async def generate() -> None:
            await asyncio.gather(*[engine.generate(response.candidate, self.tokens) for response in responses])

        engine.run(generate())
        return Run()

    def _grpo(self, work: Callable[[int | None], object], responses: Sequence[Response], at_most: int | None) -> Run:
        work(None if len(responses) == len(self.responses) else 1)
        return Run()


def disagreements(importance: Mapping[str, Tensor], tolerance: float) -> dict[str, float]:
    """How far each candidate is from l, over the largest score, given the importance `[L]` of the same response and units.

    Raises:
        RuntimeError: one is farther than `tolerance`, or all scores are zero, and there is nothing to compare.
    """
    reference_L = importance["l"].double()
    largest = float(reference_L.max())
    if not largest > 0:
        raise RuntimeError("all scores are zero: replacing a token does not move this model's answer")
    found = {}
    for letter, scores_L in importance.items():
        difference = float((scores_L.double() - reference_L).abs().max()) / largest
        if not difference <= tolerance:
            raise RuntimeError(
                f"{letter} and l differ by {difference:.2g} of the largest score, {tolerance:g} is allowed: nothing is "
                "reported"
            )
        found[letter] = difference
    del found["l"]
    return found


def report_of(settings: Settings, lengths: Sequence[Length], machine: dict[str, Any], parameters: int) -> Report:
    tables = []
    for length in lengths:
        figures = pd.DataFrame({letter: length.seconds[letter] for letter in TITLES if letter in length.seconds})
        rows = [row_of(letter, list(figures[letter]), length) for letter in figures]
        columns = ("candidate", "s / response", "fastest .. slowest", "copies", "tokens")
        tables.append(Table(f"{length.tokens} tokens: candidates", columns, rows))
        tables.append(ratio_table(f"{length.tokens} tokens: ratios", RATIOS, figures))
    busy = sum(x.busy_s for x in lengths) / sum(x.torch_s for x in lengths) if lengths[0].engine else None
    return Report(
        title=f"What counterfactual masking costs: {settings.size}, {settings.dtype}, {machine['device']}",
        stem=f"perturbation_{machine['device']}_{settings.size}",
        command="",
        machine=machine,
        tables=tables,
        notes=notes(settings, lengths, machine, parameters, busy),
        runs={
            "settings": asdict(replace(settings, out=None)),
            "parameters": parameters,
            "engine_processor_seconds_a_second_of_torch": busy,
            "lengths": {
                length.tokens: {
                    "seconds": length.seconds,
                    "runs": {
                        k: [asdict(replace(run, importance=[])) for run in runs] for k, runs in length.runs.items()
                    },
                    "disagreement": length.disagreement,
                    "published_copies_at_once": length.at_once,
                }
                for length in lengths
            },
        },
        figure=partial(draw, lengths),
    )


def row_of(letter: str, seconds: list[float], length: Length) -> tuple[str, ...]:
    runs, responses = length.runs.get(letter, [Run()]), length.sharing(letter)
    copies, tokens = (
        np.mean([getattr(run, name) for run in runs]) / responses for name in ("all_copies", "all_tokens")
    )
    mark = " (scaled)" if runs[0].all_copies > runs[0].copies else ""
    mark += " WITHOUT generation" if letter == "g" and length.engine is None else ""
    return (
        f"{letter}: {TITLES[letter]}{mark}",
        f"{np.median(seconds):.4g}",
        f"{min(seconds):.4g} .. {max(seconds):.4g}",
        f"{copies:.0f}" if copies else "",
        f"{tokens:.0f}" if tokens else "",
    )


def notes(
    settings: Settings, lengths: Sequence[Length], machine: dict[str, Any], parameters: int, busy: float | None
) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    at_once = ", ".join(f"{length.at_once} at {length.tokens} tokens" for length in lengths)
    lines = [
        f"qwen2 with random weights, {parameters / 1e6:.1f}M parameters (tied embeddings once), vocabulary "
        f"{SHAPES[settings.size].vocab}, {settings.dtype}; {settings.responses} responses after prompts of "
        f"{settings.prompt_length} tokens, with answers of {settings.answer_length}.",
        f"{settings.rounds} rounds, each candidate once a round, after a short warm-up. Seconds are wall seconds of all "
        "responses over their number; ratios are medians of the ratios of single rounds, with the interval of the sign test, "
        "which needs six rounds.",
        "g is what GRPO does with these responses: they are generated (all at once; a larger batch makes generation cheaper a "
        "response), then one forward for log-probs, then the update with one AdamW step.",
        "p replaces every reasoning token in turn by the padding token and runs whole sequences, with float32 logits of all "
        f"positions and no cache. What follows the answer is cut off. Copies in one forward: {at_once} "
        f"({'--published-copies' if settings.published_copies else 'what half of the free memory holds, or all'}).",
        f"l runs at most {FORWARD_TOKENS} tokens a forward, one response after the other. l30 is `hybrid`, with "
        f"{BUDGET:.0%} of the copies; its seconds have the gradient pass in them in full, its tokens do not. l8 and o8 replace "
        f"{SPAN} tokens at a time.",
        "Tokens are those that were computed, the clean reference included, without what a prefix cache supplied; every "
        "request has a prefix cache of its own.",
    ]
    if machine["vllm"] is None:
        lines.append(
            "vLLM is NOT installed: nothing was measured on an engine, g has no generation in it, and its ratios are too large."
        )
    else:
        lines += [
            f"vLLM {machine['vllm']}: AsyncLLM, one worker with {settings.threads} threads, prefix cache in blocks of "
            f"{BLOCK_SIZE}, priority scheduling, at most {MAX_REQUESTS} requests and {STEP_TOKENS} tokens a step, not compiled "
            f"on a CPU; at most {PerturbationConfig().max_in_flight} copies in flight. PyTorch has as many threads; neither is "
            "bound to cores. Engine and PyTorch are never timed at once: while PyTorch was, the engine's processes used "
            f"{busy:.3f} processor seconds a second.",
            f"Generation beside scoring: {settings.generating} requests begin together, each of as many tokens as the response "
            f"has but at most {MOST_TOKENS}, while responses are scored over and over; measured from the first to the end of "
            "the last. Copies meanwhile are work that is then no longer to be done (references included). The default share "
            f"is {SHARES['t15']:g}; 1 does not limit time.",
        ]
        if (warning := unsupported(machine["vllm"])) is not None:
            lines.append(warning)
    for length in lengths:
        agreed = ", ".join(f"{letter} {value:.1g}" for letter, value in length.disagreement.items())
        lines.append(
            f"Compared at {length.tokens} tokens before anything was timed, up to {COMPARED_COPIES} copies of one response: "
            f"difference from l over the largest score: {agreed}."
        )
        scaled = {letter: runs[0] for letter, runs in length.runs.items() if runs[0].all_copies > runs[0].copies}
        if scaled:
            each = ", ".join(f"{letter} {r.copies} of {r.all_copies:.0f}" for letter, r in scaled.items())
            lines.append(
                f"SCALED UP at {length.tokens} tokens (--copies-at-most {settings.copies_at_most}): evenly spaced copies of "
                f"each response were run, and seconds, copies and tokens multiplied: {each}."
            )
        retried = {letter: sum(run.retried for run in runs) for letter, runs in length.runs.items()}
        if any(retried.values()):
            lines.append(f"Requests made twice at {length.tokens} tokens, in all rounds: {retried}.")
    return lines


def draw(lengths: Sequence[Length]) -> Figure:
    """Seconds a response against its length, one line a candidate."""
    figure, axes = subplots(figsize=(7, 6))
    tokens = [length.tokens for length in lengths]
    for letter, title in TITLES.items():
        if letter in lengths[0].seconds and letter not in ("g1", "g2", "g3", *SHARES):
            medians = [np.median(length.seconds[letter]) for length in lengths]
            axes.plot(tokens, medians, "-" if len(letter) == 1 else "--", marker="o", label=f"{letter}: {title}")
    axes.set(xscale="log", yscale="log", xlabel="response length, tokens", ylabel="seconds a response")
    axes.set_xticks(tokens, [str(length) for length in tokens])
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
