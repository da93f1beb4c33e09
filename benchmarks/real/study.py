"""Pairs of real runs with SmolLM2, which `oar launch` starts: curves, what OAR reaches minus GRPO, seconds and memory."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from benchmarks.language import smollm2
from benchmarks.language.tasks import DESCRIPTION, PROBLEMS, PROMPT_TOKENS, RESPONSE_TOKENS, SOURCE, rows
from benchmarks.machine import Device
from benchmarks.report import COLOURS, Progress, Report, Table, silent, subplots
from benchmarks.statistics import mean_difference
from benchmarks.tiny.verl_run import QUICK, ROOT, quoted, versions
from benchmarks.workload import check_at_least_one
from verl_cpu.session import TIMED_OUT, Session, run_verl, undisturbed

RECIPE, NAME = "qwen2_5_0_5b_gsm8k", "real"
VARIANTS = ("grpo", "oar")
LEARNING_RATE = 1e-5
LAST = 5
"""Steps at a run's end whose mean reward stands for it."""
LONGEST_PAIR_S = 4 * 3600.0
PARTS = {
    "generation": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "advantage": "timing_s/adv",
    "OAR's part of log-probs and advantage": "timing_s/oar",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
    "whole step": "timing_s/step",
}
LARGEST = "largest difference of vLLM's probabilities"
WATCHED = {
    "share of responses that OAR scored": "oar/scored",
    "share that fell back to GRPO": "oar/fallback/any",
    "response tokens": "response_length/mean",
    LARGEST: "training/rollout_probs_diff_max",
}
REWARD, VALIDATION, MEMORY = "reward", "validation", "memory of the actor, GiB"
COLUMNS = {
    REWARD: "critic/score/mean",
    VALIDATION: f"val-core/{SOURCE}/acc/mean@1",
    **PARTS,
    MEMORY: "actor/perf/max_memory_allocated_gb",
    **WATCHED,
}
"""What is read of a step, and its name in verl's metrics."""
ON_GPU = [
    # Packing needs flash-attention, which not every machine has.
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    # Several runs share the GPU; vLLM's own measurement of what is free fails while others take memory.
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=4000000000",
    # A cluster of its own, with cores for all actors, most of which sleep; and few of them, because each imports for long.
    "+ray_kwargs.ray_init={address: local, num_cpus: 32, include_dashboard: false, object_store_memory: 2000000000}",
    "reward.num_workers=1",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    *QUICK,
]
ON_CPU = [
    "+cpu_smoke=dp",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",  # holds the embeddings
    # Attention of packed rows is masked here: its cost is quadratic in the tokens of all of them.
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
]


@dataclass(frozen=True)
class Settings:
    model: str = smollm2.NAME
    """smollm2, or a folder or the hub's name of another model."""
    pairs: int = 4
    """Pairs of runs, OAR's and GRPO's, with the seeds 1, 2, ..."""
    steps: int = 20
    """Steps of a run, one update each."""
    prompts: int = 16
    """Problems a step."""
    n: int = 8
    """Responses to each."""
    test_problems: int = 128
    """Problems for validation, before the first step and four times in a run."""
    parallel: int = 1
    """Pairs at a time, on the one GPU or the CPU."""
    override: tuple[str, ...] = ()
    """Of verl's keys, KEY=VALUE, for all runs."""
    folder: Path = Path("outputs/real")
    """Problems, logs, metrics and dumps; runs that have finished there are not run again."""
    out: Path | None = None
    """Write real_DEVICE.md, .json and .png into this folder (default: only the terminal)."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        check_at_least_one(self)
        if self.n < 2:
            raise ValueError(f"--n {self.n}: must be at least 2, or no response has an advantage over another")
        if self.prompts + self.test_problems > PROBLEMS:
            given = f"--prompts {self.prompts} --test-problems {self.test_problems}"
            raise ValueError(f"{given}: together at most {PROBLEMS}, all problems that there are")
        if self.model == smollm2.NAME and (reason := smollm2.missing()):
            raise ValueError(f"--model {reason}")

    @property
    def device(self) -> Device:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def file(self, split: str) -> Path:
        """Its problems. Another split of them has files of another name, and so is another run to `oar launch`."""
        return self.folder.absolute() / f"{split}{self.test_problems}.parquet"


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Let `oar launch` train pair by pair, and compare the runs.

    Raises:
        ValueError: see `versions`.
        RuntimeError: a run ended early.
    """
    machine = versions(settings.device == "cpu")
    settings.folder.mkdir(parents=True, exist_ok=True)
    for split, problems in rows(settings.test_problems).items():
        pd.DataFrame(problems).to_parquet(settings.file(split))
    started, stopping = list[Session](), threading.Event()

    def on_start(session: Session) -> None:
        started.append(session)
        if stopping.is_set():
            raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):  # end what was started, as Ctrl-C does
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with ThreadPoolExecutor(settings.parallel) as pool:
        try:
            pair = partial(run_pair, settings, progress, on_start)
            frame = pd.concat(pool.map(pair, range(1, settings.pairs + 1)))
        except BaseException:
            with undisturbed():  # by a second signal, which would leave processes behind
                stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for session in started:
                    session.end()
            raise
    return report_of(settings, frame, machine)


def run_pair(settings: Settings, progress: Progress, on_start: Callable[[Session], None], seed: int) -> pd.DataFrame:
    """The steps of a pair, whose runs `oar launch` starts one after the other, unless they have finished."""
    folder = settings.folder.absolute()
    name, log = f"pair {seed} of {settings.pairs}", folder / f"s{seed}.log"
    path = dict.fromkeys([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OAR_CHECKPOINTS": str(folder)}
    environment["OAR_SMOKE"] = str(folder)  # which `+cpu_smoke` asks for
    environment["RAY_worker_register_timeout_seconds"] = "600"  # of 60: pairs start at once
    if settings.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(os.cpu_count())  # one process trains; Ray gives it one thread
    if settings.device == "cuda":
        environment["VERL_USE_EXTERNAL_MODULES"] = "benchmarks.real.sockets"
    words = ["launch", RECIPE, "--variant", "oar,grpo", "--seed", str(seed), "--name", NAME]
    words += overrides(settings)

    def on_line(line: str) -> None:
        if found := re.search(r"\bstep:(\d+) - ", line):
            progress(f"{name}, step", int(found[1]), settings.steps)

    progress(name)
    status = run_verl(words, environment, log, LONGEST_PAIR_S, on_line, on_start, "oar_plugin.cli.main")
    runs = {variant: read_run(folder / "oar" / f"{NAME}-{variant}-s{seed}" / "metrics") for variant in VARIANTS}
    if status != 0 or any(settings.steps not in run.index for run in runs.values()):
        how = "was ended after four hours" if status == TIMED_OUT else f"ended with exit status {status}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{name}: `oar launch` {how}. The end of its log:\n{tail}\nAll of it: {log}")
    return pd.concat(run.assign(variant=variant, seed=seed) for variant, run in runs.items())


def overrides(settings: Settings) -> list[str]:
    """Hydra overrides of all runs; of two for one key the later counts."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        *(ON_CPU if settings.device == "cpu" else ON_GPU),
        f"actor_rollout_ref.model.path={quoted(Path(smollm2.resolved(settings.model)))}",
        f"data.train_files=[{quoted(settings.file('train'))}]",
        f"data.val_files=[{quoted(settings.file('test'))}]",
        f"data.train_batch_size={settings.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={RESPONSE_TOKENS}",
        "data.val_max_samples=-1",
        f"{actor}.optim.lr={LEARNING_RATE}",
        f"{actor}.optim.lr_warmup_steps=-1",
        f"{actor}.ppo_mini_batch_size={settings.prompts}",
        f"{rollout}.n={settings.n}",
        f"{rollout}.max_model_len={PROMPT_TOKENS + RESPONSE_TOKENS}",
        f"{rollout}.max_num_seqs={settings.prompts * settings.n}",
        f"{rollout}.max_num_batched_tokens=4096",
        f"trainer.total_training_steps={settings.steps}",
        "trainer.total_epochs=100",
        "trainer.val_before_train=True",
        f"trainer.test_freq={max(1, settings.steps // 4)}",
        "trainer.save_freq=-1",  # no checkpoints: a run that was cut off starts again
        "trainer.logger=[console,file]",
        "algorithm.oar.dump.dir=dump",
        *settings.override,
    ]


def read_run(metrics: Path) -> pd.DataFrame:
    """`COLUMNS`, a row a step; step 0 is validation alone. Of a step that was logged twice, the last. NaN: not logged."""
    files = sorted(metrics.glob("start*.jsonl"), key=lambda file: file.stat().st_mtime)
    made = [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]
    read = pd.DataFrame([one["data"] for one in made], [one["step"] for one in made])
    read = read.reindex(columns=[*COLUMNS.values()]).set_axis([*COLUMNS], axis=1).astype(float)
    return read.groupby(level=0).last().rename_axis("step")


def report_of(settings: Settings, frame: pd.DataFrame, machine: dict[str, str | None]) -> Report:
    """`frame`: a row a step, with `variant` and `seed`."""
    step, run = frame.index, [frame["seed"], frame["variant"]]
    figures = {
        f"reward, last {LAST} steps": frame[REWARD].where(step > settings.steps - LAST),
        "reward, all steps": frame[REWARD],
        "validation, before": frame[VALIDATION].where(step == 0),
        "validation, after": frame[VALIDATION].where(step == settings.steps),
    }
    outcome, by_pair = [], []
    for name, values in figures.items():
        of = values.groupby(run).mean().unstack()
        estimate, p = mean_difference(of["oar"], of["grpo"])
        interval = f" ({estimate.low:+.3f} to {estimate.high:+.3f})" if p == p else ""  # NaN: too few pairs
        means, ahead = (f"{mean:.3f}" for mean in of.mean()), f"{(of['oar'] > of['grpo']).sum()} of {len(of)}"
        outcome.append([name, *means, f"{estimate.value:+.3f}{interval}", ahead])
        by_pair += [[name, str(seed), f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}"] for seed, a, b in of.itertuples()]
    how = dict.fromkeys(PARTS, "median") | dict.fromkeys(WATCHED, "mean") | dict.fromkeys((MEMORY, LARGEST), "max")
    of_step = frame[step > 1].groupby("variant").agg(how).T.dropna(how="all").fillna(0.0)
    parts = [[name, *(f"{x:.3g}" for x in (a, b)), f"{b - a:+.3g}"] for name, a, b in of_step.itertuples()]
    precision = "float32" if settings.device == "cpu" else "float32 weights, bf16 arithmetic"
    notes = [
        f"`oar launch {RECIPE}` with {settings.model} in place of its model: real verl, Ray and vLLM, {precision}. A pair has "
        "everything but the estimator in common, the seed too.",
        *[smollm2.SOURCE] * (settings.model == smollm2.NAME),
        f"{DESCRIPTION} {settings.prompts} problems a step, {settings.n} responses to each, of at most {RESPONSE_TOKENS} "
        f"tokens; one update a step, learning rate {LEARNING_RATE:g}. Validation: {settings.test_problems} other problems, a "
        f"response each at temperature 0.6. Overrides: {' '.join(settings.override) or 'none'}.",
        f"Differences are OAR minus GRPO, with the interval of the paired t-test over {settings.pairs} pairs. Where it "
        "holds 0, no difference was seen; where not, it was seen for this model on this task, and says nothing about others.",
        "Cost of a step: all but the first; seconds are medians, memory and the difference of probabilities are maxima, others "
        "means. OAR's backward is within log-probs, its gate within advantage. OAR's run comes first in a pair, so what the "
        "machine does in between is in the difference of seconds. Responses to a problem with equal rewards are not scored. "
        f"Pairs at a time: {settings.parallel}.",
    ]
    plain = frame.round(7).astype(object).where(frame.notna(), None)
    runs = [
        {"seed": seed, "variant": variant, **of[[*COLUMNS]].to_dict("list")}
        for (seed, variant), of in plain.groupby(run)
    ]
    return Report(
        title=f"Real runs with {settings.model}: {settings.pairs} pairs of {settings.steps} steps",
        stem=f"real_{settings.device}",
        tables=[
            Table("Reward and accuracy", ("what", "GRPO", "OAR", "difference (95 %)", "OAR ahead"), outcome),
            Table("Cost of a step", ("what", "GRPO", "OAR", "OAR adds"), parts),
            Table("Each pair", ("what", "seed", "GRPO", "OAR", "difference"), by_pair),
        ],
        notes=notes,
        runs={"settings": vars(settings), "runs": runs},
        figure=partial(draw, frame),
        machine=dict(machine),
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Reward by step as lines, validation as marks; a panel a pair."""
    seeds = frame["seed"].unique()
    figure, panels = subplots(1, len(seeds), figsize=(2 + 2.6 * len(seeds), 3.4), sharey=True, squeeze=False)
    for panel, seed in zip(panels.flat, seeds, strict=True):
        for colour, variant in zip(COLOURS, VARIANTS, strict=False):
            of, label = frame[(frame["seed"] == seed) & (frame["variant"] == variant)], variant.upper()
            panel.plot(of[REWARD].dropna(), color=colour, label=f"{label}, reward")
            panel.plot(of[VALIDATION].dropna(), "o", color=colour, label=f"{label}, validation")
        panel.set(title=f"seed {seed}", xlabel="step")
    panels.flat[0].set_ylabel("share of right answers")
    panels.flat[0].legend(frameon=False, fontsize=8)
    return figure
