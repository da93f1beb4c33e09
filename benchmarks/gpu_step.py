"""Seconds, peak memory and counted FLOPs of the pieces of a training step, on one GPU, in minutes and without Ray.

`bash benchmarks/gpu_step.sh` runs both parts. FOLDER gets a line for each piece, and after each the page of all that is there.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.count.meter import Meter
from benchmarks.language.log_probs import log_probs
from benchmarks.machine import choose_device, describe_machine, load_average, timed
from benchmarks.report import Report, Table
from benchmarks.scaling.layouts import Layout, Work
from benchmarks.tiny.model import SHAPES
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.output import cause
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.prefix import WORKS
from oar_plugin.passes.request import Request

LOG_PROBS, UPDATE, WHOLE, CACHED = "log-probs", "update", "16 copies, whole", "16 copies, cached prefix"
SCORED = {"fisher": ("fisher", 1.0), "fisher, 1 in 8": ("fisher", 1 / 8), "oar_g": ("oar_g", 1.0)}
"""Piece -> importance, and the share of the responses that get scores."""
PIECES = LOG_PROBS, UPDATE, "fisher", "fisher, 1 in 8", WHOLE, CACHED, "oar_g"
ROWS, UNITS, SPAN = 2, 8, 8  # of masked copies: rows that have some, units of a row, tokens of a unit
FLASH = torch.cuda.is_available() and find_spec("flash_attn") is not None
ATTENTION = {"plain": "sdpa", "engine": "flash_attention_2" if FLASH else "sdpa"}
REPEATS, LONGEST_S = 5, 20.0  # a piece is timed so often, or until it has taken so long
Works: TypeAlias = dict[str, Callable[[], object]]  # by piece
Pieces: TypeAlias = dict[tuple[str, str, int, str], dict[str, Any]]  # part, model, response length, piece -> its line


def case(size: str, response: int, checkpointing: bool = True) -> Work:
    prompt, rows = min(512, response // 2), 8 if response < 2048 else 2
    return Work(size, None, 16, prompt, response, 16, rows, checkpointing, dtype="bfloat16")


FIRST, SECOND = [case(size, 1024, False) for size in ("0.5b", "1.5b")], [case(size, 4096) for size in ("1.5b", "0.5b")]
CASES = {"plain": [*FIRST, case("7b", 4096), *SECOND, case("7b", 1024)], "engine": [*FIRST, *SECOND]}
"""The most valuable first."""
TINY = [case("tiny", 96, False), case("tiny", 112)]


def segments_of(work: Work) -> Tensor:
    """`Segment` of each token of a row, int64 `[L]`. Random weights write no answers: the last tokens are taken for them."""
    lengths = torch.tensor([work.prompt_length, work.response_length - work.answer_length, work.answer_length])
    return torch.tensor([Segment.OUTSIDE, Segment.REASONING, Segment.ANSWER]).repeat_interleave(lengths)


def score_units(model: nn.Module, work: Work, token_BL: Tensor, cached: bool) -> None:
    """Run masked copies of some units, spread over each of some rows, and these rows without a mask."""
    request = Request.of_step(OarConfig(importance="oar_p", perturbation={"span": SPAN}), 1, replacement_token=0)
    segments_L, WORKS[model] = segments_of(work), cached
    units_US = (segments_L == Segment.REASONING).nonzero()[:, 0].split(SPAN)
    labelled_L = torch.cat(units_US[:: len(units_US) // UNITS][:UNITS])
    chosen_L = torch.zeros_like(segments_L).index_fill(0, labelled_L, int(Segment.REASONING))
    segments_BL = chosen_L.where(segments_L == Segment.REASONING, segments_L).repeat(ROWS, 1)
    keep_BL, max_tokens = torch.ones_like(segments_BL).bool(), work.micro_batch * token_BL.shape[1]
    batch_importance(model, request, token_BL[:ROWS], segments_BL, keep_BL, max_tokens)


def plain(work: Work, device: torch.device) -> Works:
    """The package's passes on a new HuggingFace model; they need nothing that the package does not need."""
    model, prompt, shape = work.make_model(device), work.prompt_length, (work.responses, len(segments_of(work)))
    if work.checkpointing:  # in training mode; importance is told itself
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    token_BL = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    rows, max_tokens = [(row[:prompt], row[prompt:]) for row in token_BL], work.micro_batch * shape[1]

    def score(importance: str, share: float) -> None:
        request, keep_BL = Request.of_step(OarConfig(importance=importance), 1), torch.ones(shape, dtype=torch.bool)
        segments_BL = segments_of(work).repeat(work.responses, 1)
        segments_BL[round(share * work.responses) :] = Segment.OUTSIDE
        if not batch_importance(model, request, token_BL, segments_BL, keep_BL, max_tokens, work.checkpointing).any():
            raise RuntimeError("nothing was scored")

    def update() -> None:
        model.train()
        try:
            for part_BL in token_BL.to(device).split(work.micro_batch):
                logits_NV = model(input_ids=part_BL, use_cache=False).logits[:, prompt - 1 : -1].flatten(0, 1)
                nn.functional.cross_entropy(logits_NV.float(), part_BL[:, prompt:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:  # also where memory ran out
            optimizer.zero_grad()
            model.eval()

    pieces = {name: partial(score, *asked) for name, asked in SCORED.items()}
    pieces |= {name: partial(score_units, model, work, token_BL, name == CACHED) for name in (WHOLE, CACHED)}
    return {LOG_PROBS: partial(log_probs, model, rows, 1.0, max_tokens), UPDATE: update, **pieces}


def engine(work: Work, device: torch.device) -> Works:
    """A new FSDP engine of verl with the plugin in it, on this process alone. Importance comes out of a log-prob pass."""
    from transformers import AutoTokenizer
    from verl.utils.distributed import initialize_global_process_group_ray

    from benchmarks.scaling.worker import Actor, build_engine, model_folder

    initialize_global_process_group_ray()
    with model_folder(work, device) as folder:
        verls = build_engine(Layout("fsdp"), work, folder, device, ATTENTION["engine"])
        token_BL = work.token_BL(AutoTokenizer.from_pretrained(folder))
    actor = Actor(verls, Layout("fsdp"), work, token_BL)
    known = actor.log_prob(actor.data())

    def score(importance: str, share: float) -> None:
        scoring = Actor(verls, Layout("fsdp"), replace(work, importance=importance, scored_share=share), token_BL)
        scoring.check(scoring.log_prob(scoring.data(importance=True)))

    def copies(cached: bool) -> None:
        with verls.eval_mode(), torch.autocast(device.type, torch.bfloat16):
            score_units(verls.module, work, token_BL.to(device), cached)

    def update() -> None:
        actor.update(actor.training_data(known, actor.advantage_BL))

    pieces = {name: partial(score, *asked) for name, asked in SCORED.items()}
    pieces |= {name: partial(copies, name == CACHED) for name in (WHOLE, CACHED)}
    return {LOG_PROBS: lambda: actor.log_prob(actor.data()), UPDATE: update, **pieces}


def count(piece: Callable[[], object]) -> float:
    with Meter() as meter:
        meter.begin("piece")
        piece()
    return meter.numbers["flops"]["piece"]


def measure(
    piece: Callable[[], object], device: torch.device, until: float, counted: bool, repeats: int
) -> dict[str, Any]:
    """Run it once to warm up, and to count FLOPs; then time it. Bytes are those of CUDA's allocator."""
    found: dict[str, Any] = {}
    if counted:
        try:
            found["flops"] = count(piece)
        except Exception as error:  # seconds are worth more, and the piece's own fault comes again
            found["uncounted"] = cause(error)
    if "flops" not in found:
        piece()
    if cuda := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        found["bytes_before"] = torch.cuda.memory_allocated(device)
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < LONGEST_S and time.time() < until):
        times.append(timed(piece, device))
    if cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found | {"s": statistics.median(times), "seconds": times}


def names(work: Work) -> list[str]:
    return [name for name in PIECES if name != UPDATE or work.size != "7b"]


def read(file: Path, on: str) -> Pieces:
    """The newest line of each piece that was measured on this device. One that was cut off counts as none."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    every = [json.loads(line) for line in lines if line.endswith("}")]
    return {(one["part"], one["model"], one["response"], one["piece"]): one for one in every if one["on"] == on}


def flops_of(part: str, work: Work, pieces: Pieces) -> dict[str, float]:
    """FLOPs by piece, as the plain part counted them: those of flash-attention's own kernels cannot be counted."""
    here = {name: pieces.get(("plain", work.size, work.response_length, name), {}) for name in names(work)}
    flops: dict[str, float] = {name: one["flops"] for name, one in here.items() if "flops" in one}
    if part == "engine" and LOG_PROBS in flops:
        # Out of a log-prob pass: the layers of scored rows run once less than in a pass of their own.
        shape, tokens = SHAPES[work.size], work.responses * len(segments_of(work))
        layers = flops[LOG_PROBS] - 2 * tokens * shape.hidden * shape.vocab
        for name in SCORED.keys() & flops.keys():
            flops[name] += flops[LOG_PROBS] - SCORED[name][1] * layers
    return flops


def added(name: str, numbers: dict[str, float], part: str) -> float:
    """What a piece adds to log-probs and update, in units of both."""
    if name in (LOG_PROBS, UPDATE) or not {name, LOG_PROBS, UPDATE} <= numbers.keys():
        return math.nan
    inside = numbers[LOG_PROBS] if part == "engine" and name in SCORED else 0.0
    return (numbers[name] - inside) / (numbers[LOG_PROBS] + numbers[UPDATE])


def report(planned: dict[str, list[Work]], pieces: Pieces) -> Report:
    rows: dict[str, list[list[str]]] = {part: [] for part in planned}
    for part, work in ((part, work) for part, cases in planned.items() for work in cases):
        here = {name: pieces.get((part, work.size, work.response_length, name), {}) for name in names(work)}
        seconds, flops = {name: one["s"] for name, one in here.items() if "s" in one}, flops_of(part, work, pieces)
        for name, one in here.items():
            cells = [one.get("error", "no time was left, or cut off"), *[""] * (len(COLUMNS) - 4)]
            if name in seconds:
                tera, shares = flops.get(name, math.nan) / 1e12, [added(name, of, part) for of in (seconds, flops)]
                sizes = [one.get(key, math.nan) / 2**30 for key in ("peak_bytes", "bytes_before")]
                numbers = one["s"], len(one["seconds"]), tera, tera / one["s"], *shares, *sizes
                cells = [f"{number:,.4g}".replace("nan", "") for number in numbers]
            rows[part].append([work.size, f"{work.response_length:,}", name, *cells])
    tables = [Table(f"{TITLES[part]}, {ATTENTION[part]}", COLUMNS, of) for part, of in rows.items()]
    notes = NOTES if "engine" in planned else [*NOTES, "verl is not installed: its engine was not measured."]
    return Report("Seconds and memory of pieces of a step", "gpu_step", tables, notes, {"pieces": [*pieces.values()]})


TITLES = {"plain": "The package's passes on HuggingFace models", "engine": "verl's FSDP engine, one process"}
COLUMNS = ["model", "response", "piece", "s", "runs", "TFLOP", "TFLOP/s", "added s / log-probs and update"]
COLUMNS += ["added FLOPs / theirs", "peak GiB", "GiB before"]
NOTES = [
    "16 responses behind prompts of 512 tokens, the last 16 tokens the answer, in micro-batches of 8 rows (1,024 tokens) or 2 "
    "(4,096). Weights are random, in the shapes of Qwen2.5; 7b has no update. Responses of 4,096 tokens, and all of 7b, "
    "compute activations again in a backward, layer by layer. Tiny shapes are a rehearsal: their figures say nothing.",
    f"s: median of {REPEATS} runs after one to warm up, fewer where they are long. GiB: the most that CUDA's allocator held, "
    "and what was there before: weights and the optimizer's state.",
    "Plain: weights and AdamW's moments in bf16, log-probs without entropy; an importance has a pass of its own. Engine: "
    "float32 weights and moments, bf16 arithmetic, verl's own log-probs, entropy and PPO loss; an importance comes out of a "
    "log-prob pass: s, TFLOP and GiB have log-probs in them, what is added has not.",
    "FLOPs: matrix products and attention (half, for it is causal), counted as operations run; the engine's follow from those.",
    f"Copies: {UNITS} units of {SPAN} tokens masked in each of {ROWS} responses, and the forwards of these without a mask.",
]


def main() -> int:
    """Returns 1 where a piece failed. One for which no time was left has not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_step", description=__doc__)
    parser.add_argument("part", choices=CASES)
    parser.add_argument("folder", type=Path, help="what its pieces.jsonl has of this device is not measured again")
    parser.add_argument("--until", type=float, default=math.inf, help="no piece begins later, in seconds of the epoch")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny shapes")
    told, device = parser.parse_args(), choose_device("auto")
    machine, file, failed = describe_machine(device), told.folder / "pieces.jsonl", False
    common = {"on": machine["accelerator"] or machine["cpu"], "attention": ATTENTION[told.part]}
    parts = [part for part in CASES if part == "plain" or find_spec("verl")]
    planned = {part: TINY if told.tiny else CASES[part] for part in parts}
    told.folder.mkdir(parents=True, exist_ok=True)
    for work in planned[told.part]:
        works, fault = Works(), ""
        for name in names(work):
            key = told.part, work.size, work.response_length, name
            if time.time() >= told.until or "s" in read(file, common["on"]).get(key, {}):
                continue
            gc.collect()  # a model, and what a failed piece had
            torch.cuda.empty_cache()
            found: dict[str, Any] = {"error": fault}
            if not fault:
                try:
                    works = works or {"plain": plain, "engine": engine}[told.part](work, device)
                    found = measure(works[name], device, told.until, told.part == "plain", 2 if told.tiny else REPEATS)
                except Exception as error:
                    traceback.print_exc()
                    found = {"error": cause(error)}
                    fault = "" if works else found["error"]  # without a model nothing else can be measured
            failed |= "error" in found
            line = json.dumps(dict(zip(("part", "model", "response", "piece"), key, strict=True)) | common | found)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(f"\n{line}")  # the line before may have been cut off
            page = report(planned, read(file, common["on"]))
            page.command = f"bash benchmarks/gpu_step.sh {told.folder}{' --tiny' * told.tiny}"
            page.machine = machine | {"load_average_after": load_average()}
            page.write(told.folder)
            print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the engine's backends may not end
