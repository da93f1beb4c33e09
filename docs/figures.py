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
        "pad": "padding token, which ends this model's turns",
        "separator": "separator of documents",
        "line break": "line break",
        "sampled": "a draw from the model's prediction (`sampled`)",
        "batch": "a reasoning token of another response",
        "position": "**no copies: the later, the more**",
    }
    of = {row["score"]: row for row in rows_of("labels_smollm2_cpu", "What stands in the masked place")}
    columns = "top 20 %", "beyond position", "top 20 % of position", "mean score"
    return table(
        " in the masked place | top 20 % of the others' mean | beyond position | top 20 % of position | mean score ",
        [[label, *(of[name][column] for column in columns)] for name, label in shown.items()],
    )


REAL, TOYS = "fidelity_smollm2_cpu", "fidelity_cpu"
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


def fidelity() -> str:
    columns = "top 20 %", "Spearman", "causal recall"
    head = " importance | overlap | Spearman | causal tokens recalled | passes "
    count = f"{load(TOYS)['notes'][0].split(';')[0]} of {len(load(TOYS)['runs']['sources'])} models."
    lines = ([label, *(row[column] for column in columns), passes(row)] for label, row in estimators(TOYS).items())
    return f"{table(head, lines)}\n{count}\n"


def fidelity_real() -> str:
    lines = []
    for label, row in estimators(REAL).items():
        shown = [row[column] for column in ("top 20 %", "minus fisher 1", "beyond position", "responses")]
        lines.append([label, *shown, passes(row)])
    return table(" importance | overlap | minus `fisher` | beyond position | responses | passes ", lines)


def predicted_real() -> str:
    """Predicted scores beside what they are predicted from."""
    rows = {row["estimator"]: row for row in rows_of(REAL, "Estimators against exact OAR-P")}
    shown = {name: f"`{name.replace(', ', '`, ')}" for name in rows if name.endswith("scored")}
    others = "position", "control: place and doubt", "fisher 1", "oar_g 1"
    shown |= {name: ESTIMATORS.get(name, "control: regression without hidden states") for name in others}
    lines = [
        [
            label,
            rows[name]["top 20 %"],
            rows[name]["beyond position"],
            passes(rows[name]),
        ]
        for name, label in shown.items()
    ]
    return table(" scores | overlap with exact `oar_p` | beyond position | passes ", lines)


def people() -> str:
    (rows,) = load("people_smollm2_cpu")["tables"].values()
    head = " credit | AUC | minus AUC before the step | top token in step "
    columns = "credit", "AUC", "difference", "top token in step"
    left = "decision", "hybrid", "span_masking"
    hidden = "control", "(1 - p)", "random", *left  # chance is beside them
    shown = [row for row in rows if not any(part in row["credit"] for part in hidden)]
    return table(head, ([row[column] for column in columns] for row in shown))


def real_reached() -> str:
    return _whole(rows_of("real_cpu", "Reward and accuracy"))


def real_steps() -> str:
    names = "OAR's part", "whole step", "memory"
    return _whole([row for row in rows_of("real_cpu", "Cost of a step") if row["what"].startswith(names)])


def _whole(rows: list[dict[str, str]]) -> str:
    return table(f" {' | '.join(rows[0])} ", (row.values() for row in rows))


def marks() -> str:
    wrong, first, results, *_ = load("marks_cpu")["tables"]
    names = {
        "`fisher`": "fisher",
        "`fisher` x doubt": "fisher x (1 - p)",
        "`oar_g` (published)": "oar_g",
        "surprisal": "surprisal",
        "random": "random",
    }
    tasks = ("chain", "parallel", "lookup")
    of = [{row["credit"]: row for row in load("marks_cpu")["tables"][title]} for title in (results, wrong, first)]
    rows = ([label, *(rows[name][task].split()[0] for rows in of for task in tasks)] for label, name in names.items())
    head = " credit | results: `chain` | `parallel` | `lookup` | wrong results: `chain` | `parallel` | `lookup` "
    return table(head + "| first error: `chain` | `parallel` | `lookup` ", rows)


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
    rows = [["GRPO's own mean reward", *(against_grpo(stem, task)["grpo"]["mean reward"] for task in TASKS), ""]]
    for label, method in JUDGED.items():
        cells = [against_grpo(stem, task)[method] for task in TASKS]
        rows.append([label, *map(gained, cells), ahead(stem, TASKS, method)])
    p = ", ".join(against_grpo(stem, task)["blame"]["p"] for task in TASKS)
    head = " credit | `chain` | `parallel` | `chain_quiet` | pairs ahead "
    return table(head, rows) + f"\nThe oracle's p on the three tasks, not corrected: {p}.\n"


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
        return [gained(row), cost["at equal FLOPs"].split()[0], row["fell apart"]]

    rows = [[label, *(cell for task in tasks for cell in cells(name, task))] for label, name in RIVALS.items()]
    head = " credit |" + "|".join(f" {title} | equal FLOPs | fell apart " for title in tasks.values())
    grpo = (f"{against_grpo(stem, task)['grpo'][key]}" for key in ("mean reward", "fell apart") for task in tasks)
    return table(head, rows) + "\nGRPO: mean reward {} and {}; {} and {} trainings fell apart.\n".format(*grpo)


LABELS = {
    "predicted `oar_p`, 123 labels a step (default)": "oar_p/123",
    "predicted `oar_p`, 31 labels": "oar_p/31",
    "predicted `fisher`, 1 response in 8 labelled": "fisher/8",
    "`fisher` of all": "fisher",
    "control: **position: the later, the more**": "position",
    "control: predicted `oar_p` without hidden states": "surface",
    "control: random": "random",
    "control: predicted `oar_p`, turned round": "inverted",
}
IN_STEPS = {
    "parallel_2": "`parallel`, two steps",
    "chain_2": "`chain`, two steps",
    "parallel": "`parallel`, four",
    "chain": "`chain`, four",
}
TWO, FOUR = list(IN_STEPS)[:2], list(IN_STEPS)[2:]
FITTED = "predicted, last layer: 2,057 labels, 16 of a response"


def labels_learned() -> str:
    """Gains at equal steps, pairs ahead, and what fell apart."""
    rows = []
    for label, name in LABELS.items():
        of = [against_grpo("learning_labels", task)[name] for task in IN_STEPS]
        fallen = sum(int(row["fell apart"].split()[0]) for row in of)
        pairs = [ahead("learning_labels", tasks, name) for tasks in (TWO, FOUR)]
        rows.append([label, *map(gained, of), *pairs, str(fallen)])
    return table(f" credit | {' | '.join(IN_STEPS.values())} | pairs ahead, two steps | four | fell apart ", rows)


def labels_all_models() -> str:
    """Gains of all models; bold where p is below 0.05, corrected like the page's."""
    from benchmarks.learning.comparison import SIGNIFICANT, gain, signed
    from benchmarks.statistics import holm

    plan, runs = judged("learning_labels", "labels")
    named = {label: name for label, name in LABELS.items() if name in plan.named}
    of = {(name, task): gain(plan, runs, task, name, trimmed=False) for name in named.values() for task in IN_STEPS}
    corrected = dict(zip(of, holm([p for _, p in of.values()]), strict=True))

    def cell(key: tuple[str, str]) -> str:
        return f"**{signed(of[key][0])}**" if corrected[key] < SIGNIFICANT else signed(of[key][0])

    rows = ([label, *(cell((name, task)) for task in IN_STEPS)] for label, name in named.items())
    return table(f" credit, all models | {' | '.join(IN_STEPS.values())} ", rows)


def labels_at_7b() -> str:
    """Gains at equal FLOPs if importance cost what it was counted to cost a 7B model."""
    plan, _ = judged("learning_labels", "labels")
    of = {
        task: {row["method"]: row["at the costs of 7B"] for row in rows_of("learning_labels", f"{task}: gain at equal")}
        for task in IN_STEPS
    }
    named = ((label, name) for label, name in LABELS.items() if name in plan.named)
    rows = ([label, f"{100 * plan.added[name]:.3g} %", *(of[task][name] for task in IN_STEPS)] for label, name in named)
    return table(f" credit | adds to log-probs and update | {' | '.join(IN_STEPS.values())} ", rows)


def labels_fidelity() -> str:
    """Against the mean of exact scores with other replacements than the one that was fitted with."""
    rows = rows_of("labels_smollm2_cpu", "Against the mean of the kinds")
    shown = {
        "predicted `oar_p`, 1,024 labels, 8 units of a response": "predicted, last layer: 1,024 labels, 8 of a response",
        "predicted `oar_p`, 2,057 labels, 16 units": FITTED,
        "the same from a middle layer": FITTED.replace("last", "middle"),
        "`fisher`": "fisher",
        "**position: the later, the more**": "position",
    }
    columns = "top 20 %", "beyond position", "beyond position, minus `fisher`"
    of = {row["credit"]: row for row in rows if row["fitted with"].endswith("sampled")}
    lines = ([label, *(of[name][column] for column in columns)] for label, name in shown.items())
    return table(" scores | overlap | beyond position | minus `fisher` ", lines)


def labels_rule() -> str:
    """Each condition on the default, with what came."""
    fitted = {
        row["credit"]: row
        for row in rows_of("labels_smollm2_cpu", "Against the mean of the kinds")
        if row["fitted with"].endswith("sampled")
    }
    four = [against_grpo("learning_labels", task)["oar_p/123"]["not trimmed"] for task in FOUR]
    added = {row["choice"]: row["slowest, balanced and filled up"] for row in rows_of("count", "Chosen responses")}
    pairs = {name: ahead("learning_labels", TWO, name) for name in ("oar_p/123", "fisher", "position")}
    rows = [
        [
            "ahead of GRPO in as many pairs with two steps as `fisher`, less four, and in more than position",
            f"{pairs['oar_p/123']}; {pairs['fisher']}; {pairs['position']}",
        ],
        ["with four steps the upper end of all models' interval is 0 or above", ", ".join(four)],
        [
            "on SmolLM2, beyond position, above `fisher`",
            f"{fitted[FITTED]['beyond position']}; {fitted['fisher']['beyond position']}",
        ],
        [
            "adds at most 3 % to a 7B model's log-probs and update, on the slowest of eight ranks",
            added["oar_p, 1 in 40 x 8"].split(": ")[1],
        ],
    ]
    return table(" condition on predicted `oar_p` | what came ", rows)


def amortized_told() -> str:
    """What the earlier study's significant gain is over all models, and predicted minus computed `fisher`."""
    from benchmarks.learning.comparison import gain, signed
    from benchmarks.statistics import holm

    plan, runs = judged("learning_amortized", "amortized")
    named = ["oar_p/8", "fisher/8", "decision/8", "value"]
    p = dict(
        zip(keys := [(task, name) for task in IN_STEPS for name in named],
            of := [gain(plan, runs, *key, trimmed=False)[1] for key in keys], strict=True)
    )  # fmt: skip
    corrected = dict(zip(keys, holm(of), strict=True))
    computed = runs[runs["method"] != "grpo"].replace({"method": {"fisher": "grpo"}})
    rows = [
        ["minus GRPO", *(signed(gain(plan, runs, task, "fisher/8", trimmed=False)[0]) for task in IN_STEPS)],
        ["p of that (corrected)",
         *(f"{p[task, 'fisher/8']:.2g} ({corrected[task, 'fisher/8']:.2g})" for task in IN_STEPS)],
        ["minus computed `fisher`", *(signed(gain(plan, computed, task, "fisher/8", trimmed=False)[0]) for task in IN_STEPS)],
    ]  # fmt: skip
    return table(f" predicted `fisher`, all models | {' | '.join(IN_STEPS.values())} ", rows)


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
        "a GRPO step (generation, log-probs, update)": "g",
        "published procedure: whole copies, all logits": "p",
        "exact, in the actor": "l",
        "exact, on the engine": "o",
        "spans of 8, on the engine": "o8",
    }

    def seconds(size: str, length: int, letter: str) -> str:
        lengths = load(f"perturbation_cpu_{size}")["lengths"]
        (candidates,) = (one["candidates"] for one in lengths if one["response_length"] == length)
        (median,) = (one["median_seconds"] for one in candidates if one["letter"] == letter)
        return f"{median:.2f}" if median < 10 else f"{median:.1f}"

    columns = (("10m", 128), ("10m", 512), ("1m", 512), ("1m", 1024))
    head = " seconds per response | 11M, 128 tokens | 11M, 512 tokens | 1M, 512 tokens | 1M, 1024 tokens "
    return table(head, ([label, *(seconds(*column, letter) for column in columns)] for label, letter in rows.items()))


def copies_range() -> str:
    lengths = [one for size in ("10m", "1m", "0.1b") for one in load(f"perturbation_cpu_{size}")["lengths"]]

    def among(*formulas: str) -> str:
        values = [target["value"] for one in lengths for target in one["targets"] if target["formula"] in formulas]
        return f"{min(values):.2f} to {max(values):.2f}"

    rows = {
        "seconds of the published procedure / of exact scores on the engine": among("p / o"),
        "generation speed while scoring (default `share_while_generating`) / without scoring": among(
            "t/s(0.15) / t/s(alone)"
        ),
        "generation speed while scoring (`share_while_generating=1`) / without scoring": among("t/s(1) / t/s(alone)"),
    }
    return table(f" ratio | smallest to largest of {len(lengths)} sizes ", rows.items())


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
    """Of each causal LM of transformers: whether its scores are right, or why it is refused."""
    seen = json.loads((ROOT / "tests" / "passes" / "architectures.json").read_text(encoding="utf-8"))
    classes = seen["architectures"].items()
    equal = [one["type"] for _, one in classes if one.get("copies") == "equal"]
    unbuilt = [f"`{name}` ({one['not built']})" for name, one in classes if "not built" in one]
    refused = [(name, one["gradient"], one["copies"]) for name, one in classes if "refused" in one.get("copies", "")]
    rows = [
        [f"`{name}`", "equal" if gradient == "equal" else "refused", copies.removeprefix("refused: ").replace("|", "/")]
        for name, gradient, copies in refused
    ]
    return (
        f"transformers {seen['transformers']} has {len(classes)} classes. {len(equal)} have the right scores, {len(refused)} "
        f"are refused, {len(unbuilt)} were not built.\n\n"
        + textwrap.fill(
            f"**Right**, by gradient and by masked copies: {', '.join(equal)}.", 120, break_on_hyphens=False
        )
        + f"\n\n{table(' refused | by gradient | why ', rows)}\n"
        + textwrap.fill(f"**Not built**: {', '.join(unbuilt)}.", 120)
        + "\n"
    )


def gpu_engines() -> str:
    """The checks of importance in verl's engines."""
    rows = []
    for one in load("gpu_suite")["results"]:
        if found := re.fullmatch(r"importance_equals_a_plain_models\[fsdp: (.*), 1\]", one["check"]):
            figures = [one["figures"][name] for name in ("fisher", "decision", "oar_p", "log-probs differ by")]
            rows.append([found[1], *(figure.replace("of the ", "of ") for figure in figures)])
    return table(" layout | `fisher` | `decision` | `oar_p` | log-probs ", rows)


def gpu_peaks() -> str:
    """Peak memory of a step's parts; for the layouts with flash-attention also before the backward came first."""
    suite = load("gpu_suite")
    (before,) = (value for key, value in suite.items() if key.startswith("peak before"))
    rows = []
    for one in suite["results"]:
        if found := re.fullmatch(r"importance_does_not_raise_the_peak_of_a_step\[(.*) chunked\]", one["check"]):
            was = before.get(f"{found[1]} chunked", {}).get("fisher", "").removesuffix(" MiB")
            names = "update", "log-probs", "fisher", "decision"
            rows.append([found[1], *(one["figures"][name].removesuffix(" MiB") for name in names), was])
    return table(" layout | update | log-probs | with `fisher` | with `decision` | `fisher` before ", rows)


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
        replacements, fidelity_real, predicted_real, people, real_reached, real_steps, fidelity, marks, learning, collapse,
        rivals, labels_learned, labels_all_models, labels_at_7b, labels_fidelity,
        labels_rule, amortized_told, in_sentences, confirmation,
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
