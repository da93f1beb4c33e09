"""What GRPO's and OAR's steps of a recipe would take on 8 to 512 GPUs, by the planner. Nothing here is measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from benchmarks.report import Progress, Report, Table
from benchmarks.workload import DEFAULT
from oar_plugin.config import PREFIX
from oar_plugin.runs.plan.known import ASSUMED, EXPECTED, PlanError, choose_gpu
from oar_plugin.runs.plan.planning import ACTOR, GATE, GENERATION, IMPORTANCE, LOG_PROB, UPDATE, Plan
from oar_plugin.runs.recipe import compose_recipe, find_recipe

SIZES = (8, 16, 32, 64, 128, 256, 512)
MODES = ("weak", "strong")
GPU = choose_gpu("H100-80")
PHASES = (GENERATION, LOG_PROB, IMPORTANCE, GATE, UPDATE)
OF_ENGINES: dict[str, Any] = {"importance": "oar_p", "perturbation.span": 8, "perturbation.backend": "rollout"}
SHOWN = (8, 64, 512)
WAYS: dict[str, dict[str, Any]] = {
    DEFAULT: {"importance": DEFAULT},
    "fisher, 1 in 8 scored": {"importance": DEFAULT, "amortize.share": 1 / 8},
    "oar_p, predicted (default)": {},
    "oar_p, spans of 8 on the engines": OF_ENGINES,
    **{f"oar_p, spans of 8, 1 in {n} scored": {**OF_ENGINES, "amortize.share": 1 / n} for n in (20, 300)},
}
"""Keys of `algorithm.oar`, and their values."""
STEP, MEASURED = "step: OAR / GRPO", "measured part: OAR / GRPO"

NOTES = (
    "**Nothing on this page was measured.** It is what the planner (`oar plan`) computes from datasheets and assumed "
    "efficiencies. Trust the ratios more than the seconds, and measure on your cluster before you rely on either.",
    "weak: the batch grows with the GPUs, from the recipe's own, beyond what anybody trains with. strong: the recipe's batch.",
    "The measured part is what `python -m benchmarks scaling` measures: log-probs and update. The gate is "
    f"{ASSUMED.gate_s * 1e9:.0f} ns a token on one core, divided by the data-parallel ranks, which weigh their own "
    f"responses, and {ASSUMED.driver_s * 1e9:.0f} ns a token for verl's driver, which multiplies (both were measured: "
    "`driver.md`).",
    "The planner counts bandwidth of links, not their latency: a few seconds on hundreds of GPUs are too few, for both.",
    f"Assumed: responses half as long as allowed, half of them scored; of the datasheet {EXPECTED.training:.0%} of the "
    f"arithmetic in training, {EXPECTED.inference:.0%} in inference, {EXPECTED.decoding:.0%} of the memory's bandwidth, "
    f"{EXPECTED.link:.0%} of the links.",
)


def measure(recipes: Sequence[str], progress: Progress) -> Report:
    """Plan each recipe (a name or a folder), weak and strong, at each size.

    Raises:
        ValueError: there is no such recipe, or it cannot run even as it is.
    """
    sizes, times = ("GPUs", "sequences", "DP"), [f"{phase.removeprefix('OAR: ')} s" for phase in PHASES]
    columns = (*sizes, *times, STEP, MEASURED, "memory")
    made: dict[str, list[dict[str, Any]]] = {}
    tables, problems, ways = [], dict[str, None](), list[list[str]]()  # problems are the same in both modes
    for done, folder in enumerate(map(find_recipe, recipes)):
        progress(folder.name, done, len(recipes))
        config = compose_recipe(folder, "oar")
        for mode in MODES:
            rows = [planned(config, mode, gpus) for gpus in SIZES]
            cells = [
                [str(row[name]) for name in ("gpus", "sequences", "data")]
                + [f"{row['seconds'].get(phase, 0.0):.3g}" for phase in PHASES]
                + [f"{row[STEP]:.3f}", f"{row[MEASURED]:.3f}", row["memory"]]
                for row in rows
                if "problem" not in row
            ]
            problems |= {f"{folder.name}, {x['gpus']} GPUs: {x['problem']}.": None for x in rows if "problem" in x}
            tables.append(Table(f"PROJECTED, not measured: {folder.name}, {GPU.name}, {mode}", columns, cells))
            made.setdefault(folder.name, []).extend(rows)
        for way, keys in WAYS.items():
            found = [planned(config, "strong", gpus, keys) for gpus in SHOWN]
            ways.append([folder.name, way, *map(_ratio, found)])
    title = f"PROJECTED, not measured: OAR / GRPO of a whole step, {GPU.name}, strong"
    tables.append(Table(title, ["recipe", "importance", *(f"{gpus} GPUs" for gpus in SHOWN)], ways))
    runs = {"projection": True, "recipes": made}
    return Report("PROJECTION of scaling to many GPUs", "scaling_projection", tables, [*NOTES, *problems], runs)


def _ratio(row: dict[str, Any]) -> str:
    fits = row.get("memory") == "fits"
    return f"{row[STEP]:.3f}{'' if fits else ', ' + row['memory']}" if STEP in row else ""


def planned(config: DictConfig, mode: str, gpus: int, oar: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A recipe's plan on so many GPUs, or why it cannot run so. `oar`: other values of keys of `algorithm.oar`."""
    own = config.trainer.nnodes * config.trainer.n_gpus_per_node
    factor = gpus / own if mode == "weak" else 1.0
    batch = {"data.train_batch_size": config.data.train_batch_size}
    batch[f"{ACTOR}.ppo_mini_batch_size"] = config.actor_rollout_ref.actor.ppo_mini_batch_size
    overrides = {key: max(1, round(size * factor)) for key, size in batch.items()}
    overrides["trainer.n_gpus_per_node"] = per_node = min(config.trainer.n_gpus_per_node, gpus)
    overrides["trainer.nnodes"] = gpus // per_node
    changed = config.copy()
    overrides |= {f"{PREFIX}.{key}": value for key, value in (oar or {}).items()}
    for key, size in overrides.items():
        OmegaConf.update(changed, key, size)
    row: dict[str, Any] = {"mode": mode, "gpus": gpus}
    try:
        plan = Plan(changed, GPU)
    except PlanError as error:
        return row | {"problem": str(error).splitlines()[-1]}
    row |= {"sequences": plan.sequences, "data": plan.dp, "memory": plan.verdict, "seconds": plan.seconds}
    return row | {STEP: plan.to_grpo, MEASURED: 1 + plan.oar / (plan.seconds[LOG_PROB] + plan.seconds[UPDATE])}
