"""Runs of `oar launch` with SmolLM2 on problems that it solves now and then: their curves, seconds and memory, pair by pair."""

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from benchmarks.language import smollm2
from benchmarks.language.tasks import ALL, DESCRIPTION, EXAMPLES, PROMPT_TOKENS, rows
from benchmarks.machine import Device
from benchmarks.report import COLOURS, Progress, Report, Table, silent, subplots
from benchmarks.statistics import mean_difference
from benchmarks.tiny.verl_run import ROOT, quoted
from benchmarks.workload import check_at_least_one
from oar_plugin.hosts.vllm.versions import installed
from verl_cpu import wanted
from verl_cpu.session import TIMED_OUT, Session, run_verl

NAME = "real"
"""Of the runs: real-oar-s1 and so on."""
RECIPE = "qwen2_5_0_5b_gsm8k"
VARIANTS = ("grpo", "oar")
PROBLEMS = len(ALL) - EXAMPLES
LAST = 5
"""Steps at a run's end whose mean reward stands for it."""
LONGEST_RUN_S = 4 * 3600.0
WHOLE = "whole step"
PARTS = {
    "generation": "gen",
    "log-probs": "old_log_prob",
    "of it OAR": "oar",
    "advantage": "adv",
    "update": "update_actor",
    "weights": "update_weights",
    WHOLE: "step",
}
"""verl's timers. OAR's is its backward, within log-probs, and its gate, within advantage."""
WATCHED = {
    "responses that OAR scored": "oar/scored",
    "fallbacks to GRPO": "oar/fallback/any",
    "answers found": "oar/answer_found",
    "reasoning tokens": "oar/reasoning_tokens",
    "response tokens": "response_length/mean",
    "responses cut off": "response_length/clip_ratio",
    "entropy": "actor/entropy",
    "largest difference of vLLM's probabilities": "training/rollout_probs_diff_max",
}
"""verl's and OAR's metrics; OAR's are shares of the responses."""
MEMORY = {"cuda": "actor/perf/max_memory_allocated_gb", "cpu": "actor/perf/cpu_memory_used_gb"}
"""Most that the actor held; or what the whole machine holds, other programs too."""
ON_GPU = [
    # Packing needs flash-attention, which not every machine has.
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",  # a small model; several runs may share the GPU
    "+ray_kwargs.ray_init.address=local",  # a cluster of its own
    # verl polls every 2 s for a finished batch, as long as the rest of a step.
    "trainer.v1.sampler.custom_sampler.path=pkg://verl_cpu.sampler",
    "trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer",
]
ON_CPU = [
    "+cpu_smoke=dp",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",  # holds the embeddings
]


@dataclass(frozen=True)
class Settings:
    model: str = smollm2.NAME
    """smollm2, or a folder or the hub's name of another model."""
    pairs: int = 4
    """Pairs of runs, GRPO's and OAR's, with the seeds 1, 2, ..."""
    steps: int = 20
    """Steps of a run, one update each."""
    prompts: int = 16
    """Problems a step."""
    n: int = 8
    """Responses to each."""
    response_length: int = 64
    """Longest response, in tokens."""
    lr: float = 1e-5
    """Learning rate, without a warm-up."""
    test_problems: int = 128
    """Problems for validation, before the first step and four times in a run."""
    parallel: int = 1
    """Runs at a time on the one GPU."""
    override: tuple[str, ...] = ()
    """Further overrides of verl's keys, KEY=VALUE, for all runs."""
    folder: Path = Path("outputs/real")
    """Problems, checkpoints' folders, logs and dumps; finished runs that are there are not run again."""
    out: Path | None = None
    """Write real_DEVICE.md, .json and .png into this folder (default: only the terminal)."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        check_at_least_one(self)
        if self.n < 2:
            raise ValueError(f"--n {self.n}: must be at least 2, or no response has an advantage over another")
        if self.lr <= 0:
            raise ValueError(f"--lr {self.lr}: must be above 0")
        if (asked := self.prompts + self.test_problems) > PROBLEMS:
            given = f"--prompts {self.prompts} --test-problems {self.test_problems}"
            raise ValueError(f"{given}: are {asked} problems, there are {PROBLEMS}")
        if self.model == smollm2.NAME and (reason := smollm2.missing()):
            raise ValueError(f"--model {reason}")

    @property
    def device(self) -> Device:
        return "cuda" if torch.cuda.is_available() else "cpu"


Run = dict[str, Any]
"""`variant`, `seed`; lists over steps: `reward`, `memory`, `WATCHED`, and `seconds` of each part; `validation`."""


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Run `oar launch` for each seed and variant, and compare the pairs.

    Raises:
        ValueError: a machine that is not one for the CPU stack.
        RuntimeError: a run ended early.
    """
    for name in ("verl", "vllm"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed; `oar doctor` says what is missing for whole runs")
    if settings.device == "cpu" and not wanted():
        raise ValueError("PyTorch is built for GPUs and sees none; VERL_PLATFORM=cpu trains with verl's CPU stack")
    folder = settings.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for split, problems in rows(settings.test_problems).items():
        pd.DataFrame(problems).to_parquet(folder / f"{split}.parquet")
    asked = [(variant, seed) for seed in range(1, settings.pairs + 1) for variant in VARIANTS]
    started: list[Session] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    with ThreadPoolExecutor(settings.parallel) as pool:
        try:
            one = partial(run_once, settings, folder, progress, started.append)
            runs = list(pool.map(one, *zip(*asked, strict=True)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for session in started:
                session.end()
            raise
    report = report_of(settings, runs)
    report.machine = {"verl": importlib.metadata.version("verl"), "vllm": installed()}
    return report


def run_once(
    settings: Settings, folder: Path, progress: Progress, on_start: Callable[[Session], None], variant: str, seed: int
) -> Run:
    """One run, which `oar launch` starts unless it has finished."""
    name = f"{variant}, seed {seed}"
    log, own = folder / f"{variant}-s{seed}.log", folder / "oar" / f"{NAME}-{variant}-s{seed}"
    path = dict.fromkeys([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OAR_CHECKPOINTS": str(folder),
        "OAR_SMOKE": str(folder),  # which `+cpu_smoke` asks for
    }
    if settings.device == "cuda":
        environment |= {"VERL_USE_EXTERNAL_MODULES": "benchmarks.real.sockets"}

    def on_line(line: str) -> None:
        if found := re.search(r"\bstep:(\d+) - ", line):
            progress(name, int(found[1]), settings.steps)

    progress(name, 0, settings.steps)
    words = ["launch", RECIPE, "--variant", variant, "--seed", str(seed), "--name", NAME, *overrides(settings, folder)]
    status = run_verl(words, environment, log, LONGEST_RUN_S, on_line, on_start, "oar_plugin.cli.main")
    metrics = read_metrics(own / "metrics")
    if status != 0 or settings.steps not in metrics:
        how = "was ended after four hours" if status == TIMED_OUT else f"ended with exit status {status}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        done = f"{max(metrics, default=0)} of {settings.steps} steps"
        raise RuntimeError(f"{name}: `oar launch` {how} after {done}. The end of its log:\n{tail}\nAll of it: {log}")
    return run_of(metrics, variant, seed, settings.device)


def overrides(settings: Settings, folder: Path) -> list[str]:
    """Hydra overrides of all runs; of two for one key the later counts."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    length = PROMPT_TOKENS + settings.response_length
    return [
        *(ON_CPU if settings.device == "cpu" else ON_GPU),
        f"actor_rollout_ref.model.path={quoted(Path(smollm2.resolved(settings.model)))}",
        f"data.train_files=[{quoted(folder / 'train.parquet')}]",
        f"data.val_files=[{quoted(folder / 'test.parquet')}]",
        f"data.train_batch_size={settings.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={settings.response_length}",
        "data.val_max_samples=-1",
        f"{actor}.optim.lr={settings.lr}",
        f"{actor}.optim.lr_warmup_steps=-1",
        f"{actor}.ppo_mini_batch_size={settings.prompts}",
        f"{actor}.ppo_max_token_len_per_gpu={max(8192, length)}",
        f"{rollout}.n={settings.n}",
        f"{rollout}.max_model_len={length}",
        f"{rollout}.max_num_batched_tokens={max(4096, length)}",
        f"trainer.total_training_steps={settings.steps}",
        "trainer.total_epochs=100",
        f"trainer.test_freq={max(1, settings.steps // 4)}",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        *settings.override,
    ]


def read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """What verl's `file` logger wrote, by step; a step that was made again after an interruption counts once, as made last."""
    found = defaultdict[int, dict[str, Any]](dict)
    for file in sorted(folder.glob("start*.jsonl"), key=lambda file: file.stat().st_mtime):
        for line in file.read_text().split("\n")[:-1]:
            record = json.loads(line)
            found[record["step"]] |= record["data"]
    return found


def run_of(metrics: Mapping[int, Mapping[str, Any]], variant: str, seed: int, device: str) -> Run:
    """The run's row of the JSON, from verl's metrics by step."""
    steps = [metrics[step] for step in sorted(metrics) if "critic/score/mean" in metrics[step]]
    timers = {part: [step.get(f"timing_s/{timer}", 0.0) for step in steps] for part, timer in PARTS.items()}
    # verl's step holds the validation that follows it.
    timers[WHOLE] = [
        whole - step.get("timing_s/testing", 0.0) for whole, step in zip(timers[WHOLE], steps, strict=True)
    ]
    named = {"reward": "critic/score/mean", "memory": MEMORY[device], **WATCHED}
    return {
        "variant": variant,
        "seed": seed,
        **{name: [step.get(key) for step in steps] for name, key in named.items()},
        "seconds": timers,
        "validation": {
            step: value
            for step in sorted(metrics)
            for key, value in metrics[step].items()
            if key.startswith("val-core/") and "/acc/mean@" in key
        },
    }


def report_of(settings: Settings, runs: Sequence[Run]) -> Report:
    pairs = [{run["variant"]: run for run in runs if run["seed"] == seed} for seed in range(1, settings.pairs + 1)]
    figures = {
        f"reward, last {LAST} steps": lambda run: float(np.mean(run["reward"][-LAST:])),
        "reward, all steps": lambda run: float(np.mean(run["reward"])),
        "validation at the end": lambda run: list(run["validation"].values())[-1],
    }
    outcome, by_pair = [], []
    for name, figure in figures.items():
        grpo, oar = ([figure(pair[variant]) for pair in pairs] for variant in VARIANTS)
        difference, p = mean_difference(oar, grpo)
        ahead = sum(ours > theirs for ours, theirs in zip(oar, grpo, strict=True))
        shown = f"{difference.value:+.3f}" + (
            "" if np.isnan(p) else f" ({difference.low:+.3f} to {difference.high:+.3f})"
        )
        outcome.append([name, f"{np.mean(grpo):.3f}", f"{np.mean(oar):.3f}", shown, f"{ahead} of {len(pairs)}"])
        by_pair += [
            [name, str(seed), f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}"] for seed, a, b in zip(count(1), grpo, oar)
        ]
    grpo, oar = ([run for run in runs if run["variant"] == variant] for variant in VARIANTS)
    parts = []
    for part in PARTS:
        # The first step imports and allocates.
        ours, theirs = (np.median([s for run in of for s in run["seconds"][part][1:]]) for of in (oar, grpo))
        parts.append([part, f"{theirs:.3f}", f"{ours:.3f}", f"{ours - theirs:+.3f}"])
    ours, theirs = (max(max(run["memory"]) for run in of) for of in (oar, grpo))
    parts.append(["memory, GiB, largest", f"{theirs:.2f}", f"{ours:.2f}", f"{ours - theirs:+.2f}"])
    watched = [[name, *(shown_mean(of, name) for of in (grpo, oar))] for name in WATCHED]
    cpu = settings.device == "cpu"
    notes = [
        f"`oar launch {RECIPE}` with {settings.model} in place of its model: real verl, Ray and vLLM, "
        f"{'float32' if cpu else 'float32 weights, bf16 arithmetic'}. smollm2 is SmolLM2-135M-Instruct (Apache-2.0), its "
        "weights dequantised from four bits. Pairs have everything in common but the estimator, the seed too.",
        f"{DESCRIPTION} {settings.prompts} problems a step, {settings.n} responses to each of at most "
        f"{settings.response_length} tokens; one update a step, learning rate {settings.lr:g}; {settings.test_problems} other "
        "problems for validation, one response each at temperature 0.6.",
        f"Differences are OAR less GRPO with the interval of the paired t-test over {settings.pairs} pairs. An interval that "
        "holds 0 shows no difference, and no interval over so few pairs, of one model and task, shows a gain in general.",
        "Seconds are medians over steps but each run's first, without validation. OAR's backward is within log-probs, its gate "
        f"within advantage. {settings.parallel} run(s) at a time"
        + (": seconds of runs side by side are not those of a run alone." if settings.parallel > 1 else "."),
        "Memory is what the whole machine holds."
        if cpu
        else "Memory is the most that the actor's process has allocated.",
    ]
    return Report(
        title=f"Real runs: {settings.pairs} pairs of {settings.steps} steps with {settings.model}",
        stem=f"real_{settings.device}",
        tables=[
            Table("OAR less GRPO", ("what", "GRPO", "OAR", "difference (95 %)", "OAR ahead"), outcome),
            Table("Seconds of a step", ("part", "GRPO", "OAR", "OAR adds"), parts),
            Table("Means over all steps", ("what", "GRPO", "OAR"), watched),
            Table("Each pair", ("what", "seed", "GRPO", "OAR", "difference"), by_pair),
        ],
        notes=notes,
        runs={"settings": vars(settings), "runs": list(runs)},
        figure=partial(draw, pairs),
    )


def shown_mean(runs: Sequence[Run], name: str) -> str:
    values = [value for run in runs for value in run[name] if value is not None]
    return f"{np.mean(values):.3g}" if values else ""


def draw(pairs: Sequence[Mapping[str, Run]]) -> Figure:
    """Reward by step as lines, validation as marks; a panel a pair."""
    figure, panels = subplots(1, len(pairs), figsize=(2.4 + 2.6 * len(pairs), 3.4), sharey=True, squeeze=False)
    for panel, (seed, pair) in zip(panels.flat, enumerate(pairs, start=1), strict=True):
        for colour, (variant, run) in zip(COLOURS, pair.items(), strict=False):
            panel.plot(
                range(1, len(run["reward"]) + 1), run["reward"], color=colour, label=f"{variant.upper()}, reward"
            )
            steps, values = zip(*run["validation"].items(), strict=True)
            panel.plot(steps, values, "o", color=colour, label=f"{variant.upper()}, validation")
        panel.set(title=f"seed {seed}", xlabel="step")
    panels.flat[0].set_ylabel("share of right answers")
    panels.flat[0].legend(frameon=False, fontsize=8)
    return figure
