"""Every measured figure in README.md and docs/ is read from a committed file, and its section links to that file."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from oar_plugin.credit.answer import PATTERN_SECONDS
from oar_plugin.passes.segments import LOST_SECONDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MADE = "faults.md"  # of files as a whole, which tests/faults/test_table.py holds it to
OF_DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != MADE)
DOCUMENTS = ["README.md", "benchmarks/README.md", *OF_DOCS]
MEASUREMENT = r"\d\.\d|\d ?%|\de-\d|\d x \d|\d times|\b1/\d|\d of \d|\d (?:s|seconds|minutes|hours|GB|GiB|MiB)\b"

NO_MEASUREMENT = [
    r"OAR-P|arXiv 2601\.07408|Apache-2\.0|\d+\.\d+\.\d+(?:\.dev)?|\| 3\.1\d (?=\|)",
    r"(?:verl|vLLM|torch|megatron-core|with|mbridge|TransformerEngine|Python|TRL)(?: |==)\d\.\d+",
    r"(?:, | and |for 1\.15 and )1\.16",
    r" \(or 3\.10, 3\.12\)| to 0\.31",
    r"1\.5B|0\.1B|top[ -](?:20|10) %|95 %|at 95 %|[Bb]udget (?:of )?0\.[35]|spans of 8",
    r"24 steps of 16 x 8|is below 0\.05|TP 2 x PP 2 x CP 2|TP x PP x CP|`answer_mean`|x 1\.0",
    r"needs 6\.5 GB of memory",  # what the demo asks for before it starts (tests/recipes)
    r"noise of 0\.001|sigma 0\.001|tau 0\.4|floor 0\.1|above 0\.1|; 0\.1 is even",  # settings, and shares that follow from them
    r"at least 60 % of their answers|by more than 0\.02|each about 0\.1 uncertain",  # thresholds, rounded
    r"\| [\w ,]+ \| \d+ \| \d\.\d \| \d\.\d \|",  # errors by formula (tests/runs/evaluate/test_statistics.py)
    rf"{PATTERN_SECONDS:g} seconds(?= of CPU time| a response)|batch {LOST_SECONDS:g} seconds",  # limits
    r"(?:within )?\d(?:\.\d)?e-\d",  # learning rates, and limits that tests assert
]
"""Numbers that define something: versions, sizes, settings, thresholds. Everything else has a source below."""


def load(stem):
    return json.loads((RESULTS / f"{stem}.json").read_text())


def percent(share):
    return f"{share:.1%}".replace("%", " %")


def agreement():
    return {dtype: {row["name"]: row for row in rows} for dtype, rows in load("fidelity_cpu")["summary"].items()}


def passes(row):
    return " + ".join(f"{row[way]:.1f}".removesuffix(".0") for way in ("forward", "backward"))


def fidelity():
    of = agreement()
    names = {
        "`oar_p` (exact)": "oar_p", "`hybrid`, budget 0.5": "hybrid 0.5", "`hybrid`, budget 0.3": "hybrid 0.3",
        "attention patching (in the study only)": "attention", "**`fisher`** (default)": "fisher 1",
        "`oar_g` (published)": "oar_g 1", "random": "random",
    }  # fmt: skip
    for label, name in names.items():
        row, bf16 = of["float32"][name], of["bfloat16"][name]["means"]["overlap"]["value"]
        means = " | ".join(f"{row['means'][key]['value']:.2f}" for key in ("overlap", "spearman", "recall"))
        yield "fidelity_cpu", f"| {label} | {means} | {passes(row)} | {bf16:.2f} |"
    exact, again = of["float32"]["oar_p"]["means"], of["float32"]["oar_p sampled"]["means"]
    half = max(row["means"]["overlap"]["high"] - row["means"]["overlap"]["low"] for row in of["float32"].values()) / 2
    yield "fidelity_cpu", f"Each overlap is ± {half:.2f} or less"
    models = {(measured["task"], measured["seed"]) for measured in load("fidelity_cpu")["measured"]}
    yield "fidelity_cpu", f"{exact['overlap']['count']} responses of {len(models)} small models"
    yield "fidelity_cpu", f"agrees with itself in {again['overlap']['value']:.2f} of the top tokens"


def marks():
    tables = load("marks_cpu")["tables"]
    wrong, first, results, *_ = tables
    names = {
        "`decision`": "decision", "`decision` times doubt": "decision x (1 - p)", "`onward` (candidate)": "onward",
        "`onward` times doubt": "onward x (1 - p)",
        "entropy factor alone (control)": "EntropyFactor", "`fisher` (default)": "fisher",
        "`fisher` times doubt": "fisher x (1 - p)", "`oar_g` (published)": "oar_g", "surprisal": "surprisal",
        "right answer known: gradient": "gold norm", "right answer known: signed, 8 backwards": "gold sweep 8 signed",
        "random": "random",
    }  # fmt: skip
    for label, name in names.items():
        rows = [row for title in (results, wrong, first) for row in tables[title] if row["credit"] == name]
        yield (
            "marks_cpu",
            f"| {label} | {' | '.join(row[task] for row in rows for task in ('chain', 'parallel', 'lookup'))} |",
        )


FIVE = ("chain", "parallel", "lookup", "chain_quiet", "parallel_quiet")
GAIN = "minus GRPO's (95 %)"
JUDGED = {  # label -> method, its scores on the page of fidelity
    "oracle: which results were wrong is known": ("blame", None),
    "`fisher`, `two_level` (default)": ("fisher", "fisher 1"),
    "`decision`, `two_level`": ("decision", None),
    "influence of `decision` times doubt, `two_level` (candidate)": ("doubted", None),
    "`decision`, doubt in worse responses (candidate)": ("spare", None),
    "control: entropy factor alone": ("entropy_factor", None),
    "control: random": ("random", "random"),
}


def compared(stem, task):
    """Method -> its row against GRPO."""
    return {row["method"]: row for row in load(stem)["tables"][f"{task}: mean reward over the run, against GRPO"]}


def bold(text, verdict):
    return f"**{text}**" if verdict in ("**faster**", "**slower**") else text


def learning():
    tasks, stem = ("chain", "parallel", "chain_quiet"), "learning_judged"
    of, scores = {task: compared(stem, task) for task in tasks}, agreement()["float32"]
    for label, (method, score) in JUDGED.items():
        rows = [of[task][method] for task in tasks]
        gains = [row[GAIN] for row in rows]
        cells = [
            bold(f"{gain[:-1]}; {row['ahead in']})", row["verdict"]) for gain, row in zip(gains, rows, strict=True)
        ]
        yield stem, f"| {label} | {' | '.join(cells)} |"
        if score or method in ("blame", "decision"):
            first = f"{scores[score]['means']['overlap']['value']:.2f}" if score else ""
            short = " | ".join(bold(gain.split()[0], row["verdict"]) for gain, row in zip(gains, rows, strict=True))
            yield stem, f"| {label} | {first} | {short} |".replace("|  |", "| |")
    for task in tasks:
        yield stem, f"{of[task]['grpo']['mean reward']} on `{task}`"
    ahead = {name: sum(int(of[task][name]["ahead in"].split()[0]) for task in tasks) for name, _ in JUDGED.values()}
    yield stem, f"ahead on all three tasks, in {ahead['blame']} of 72 pairs"
    yield stem, f"is ahead in {ahead['spare']} of 72 pairs"
    yield stem, f"ahead in {ahead['fisher']} of 72, most of them on `parallel`"
    yield stem, f"behind in {72 - ahead['random']} of 72 pairs"
    recall = [load(stem)["tables"][f"{task}: mean weights, and what importance cost"] for task in tasks]
    shares = [row["recall"] for rows in recall for row in rows if row["method"] == "decision"]
    p = [of[task]["blame"]["p"] for task in tasks]
    yield stem, f"(p of {p[0]}, {p[1]} and {p[2]}, not corrected)"
    quiet = [run for run in load(stem)["runs"]["judged_on"] if run["task"] == "chain_quiet"]
    ((fallen, pair),) = ((run["held_out"], (run["warm"], run["seed"])) for run in quiet if run["held_out"] < 0.6)
    yield stem, f"falls apart (held-out accuracy {fallen:.3f})"
    mean = {
        name: {(run["warm"], run["seed"]): run["reward"] for run in quiet if run["method"] == name}
        for name in ("grpo", "fisher", "spare", "random")
    }
    without = {
        name: np.mean(
            [
                np.mean([rewards[key] - mean["grpo"][key] for key in rewards if key != pair and key[0] == warm])
                for warm in {warm for warm, _ in rewards}
            ]
        )
        for name, rewards in mean.items()
    }
    yield (
        stem,
        f"the default is {without['fisher']:+.3f}, `spare` {without['spare']:+.3f}, random {without['random']:+.3f}",
    )
    yield stem, f"its recall is {min(shares)} to {max(shares)}"
    for task in ("chain", "parallel"):
        row = compared("learning_verl", task)["fisher"]
        yield "learning_verl", f"{row[GAIN][:-1]}; {row['ahead in']}) on `{task}`"


def explored():
    stem, tasks = "learning_explored", ("chain", "parallel", "parallel_quiet")
    trained = load(stem)["runs"]["judged_on"]
    fallen = [run for run in trained if run["held_out"] < 0.6]
    assert not [run for run in fallen if run["method"].startswith("fisher")]
    assert {("grpo", "chain_quiet"), ("blame", "lookup")} <= {(run["method"], run["task"]) for run in fallen}
    of_lookup = sum(run["task"] == "lookup" for run in fallen)
    yield (
        stem,
        f"Of {len(trained)} trainings {len(fallen)} fall apart (held-out accuracy below 0.6), {of_lookup} of them",
    )
    of = {task: compared(stem, task) for task in tasks}
    ahead = {
        name: sum(int(of[task][name]["ahead in"].split()[0]) for task in tasks)
        for name in of["chain"]
        if name != "grpo"
    }
    yield stem, f"which tokens decide is ahead in {ahead['decides']} of 12 pairs"
    yield stem, f"in the worse responses in {ahead['known decisions, spare']} of 12"
    yield stem, f"which results were wrong in {ahead['blame']} of 12"
    yield stem, f"below zero in {ahead['signed']} of 12"
    yield stem, f"the default in {ahead['fisher']} of 12"
    order = ("decides", "known decisions, spare", "blame", "signed", "fisher")
    every = [sum(int(compared(stem, task)[name]["ahead in"].split()[0]) for task in FIVE) for name in order]
    yield stem, "On all five it is {}, {}, {}, {} and {} of 20".format(*every)
    onward = [of[task]["onward"][GAIN].split()[0] for task in tasks]
    yield stem, f"`onward` is {onward[0]}, {onward[1]} and {onward[2]}"
    paper, ours = ([of[task][name][GAIN].split()[0] for task in tasks] for name in ("fisher, bi_level", "fisher"))
    yield stem, f"{paper[0]} on `chain`, {paper[1]} on `parallel` and {paper[2]} on `parallel_quiet`"
    yield stem, f"with `two_level` {ours[0]}, {ours[1]} and {ours[2]}"


def published():
    stem, tasks = "learning_paper", ("chain", "parallel")
    of = {task: compared(stem, task) for task in tasks}
    found = [float(row["p"]) for task in tasks for name, row in of[task].items() if name != "grpo"]
    yield stem, f"Of {len(found)} comparisons with GRPO the smallest p is {min(found)}"
    gain = {name: [of[task][name][GAIN].split()[0] for task in tasks] for name in of["chain"] if name != "grpo"}
    yield (
        stem,
        f"{gain['tau 0.2 beta 1'][0]} with tau 0.2 and beta 1, {gain['tau 0.9 beta 4'][0]} with tau 0.9 and beta 4",
    )
    boost, suppress, both = (" and ".join(gain[name]) for name in ("boost only", "suppress only", "published"))
    yield stem, f"boost only {boost}, suppress only {suppress}, both {both}"
    wide = compared("learning_vocabulary", "chain_32k")
    fisher, decision = (wide[name][GAIN].split()[0] for name in ("fisher", "decision"))
    yield "learning_vocabulary", f"`fisher` {fisher} and `decision` {decision}"


def costs():
    run = load("run_cpu")
    (ratio,) = (r for r in run["ratios"] if r["name"] == "whole step, wall seconds")
    low, high = ratio["interval"]
    (importance,) = (p["added_share"] for p in run["phases"] if p["title"] == "importance")
    yield "run_cpu", f"took {ratio['value']:.2f} times as long as one with GRPO (95 %: {low:.2f} to {high:.2f},"
    yield "run_cpu", f"took {ratio['value']:.2f} times as long ({low:.2f} to {high:.2f}, {ratio['pairs']} pairs)"
    yield "run_cpu", f"importance itself was {percent(importance)} of a GRPO step"
    on_eight = load("scaling_projection")["runs"]["recipes"]["qwen2_5_7b_math"][0]
    assert on_eight["gpus"] == 8
    yield "scaling_projection", f"projects {on_eight['step: OAR / GRPO']:.2f} for 7B on eight H100s"
    four = {t["name"].split(":")[0]: t["value"] for t in load("scaling_cpu")["targets"] if ": 4 against 1" in t["name"]}
    ends = " to ".join(f"{four[kind]:.2f} ({kind})" for kind in (min(four, key=four.get), max(four, key=four.get)))
    yield "scaling_cpu", f"on four processes was {ends} of the ratio on one"
    yield "scaling_cpu", f"data-parallel {four['data, strong']:.2f} and {four['data, weak']:.2f}"


def step():
    small, large = ("step_cpu_10m", "step_cpu_0.1b")
    of = {stem: {row["ratio"].strip("`"): row for row in load(stem)["tables"]["Ratios"]} for stem in (small, large)}
    for stem, formula, text in (
        (small, "(b - a) / a", "importance added {} of a log-prob forward"),
        (small, "(b - a) / (a + e)", "which is {} of log-probs and update together"),
        (small, "d / (b - a)", "the published procedure took {} times what importance added"),
        (small, "d / b", "and {} times what log-probs and importance took together"),
        (small, "mem(b) / mem(e)", "the fused pass had {} of the update's peak memory"),
        (large, "(b - a) / a", "it added {} of a log-prob forward"),
        (large, "(b - a) / (a + e)", "{} of log-probs and update"),
        (large, "mem(b) / mem(e)", "{} of the update's peak memory"),
    ):
        yield stem, text.format(of[stem][formula]["median (95 %)"])
    for stem in (small, large):
        share = float(of[stem]["f / a"]["median (95 %)"].split()[0])
        yield stem, f"{percent(share)} of a forward"


def copies():
    pages = {size: load(f"perturbation_cpu_{size}")["lengths"] for size in ("10m", "1m", "0.1b")}
    found = {(size, one["response_length"]): one for size, page in pages.items() for one in page}
    seconds = {key: {c["letter"]: c["median_seconds"] for c in one["candidates"]} for key, one in found.items()}
    rows = {
        "g": "a GRPO step (generation, log-probs, update)", "p": "published procedure: whole copies, all logits",
        "l": "exact, in the actor", "o": "exact, on the engine", "l30": "budget 0.3 by gradient, in the actor",
        "o30": "budget 0.3 by blocks, on the engine", "o8": "spans of 8, on the engine",
    }  # fmt: skip
    for letter, label in rows.items():
        cells = [seconds[key][letter] for key in (("10m", 128), ("10m", 512), ("1m", 512), ("1m", 1024))]
        shown = " | ".join(f"{s:.2f}" if s < 10 else f"{s:.1f}" for s in cells)
        yield "perturbation_cpu_10m", f"| {label} | {shown} |"
    for text, *formulas in (
        ("1/{:.1f} to 1/{:.1f} of the published", "p / o"),
        ("{:.3f} to {:.3f} of the time of all copies", "l30 / l", "o30 / o"),
        ("{:.2f} to {:.2f} times its speed alone", "t/s(0.15) / t/s(alone)"),
        ("it fell to {:.2f} to {:.2f}", "t/s(1) / t/s(alone)"),
    ):
        values = [t["value"] for one in found.values() for t in one["targets"] if t["formula"] in formulas]
        yield "perturbation_cpu_0.1b", text.format(min(values), max(values))


def flat(text):
    return " ".join(text.split())


def without_fences(document):
    return re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def figures():
    return [
        figure
        for source in (fidelity, marks, learning, explored, published, costs, step, copies)
        for figure in source()
    ]


def test_every_figure_is_what_its_file_says_and_its_section_links_to_it(figures):
    sections = [flat(text) for document in DOCUMENTS for text in re.split(r"\n(?=#)", without_fences(document))]
    for stem, figure in figures:
        places = [section for section in sections if figure in section]
        assert places, f"no document says: {figure}"
        assert all(f"benchmarks/results/{stem}." in section for section in places), f"{figure}: no link to {stem}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_figure_is_without_a_source(document, figures):
    text = flat(without_fences(document))
    for _, figure in sorted(figures, key=lambda found: -len(found[1])):
        text = text.replace(figure, "")
    for pattern in (r"\]\([^)]*\)", *NO_MEASUREMENT, r"`[^`]*`"):
        text = re.sub(pattern, "", text)
    left = re.findall(rf".{{0,40}}(?:{MEASUREMENT}).{{0,20}}", text)
    assert left == [], "numbers that no file is named for; a measurement needs a source above, anything else a pattern"


def test_the_picture_is_drawn_from_the_committed_page():
    drawn = runpy.run_path(str(ROOT / "docs" / "shaded_tokens.py"))["picture"]()
    assert (ROOT / "docs" / "shaded_tokens.svg").read_text() == drawn
