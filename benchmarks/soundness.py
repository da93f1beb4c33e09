"""Do weights change with what should not matter? `python -m benchmarks.soundness` prints the page, in two minutes of a core."""

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.fidelity.scores import largest, rank_correlation
from benchmarks.learning.tasks import TASKS
from benchmarks.learning.training import roll_out
from benchmarks.learning.warm_start import SPREAD, warm_model, widened
from benchmarks.report import Table
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance import IMPORTANCES as SHIPPED
from oar_plugin.estimator import reshape
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request

LOOKED_AT = {name: one for name, one in SHIPPED.items() if one.copies is None and not one.learns}
IMPORTANCES = [name for name, one in LOOKED_AT.items() if one.backwards or one.reads]
GATES = ("two_level", "bi_level")
STARTS = ("chain", "parallel")
RESPONSES = 32
TOP = 0.15
"""What `two_level` boosts by default."""
VOCABULARIES, MASSES = (32_000, 152_000), (0.01, 0.05)
SCALES = (1e-3, 1e3)
LEAST = 0.9
SLACK = 0.05
"""An importance counts as unchanged from this overlap on, or where it loses no more than this against another draw."""

COLUMNS = ("overlap", "Spearman", *(f"`{gate}`, {what}" for gate in GATES for what in ("mean", "largest")))
QUESTIONS: dict[str, tuple[str, ...]] = {
    "another draw": COLUMNS,
    "bf16": COLUMNS,
    "vocabulary": ("words", "mass", *COLUMNS),
    "scale": ("times", *COLUMNS),
}
"""What is changed, and the columns of its table."""

TEXT = """\
# Is an importance sound?

`python -m benchmarks.soundness` prints this page. {responses} sampled responses of one small trained model for each of the
tasks {starts} (what the study of learning starts from) are scored as they are, and again with one thing changed
that should not matter:

- **another draw**: of random signs or noise. The measure for the rest: what changes less is lost in what chance does.
- **bf16**: parameters and activations, against float32.
- **vocabulary**: {vocabularies} words in place of 47. The further ones have Gaussian logits (standard deviation
  {spread:g}) and together 1 % or 5 % of the mass, as a mean over rows. That changes the distribution itself as well, so some
  change is right. Rows that are sure without these words get some of it too, more than in a large model.
- **scale**: embeddings 1,000 times as small or as large in a model that computes the same (its logits differ by {error:.0e} at
  most). What `oar_g` reads depends on how its noise, of a fixed size, compares with the embeddings.

"Overlap" is the share of the top 15 % of a response's reasoning tokens, what the default gate boosts, that stays there;
"Spearman" is of all its reasoning tokens; then come mean and largest change of a weight under each gate (weights average 1). In
the first table an importance counts as unchanged where the worst overlap is {least} or more, or within {slack} of what another
draw leaves.
"""


class Batch(NamedTuple):
    """Responses of which each can be scored, padded behind their end."""

    token_BL: Tensor
    segments_BL: Tensor
    mask_BL: Tensor


@dataclass(frozen=True)
class Change:
    """What became of scores, as means over responses, and of weights: mean and largest change under each gate."""

    overlap: float
    spearman: float
    weights: list[float]

    def cells(self) -> list[str]:
        return [f"{figure:.2f}" for figure in (self.overlap, self.spearman, *self.weights)]


@dataclass
class Found:
    """Of the model of one task: changes by question, importance and case; and the largest difference of a logit between models
    that differ in scale alone."""

    start: str
    changes: dict[tuple[str, str, tuple[str, ...]], Change] = field(default_factory=dict)
    error: float = 0.0


def study(start: str) -> Found:
    model = warm_model(start, 0)
    batch = responses(model, start)
    before = {name: scores(model, name, batch) for name in IMPORTANCES}
    found = Found(start)

    def ask(question: str, other: PreTrainedModel, *case: str, seed: int = 0) -> None:
        for name, before_BL in before.items():
            found.changes[question, name, case] = change(name, before_BL, scores(other, name, batch, seed), batch)

    ask("another draw", model, seed=1)
    ask("bf16", copy.deepcopy(model).bfloat16())
    for vocabulary, mass in itertools.product(VOCABULARIES, MASSES):
        case = f"{vocabulary:,}", f"{mass:g}"
        ask("vocabulary", widened(model, TASKS[start], vocabulary, mass), *case)
    for factor in SCALES:
        other = rescaled(model, factor)
        difference_NV = logits(other, batch, batch.mask_BL) - logits(model, batch, batch.mask_BL)
        found.error = max(found.error, difference_NV.abs().max().item())
        ask("scale", other, f"{factor:g}")
    return found


@torch.no_grad()
def responses(model: PreTrainedModel, start: str) -> Batch:
    """Sampled from the model, of groups whose responses did not all do alike."""
    rollout = roll_out(model, TASKS[start], random.Random(0), torch.Generator().manual_seed(0), 16, 8)
    rows = (rollout.status_B == Status.SCORED).nonzero()[:RESPONSES, 0]
    return Batch(rollout.token_BL[rows], rollout.segments_BL[rows], rollout.mask_BL[rows])


def scores(model: PreTrainedModel, name: str, batch: Batch, seed: int = 0) -> Tensor:
    """Importance, float32 `[B, L]`."""
    config = OarConfig.parse({"importance": name, "seed": seed})
    return batch_importance(model, Request.of_step(config, 1), *batch)


def change(name: str, before_BL: Tensor, after_BL: Tensor, batch: Batch) -> Change:
    reasoning_BL = batch.segments_BL == Segment.REASONING
    lengths = reasoning_BL.sum(-1).tolist()
    overlap = spearman = 0.0
    for before_R, after_R in zip(*(of[reasoning_BL].split(lengths) for of in (before_BL, after_BL)), strict=True):
        top, then = (set(largest(score_R, TOP).tolist()) for score_R in (before_R, after_R))
        overlap += len(top & then) / len(top) / len(lengths)
        spearman += rank_correlation(after_R, before_R) / len(lengths)
    weights = []
    for gate in GATES:
        config = OarConfig.parse({"importance": name, "gate": gate})
        scored_B = torch.full((len(lengths),), int(Status.SCORED))
        before, after = (
            reshape(torch.ones_like(of_BL), of_BL, reasoning_BL, scored_B, config).weight_BL[reasoning_BL]
            for of_BL in (before_BL, after_BL)
        )
        weights += [(after - before).abs().mean().item(), (after - before).abs().max().item()]
    return Change(overlap, spearman, weights)


@torch.no_grad()
def rescaled(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """A copy that computes the same with embeddings `factor` times as large.

    So is all that is added to the residual stream; the norms, whose epsilon goes along, divide it out.
    """
    scaled: Any = copy.deepcopy(model)
    scaled.lm_head.weight = nn.Parameter(scaled.lm_head.weight.clone())  # no longer the embeddings
    norms, added = [scaled.model.norm], [scaled.model.embed_tokens]
    for layer in scaled.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        added += [layer.self_attn.o_proj, layer.mlp.down_proj]
    for norm in norms:
        norm.variance_epsilon *= factor**2
    for module in added:
        module.weight *= factor
    return scaled


@torch.no_grad()
def logits(model: PreTrainedModel, batch: Batch, wanted_BL: Tensor) -> Tensor:
    """Of the rows that predict wanted tokens, `[N, V]`."""
    parts: Any = model
    hidden_BLH = parts.model(input_ids=batch.token_BL, use_cache=False).last_hidden_state
    rows: Tensor = parts.lm_head(hidden_BLH[:, :-1][wanted_BL[:, 1:]])
    return rows


def page(found: Sequence[Found]) -> str:
    tables = [summary(found)]
    for question, columns in QUESTIONS.items():
        rows = [
            (name, one.start, *case, *of.cells())
            for one in found
            for (asked, name, case), of in one.changes.items()
            if asked == question
        ]
        tables.append(Table(question, ("importance", "task", *columns), rows))
    text = TEXT.format(
        responses=RESPONSES,
        starts=" and ".join(f"`{start}`" for start in STARTS),
        least=LEAST,
        slack=SLACK,
        spread=SPREAD,
        vocabularies=" or ".join(f"{size:,}" for size in VOCABULARIES),
        error=max(one.error for one in found),
    )
    return "\n".join([text, *(line for table in tables for line in table.markdown())]).rstrip()


def summary(found: Sequence[Found]) -> Table:
    """Worst overlaps."""
    rows = []
    for name in IMPORTANCES:
        worst = [
            min(of.overlap for one in found for (*asked, _), of in one.changes.items() if asked == [question, name])
            for question in QUESTIONS
        ]
        enough = min(LEAST, worst[0] - SLACK)
        rows.append((name, *(f"{'' if overlap >= enough else '**no** '}{overlap:.2f}" for overlap in worst)))
    return Table("Which is unchanged by what: worst overlaps", ("importance", *QUESTIONS), rows)


def main() -> None:
    print(page([study(start) for start in STARTS]))


if __name__ == "__main__":
    main()
