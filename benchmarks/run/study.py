"""Whole runs of verl, on one GPU or a CPU, whose steps are GRPO's and OAR's in turn, and what each phase of them takes."""

import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.machine import Device
from benchmarks.report import Progress, Report, Table, silent
from benchmarks.run.assets import FINDER, METHOD, REWARD, prompt_rows
from benchmarks.statistics import Ratio, ratio_table
from benchmarks.tiny.model import SHAPES, model_of
from benchmarks.tiny.verl_run import QUICK, quoted, read_metrics, training_environment, training_overrides, versions
from benchmarks.tiny.words import make_tokenizer
from benchmarks.workload import DEFAULT, check_at_least_one, check_importance, check_size, model_line
from verl_cpu import cpu_environment, cpu_overrides
from verl_cpu.session import TIMED_OUT, run_verl

SIZES = ("1m", "10m", "50m", "0.1b", "0.5b", "1.5b")
"""vLLM serves no smaller heads on a CPU, where the larger ones take hours; 80 GB hold no larger one with its optimizer."""
LIMIT = 1.10
"""Target: a whole OAR step over a whole GRPO step, with the default importance and half of the rows without an advantage."""
WARM_UP = 2
"""Steps at the beginning of a run that do not count: one of each method. The first one of each imports and allocates."""
LONGEST_RUN_S = 3600.0
PHASES = {
    "generation": "gen",
    "log-probs": "old_log_prob",
    "advantage": "adv",
    "update": "update_actor",
    "weight sync": "update_weights",
}
"""verl's timers of what a step consists of; the second holds OAR's forward and backward, the third its gate."""
REST, WHOLE, IMPORTANCE = "rest", "whole step", "of it importance"
SHOWN = [*PHASES, REST, WHOLE, IMPORTANCE]
LENGTHS = ("response_length/mean", "response_length/min", "response_length/max")
SAME_WORK = ("prompt_length/mean", *LENGTHS, "critic/score/mean")
"""verl's metrics that must be equal in all steps."""
CONTROL = "control, GRPO alone"
GPU_OVERRIDES = [
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "+ray_kwargs.ray_init.address=local",  # not a cluster that runs already
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "reward.num_workers=1",  # which counts its calls, see assets.py
    *QUICK,
]
"""Beside verl's defaults: bf16 arithmetic, flash-attention, CUDA graphs."""


@dataclass(frozen=True)
class Settings:
    size: str = "10m"
    """Parameters of the model, about: 1m, 10m, 50m, 0.1b, 0.5b, 1.5b."""
    prompts: int = 4
    """Prompts a step."""
    n: int = 4
    """Responses to a prompt."""
    prompt_length: int = 32
    """Tokens of each prompt."""
    response_length: int = 128
    """Tokens of each response."""
    scored_share: float = 0.5
    """Share of the prompts whose responses have unequal rewards, and so an advantage."""
    micro_batch: int = 8
    """Sequences at a time, in the log-prob pass and in the update."""
    importance: str = DEFAULT
    """Of OAR's steps: any, or python:MODULE:CLASS; masked copies run in the actor."""
    steps: int = 6
    """Counted steps of each method in a run, after a warm-up of one each."""
    rounds: int = 2
    """Runs of verl."""
    control: bool = False
    """Then run GRPO alone, with verl's own trainer, to compare."""
    out: Path | None = None
    """Write run_DEVICE.md and .json into this folder (default: only the terminal)."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        check_at_least_one(self)
        check_importance(self.importance, copies=True)
        check_size(self.size, SIZES)
        for name, least, why in (
            ("n", 2, "or no response has an advantage over another"),
            ("prompt_length", 8, "the digits of the prompt's number"),
            ("response_length", 32, "eight of them are the answer"),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least}, {why}")
        whole = f"make a whole number of the {self.prompts} prompts (--prompts)"
        if not 0 < self.scored_share <= 1 or self.scored_share * self.prompts % 1:
            raise ValueError(f"--scored-share {self.scored_share}: must be in (0, 1] and {whole}")
        if self.responses % self.micro_batch:
            raise ValueError(f"--micro-batch {self.micro_batch}: must divide the {self.responses} responses of a step")

    @property
    def device(self) -> Device:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.prompts * self.n

    def steps_of(self, name: str) -> int:
        """Of the run of verl with that name, with the warm-up."""
        return WARM_UP + (self.steps if name == CONTROL else 2 * self.steps)


Step = dict[str, Any]
"""A counted step: the name of its `run`, `step` from 1, whether it is `oar`'s, its seconds by phase and as a whole, what was
`scored` (None in GRPO's), and the `work` that all must share."""


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Run verl round by round, check that all steps did the same work, and compare them.

    Raises:
        ValueError: see `versions`.
        RuntimeError: verl ended early, or GRPO's and OAR's steps did not do the same work, so that no ratio may be told.
    """
    machine = versions(settings.device == "cpu")
    steps: list[Step] = []
    control: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="oar-run-") as temporary:
        folder = Path(temporary)
        parameters = write_assets(folder, settings)
        for run in range(settings.rounds):
            steps += run_once(settings, folder, f"run {run + 1} of {settings.rounds}", progress)
            check_comparable(settings, steps, [])  # before the next run, which would be for nothing
        if settings.control:
            control = run_once(settings, folder, CONTROL, progress)
            check_comparable(settings, steps, control)
    report = report_of(settings, steps, control, parameters)
    threads = int(cpu_environment()["OMP_NUM_THREADS"])  # in verl's processes, not in this one
    report.machine = {**machine, "torch_threads": threads}
    return report


def write_assets(folder: Path, settings: Settings) -> int:
    """Write `model/` and `prompts.parquet` below `folder`; returns the number of parameters, tied embeddings once."""
    with_signal = round(settings.scored_share * settings.prompts)
    rows = prompt_rows(settings.steps_of("run"), settings.prompts, with_signal, settings.prompt_length)
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    shape, context = SHAPES[settings.size], settings.prompt_length + settings.response_length + 1
    tokenizer = make_tokenizer(shape.vocab)
    model = model_of(shape, context, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    # A response as long as allowed counts as cut off, and is not scored, unless its last token can end one.
    model.generation_config.eos_token_id = list(range(shape.vocab))
    for saved in (tokenizer, model):
        saved.save_pretrained(folder / "model")
    return sum(parameter.numel() for parameter in model.parameters())


def run_once(settings: Settings, folder: Path, name: str, progress: Progress) -> list[Step]:
    """One run of verl: its steps without the warm-up."""
    own, total = folder / name.replace(" ", "_"), settings.steps_of(name)
    own.mkdir()
    log, metrics = own / "verl.log", own / "metrics.jsonl"
    environment = training_environment(metrics)
    if name != CONTROL:
        environment["VERL_USE_EXTERNAL_MODULES"] = "benchmarks.run.trainer"

    def on_line(line: str) -> None:
        if found := re.search(r"\bstep:(\d+) - ", line):
            progress(name, int(found[1]), total)

    progress(name, 0, total)
    status = run_verl(overrides(settings, folder, own, total, name), environment, log, LONGEST_RUN_S, on_line=on_line)
    lines = read_metrics(metrics)
    if status != 0 or len(lines) < total:
        how = "was ended after an hour" if status == TIMED_OUT else f"ended with exit status {status}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        kept = shutil.move(log, Path(tempfile.mkdtemp(prefix="oar-run-")))
        done = f"{len(lines)} of {total} steps"
        raise RuntimeError(f"{name}: verl {how} after {done}. The end of its log:\n{tail}\nAll of it: {kept}")
    return [parse_step(line, name) for line in lines[WARM_UP:]]


def overrides(settings: Settings, folder: Path, own: Path, steps: int, name: str) -> list[str]:
    """Hydra overrides of one run, whose folder is `own`; of two for one key the later counts."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    method = ["algorithm.adv_estimator=oar", f"algorithm.oar.importance={settings.importance}"]
    method.append(f"algorithm.oar.answer_patterns=['{FINDER}']")
    batch = (settings.prompts, settings.n)
    longest = (settings.prompt_length, settings.response_length)
    paths = folder / "model", folder / "prompts.parquet", own / "checkpoints"
    return [
        *(cpu_overrides() if settings.device == "cpu" else GPU_OVERRIDES),
        # Without a learning rate the update does all its work, and the model stays the same for both methods.
        *training_overrides(*paths, steps, 0, 0.0, batch, longest),
        *(["algorithm.adv_estimator=grpo"] if name == CONTROL else method),
        "data.shuffle=False",  # each batch has its share of prompts with a signal
        f"{rollout}.ignore_eos=True",
        f"++{rollout}.engine_kwargs.vllm.num_gpu_blocks_override=null",  # as many as the memory holds
        f"{rollout}.log_prob_micro_batch_size_per_gpu={settings.micro_batch}",
        f"{actor}.ppo_micro_batch_size_per_gpu={settings.micro_batch}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",  # as verl has it
        f"reward.custom_reward_function.path={REWARD}",
        "trainer.save_freq=-1",
        f"hydra.run.dir={quoted(own / 'hydra')}",
    ]


def parse_step(metrics: dict[str, Any], run: str) -> Step:
    """A step from what verl's `file` logger wrote of it, with `step` in it."""
    seconds = {phase: metrics[f"timing_s/{timer}"] for phase, timer in PHASES.items()}
    whole = metrics["timing_s/step"]
    return {
        "run": run,
        "step": metrics["step"],
        "oar": bool(metrics.get(METHOD, 0.0)),
        **seconds,
        REST: whole - math.fsum(seconds.values()),
        WHOLE: whole,
        IMPORTANCE: metrics.get("timing_s/oar", 0.0),
        "scored": metrics.get("oar/scored"),
        "work": {name: metrics[name] for name in SAME_WORK},
    }


def expected_work(settings: Settings) -> dict[str, float]:
    """The values of `SAME_WORK`."""
    lengths = dict.fromkeys(LENGTHS, settings.response_length)
    rewarded = settings.n // 2 / settings.n * settings.scored_share
    return {"prompt_length/mean": settings.prompt_length, **lengths, "critic/score/mean": rewarded}


def check_comparable(settings: Settings, steps: Sequence[Step], control: Sequence[Step] = ()) -> None:
    """Raises: RuntimeError, with the figure at fault, where a step did other work than was asked for."""
    share = settings.scored_share
    for step in [*steps, *control]:
        name = f"{'OAR' if step['oar'] else 'GRPO'}'s step {step['step']} of {step['run']}"
        for key, value in expected_work(settings).items():
            if not math.isclose(step["work"][key], value, abs_tol=1e-6):
                raise RuntimeError(f"{name} has {key} {step['work'][key]:g} in place of {value:g}")
        scored = step["scored"]
        if step["oar"] and (scored is None or not math.isclose(scored, share, abs_tol=1e-6)):
            raise RuntimeError(f"{name} has oar/scored {scored} in place of {share:g} (--scored-share)")
        if not step["oar"] and scored is not None:
            raise RuntimeError(f"{name} has oar/scored {scored}: a GRPO step scores nothing")
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        if first["oar"] == second["oar"] or first["run"] != second["run"]:
            both = f"steps {first['step']} and {second['step']} of {first['run']}"
            raise RuntimeError(f"{both} are not one of each method")


def report_of(settings: Settings, steps: list[Step], control: list[Step], parameters: int) -> Report:
    frame = pd.DataFrame([{**step, "pair": place // 2 + 1} for place, step in enumerate(steps)]).set_index("pair")
    grpo, oar = frame[~frame["oar"]], frame[frame["oar"]]
    added, usual = oar[SHOWN] - grpo[SHOWN], grpo[WHOLE].median()
    figures = pd.DataFrame({"oar": oar[WHOLE], "grpo": grpo[WHOLE]})
    figures = figures.assign(usual=usual, added=added[["log-probs", "advantage"]].sum(axis=1))
    stated = f"--importance {Settings.importance} --scored-share {Settings.scored_share}"
    as_stated = (settings.importance, settings.scored_share) == (Settings.importance, Settings.scored_share)
    ratios = [
        Ratio("oar / grpo", "whole step", LIMIT, stated_for=None if as_stated else stated),
        Ratio("1 + added / usual", "same, by what OAR adds to log-probs and advantage of a usual GRPO step"),
    ]
    phases = [
        [phase, f"{theirs:.3f}", f"{theirs / usual:.1%}", f"{ours:.3f}", f"{more:+.3f}", f"{more / usual:+.1%}"]
        for phase, theirs, ours, more in zip(
            SHOWN, grpo[SHOWN].median(), oar[SHOWN].median(), added.median(), strict=True
        )
    ]
    columns = ("phase", "GRPO", "of its step", "OAR", "OAR adds", "of GRPO's step")
    precision = "float32" if settings.device == "cpu" else "float32 weights, bf16 arithmetic"
    notes = [
        f"{model_line(settings.size, parameters, precision)}; {settings.prompts} prompts a step of {settings.prompt_length} "
        f"tokens, {settings.n} responses to each of exactly {settings.response_length} tokens, of which the last 32 characters "
        f"count as the answer; {settings.micro_batch} sequences a micro-batch, activation checkpointing, FSDP2, one worker.",
        f"Neighbouring steps are a pair, in the order GRPO OAR OAR GRPO. Runs of verl: {settings.rounds}, with "
        f"{settings.steps} counted steps of each method, after {WARM_UP} that are thrown away. The learning rate is 0; "
        f"{settings.scored_share:.0%} of the prompts have responses of unequal rewards, which do not depend on the text.",
        f"Importance, `{settings.importance}`, is verl's `timing_s/oar`: marking rows and the backward, which are within "
        "log-probs, and the gate, which is within advantage. `rest` is what no timer covers.",
        "Ratios and `OAR adds` are medians over pairs, with the interval of the sign test, which needs six. Generation, update "
        "and weight sync do the same work in both methods: what differs there, and not in the second ratio, is the machine's.",
    ]
    if control:
        alone = pd.DataFrame(control)[WHOLE].median()
        notes.append(
            f"Control: {len(control)} steps of a run of GRPO alone, with verl's own trainer, after all others: {alone:.3f} s a "
            f"step, {alone / usual:.2f} of GRPO's steps beside OAR's. Not interleaved, so it moves with the machine."
        )
    batch = f"{settings.size}, {settings.responses} x {settings.response_length}, {settings.importance}"
    return Report(
        title=f"What OAR costs in whole runs of verl: {batch}, {settings.scored_share:.0%} of the rows scored",
        stem=f"run_{settings.device}",
        tables=[
            ratio_table(f"OAR / GRPO, {len(oar)} pairs of steps", ratios, figures),
            Table("Seconds a step, medians", columns, phases),
        ],
        notes=notes,
        runs={"settings": vars(settings), "parameters": parameters, "steps": steps, "control": control},
    )
