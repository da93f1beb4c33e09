"""Whole runs of verl on a CPU whose steps are GRPO's and OAR's in turn, and what each phase of them takes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch

from benchmarks.importance import DEFAULT, check_importance
from benchmarks.machine import describe_machine, load_average
from benchmarks.report import COLOURS, Report, Table, subplots
from benchmarks.run.assets import CPU_SECONDS, FINDER, HOST_ADVANTAGE, METHOD, REWARD, prompt_rows
from benchmarks.statistics import median, paired_ratio
from benchmarks.study import Progress, check_at_least_one, silent
from benchmarks.tiny.random_models import SHAPES, build_shape
from benchmarks.tiny.verl_run import quoted, read_metrics, training_environment, training_overrides
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.hosts.verl.cpu import cpu_environment, cpu_overrides, wanted
from oar_plugin.hosts.verl.cpu.session import TIMED_OUT, run_verl
from oar_plugin.hosts.vllm.versions import installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = ("1m", "10m", "50m", "0.1b", "0.5b")
"""vLLM serves no smaller heads on a CPU, and larger ones take hours."""
LIMIT = 1.10
"""Target: a whole OAR step over a whole GRPO step, with the default importance and half of the rows without an advantage."""
WARM_UP = 2
"""Steps at the beginning of a run that do not count: one of each method. The first one of each imports and allocates."""
LONGEST_RUN_S = 3600.0
PHASES = ["generation", "log-probs", "importance", "advantage", "update", "weight sync", "rest"]
CHANGED = ["log-probs", "importance", "advantage"]
"""Phases in which an OAR step does anything else than a GRPO step."""
WHOLE = "whole step"
CONTROL = "control, GRPO alone"


@dataclass(frozen=True)
class Settings:
    size: str = "10m"
    """Parameters of the model, about: 1m, 10m, 50m, 0.1b, 0.5b."""
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
    checkpointing: Literal["on", "off"] = "on"
    """Activation checkpointing in the actor; on, as in verl."""
    steps: int = 6
    """Counted steps of each method in a run, after a warm-up of one each."""
    rounds: int = 2
    """Runs of verl."""
    control: bool = False
    """Then run GRPO alone, with verl's own trainer, to compare."""
    out: Path | None = None
    """Write run_cpu.md, .json and .png into this folder (default: only the terminal)."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        check_at_least_one(self, "prompts", "micro_batch", "steps", "rounds")
        check_importance(self.importance, copies=True)
        if self.size not in SIZES:
            raise ValueError(f"--size {self.size}: allowed: {', '.join(SIZES)}")
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
    def responses(self) -> int:
        """Of a step."""
        return self.prompts * self.n

    def steps_of(self, name: str) -> int:
        """Of the run of verl with that name, with the warm-up."""
        return WARM_UP + (self.steps if name == CONTROL else 2 * self.steps)


Step = dict[str, Any]
"""A counted step: the name of its `run`, `step` from 1, whether it is `oar`'s, its seconds by phase and as a whole,
`cpu_seconds` of all processes (None in the control), what was `scored` (None in GRPO's), and the `work` that all must share."""


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Run verl round by round, check that all steps did the same work, and compare them.

    Raises:
        ValueError: an argument that cannot work, or a machine that is not one for the CPU stack.
        RuntimeError: verl ended early, or GRPO's and OAR's steps did not do the same work, so that no ratio may be told.
    """
    settings.check()
    for name in ("verl", "vllm"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed; `oar doctor` says what is missing for whole runs on a CPU")
    if not wanted():
        raise ValueError("this measures verl's CPU stack, and PyTorch sees an accelerator or is not a CPU build")
    machine = describe_machine(torch.device("cpu"))
    machine |= {"verl": importlib.metadata.version("verl"), "vllm": installed()}
    machine["torch_threads"] = int(cpu_environment()["OMP_NUM_THREADS"])  # in verl's processes, not in this one
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
    return report_of(settings, steps, control, machine | {"load_average_after": load_average()}, parameters)


def write_assets(folder: Path, settings: Settings) -> int:
    """Write `model/` and `prompts.parquet` below `folder`; returns the number of parameters, tied embeddings once."""
    with_signal = round(settings.scored_share * settings.prompts)
    rows = prompt_rows(settings.steps_of("run"), settings.prompts, with_signal, settings.prompt_length)
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    shape = SHAPES[settings.size]
    tokenizer = make_tokenizer(shape.vocab)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = (shape.vocab, settings.prompt_length + settings.response_length + 1, torch.float32, torch.device("cpu"))
    model: Any = build_shape(shape, "qwen2", *size, 0, **ends)
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
    prompts = folder / "prompts.parquet"
    batch = (settings.prompts, settings.n)
    # One more than is generated: a response as long as allowed counts as cut off, and is not scored.
    longest = (settings.prompt_length, settings.response_length + 1)
    return [
        *cpu_overrides(),
        # Without a learning rate the update does all its work, and the model stays the same for both methods.
        *training_overrides(folder / "model", (prompts, prompts), own / "checkpoints", steps, 0, 0.0, batch, longest),
        *(["algorithm.adv_estimator=grpo"] if name == CONTROL else method),
        "data.shuffle=False",  # each batch has its share of prompts with a signal
        f"{rollout}.response_length={settings.response_length}",
        f"{rollout}.ignore_eos=True",
        f"++{rollout}.engine_kwargs.vllm.num_gpu_blocks_override=null",  # as many as the memory holds
        f"{rollout}.log_prob_micro_batch_size_per_gpu={settings.micro_batch}",
        f"{actor}.ppo_micro_batch_size_per_gpu={settings.micro_batch}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={settings.checkpointing == 'on'}",
        f"reward.custom_reward_function.path={REWARD}",
        "trainer.save_freq=-1",
        f"hydra.run.dir={quoted(own / 'hydra')}",
    ]


def parse_step(metrics: dict[str, Any], run: str) -> Step:
    """A step from what verl's `file` logger wrote of it, with `step` in it."""
    seconds = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    importance = seconds.get("oar", 0.0)
    advantage = seconds.get(HOST_ADVANTAGE, seconds["adv"])
    # `timing_s/oar` counts the gate, which verl's timer of the advantage has too, and parts of the log-prob pass.
    within_log_probs = importance - (seconds["adv"] - advantage) if importance else 0.0
    log_probs = seconds["old_log_prob"] - within_log_probs
    known = (seconds["gen"], log_probs, importance, advantage, seconds["update_actor"], seconds["update_weights"])
    return {
        "run": run,
        "step": metrics["step"],
        "oar": bool(metrics.get(METHOD, 0.0)),
        **dict(zip(PHASES, (*known, seconds["step"] - math.fsum(known)), strict=True)),
        WHOLE: seconds["step"],
        "cpu_seconds": metrics.get(CPU_SECONDS),
        "scored": metrics.get("oar/scored"),
        "work": {name: metrics[name] for name in expected_work(Settings())},
    }


def expected_work(settings: Settings) -> dict[str, float]:
    """verl's metrics that must be equal in all steps."""
    lengths = {f"response_length/{name}": settings.response_length for name in ("mean", "min", "max")}
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


def in_pairs(steps: Sequence[Step]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """GRPO's and OAR's steps, a row a pair of neighbours."""
    frame = pd.DataFrame([{**step, "pair": place // 2} for place, step in enumerate(steps)]).set_index("pair")
    return frame[~frame["oar"]], frame[frame["oar"]]


def report_of(
    settings: Settings, steps: list[Step], control: list[Step], machine: dict[str, Any], parameters: int
) -> Report:
    grpo, oar = in_pairs(steps)
    whole, usual, usual_oar = paired_ratio(oar[WHOLE], grpo[WHOLE]), grpo[WHOLE].median(), oar[WHOLE].median()
    changed = median(1 + (oar[CHANGED] - grpo[CHANGED]).sum(axis=1) / usual)
    processor = paired_ratio(oar["cpu_seconds"], grpo["cpu_seconds"])
    judged, stated = whole.verdict(LIMIT), (Settings.importance, Settings.scored_share)
    if (settings.importance, settings.scored_share) != stated:
        judged = "not judged: the target is stated for --importance {} --scored-share {}".format(*stated)
    ratios = [
        ("whole step, wall seconds", str(whole), f"<= {LIMIT:.2f}", judged),
        ("same, by the phases that OAR changes", str(changed), "", "for information"),
        ("whole step, processor seconds of all processes", str(processor), "", "for information"),
    ]
    phases = []
    for phase in (*PHASES, WHOLE):
        of_grpo, of_oar, added = grpo[phase].median(), oar[phase].median(), (oar[phase] - grpo[phase]).median()
        shares = [f"{of_grpo:.3f}", f"{of_grpo / usual:.1%}", f"{of_oar:.3f}", f"{of_oar / usual_oar:.1%}"]
        phases.append([phase, *shares, f"{added:+.3f}", f"{added / usual:+.1%}"])
    batch = f"{settings.size}, {settings.responses} x {settings.response_length}, {settings.importance}"
    columns = ("phase", "GRPO", "of its step", "OAR", "of OAR's step", "OAR adds", "of GRPO's step")
    return Report(
        title=f"What OAR costs in whole runs of verl: {batch}, {settings.scored_share:.0%} of the rows scored",
        stem="run_cpu",
        command="",
        machine=machine,
        tables=[
            Table(f"OAR / GRPO, {len(oar)} pairs of steps", ("ratio", "median (95 %)", "target", "verdict"), ratios),
            Table("Seconds a step, medians", columns, phases),
        ],
        notes=notes(settings, steps, control, machine, parameters),
        runs={"settings": vars(settings), "parameters": parameters, "steps": steps, "control": control},
        figure=partial(draw, grpo, oar),
    )


def notes(
    settings: Settings, steps: list[Step], control: list[Step], machine: dict[str, Any], parameters: int
) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    lines = [
        f"qwen2 with random weights, {parameters / 1e6:.1f}M parameters (tied embeddings once), vocabulary "
        f"{SHAPES[settings.size].vocab}, float32; {settings.prompts} prompts a step of {settings.prompt_length} tokens, "
        f"{settings.n} responses to each of exactly {settings.response_length} tokens (ignore_eos). The last 32 characters "
        "count as the answer: eight tokens, one more or less where the model wrote one of the few that have not four letters. "
        f"{settings.micro_batch} sequences a micro-batch, activation checkpointing {settings.checkpointing}.",
        f"verl {machine['verl']}, vLLM {machine['vllm']}, FSDP2 with one worker; a thread in each of verl's processes. Actor, "
        "engine and trainer take turns (trainer_mode=sync).",
        "GRPO's and OAR's steps take turns within a run, in the order GRPO OAR OAR GRPO, so that whatever slows down the "
        f"machine slows down both; neighbours are a pair. Runs of verl: {settings.rounds}, with {settings.steps} counted steps "
        f"of each method, after {WARM_UP} that are thrown away. In a GRPO step the actor gets no request.",
        "The learning rate is 0: the update does all its work, and both methods see the same model. Rewards do not depend on "
        f"the text: {settings.scored_share:.0%} of the prompts have responses of unequal rewards. Checked in every step: "
        "lengths, mean reward, and that OAR scored exactly that share of the rows (`oar/scored`).",
        f"Importance, `{settings.importance}`, is verl's `timing_s/oar` (marking rows, the backward, the gate); log-probs are "
        "what is left of `old_log_prob`, in OAR's steps a forward that keeps a graph. `rest` is what no timer covers. Medians "
        "of parts need not add up to the median of the whole.",
        "Ratios and `OAR adds` are medians over pairs, with the interval of the sign test, which needs six pairs and assumes "
        "nothing about how times are distributed. Processor seconds run from one step's end to the next one's.",
        "Generation, update and weight sync do the same work in both methods, so what differs there is the machine's. The "
        "second ratio leaves it out: a median GRPO step plus what OAR adds to the other phases, over that step.",
    ]
    if control:
        alone, beside = pd.DataFrame(control)[WHOLE].median(), in_pairs(steps)[0][WHOLE].median()
        lines.append(
            f"Control: {len(control)} steps of a run of GRPO alone, with verl's own trainer, after all others: {alone:.3f} s a "
            f"step, {alone / beside:.2f} of GRPO's steps beside OAR's. Not interleaved, so it moves with the machine."
        )
    return lines


def draw(grpo: pd.DataFrame, oar: pd.DataFrame) -> Figure:
    """Stacked bars of the phases, drawn to the sum that their medians have, and the ratio of each pair."""
    figure, (bars, dots) = subplots(2, 1, figsize=(8, 5.6), height_ratios=(1, 1.15))
    medians = pd.DataFrame({"OAR": oar[PHASES].median(), "GRPO": grpo[PHASES].median()}).T
    medians.plot.barh(
        stacked=True, ax=bars, color=list(COLOURS), width=0.6, xlabel="seconds a step, median of each phase"
    )
    for drawn in bars.containers:
        shown = [f"{seconds:.2f}" if seconds > 0.06 * medians.loc["OAR"].sum() else "" for seconds in drawn.datavalues]
        bars.bar_label(drawn, shown, label_type="center", color="w", fontsize=8)

    ratio = paired_ratio(oar[WHOLE], grpo[WHOLE])
    dots.axhspan(ratio.low, ratio.high, color=COLOURS[0], alpha=0.15, lw=0, label="95 % interval of the median")
    dots.axhline(ratio.value, color=COLOURS[0], label=f"median {ratio.value:.3f}")
    dots.axhline(LIMIT, color=COLOURS[1], ls="--", label=f"target {LIMIT:.2f}")
    for (_, pairs), colour in zip((oar[WHOLE] / grpo[WHOLE]).groupby(oar["run"]), COLOURS * len(oar), strict=False):
        dots.plot(pairs.index + 1, pairs, "o", color=colour, markersize=4)
    dots.set(xlabel="pair of steps (another colour: another run of verl)", ylabel="OAR / GRPO, whole step")
    dots.xaxis.get_major_locator().set_params(integer=True)
    for panel in (bars, dots):
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=7, frameon=False, fontsize=8)
    return figure
