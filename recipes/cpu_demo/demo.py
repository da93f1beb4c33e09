"""The demo from its warm start to its summary."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.language import smollm2
from benchmarks.tiny.data import write_problems
from benchmarks.tiny.model import build_model
from benchmarks.tiny.warm_start import LEARNED, WarmStart, accuracy, train
from benchmarks.tiny.words import make_tokenizer, text
from oar_plugin.page import sources
from oar_plugin.page.inspector import inspector_page
from recipes.cpu_demo import report, word_problems
from recipes.cpu_demo.report import Accuracy, MethodResult, Share
from recipes.cpu_demo.training import SETUPS, TASK, Method, Run, TrainingFailed, run_training

ONE_SUM = replace(TASK, steps=1)
ON_ONE_SUM = WarmStart(short_steps=300, full_steps=0, learning_rate=2e-3)
ON_RESPONSES = WarmStart(short_steps=0, full_steps=400, learning_rate=2e-3, batch=32)
"""Single sums first: what they are is learned from them in a tenth of the time that whole responses take."""
TRIES = 3
"""Warm starts, at most: some models get stuck before they can copy."""
HELD_OUT = 512
MINUTES = {"tiny": (1.5, 0.1), "smollm2": (1.0, 1.5)}
"""On two cores: before the first step, and of a step. Those of SmolLM2 were measured while other programs ran."""


def run_demo(folder: Path, name: str, methods: Sequence[Method], steps: int, seed: int) -> None:
    """Everything goes to `folder`. Raises TrainingFailed."""
    started = time.monotonic()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)  # faster than two for matrices of this size, and always the same sums
    console = Console(highlight=False, soft_wrap=True)  # paths in one piece, to be copied
    console.print(f"[bold]OAR demo[/]: everything goes to [cyan]{escape(str(folder))}[/]")
    start, step = MINUTES[name]
    console.print(f"{steps} steps: about {len(methods) * (start + steps * step):.0f} minutes on two cores")
    before = (prepare_smollm2 if name == "smollm2" else prepare_tiny)(
        console, folder, steps * SETUPS[name].prompts, seed
    )

    results: dict[str, MethodResult] = {}
    for method in methods:
        run = Run(folder, method, name, steps, seed)
        cost = run_training(run, console)
        after = None
        if before is not None:
            trained = AutoModelForCausalLM.from_pretrained(run.trained_model).eval()
            after = measure(console, trained, f"after {steps} steps of {method.upper()}")
        results[method] = MethodResult(after, **cost)

    run = Run(folder, "oar", name, steps, seed)
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
    numbers: dict[str, object] = {"after": {method: result.plain() for method, result in results.items()}}
    if before is not None:
        numbers["before"] = before.plain()
    files["numbers"].write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    weights = report.weights_by_kind(dumped.items) if name == "tiny" else {}
    report.print_summary(console, before, results, weights, time.monotonic() - started, files)


def prepare_smollm2(console: Console, folder: Path, number: int, seed: int) -> None:
    """The package's model as it is, and `number` word problems."""
    rows = word_problems.rows(number, seed)
    question, right = rows[0]["prompt"][-1]["content"], rows[0]["reward_model"]["ground_truth"]
    console.print(f"The task, behind worked examples: [green]{question}[/]  ->  [green]… #### {right}[/]")
    console.print(
        "The model: SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), dequantised from the four bits of its package"
    )
    (folder / "model").symlink_to(smollm2.folder())
    pd.DataFrame(rows).to_parquet(folder / "problems.parquet")


def prepare_tiny(console: Console, folder: Path, number: int, seed: int) -> Accuracy:
    """A model after its warm start, `number` problems, and how many held-out ones it solves."""
    problems = list(itertools.islice(TASK.problems(seed), number))
    console.print(f"The task: [green]{text(problems[0].prompt)}[/]  ->  [green]… #### {text(problems[0].answer)}[/]")
    model, before = warm_start(console, seed)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    write_problems(folder / "problems.parquet", problems)
    return before


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
