"""Every candidate of counterfactual masking, measured side by side.

Round by round each candidate takes all responses once, first those in PyTorch, then those on the engine, never two at a time;
the engine rests while PyTorch is timed. Before anything is timed, candidates that should agree are compared.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor
from transformers.utils import logging

from benchmarks.machine import Device, choose_device, synchronize
from benchmarks.offload.engine import GENERATING, MOST_TOKENS, SHARES, Engine, serving
from benchmarks.offload.passes import Passes
from benchmarks.offload.scoring import FORWARD_TOKENS, InTorch, Run, copies_that_fit, made_responses
from benchmarks.report import Progress, Report, Table, silent
from benchmarks.statistics import Ratio, ratio_table
from benchmarks.tiny.model import SHAPES
from benchmarks.workload import Workload, model_line
from oar_plugin.config import OarConfig
from oar_plugin.hosts.vllm.versions import installed
from oar_plugin.passes.request import Request

TITLES = {
    "g": "GRPO's step: generation, log-probs, update",
    "g1": "generation (vLLM)",
    "g2": "log-prob forward",
    "g3": "update",
    "p": "published OAR-P: whole copies, all logits",
    "l": "exact, in the actor: prefix shared, answer rows",
    "l30": "same, gradient and 30 % of the copies",
    "o": "exact, on the idle engine (vLLM)",
    "o30": "same, budget 0.3, by blocks",
    "t0": f"{GENERATING} requests generated alone (seconds of all)",
    "t15": f"same beside scoring, share {SHARES['t15']:g} (default)",
    "t100": "same beside scoring, share 1",
}
RATIOS = (
    Ratio("p / o", "published over exact on the engine", 3.0, at_most=False),
    Ratio("p / l", "published over exact in the actor"),
    Ratio("l30 / l", "30 % by gradient, of exact in the actor", 0.4),
    Ratio("o30 / o", "30 % by blocks, of exact on the engine", 0.4),
    *(Ratio(f"{letter} / g", "over a GRPO step") for letter in ("o", "o30", "l", "l30", "p")),
    Ratio("t0 / t15", "tokens a second beside scoring, default share, of those alone", 0.85, at_most=False),
    Ratio("t0 / t100", "same, copies without a limit in time"),
)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest difference of two candidates that should agree, over the largest score. In bfloat16 they agree roughly."""
COMPARED_COPIES = 32
"""Copies of one response that are compared."""


@dataclass(frozen=True)
class Settings(Workload):
    sizes: ClassVar[Sequence[str]] = tuple(size for size in SHAPES if size != "tiny")  # vLLM: its heads are too small
    size: str = "10m"
    responses: int = 4
    prompt_length: int = 64
    response_length: int = 512
    """Tokens of each response."""
    device: Device = "auto"
    """auto takes CUDA where there is one."""
    threads: int = 2
    """CPU threads of torch and of vLLM."""
    out: Path | None = None
    """Write perturbation_DEVICE_SIZE_LENGTH.md and .json into this folder (default: only the terminal)."""


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Build the model, start the engine where vLLM is installed, compare, and run every candidate.

    Raises:
        RuntimeError: candidates that should agree do not; the engine could not score or generate.
    """
    progress("building the model")
    device, tokens, vllm = choose_device(settings.device), settings.response_length, installed()
    context = settings.prompt_length + tokens + 1  # one for the token that a scoring request generates
    model = settings.model(context, device)
    request = Request.of_step(OarConfig.parse({"importance": "hybrid"}), 1)
    passes = Passes(model, settings.batch(tokens, device=device), request, micro_batch=4)
    responses = made_responses(passes)
    padding = int(passes.batch.token_BL[0, -1])  # the end-of-sequence token pads, as with most tokenizers
    with ExitStack() as stack:
        engine = None
        if vllm is not None:
            progress("starting the engine")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            logging.disable_progress_bar()
            model.save_pretrained(folder)
            logging.enable_progress_bar()
            engine = stack.enter_context(
                serving(folder, settings.dtype, context, padding, settings.threads, device.type == "cpu")
            )
        local = InTorch(passes, padding, copies_that_fit(model, context))
        there = {} if engine is None else engine.works(tokens)
        works = local.works() | there
        progress("comparing")  # before the first update, which changes the weights that the engine does not see
        exact = {letter: work for letter, work in works.items() if letter in ("p", "l", "o")}
        found = {letter: work(responses[:1], COMPARED_COPIES).importance[0] for letter, work in exact.items()}
        differences = disagreements(found, TOLERANCE[settings.dtype])
        runs: dict[str, list[Run]] = {letter: [] for letter in works}
        pieces = [(number, letter) for number in range(settings.rounds + 1) for letter in works]
        for done, (number, letter) in enumerate(pieces):
            progress(f"round {number} of {settings.rounds}: {TITLES[letter]}", done, len(pieces))
            if number:
                work = partial(works[letter], responses, None)
                runs[letter].append(timed_run(work, device, None if letter in there else engine))
            elif letter not in SHARES:
                works[letter](responses[:1], 4)  # a warm-up
    facts = {
        "vllm": vllm,
        "parameters": sum(p.numel() for p in model.parameters()),
        "disagreement": differences,
        "published_copies_at_once": local.at_once,
    }
    return report_of(settings, device.type, facts, runs)


def timed_run(work: Callable[[], Run], device: torch.device, engine: Engine | None) -> Run:
    """A run with its seconds. `engine`: one that rests meanwhile."""
    if engine is not None:
        engine.rest()
    busy_s = engine.cpu_seconds() if engine else 0.0
    synchronize(device)
    begin = time.perf_counter()
    run = work()
    synchronize(device)
    run.seconds = run.seconds or time.perf_counter() - begin
    run.busy_s = engine.cpu_seconds() - busy_s if engine else 0.0
    return run


def disagreements(importance: Mapping[str, Tensor], tolerance: float) -> dict[str, float]:
    """How far each candidate is from l, over the largest score, given the importance `[L]` of the same response and units.

    Raises:
        RuntimeError: one is farther than `tolerance`, or all scores are zero, and there is nothing to compare.
    """
    reference_L = importance["l"].double()
    largest = float(reference_L.max())
    if not largest > 0:
        raise RuntimeError("all scores are zero: replacing a token does not move this model's answer")
    found = dict[str, float]()
    for letter, scores_L in importance.items():
        found[letter] = float((scores_L.double() - reference_L).abs().max()) / largest
        if not found[letter] <= tolerance:
            said = f"{letter} and l differ by {found[letter]:.2g} of the largest score, {tolerance:g} is allowed"
            raise RuntimeError(f"{said}: nothing is reported")
    del found["l"]
    return found


def report_of(settings: Settings, device: str, facts: dict[str, Any], runs: Mapping[str, Sequence[Run]]) -> Report:
    sharing = {letter: 1 if letter in SHARES else settings.responses for letter in runs}
    figures = pd.DataFrame({x: [run.seconds / sharing[x] for run in each] for x, each in runs.items()})
    figures["g"] = figures.filter(["g1", "g2", "g3"]).sum(axis=1)
    totals = {x: [(run.copies, run.tokens) for run in each] for x, each in runs.items()}
    counts = {x: pd.DataFrame(each).mean() / sharing[x] for x, each in totals.items()}
    rows = []
    for letter in filter(figures.__contains__, TITLES):
        mark = " WITHOUT generation" if letter == "g" and "g1" not in runs else ""
        seconds, shown = figures[letter], [f"{count:.0f}" if count else "" for count in counts.get(letter, (0, 0))]
        spread = f"{seconds.min():.4g} .. {seconds.max():.4g}"
        rows.append([f"{letter}: {TITLES[letter]}{mark}", f"{seconds.median():.4g}", spread, *shown])
    columns = ("candidate", "s / response", "fastest .. slowest", "copies", "tokens")
    tokens, vllm = settings.response_length, facts["vllm"]
    notes = [
        f"{model_line(settings.size, facts['parameters'], settings.dtype)}; {settings.responses} responses of {tokens} tokens "
        f"after prompts of {settings.prompt_length}, answers of {settings.answer_length}; {settings.threads} threads. How it "
        "is kept fair: benchmarks/README.md.",
        f"{settings.rounds} rounds, each candidate once a round, after a short warm-up. Seconds are wall seconds of all "
        "responses over their number; ratios are medians of the ratios of single rounds, with the interval of the sign test, "
        "which needs six rounds.",
        f"p runs {facts['published_copies_at_once']} copies in one forward (what half of the free memory holds, or all), l at "
        f"most {FORWARD_TOKENS} tokens, one response after the other. Tokens are those that were computed, the clean reference "
        "included, without what a prefix cache supplied and without the gradient pass of l30.",
        f"Compared before anything was timed, up to {COMPARED_COPIES} copies of one response: difference from l over the "
        f"largest score: {', '.join(f'{letter} {value:.1g}' for letter, value in facts['disagreement'].items())}.",
    ]
    if vllm is None:
        notes.append(
            "vLLM is NOT installed: nothing was measured on an engine, g has no generation in it, and its ratios are too large."
        )
    else:
        in_torch = [run for letter in ("g2", "g3", "p", "l", "l30") for run in runs[letter]]
        busy = sum(run.busy_s for run in in_torch) / sum(run.seconds for run in in_torch)
        retried = sum(run.retried for each in runs.values() for run in each)
        notes += [
            f"vLLM {vllm}: while PyTorch was timed, its processes used {busy:.3f} processor seconds a second. Beside scoring "
            f"each request generates as many tokens as the response has but at most {MOST_TOKENS}; copies meanwhile are work "
            f"that is then no longer to be done (references included). Requests made twice, in all rounds: {retried}.",
        ]
    each_run = {letter: [asdict(replace(run, importance=[])) for run in each] for letter, each in runs.items()}
    return Report(
        f"What counterfactual masking costs: {settings.size}, {tokens} tokens, {settings.dtype}, {device}",
        f"perturbation_{device}_{settings.size}_{tokens}",
        [Table("Candidates", columns, rows), ratio_table("Ratios", RATIOS, figures)],
        notes,
        {
            "settings": asdict(replace(settings, out=None)),
            **facts,
            "seconds": figures.to_dict("list"),
            "runs": each_run,
        },
    )
