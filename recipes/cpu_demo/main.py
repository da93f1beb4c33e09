"""`oar demo`: a small model, trained with OAR through verl on this machine, and what came of it."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from oar_plugin.cli.arguments import positive

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from recipes.cpu_demo.report import Accuracy, MethodResult
    from recipes.cpu_demo.task import Problem

NEEDED_GB = 6.5
HELD_OUT = 512
DEFAULT_STEPS = 35


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `oar demo`."""
    parser.add_argument(
        "--compare", action="store_true", help="also train with plain GRPO, from the same model and seed"
    )
    parser.add_argument("--steps", type=positive, default=DEFAULT_STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("oar_demo"),
        help="each start makes a folder of its own in here (default: %(default)s)",
    )
    parser.epilog = "Needs two cores, 6.5 GB of free memory and no GPU. Ctrl-C ends it and every process it started."


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when it went through, 1 when something stopped it (one line says what)."""
    console = Console()
    problem = _obstacle()
    if problem:
        print(f"oar demo: {problem}", file=sys.stderr)
        return 1
    try:
        folder = _new_folder(args.out)
    except OSError as error:
        print(
            f"oar demo: cannot write to {args.out} ({error.strerror}): choose another place with --out", file=sys.stderr
        )
        return 1

    from recipes.cpu_demo.training import TrainingFailed

    try:
        _run(console, folder, args.compare, args.steps, args.seed)
    except TrainingFailed as error:
        print(f"oar demo: {error}", file=sys.stderr)
        return 1
    return 0


def _obstacle() -> str | None:
    """What keeps the demo from running here, and what to do about it."""
    import importlib.util

    missing = [name for name in ("verl", "vllm", "psutil", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed here: start it with `bash recipes/cpu_demo/run.sh`, which installs it"
    free = _free_memory() / 1024**3
    if free < NEEDED_GB:
        return f"needs {NEEDED_GB:g} GB of free memory, there are {free:.1f}: close other programs and start again"
    from oar_plugin.hosts.verl import cpu

    if not cpu.wanted():
        return "this is the demo for machines without a GPU: here use your own verl command with algorithm.adv_estimator=oar"
    return None


def _free_memory() -> int:
    """Bytes that new processes can have: of the machine, or of the container where that allows less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cache = int((group / "memory.stat").read_text().split("inactive_file ")[1].split()[0])
    except (OSError, ValueError, IndexError):  # no such limit ("max"), or no control groups of version 2
        return free
    return min(free, limit - used + cache)


def _new_folder(parent: Path) -> Path:
    """A folder that no other start of the demo uses."""
    folder = parent.resolve() / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    return folder


def _run(console: Console, folder: Path, compare: bool, steps: int, seed: int) -> None:
    started = time.monotonic()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from recipes.cpu_demo import data, report, training, warm_start
    from recipes.cpu_demo.tokenizer import build_tokenizer

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)  # faster than two for matrices of this size, and always the same sums

    console.print(f"[bold]OAR demo[/]: everything goes to [cyan]{folder}[/]", highlight=False, soft_wrap=True)
    tokenizer = build_tokenizer()
    held_out = data.held_out(HELD_OUT)
    train_file, validation_file = data.write_data(folder / "data", seed, steps * training.PROMPTS, held_out)
    example = held_out[0]
    console.print(
        f"The task: [green]{example.prompt}[/]  ->  [green]{example.outline}[/]", highlight=False, soft_wrap=True
    )

    model = _warm_start(console, tokenizer, seed)
    warm_start.save(model, tokenizer, folder / "model")
    before = _measure(console, model, tokenizer, held_out, "before training")

    results: dict[str, MethodResult] = {}
    runs: dict[str, training.Run] = {}
    methods: tuple[training.Method, ...] = ("oar", "grpo") if compare else ("oar",)
    for method in methods:
        run = training.Run(folder / method, method, folder / "model", train_file, validation_file, steps, seed)
        runs[method] = run
        outcome = training.train(run, console)
        trained = AutoModelForCausalLM.from_pretrained(run.trained_model).eval()
        accuracy = _measure(console, trained, tokenizer, held_out, f"after {steps} steps of {method.upper()}")
        results[method] = report.MethodResult(
            accuracy,
            training.read_metrics(run.metrics_file),
            outcome.seconds,
            outcome.start_up_seconds,
            outcome.peak_bytes,
        )

    rows = report.load_rows(runs["oar"].weights_folder)
    report.draw_curve(folder / "curve.png", before, results)
    report.write_tokens_page(folder / "tokens.html", rows)
    _write_results(folder / "results.json", before, results)
    report.print_summary(
        console,
        before,
        results,
        report.weights_by_kind(rows),
        time.monotonic() - started,
        {
            "curve": folder / "curve.png",
            "tokens and weights": folder / "tokens.html",
            "the command, to repeat": runs["oar"].script_file,
            "numbers": folder / "results.json",
            "the trained model": runs["oar"].trained_model,
        },
    )


def _warm_start(console: Console, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from recipes.cpu_demo import warm_start

    started = time.monotonic()
    columns = (
        TextColumn("[bold]Warm start[/] (imitation of a tutor who errs)"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None, loss="-")
        model = warm_start.warm_start(
            tokenizer,
            seed,
            lambda step, total, loss: progress.update(task, completed=step, total=total, loss=f"{loss:.2f}"),
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"Warm start: {parameters / 1e6:.2f} M parameters, {time.monotonic() - started:.0f} s", highlight=False
    )
    return model


def _measure(
    console: Console, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[Problem], when: str
) -> Accuracy:
    from recipes.cpu_demo.report import Accuracy, Share
    from recipes.cpu_demo.task import is_right
    from recipes.cpu_demo.warm_start import respond

    with console.status(f"{len(held_out)} held-out problems, {when}"):
        shares = [
            Share(sum(is_right(text, p.answer) for text, p in zip(texts, held_out, strict=True)), len(held_out))
            for texts in (respond(model, tokenizer, held_out, greedy) for greedy in (False, True))
        ]
    accuracy = Accuracy(*shares)
    console.print(
        f"Right {when}: [bold]{100 * accuracy.sampled.value:.0f} %[/] sampled, "
        f"{100 * accuracy.greedy.value:.0f} % greedy",
        highlight=False,
    )
    return accuracy


def _write_results(path: Path, before: Accuracy, results: dict[str, MethodResult]) -> None:
    def plain(accuracy: Accuracy) -> dict[str, object]:
        return {
            name: {"right": share.right, "of": share.total, "interval_95": share.interval()}
            for name, share in (("sampled", accuracy.sampled), ("greedy", accuracy.greedy))
        }

    methods = {
        name: {
            **plain(result.accuracy),
            "seconds": result.seconds,
            "start_up_seconds": result.start_up_seconds,
            "peak_bytes": result.peak_bytes,
        }
        for name, result in results.items()
    }
    path.write_text(json.dumps({"before": plain(before), "after": methods}, indent=2) + "\n")
