"""What GRPO's and OAR's steps of a recipe would take on 8 to 512 GPUs, by the planner. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from benchmarks.machine import describe_machine, load_average
from benchmarks.report import COLOURS, Report, Table, subplots
from benchmarks.study import Progress
from oar_plugin.hosts.verl.recipe import compose_recipe, find_recipe
from oar_plugin.plan import Plan, PlanError, choose_gpu, on_gpus, with_overrides
from oar_plugin.plan.hardware import EXPECTED, GATE_SECONDS_PER_TOKEN, Gpu
from oar_plugin.plan.seconds import GATE, GENERATION, IMPORTANCE, LOG_PROB, UPDATE
from oar_plugin.plan.setup import ACTOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (8, 16, 32, 64, 128, 256, 512)
MODES = ("weak", "strong")
PHASES = (GENERATION, LOG_PROB, IMPORTANCE, GATE, UPDATE)
STEP, MEASURED = "step: OAR / GRPO", "measured part: OAR / GRPO"

Row = dict[str, Any]


def measure(settings: Any, progress: Progress) -> Report:
    """Plan each recipe of `settings.project` (names or folders) on `settings.project_gpu`, weak and strong, at each size.

    Raises:
        ValueError: there is no such recipe or GPU, or a recipe cannot run even as it is.
    """
    gpu = choose_gpu(settings.project_gpu)
    rows: dict[str, list[Row]] = {}
    for done, name in enumerate(settings.project):
        progress(name, done, len(settings.project))
        config = compose_recipe(find_recipe(name), "oar")
        Plan(config, gpu)
        rows[find_recipe(name).name] = [*project(config, gpu)]
    times = [f"{phase.removeprefix('OAR: ')} s" for phase in PHASES]
    columns = ["GPUs", "sequences", "DP", *times, STEP, MEASURED, "memory"]
    tables, problems = [], dict[str, None]()
    for recipe, made in rows.items():
        problems |= {f"{recipe}, {row['gpus']} GPUs: {row['problem']}.": None for row in made if "problem" in row}
        for mode in MODES:
            cells = [_cells(row) for row in made if row["mode"] == mode and "problem" not in row]
            tables.append(Table(f"PROJECTED, not measured: {recipe}, {gpu.name}, {mode}", columns, cells))
    return Report(
        title="PROJECTION of scaling to many GPUs",
        stem="scaling_projection",
        command="",
        machine=describe_machine(torch.device("cpu")) | {"load_average_after": load_average()},
        tables=tables,
        notes=[*_NOTES, *problems],
        runs={"projection": True, "recipes": rows},
        figure=lambda: _draw(rows),
    )


def project(config: DictConfig, gpu: Gpu, sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """A recipe's plan in both modes at each size, or why it cannot run so."""
    own = int(config.trainer.nnodes * config.trainer.n_gpus_per_node)
    batch = {"data.train_batch_size": config.data.train_batch_size}
    batch[f"{ACTOR}.ppo_mini_batch_size"] = config.actor_rollout_ref.actor.ppo_mini_batch_size
    for mode in MODES:
        for gpus in sizes:
            factor = gpus / own if mode == "weak" else 1.0
            overrides = {key: max(1, round(size * factor)) for key, size in batch.items()}
            row: Row = {"mode": mode, "gpus": gpus}
            try:
                made = Plan(on_gpus(with_overrides(config, overrides), gpus), gpu)
            except PlanError as error:
                yield row | {"problem": str(error).splitlines()[-1]}
                continue
            measured = made.seconds[LOG_PROB] + made.seconds[UPDATE]
            ratios = {STEP: made.to_grpo, MEASURED: 1 + made.oar / measured}
            row |= {"sequences": made.setup.sequences, "data": made.setup.dp, "memory": made.verdict}
            yield row | {"seconds": made.seconds, **ratios}


def _cells(row: Row) -> list[str]:
    seconds = [f"{row['seconds'].get(phase, 0.0):.3g}" for phase in PHASES]
    ratios = [f"{row[STEP]:.3f}", f"{row[MEASURED]:.3f}"]
    return [str(row["gpus"]), str(row["sequences"]), str(row["data"]), *seconds, *ratios, row["memory"]]


def _draw(rows: dict[str, list[Row]]) -> Figure:
    figure, panels = subplots(1, 2, sharey=True)
    for panel, mode in zip(panels, MODES, strict=True):
        for (recipe, made), colour in zip(rows.items(), COLOURS * len(rows), strict=False):
            points = [(row["gpus"], row[STEP]) for row in made if row["mode"] == mode and STEP in row]
            panel.plot(*zip(*points, strict=True), "o--", color=colour, label=recipe) if points else None
        panel.set(title=f"{mode}, projected", xlabel="GPUs", xscale="log")
        panel.set_xticks(SIZES, map(str, SIZES))
        panel.minorticks_off()
    panels[0].set_ylabel(STEP)
    panels[0].legend(frameon=False)
    return figure


_NOTES = (
    "**Nothing on this page was measured.** It is what the planner (`oar plan`) computes from datasheets and assumed "
    "efficiencies. Trust the ratios more than the seconds, and measure on your cluster before you rely on either.",
    "weak: the batch grows with the GPUs, from the recipe's own, beyond what anybody trains with. strong: the recipe's batch.",
    "The measured part is what `python -m benchmarks scaling` measures: log-probs and update. The gate is "
    f"{GATE_SECONDS_PER_TOKEN * 1e9:.0f} ns a token on one core of verl's driver (that was measured): it grows with the batch "
    "and does not shrink with the GPUs.",
    "The planner counts bandwidth of links, not their latency: a few seconds on hundreds of GPUs are too few, for both.",
    f"Assumed: responses half as long as allowed, half of them scored; of the datasheet {EXPECTED.training:.0%} of the "
    f"arithmetic in training, {EXPECTED.inference:.0%} in inference, {EXPECTED.decoding:.0%} of the memory's bandwidth, "
    f"{EXPECTED.link:.0%} of the links.",
)
