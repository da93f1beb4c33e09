"""Write every measured figure into the documents: `python -m docs.figures`.

A block of a document starts with the line `<!-- from NAME -->` and ends with the line `<!-- end -->`. Between them stands what
the function NAME of `FIGURES` returns. The functions read committed files only.
"""

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- from (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GAIN = "minus GRPO's (95 %)"


@cache
def load(stem: str) -> Any:
    return json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table. `head` has the titles, separated by `|`."""
    titles = head.split("|")
    lines = [f"|{head}|", "|---" * len(titles) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def rows_of(stem: str, start: str) -> list[dict[str, str]]:
    """The rows of the table whose title starts so."""
    (rows,) = (rows for title, rows in load(stem)["tables"].items() if title.startswith(start))
    return list(rows)


# ---- fidelity and marks


def replacements() -> str:
    """Exact OAR-P by what stands in the masked place, against the mean of the other kinds."""
    shown = {
        "pad": "padding token (ends this model's turns)",
        "separator": "separator of documents",
        "line break": "line break",
        "sampled": "the model's draw (`sampled`)",
        "batch": "token of another response",
        "position": "**no copies, position**",
    }
    of = {row["score"]: row for row in rows_of("labels_smollm2_cpu", "What stands in the masked place")}
    columns = "top 20 %", "beyond position", "mean score"
    return table(
        " in the masked place | overlap with the others' mean | beyond position | mean score ",
        [[label, *(of[name][column] for column in columns)] for name, label in shown.items()],
    )


REAL = "fidelity_smollm2_cpu"
ESTIMATORS = {
    "oar_p": "`oar_p` (exact)",
    "oar_p, 1 in 8 scored": "predicted `oar_p`, 1 in 8 scored",
    "position": "**position: the later, the more**",
    "oar_p sampled": "`oar_p`, sampled replacements",
    "fisher, 1 in 8 scored": "predicted `fisher`, 1 in 8 scored",
    "fisher 1": "**`fisher`**",
    "grail 1": "`grail`",
    "oar_g 1": "`oar_g` (published)",
    "random": "random",
    "entropy": "`entropy`",
}


def estimators(stem: str) -> dict[str, dict[str, str]]:
    """Those that are shown, by label, in the page's order: the largest overlap first."""
    rows = rows_of(stem, "Estimators against exact OAR-P")
    return {ESTIMATORS[row["estimator"]]: row for row in rows if row["estimator"] in ESTIMATORS}


def passes(row: dict[str, str]) -> str:
    return f"{float(row['forward']) + float(row['backward']):.1f}"


def fidelity_real() -> str:
    of, lines = estimators(REAL), []
    rows = of["`oar_p` (exact)"]["responses"]
    for label, row in of.items():
        few = "" if row["responses"] == rows else f" ({row['responses']} responses)"
        lines.append([label + few, row["top 20 %"], row["beyond position"], passes(row)])
    return table(" importance | overlap | beyond position | passes ", lines)


# ---- learning


JUDGED = {
    "oracle: the wrong results are known": "blame",
    "`fisher`, `two_level`": "fisher",
    "control: random": "random",
}
TASKS = ("chain", "parallel", "chain_quiet")


def against_grpo(stem: str, task: str) -> dict[str, Any]:
    """Method -> its row in the comparison with GRPO on a task."""
    return {row["method"]: row for row in rows_of(stem, f"{task}: mean reward over the run, against GRPO")}


def ahead(stem: str, tasks: Iterable[str], method: str) -> str:
    """In how many pairs of model and seed a method is ahead of GRPO: `7 of 12`."""
    counts = [against_grpo(stem, task)[method]["ahead in"].split(" of ") for task in tasks]
    return " of ".join(str(sum(int(count[part]) for count in counts)) for part in (0, 1))


def gained(row: dict[str, str]) -> str:
    """The gain of a row of `against_grpo`; bold where the method can be told apart from GRPO."""
    return f"**{row[GAIN]}**" if row["verdict"] in ("**faster**", "**slower**") else row[GAIN]


def trainings(stem: str) -> list[dict[str, Any]]:
    """The judged trainings of a page."""
    of = load(stem)["runs"]["judged_on"]
    return [dict(zip(of["columns"], row, strict=True)) for row in of["data"]]


def judged(stem: str, name: str) -> tuple[Any, Any]:
    """The plan of that name, and the judged trainings of its page as a data frame."""
    import pandas as pd

    from benchmarks.learning.plan import PLANS, read_plan

    return read_plan(PLANS / f"{name}.yaml"), pd.DataFrame(trainings(stem))


def learning() -> str:
    stem = "learning_judged"
    rows = []
    for label, method in JUDGED.items():
        cells = [against_grpo(stem, task)[method] for task in TASKS]
        rows.append([label, *map(gained, cells), ahead(stem, TASKS, method)])
    return table(" credit | `chain` | `parallel` | `chain_quiet` | pairs ahead ", rows)


def collapse() -> str:
    """The one training of `chain_quiet` that collapsed, and the gains without its pair."""
    from benchmarks.learning.comparison import gain

    plan, runs = judged("learning_judged", "judged")
    (fallen,) = runs[(runs["task"] == "chain_quiet") & (runs["held_out"] < 0.6)].to_dict("records")
    others = runs[(runs["warm"] != fallen["warm"]) | (runs["seed"] != fallen["seed"])]
    shown = (f"`{name}` {gain(plan, others, 'chain_quiet', name)[0].value:+.3f}" for name in ("fisher", "random"))
    return (
        f"On `chain_quiet` one training of `{fallen['method']}` collapsed, which raises every difference there. Without its "
        f"pair: {', '.join(shown)}.\n"
    )


RIVALS = {
    "oracle: the wrong results are known": "blame",
    "`fisher`, `two_level`": "fisher",
    "`grail`, `z_score` (GRAIL)": "grail",
    "`entropy`, `top_only` (the 80/20 rule)": "top_only",
    "control: `fisher`, the gate turned round": "inverted",
    "control: random": "random",
}


def rivals() -> str:
    stem, tasks = "learning_rivals", {"parallel_2": "`parallel`, two steps", "chain_2": "`chain`, two steps"}

    def cells(name: str, task: str) -> list[str]:
        row = against_grpo(stem, task)[name]
        (cost,) = (row for row in rows_of(stem, f"{task}: gain at equal cost") if row["method"] == name)
        return [gained(row), cost["at equal FLOPs"].split()[0]]

    rows = [[label, *(cell for task in tasks for cell in cells(name, task))] for label, name in RIVALS.items()]
    head = " credit |" + "|".join(f" {title} | equal FLOPs " for title in tasks.values())
    return table(head, rows)


LABELS = {
    "`oar_p`, 123 labels (default)": "oar_p/123",
    "`oar_p`, 31 labels": "oar_p/31",
    "`fisher`, 1 in 8": "fisher/8",
    "`fisher` of all": "fisher",
}
IN_STEPS = {
    "parallel_2": "`parallel`, two steps",
    "chain_2": "`chain`, two steps",
    "parallel": "`parallel`, four",
    "chain": "`chain`, four",
}
TWO, FOUR = list(IN_STEPS)[:2], list(IN_STEPS)[2:]
FITTED = "predicted, last layer: 4,096 labels, 8 of a response"


def labels_learned() -> str:
    """Gains at equal steps, and pairs ahead."""
    rows = []
    for label, name in LABELS.items():
        of = [against_grpo("learning_labels", task)[name] for task in IN_STEPS]
        rows.append([label, *map(gained, of), ahead("learning_labels", IN_STEPS, name)])
    return table(f" credit | {' | '.join(IN_STEPS.values())} | pairs ahead ", rows)


def labels_at_7b() -> str:
    """Gains of predicted `oar_p` at equal FLOPs if it cost what it was counted to cost a 7B model."""
    rows = (rows_of("learning_labels", f"{task}: gain at equal") for task in IN_STEPS)
    gains = [row["at the costs of 7B"] for task in rows for row in task if row["method"] == "oar_p/123"]
    return f"{'; '.join(gains)}.\n"


def fitted_with_draws() -> dict[str, dict[str, str]]:
    """Regressions on draws of the model's own, and what stands beside them, against the mean of the other replacements."""
    rows = rows_of("labels_smollm2_cpu", "Against the mean of the kinds")
    return {row["credit"]: row for row in rows if row["fitted with"].endswith("sampled")}


def labels_fidelity() -> str:
    shown = {
        "predicted `oar_p`, 4,096 labels, 8 units of a response": FITTED,
        "the same from a middle layer": FITTED.replace("last", "middle"),
        "predicted `oar_p`, 8,195 labels, 16 units": "predicted, last layer: 8,195 labels, 16 of a response",
        "`fisher`": "fisher",
        "**position: the later, the more**": "position",
    }
    columns, of = ("top 20 %", "beyond position", "beyond position, minus `fisher`"), fitted_with_draws()
    lines = ([label, *(of[name][column] for column in columns)] for label, name in shown.items())
    return table(" scores | overlap | beyond position | minus `fisher` ", lines)


def labels_units() -> str:
    """In long texts, predictions beyond position by the length of the units that they were fitted with."""
    rows = rows_of("labels_smollm2_cpu", "Predictions in long texts")
    found = {(row["labels"], row["tokens of a unit"]): row["single tokens, beyond position"] for row in rows}
    shown = {"float32": "float32", "bfloat16": "bf16, behind a cached prefix", "bfloat16, whole": "bf16, whole copies"}
    lines = ([label, *(found[kind, span] for span in ("1", "4", "8", "16"))] for kind, label in shown.items())
    return table(" labels in | units of 1 token | 4 | 8 | 16 ", lines)


def labels_rule() -> str:
    """Each condition on the default, with what came."""
    four = [against_grpo("learning_labels", task)["oar_p/123"]["not trimmed"] for task in FOUR]
    added = {row["choice"]: row["slowest, balanced and filled up"] for row in rows_of("count", "Chosen responses")}
    pairs = [ahead("learning_labels", TWO, name) for name in ("oar_p/123", "fisher", "position")]
    beyond = [fitted_with_draws()[name]["beyond position"] for name in (FITTED, "fisher")]
    rows = [
        ["two steps: ahead in as many pairs as `fisher`, less four, and more than position", "; ".join(pairs)],
        ["four steps: upper end of all models' interval at least 0", ", ".join(four)],
        ["SmolLM2, beyond position: above `fisher`", "; ".join(beyond)],
        ["7B: adds at most 3 % on the slowest of eight ranks", added["oar_p, 1 in 40 x 8"].split(": ")[1]],
    ]
    return table(" condition | came ", rows)


def in_sentences() -> str:
    of = against_grpo("learning_sentences", "sentences")
    overlap = estimators("sentences/fidelity_cpu")["**`fisher`**"]["top 20 %"]
    return (
        f"Overlap of `fisher` with exact OAR-P: {overlap}. Mean reward of GRPO: {of['grpo']['mean reward']}; minus GRPO's: "
        f"`fisher` {of['fisher'][GAIN]}, the oracle {of['blame'][GAIN]}.\n"
    )


def confirmation() -> str:
    shares = {"parallel_2": "40 %", "parallel_2_rare": "20 %"}
    of = {task: against_grpo("learning_success", task) for task in shares}
    columns = [GAIN, "ahead in", "p"]
    rows = [
        [share, *(of[task]["fisher"][name] for name in columns), of[task]["blame"][GAIN]]
        for task, share in shares.items()
    ]
    return table(" share of right demonstrations | `fisher` minus GRPO (95 %) | pairs ahead | p | oracle ", rows)


# ---- cost


def run_cost() -> str:
    def ratio(page: str) -> tuple[str, str]:
        (title, rows), *_ = load(page)["tables"].items()
        return rows[0]["median (95 %)"].replace("(", "(95 %: "), title.removeprefix("OAR / GRPO, ")

    (default, pairs), (fisher, others) = ratio("run_cpu"), ratio("run_fisher_cpu")
    return (
        f"On a CPU, with half of the responses needing credit, a step took {default} times as long as a step with GRPO "
        f"({pairs}, 128 responses). With `fisher` of all: {fisher} ({others}, 16 responses).\n"
    )


def projection() -> str:
    eight = load("scaling_projection")["runs"]["recipes"]["qwen2_5_7b_math"][0]
    ratio = eight["step: OAR / GRPO"]
    return f"With a 7B model on {eight['gpus']} H100s, a step with OAR takes {ratio:.2f} times as long as a step with GRPO.\n"


def projection_sizes() -> str:
    """A step of a 7B model: OAR / GRPO, on more and more GPUs."""
    title = "PROJECTED, not measured: qwen2_5_7b_math, NVIDIA H100 SXM 80 GB, "
    weak, strong = (
        {row["GPUs"]: float(row["step: OAR / GRPO"]) for row in load("scaling_projection")["tables"][title + kind]}
        for kind in ("weak", "strong")
    )
    rows = ([gpus, f"{weak[gpus]:.2f}", f"{strong[gpus]:.2f}"] for gpus in ("8", "64", "512"))
    return table(" GPUs | the batch grows with the GPUs | the same batch ", rows)


def scaling() -> str:
    of = {target["name"]: target for target in load("scaling_cpu")["targets"]}
    kinds = ("data, weak", "data, strong", "tensor", "pipeline", "sequence", "context")

    def cell(kind: str, processes: int) -> str:
        target = of[f"{kind}: {processes} against 1"]
        return f"{target['value']:.2f} ({target['low']:.2f} to {target['high']:.2f})"

    rows = ([str(processes), *(cell(kind, processes) for kind in kinds)] for processes in (2, 4))
    head = " processes | data, weak | data, strong | tensor | pipeline | sequence (Ulysses) | context "
    return table(head, rows)


def copies() -> str:
    rows = {
        "a GRPO step": "g",
        "published procedure: whole copies, all logits": "p",
        "exact, behind a cached prefix": "l",
        "exact, on the engine": "o",
        "spans of 8, on the engine": "o8",
    }

    def seconds(size: str, length: int, letter: str) -> str:
        lengths = load(f"perturbation_cpu_{size}")["lengths"]
        (candidates,) = (one["candidates"] for one in lengths if one["response_length"] == length)
        (median,) = (one["median_seconds"] for one in candidates if one["letter"] == letter)
        return f"{median:.2f}" if median < 10 else f"{median:.1f}"

    columns = (("10m", 128), ("10m", 512), ("1m", 1024))
    head = " seconds per response | 11M, 128 tokens | 11M, 512 tokens | 1M, 1024 tokens "
    return table(head, ([label, *(seconds(*column, letter) for column in columns)] for label, letter in rows.items()))


def copies_range() -> str:
    lengths = [one for size in ("10m", "1m", "0.1b") for one in load(f"perturbation_cpu_{size}")["lengths"]]

    def among(*formulas: str) -> str:
        values = [target["value"] for one in lengths for target in one["targets"] if target["formula"] in formulas]
        return f"{min(values):.2f} to {max(values):.2f}"

    return (
        f"In {len(lengths)} sizes the published procedure takes {among('p / o')} times as long as exact scores on the engine.\n"
        f"While copies run there, generation has {among('t/s(0.15) / t/s(alone)')} of its speed; without a limit\n"
        f"(`share_while_generating=1`) {among('t/s(1) / t/s(alone)')}.\n"
    )


# ---- evaluation


def errors() -> str:
    """Worst-case errors in percentage points, by formula."""
    sets = {"gsm8k": 1319, "olympiadbench": 674, "math500": 500, "minerva": 272, "amc23": 40, "aime24, aime25": 30}
    five = [sets[name] for name in ("math500", "aime24, aime25", "amc23", "minerva", "olympiadbench")]

    def of(problems: int) -> tuple[float, float]:
        return 50 / math.sqrt(problems), 100 / math.sqrt(2 * 32 * problems)

    rows = [[name, str(problems), *(f"{error:.1f}" for error in of(problems))] for name, problems in sets.items()]
    mean = [math.hypot(*column) / 5 for column in zip(*map(of, five), strict=True)]
    rows.append(["average of the default five", str(sum(five)), *(f"{error:.1f}" for error in mean)])
    return table(" set | problems | one checkpoint, at most | difference at K = 32, at most ", rows)


def architectures() -> str:
    """How many causal LMs of transformers have right scores; which are refused, by reason, and which were not built."""
    seen = json.loads((ROOT / "tests" / "passes" / "architectures.json").read_text(encoding="utf-8"))
    classes = seen["architectures"].items()
    right = sum(one.get("copies") == "equal" for _, one in classes)
    unbuilt = [f"`{name}`" for name, one in classes if "not built" in one]
    refused: dict[str, list[str]] = {}
    for name, one in classes:
        if "refused" in one.get("copies", ""):
            why = one["copies"].removeprefix("refused: ")
            where = "`oar_p` only: " if one["gradient"] == "equal" else ""
            refused.setdefault(where + why, []).append(f"`{name}`")
    return (
        f"Of {len(classes)} classes of transformers {seen['transformers']}, {right} have right scores.\n\n"
        + table(" refused | why ", ([", ".join(names), why] for why, names in refused.items()))
        + "\n"
        + textwrap.fill(f"Not built: {', '.join(unbuilt)}.", 128)
        + "\n"
    )


def gpu_engines() -> str:
    """The checks of importance in verl's engines. Layouts with the same figures share a row."""
    layouts: dict[tuple[str, ...], list[str]] = {}
    for one in load("gpu_suite")["results"]:
        if found := re.fullmatch(r"importance_equals_a_plain_models\[fsdp: (.*), 1\]", one["check"]):
            figures = tuple(one["figures"][name].replace("of the ", "of ") for name in ("fisher", "oar_p"))
            layouts.setdefault(figures, []).append(found[1])
    return table(" layout | `fisher` | `oar_p` ", ([", ".join(names), *figures] for figures, names in layouts.items()))


def gpu_peaks() -> str:
    """Peak memory of a step's parts."""
    rows = []
    for one in load("gpu_suite")["results"]:
        if found := re.fullmatch(r"importance_does_not_raise_the_peak_of_a_step\[(.*) chunked\]", one["check"]):
            names = "update", "log-probs", "fisher"
            rows.append([found[1], *(one["figures"][name].removesuffix(" MiB") for name in names)])
    return table(" layout | update | log-probs | log-probs with `fisher` ", rows)


def first_run() -> str:
    """The recipes for a first run, as `oar plan` projects them."""
    from oar_plugin.runs.plan.known import choose_gpu
    from oar_plugin.runs.plan.planning import Plan, in_gib
    from oar_plugin.runs.recipe import compose_recipe, find_recipe

    rows = []
    recipes = {
        "qwen2_5_7b_math": ("H100-80",),
        "qwen2_5_0_5b_gsm8k": ("L4-24", "4090-24"),
        "qwen2_5_1_5b_lora": ("4090-24",),
    }
    for name, key in ((name, key) for name, keys in recipes.items() for key in keys):
        made = Plan(config := compose_recipe(find_recipe(name)), choose_gpu(key))
        hours, least, most = made.hours or (math.nan,) * 3
        gpus = f"{config.trainer.n_gpus_per_node} {made.gpu.name}"
        left = f"{in_gib(made.headroom, 0)} of {made.gpu.memory_gib:.0f}"
        time = f"{hours:.1f} ({least:.1f} to {most:.1f})"
        rows.append([f"`{name}`", gpus, left, f"{made.step:.0f}", time, f"{made.to_grpo:.2f}"])
    return table(" recipe | GPUs | GiB left | seconds per step | hours | OAR / GRPO ", rows)


FIGURES: dict[str, Callable[[], str]] = {
    figure.__name__: figure
    for figure in (
        replacements, fidelity_real, learning, collapse,
        rivals, labels_learned, labels_at_7b, labels_fidelity,
        labels_units, labels_rule, in_sentences, confirmation,
        run_cost, projection, projection_sizes, scaling, copies, copies_range, errors,
        architectures, gpu_engines, gpu_peaks, first_run,
    )
}  # fmt: skip


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def written(text: str) -> str:
    """A document with every block as its function returns it."""
    return BLOCK.sub(lambda block: block[1] + FIGURES[block[2]]() + block[3], text)


if __name__ == "__main__":
    for path in documents():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
