"""What GRPO's and OAR's steps of a recipe would take on more GPUs than anybody measured here, by the planner. Projections.

The planner's times come from datasheets and stated efficiencies (see `oar plan`). Added here is the gate, which verl's driver
runs alone for the whole batch: with the batch it grows, with the GPUs it does not shrink.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.scaling.measure import MODES, Mode
from oar_plugin.hosts.verl.recipe import compose_recipe
from oar_plugin.plan import LayoutError, plan

SIZES = (8, 16, 32, 64, 128, 256, 512)

GATE_SECONDS_PER_TOKEN = 7e-8
"""Of `estimator.reshape` on one core (AMD EPYC, 2048 rows of 2048 tokens; 6e-8 with rows of 1024).

Rows are padded to the longest. One core, because Ray gives an actor as many threads as it asked for CPUs.
"""

_BATCH = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
_COLUMNS = (
    *("GPUs", "sequences", "data parallel", "generation s", "log-prob s", "importance s", "gate s", "update s"),
    *("step OAR / GRPO", "log-prob + update OAR / GRPO", "memory"),
)


@dataclass(frozen=True)
class Projected:
    """A recipe on so many GPUs.

    Attributes:
        gpus: of the trainer.
        mode: weak: the batch grows with the GPUs, from the recipe's own. strong: it is the recipe's.
        sequences: of a step.
        data: data-parallel size.
        seconds: of a step, by phase.
        step_ratio: OAR's whole step over GRPO's.
        measured_ratio: the same of what `oar bench scaling` measures: log-prob pass and update.
        memory: the planner's verdict.
        problem: why the recipe cannot run so; the other figures are then empty.
    """

    gpus: int
    mode: Mode
    sequences: int = 0
    data: int = 0
    seconds: dict[str, float] | None = None
    step_ratio: float | None = None
    measured_ratio: float | None = None
    memory: str = ""
    problem: str | None = None


@dataclass(frozen=True)
class Projection:
    """A recipe at several sizes.

    Attributes:
        recipe: its folder.
        gpu: name of the GPU that it is projected for.
        rows: by mode and size.
        assumptions: of the planner, in sentences.
    """

    recipe: Path
    gpu: str
    rows: list[Projected]
    assumptions: list[str]


def project(recipe: Path, gpu: str | None = None, sizes: Sequence[int] = SIZES) -> Projection:
    """Plan a recipe's OAR variant at each size, weak and strong.

    Args:
        recipe: its folder.
        gpu: a name that `oar plan --gpu` knows.
        sizes: numbers of GPUs.

    Raises:
        RecipeError: no such recipe.
        LayoutError: it cannot run even as it is.
        ValueError: an unknown GPU.
    """
    from oar_plugin.plan import report

    own = plan(compose_recipe(recipe, "oar"), gpu=gpu)
    rows = [row for mode in MODES for row in _rows(recipe, gpu, mode, own.setup.layout.gpus, sizes)]
    return Projection(recipe, own.gpu.name, rows, report.assumptions(own))


def _rows(recipe: Path, gpu: str | None, mode: Mode, own_gpus: int, sizes: Sequence[int]) -> Iterator[Projected]:
    config = compose_recipe(recipe, "oar")
    for gpus in sizes:
        overrides = []
        if mode == "weak":
            overrides = [f"{key}={max(1, round(_read(config, key) * gpus / own_gpus))}" for key in _BATCH]
        try:
            made = plan(compose_recipe(recipe, "oar", overrides), gpus=gpus, gpu=gpu)
        except LayoutError as error:
            yield Projected(gpus, mode, problem=str(error).strip().splitlines()[-1])
            continue
        seconds = made.seconds
        work = made.setup.workload
        gate = GATE_SECONDS_PER_TOKEN * work.sequences * work.max_response
        importance, without = seconds.oar, seconds.log_prob + seconds.update
        yield Projected(
            gpus,
            mode,
            work.sequences,
            made.setup.layout.dp,
            {
                "generation": seconds.generation,
                "log_prob": seconds.log_prob,
                "importance": importance,
                "gate": gate,
                "update": seconds.update,
                "reference": seconds.reference,
                "weight_sync": seconds.weight_sync,
            },
            seconds.ratio_to_grpo * (1 + gate / seconds.total),
            1 + (importance + gate) / without,
            made.verdict,
        )


def _read(config: Any, key: str) -> int:
    for part in key.split("."):
        config = config[part]
    return int(config)


def tables(projection: Projection) -> list[Table]:
    """For the terminal: one a mode."""
    shown = []
    for mode in MODES:
        table = Table(title=f"PROJECTED, not measured: {projection.recipe.name}, {projection.gpu}, {mode}")
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for row in projection.rows:
            if row.mode == mode:
                table.add_row(*_cells(row))
        shown.append(table)
    return shown


def _cells(row: Projected) -> list[str]:
    if row.seconds is None or row.step_ratio is None or row.measured_ratio is None:
        return [str(row.gpus), *[""] * (len(_COLUMNS) - 2), row.problem or ""]
    phases = [f"{row.seconds[name]:.3g}" for name in ("generation", "log_prob", "importance", "gate", "update")]
    ratios = [f"{row.step_ratio:.3f}", f"{row.measured_ratio:.3f}"]
    return [str(row.gpus), str(row.sequences), str(row.data), *phases, *ratios, row.memory]


def markdown(projections: Sequence[Projection], command: str) -> str:
    """A page that nobody can take for a measurement."""
    lines = ["# PROJECTION of scaling to many GPUs", "", "```", command, "```", ""]
    lines += [
        "**Nothing on this page was measured.** It is what the planner (`oar plan`) computes from datasheets and stated "
        "efficiencies. Trust the ratios more than the seconds, and measure on your cluster before you rely on either "
        "([SCALING.md](SCALING.md)).",
        "",
        "weak: the batch grows with the GPUs, from the recipe's own, beyond what anybody trains with. strong: the recipe's "
        "batch on more GPUs. The last ratio is of what `oar bench scaling` measures.",
        "",
        f"The gate is computed by verl's driver alone, {GATE_SECONDS_PER_TOKEN * 1e9:.0f} ns a token on one core (that was "
        "measured), padding included: it grows with the batch and does not shrink with the GPUs. The planner counts "
        "bandwidth of links, not their latency: a few seconds on hundreds of GPUs are too few, for GRPO as for OAR.",
        "",
    ]
    for projection in projections:
        for mode in MODES:
            lines += [f"## {projection.recipe.name}, {projection.gpu}, {mode}", ""]
            cells = [_cells(row) for row in projection.rows if row.mode == mode]
            lines += [f"| {' | '.join(row)} |" for row in (_COLUMNS, ["---"] * len(_COLUMNS), *cells)]
            lines.append("")
        lines += [*(f"- {line}" for line in projection.assumptions), ""]
    return "\n".join(lines)


def to_json(projections: Sequence[Projection], command: str) -> str:
    """The same figures."""
    content = [{**asdict(projection), "recipe": projection.recipe.name} for projection in projections]
    return json.dumps({"projection": True, "command": command, "recipes": content}, indent=1)
