"""Every credit on responses of warm models, and how it treats each kind of token."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.fidelity.scores import auc, mean_over_groups
from benchmarks.fidelity.tables import plus_minus
from benchmarks.language import smollm2
from benchmarks.learning.tasks import TASKS
from benchmarks.learning.training import Credit, Rollout, Run, forward, importance, log_probs, roll_out
from benchmarks.learning.warm_start import warm_model
from benchmarks.machine import Device, choose_device
from benchmarks.marks import people
from benchmarks.report import Progress, Report, Table
from benchmarks.tiny.words import FILLER
from benchmarks.workload import check_at_least_one
from oar_plugin.credit.gate import two_level
from oar_plugin.credit.importance import IMPORTANCES as SHIPPED
from oar_plugin.credit.importance import importance_of
from oar_plugin.passes.segments import longest_of

PROMPTS, COPIES = 16, 8
_CANDIDATES = "python:benchmarks.candidates.learning"
IMPORTANCES = {
    **{name: name for name, one in SHIPPED.items() if not one.copies},
    "EntropyFactor": f"{_CANDIDATES}:EntropyFactor",
    "onward": f"{_CANDIDATES}:Onward",
}
JUDGED = {
    "wrong AUC": "Which result is wrong: AUC of wrong results against every other token of their response",
    "first hit": "Which step is wrong first: share of wrong responses whose highest token stands in it",
    "results AUC": "What is a result: AUC of results against every other token of their response",
}
KINDS = ("wrong results, wrong answer", "right results, wrong answer", "results, right answer", "filler", "form")


@dataclass(frozen=True)
class Settings:
    tasks: tuple[str, ...] = ("chain", "parallel", "lookup")
    """Of the study of learning."""
    models: int = 2
    """Warm models a task, trained once and kept on disk."""
    batches: int = 4
    """A model, each of 16 problems and 8 responses to each."""
    by: Literal["known", "people"] = "known"
    """Against what is known of tokens, or people's marks; the options below are for these."""
    importances: tuple[str, ...] = tuple(SHIPPED)
    """Built-in ones that need no other prompt, or `python:<module>:<class>`."""
    spans: int = 64
    """Into at most so many a response is cut for masked copies; one with fewer reasoning tokens, into tokens."""
    model: str | None = None
    """With people's marks: folder or name of a HuggingFace model, or `smollm2`."""
    device: Device = "auto"
    """Of the model; auto takes CUDA where there is one. The tasks' small models are on the CPU."""
    micro_batch: int | None = None
    """Most tokens of a forward with people's marks; as many as take 2 GiB where it is not given."""
    solutions: int | None = None
    """Of people's marks, drawn ones; all where it is not given."""
    folder: Path | None = None
    """With people's marks: scores of an importance are saved there, and an interrupted study resumes."""
    seed: int = 0
    """Of problems, sampling and signs."""
    out: Path | None = None
    """Folder for the page and the JSON; without it only the terminal."""

    def check(self) -> None:
        """Raises: ValueError with the argument at fault."""
        sizes = "models", "batches", "spans", "micro_batch", "solutions"
        check_at_least_one(self, *sizes)
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"--tasks {unknown[0]}: allowed: {', '.join(TASKS)}")
        if self.model and self.by != "people":
            raise ValueError(f"--model {self.model}: needs --by people")
        if self.by == "people" and not (self.model and find_spec("champ_dataset")):
            raise ValueError("--by people needs --model MODEL and the extra [language]")
        for name in self.importances:
            importance_of(name)


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises: RuntimeError for a model that does not learn its task, or gives nothing to compare."""
    if settings.by == "people":
        return by_people(settings, progress)
    rows: list[dict[str, Any]] = []
    for task, number, model, rollout in rollouts(settings, progress):
        for name, score_BL in scores(model, rollout, settings.seed).items():
            rows += [{"task": task, "model": number, "credit": name, **row} for row in judged(score_BL, rollout)]
    found = pd.DataFrame(rows)
    return report(settings, found, "What does credit mark?", tables(found), notes(found))


def by_people(settings: Settings, progress: Progress) -> Report:
    """Raises: RuntimeError, where no solution can be scored."""
    name, model, tokenizer = loaded(settings, "reading solutions", progress)
    read, without = people.solutions(tokenizer, longest_of(model.config), settings.solutions, settings.seed)
    if not read:
        raise RuntimeError(f"--model {settings.model}: all {without} solutions are too long for it")
    asked = settings.importances, settings.spans, settings.micro_batch, settings.seed, settings.folder
    found = pd.DataFrame(people.judged(model, tokenizer, read, *asked))
    shown = [people.table(found)], people.notes(read, without, settings.spans)
    stem = f"people_{name}_{model.device.type}"
    return report(settings, found.drop(columns="problem"), "Does credit find the first wrong step?", *shown, stem)


def loaded(settings: Settings, then: str, progress: Progress) -> tuple[str, PreTrainedModel, Any]:
    """Last part of the model's name, the model on its device, and its tokenizer."""
    progress(then)
    folder = smollm2.resolved(str(settings.model))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(choose_device(settings.device)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:  # it masks tokens in copies
        tokenizer.pad_token_id = model.config.pad_token_id
    return Path(str(settings.model)).name, model, tokenizer


def report(
    settings: Settings, found: pd.DataFrame, title: str, tables: list[Table], notes: list[str], stem: str = "marks_cpu"
) -> Report:
    keys = [key for key in ("task", "model", "writer", "credit") if key in found]
    means = found.groupby(keys, sort=False).mean().round(4).reset_index()
    runs = {"settings": asdict(settings), "means": means.astype(object).where(means.notna(), None).to_dict("records")}
    return Report(title, stem, tables, notes, runs)


def rollouts(settings: Settings, progress: Progress) -> Iterator[tuple[str, int, PreTrainedModel, Rollout]]:
    """Task, number of the warm model, model, and its responses batch by batch."""
    pairs = [(task, number) for task in settings.tasks for number in range(settings.models)]
    for done, (task, number) in enumerate(pairs):
        progress(f"{task}, model {number}", done, len(pairs))
        model, problems, noise = warm_model(task, number, progress), random.Random(settings.seed), torch.Generator()
        for batch in range(settings.batches):
            noise.manual_seed(settings.seed * settings.batches + batch)
            yield task, number, model, roll_out(model, TASKS[task], problems, noise, PROMPTS, COPIES)


def scores(model: PreTrainedModel, rollout: Rollout, seed: int) -> dict[str, Tensor]:
    """Of each credit, `[B, L]`, read at reasoning tokens; with any sign."""
    passes = forward(model, rollout)
    log_prob_BL = log_probs(rollout, passes)
    doubt_BL = -torch.expm1(log_prob_BL)
    found: dict[str, Tensor] = {}
    for name, path in IMPORTANCES.items():
        # The importance reads no more of a run than these.
        run = Run(task="", credit=Credit(importance=path), lr=0.0, warm=0, seed=seed)
        found[name] = importance(run, rollout, passes, step=0)
        if importance_of(path).backwards:
            found[f"{name} x (1 - p)"] = found[name] * doubt_BL
    found["surprisal"] = -log_prob_BL
    return found


def judged(score_BL: Tensor, rollout: Rollout) -> Iterator[dict[str, float]]:
    """A row for each response that can be scored; what it has no tokens for is missing."""
    filler_BL = torch.isin(rollout.token_BL, torch.tensor(sorted(FILLER)))
    negative_BL = rollout.negative_B1.expand_as(filler_BL)
    result_BL, wrong_BL = rollout.causal_BL, rollout.wrong_BL
    kinds = (
        wrong_BL & negative_BL,
        rollout.right_in_wrong_BL,
        result_BL & ~negative_BL,
        filler_BL & ~result_BL,
        ~filler_BL & ~result_BL,
    )
    weight_BL = two_level(score_BL, rollout.reasoning_BL)
    for row in rollout.reasoning_BL.any(-1).nonzero()[:, 0].tolist():
        keep_L = rollout.reasoning_BL[row]
        score_R, result_R, wrong_R = (x[row][keep_L].numpy() for x in (score_BL, result_BL, wrong_BL))
        found = {"results AUC": auc(score_R, result_R)}
        if rollout.negative_B1[row] and wrong_R.any():
            found |= {"wrong AUC": auc(score_R, wrong_R), "first hit": first_hit(score_R, result_R, wrong_R)}
        for name, kind_BL in zip(KINDS, kinds, strict=True):
            kind_R = kind_BL[row][keep_L].numpy()
            if kind_R.any():
                found[f"{name}, weight"] = float(weight_BL[row][keep_L].numpy()[kind_R].mean())
        yield found


def first_hit(score_R: np.ndarray, result_R: np.ndarray, wrong_R: np.ndarray) -> float:
    """Whether the highest score is in the step with the first wrong result; among equals, the share that is.

    A step ends one token behind its result, with `;`.
    """
    before_R = result_R.cumsum()
    step_R = np.concatenate([[0, 0], before_R[:-2]])[: len(before_R)]
    return float((step_R == step_R[wrong_R.argmax()])[score_R == score_R.max()].mean())


def tables(found: pd.DataFrame) -> list[Table]:
    """The most important first."""
    made, credits = overview(found), list(found.groupby("credit", sort=False))
    for task in found["task"].unique():
        rows = [[name, *(_shown(of[of["task"] == task], f"{kind}, weight") for kind in KINDS)] for name, of in credits]
        made.append(Table(f"{task}: mean weight", ("credit", *KINDS), rows))
    return made


def overview(found: pd.DataFrame) -> list[Table]:
    """A table for each metric of `JUDGED`: credits, and means of all tasks and of each."""
    tasks = list(found["task"].unique())
    parts = ({"all tasks": tasks} if len(tasks) > 1 else {}) | {task: [task] for task in tasks}
    made = []
    for metric, title in JUDGED.items():
        credits = found.groupby("credit", sort=False)
        rows = [[name, *(_shown(of[of["task"].isin(part)], metric) for part in parts.values())] for name, of in credits]
        made.append(Table(title, ("credit", *parts), rows))
    return made


def _shown(rows: pd.DataFrame, metric: str) -> str:
    return plus_minus(mean_over_groups([list(of) for _, of in rows.groupby(["task", "model"])[metric]]))


def notes(found: pd.DataFrame) -> list[str]:
    """What one has to know to read the figures."""
    some = found[found["credit"] == found["credit"].iloc[0]]
    asked = some["wrong AUC"].count()
    return [
        f"{len(some)} responses of groups with an advantage, {asked} of them with a wrong answer and a wrong result on the way "
        f"to it; {found.groupby('task')['model'].nunique().min()} warm models a task, before any training with rewards.",
        "A result is wrong where it does not follow from what its own step says, right although it goes on from a wrong "
        "one. A step ends with the `;` behind its result. Form: all reasoning that is neither result nor filler.",
        "Means over responses, of the models' means; ±: half the width of a 95 % percentile bootstrap over each model's "
        "responses. It says nothing about other models. AUC: equal scores count a half.",
        "Weights: two_level, tau 0.85, beta 2, of the scores as they are, signed ones included.",
        "p: the probability that a token was drawn with. These models learned from demonstrations that err in one step of four "
        "or five, so that a wrong result is an unlikely one; a model that is sure of what is wrong has nothing to show there.",
        "Small models on made-up tasks: what is marked here need not be elsewhere.",
    ]
