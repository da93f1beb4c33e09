"""The demo from its warm start to its summary."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.tiny.data import write_problems
from benchmarks.tiny.model import build_model
from benchmarks.tiny.warm_start import LEARNED, WarmStart, accuracy, train
from benchmarks.tiny.words import make_tokenizer, text
from oar_plugin.page import sources
from oar_plugin.page.inspector import inspector_page
from recipes.cpu_demo import report
from recipes.cpu_demo.report import Accuracy, MethodResult, Share
from recipes.cpu_demo.training import PROMPTS, TASK, Method, Run, TrainingFailed, run_training

ONE_SUM = replace(TASK, steps=1)
ON_ONE_SUM = WarmStart(short_steps=300, full_steps=0, learning_rate=2e-3)
ON_RESPONSES = WarmStart(short_steps=0, full_steps=400, learning_rate=2e-3, batch=32)
"""Single sums first: what they are is learned from them in a tenth of the time that whole responses take."""
TRIES = 3
"""Warm starts, at most: some models get stuck before they can copy."""
HELD_OUT = 512


def run_demo(folder: Path, methods: Sequence[Method], steps: int, seed: int) -> None:
    """Everything goes to `folder`. Raises TrainingFailed."""
    started = time.monotonic()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)  # faster than two for matrices of this size, and always the same sums
    console = Console(highlight=False, soft_wrap=True)  # paths in one piece, to be copied
    console.print(f"[bold]OAR demo[/]: everything goes to [cyan]{escape(str(folder))}[/]")
    problems = list(itertools.islice(TASK.problems(seed), steps * PROMPTS))
    console.print(f"The task: [green]{text(problems[0].prompt)}[/]  ->  [green]… #### {text(problems[0].answer)}[/]")
    model, before = warm_start(console, seed)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    write_problems(folder / "problems.parquet", problems)

    results: dict[str, MethodResult] = {}
    for method in methods:
        run = Run(folder, method, steps, seed)
        cost = run_training(run, console)
        trained = AutoModelForCausalLM.from_pretrained(run.trained_model).eval()
        results[method] = MethodResult(measure(console, trained, f"after {steps} steps of {method.upper()}"), **cost)

    run = Run(folder, "oar", steps, seed)
    dumped = sources.read([run.weights_folder])
    files = {
        "curves": folder / "curves.png",
        "tokens and weights": folder / "tokens.html",
        "the command, to repeat": run.script_file,
        "numbers": folder / "results.json",
        "the trained model": run.trained_model,
    }
    report.draw_curves({method: result.metrics for method, result in results.items()}, files["curves"])
    page = inspector_page(dumped.items, dumped.header, "demo of OAR")
    files["tokens and weights"].write_text(page, encoding="utf-8")
    numbers = {"before": before.plain(), "after": {method: result.plain() for method, result in results.items()}}
    files["numbers"].write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    report.print_summary(
        console, before, results, report.weights_by_kind(dumped.items), time.monotonic() - started, files
    )


def warm_start(console: Console, seed: int) -> tuple[PreTrainedModel, Accuracy]:
    """A model that half knows the task: it imitates demonstrations in which a fifth of the results are wrong."""
    columns = TextColumn("[bold]Warm start[/] (imitation, with errors)"), BarColumn(), TimeElapsedColumn()
    hidden = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task("", total=ON_ONE_SUM.short_steps + ON_RESPONSES.full_steps)
        for attempt in range(TRIES):
            started = time.monotonic()
            progress.reset(bar)
            model = build_model(seed + 1000 * attempt, hidden=128, layers=2, heads=4)
            for task, settings in ((ONE_SUM, ON_ONE_SUM), (TASK, ON_RESPONSES)):
                train(model, task, seed, settings, lambda *_: progress.advance(bar))
            millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            console.print(f"Warm start: {millions:.2f} M parameters, {time.monotonic() - started:.0f} s")
            before = measure(console, model, "before training")
            if before.greedy.value >= LEARNED:
                return model, before
    raise TrainingFailed(f"{TRIES} warm starts did not learn the task: try another --seed")


def measure(console: Console, model: PreTrainedModel, when: str) -> Accuracy:
    sampled, greedy = (accuracy(model, TASK, HELD_OUT, greedy) for greedy in (False, True))
    console.print(f"Right {when}: [bold]{100 * sampled:.0f} %[/] sampled, {100 * greedy:.0f} % greedy")
    return Accuracy(Share(round(sampled * HELD_OUT), HELD_OUT), Share(round(greedy * HELD_OUT), HELD_OUT))
