"""What follows from counted forwards and backwards: masked copies, labels, passes of their own, and the slowest rank."""

import math
import statistics
from collections.abc import Mapping

import numpy as np

from benchmarks.count.shapes import Counts, at
from benchmarks.report import Table
from oar_plugin.credit.importance import IMPORTANCES, Importance
from oar_plugin.credit.regression import COLUMNS, FEATURES
from oar_plugin.runs.plan.known import KNOWN, load_model

PROMPT, ANSWER, SPAN = 512, 16, 8
LAYERS: dict[str, int] = {name: load_model(name).num_hidden_layers for name in KNOWN["models"]}
DENSE, RESPONSES = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"), (1024, 4096, 16384)
PAIRS: tuple[tuple[int, int | None], ...] = ((40, 8), (20, 8), (8, 4), (20, None), (8, None))
"""One response in so many has labels, and how many; None: of every unit of `SPAN` tokens."""
JUDGED = ((40, 8), (80, 16), (20, 4), (10, 2), (40, 2))
BATCH, RANKS, NEEDING, BATCHES = 1024, 8, 0.6, 10_000
IN_ALL = round(BATCH * NEEDING)


def added_flops(counts: Counts, layers: int, length: int, importance: Importance) -> float:
    """Return what an importance adds to the FLOPs of log-probs: forwards, backwards, and the rows that these start from."""
    of = counts["flops"]
    backward = at(of["importance"], layers, length) - at(of["log-probs"], layers, length)
    forwards = (len(importance.forwards(1)) - 1) * at(of["layers"], layers, length)
    rows = sum(length - PROMPT - ANSWER if each.rows == "reasoning" else ANSWER for each in importance.backwards)
    return len(importance.backwards) * backward + forwards + 2 * at(of["head"], layers, rows)


def copies_flops(counts: Counts, layers: int, length: int, copies: float, prefix: bool) -> float:
    """FLOPs of masked copies of a response, with a shared prefix from a first masked token on, and its unmasked forward."""
    flops, reasoning = counts["flops"], length - PROMPT - ANSWER
    whole, head = flops["layers"], at(flops["head"], layers, ANSWER)
    # First masked tokens are spread evenly over the reasoning.
    starts = [PROMPT + reasoning * (i + 0.5) / 64 for i in range(64)]
    cached = statistics.fmean(at(whole, layers, start) for start in starts) if prefix else 0.0
    forward = at(whole, layers, length) + head
    return forward + copies * (forward - cached)


class Response:
    """FLOPs of the parts of a step, of one response."""

    def __init__(self, name: str, counts: Counts, response: int) -> None:
        self.counts, self.layers, self.length = counts, LAYERS[name], PROMPT + response
        self.reasoning = response - ANSWER
        flops = {part: at(of, self.layers, self.length) for part, of in counts["flops"].items()}
        self.forward, self.log_probs, self.update = (flops[part] for part in ("layers", "log-probs", "update"))
        self.both = self.log_probs + self.update
        self.fisher = added_flops(counts, self.layers, self.length, IMPORTANCES["fisher"])
        # Of each reasoning token: its projection, and the product with the coefficients.
        self.prediction = 2.0 * self.reasoning * (load_model(name).hidden_size * COLUMNS + FEATURES)

    def labels(self, units: int | None, prefix: bool = False) -> float:
        """Of a chosen response: copies, its unmasked forward, and sums of the regression."""
        count = units or self.reasoning / SPAN
        return copies_flops(self.counts, self.layers, self.length, count, prefix) + count * 2.0 * FEATURES**2

    def gradient(self, own_pass: bool) -> float:
        """Of a chosen response with `fisher`: it, its own forward, and sums of the regression."""
        return self.fisher + own_pass * self.forward + self.reasoning * 2.0 * FEATURES**2


def percent(share: float) -> str:
    return f"{100 * share:,.0f} %" if share > 1 else f"{100 * share:.3g} %"


def named(parts: int, units: int | None) -> str:
    return f"1 in {parts} x {units or f'all, spans of {SPAN}'}"


def tables(all_counts: Mapping[str, Counts]) -> list[Table]:
    """From counts of models with checkpointing."""
    shown = [(name, size) for name in DENSE if name in all_counts for size in RESPONSES]
    of = {key: Response(key[0], all_counts[key[0]], key[1]) for key in shown}
    return [_labels(of), _passes(of), *([_slowest(of[DENSE[0], 4096])] if DENSE[0] in all_counts else [])]


def _labels(responses: Mapping[tuple[str, int], Response]) -> Table:
    rows = []
    for (name, size), of in responses.items():
        for parts, units in PAIRS:
            added = [(of.labels(units, prefix) / parts + of.prediction) / of.both for prefix in (False, True)]
            cells = [f"{(units or of.reasoning / SPAN) / parts:.3g}"]
            cells += [percent(share * one) for one in added for share in (NEEDING, 1.0)]
            rows.append([name, f"{size:,}", named(parts, units), *cells, percent(NEEDING * of.prediction / of.both)])
    ways = [f"{way}, {share}" for way in ("whole", "cached prefix") for share in ("60%", "100%")]
    columns = ["model", "response", "labels", "copies per response", *ways, "of that prediction, 60%"]
    return Table("Labels of a few units: what they add to log-probs and update (derived)", columns, rows)


def _passes(responses: Mapping[tuple[str, int], Response]) -> Table:
    rows = []
    for (name, size), of in responses.items():
        copies, (inside, own) = of.labels(8) / 40, (of.gradient(own) / 8 for own in (False, True))
        for way, with_log_probs, alone, bypassing in (
            ("fisher", of.fisher, of.fisher + of.forward, of.fisher + of.forward),
            ("fisher, 1 in 8", inside + of.prediction, own + of.prediction, of.log_probs + inside + of.prediction),
            (f"oar_p, {named(40, 8)}", *2 * [copies + of.prediction], of.log_probs + copies + of.prediction),
        ):
            shares = with_log_probs / of.both, alone / of.both, bypassing / of.update
            rows.append([name, f"{size:,}", way, *(percent(NEEDING * one) for one in shares)])
    where = ["in the log-prob pass", "in a pass of its own", "without a log-prob pass, of the update"]
    title = "Where importance runs: what it adds, 60% of the responses needing credit (derived)"
    return Table(title, ["model", "response", "importance", *where], rows)


def largest(parts: int) -> tuple[float, float, int]:
    """Chosen responses of a rank, one in `parts`: the mean, the largest by hashes (mean over made-up batches), and balanced."""
    needing = [IN_ALL // RANKS + (rank < IN_ALL % RANKS) for rank in range(RANKS)]  # verl deals them out evenly
    chosen = np.random.default_rng(0).binomial(needing, 1 / parts, (BATCHES, RANKS))
    return IN_ALL / parts / RANKS, float(chosen.max(1).mean()), math.ceil(round(IN_ALL / parts) / RANKS)


def _slowest(of: Response) -> Table:
    ways = [
        (f"oar_p, {named(*pair)}", pair[0], f"{IN_ALL * pair[1] / pair[0]:.0f}", of.labels(pair[1])) for pair in JUDGED
    ]
    ways.append((f"oar_p, {named(40, 8)}, cached prefix", 40, ways[0][2], of.labels(8, prefix=True)))
    ways += [
        (f"fisher, 1 in 8, {where}", 8, "all tokens", of.gradient(own))
        for own, where in ((False, "in the log-prob pass"), (True, "in a pass of its own"))
    ]
    rows = []
    for label, parts, labels, chosen in ways:
        counts, whole = largest(parts), BATCH / RANKS * of.both
        added = [(count * chosen + IN_ALL / RANKS * of.prediction) / whole for count in counts]
        shown = zip(("{:.1f}", "{:.1f}", "{}"), counts, map(percent, added), strict=True)
        rows.append([label, labels, *(f"{text.format(count)}: {cost}" for text, count, cost in shown)])
    columns = ["choice", "labels per step", "mean rank", "slowest, hashes", "slowest, balanced and filled up"]
    title = f"Chosen responses of a rank, and what they add to log-probs and update: 7B, {BATCH:,} of 4,096 tokens"
    return Table(f"{title}, {RANKS} ranks (simulated)", columns, rows)


NOTES = (
    "Labels of a few units: of the responses that need credit one in so many gets so many labels. A label is one masked copy: "
    "a forward without a graph from the prompt to the end of the answer, with logits of the answer's rows alone. A chosen "
    "response also runs once unmasked: with 8 labels, a ninth of its cost. Behind a cached prefix a copy starts at its first "
    "masked token, on average in the middle of the reasoning. Prediction: each reasoning token's projection, and a product.",
    "In the log-prob pass `fisher` shares its forward with log-probs. In a pass of its own it runs one more, without logits. "
    "Without a log-prob pass (verl's bypass mode, TRL) the update alone is the unit. Predictions then read every response that "
    "needs credit once, with logits, because probabilities are features (verl's bypass mode reads the others too).",
    f"Ranks: {NEEDING:.0%} of the responses need credit, as many on each rank (verl deals them out so). Hashes choose each by "
    f"itself: means of {BATCHES:,} made-up batches. All wait for the rank with most, or, filled up, run as many. Balanced: the "
    "ranks' numbers of chosen responses differ by at most one.",
)
