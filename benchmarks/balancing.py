"""What the scoring pass runs beside what it needs, on many ranks: `python -m benchmarks.balancing` prints the page."""

from collections.abc import Sequence

import numpy as np
import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from benchmarks.report import Table
from oar_plugin.hosts.verl.balancing import balanced_partitions, scored_first

PROMPTS, RESPONSES = 1024, 8
LONGEST = 8192
RANKS = (8, 16, 32, 64, 128, 256, 512)
SHARES = (0.2, 0.4, 0.6, 0.8, 0.9)
SEEDS = 5
FALLBACKS = 0.1

TEXT = """\
# Scored rows on many ranks

`python -m benchmarks.balancing` prints this page. It runs no model: it makes up batches, calls the functions that deal rows
out to ranks (`oar_plugin/hosts/verl/balancing.py`), and counts. A batch has {prompts:,} prompts x {responses} responses. A
prompt has 60 to 260 tokens, a response log-normally many (median 1,500, sigma 0.8, at most {longest:,}). A group has a
signal with the chance in the table; then all its responses are scored. Each figure is the worst of {seeds} batches.

Every rank must run the same number of forwards, so all take as many rows into the scoring pass as the rank with the most
scored ones; what a rank lacks it fills up with rows that it does not score.

- **tokens**: of the rows in the scoring pass on all ranks, by those of the scored rows. 1 means that nothing is run for
  nothing; the most is {worst:.2f}.
- **rows**: the same with rows. A rank fills up with the shortest that it has.
- **some fall back**: tokens, where {fallbacks:.0%} of the rows that were to be scored turn out not to have an answer. The
  driver does not know which; the actors do, and fill up. The most is {worst_fallbacks:.2f}.
- **largest**: tokens in the scoring pass of the rank with most of them, by the mean rank's scored tokens. The others wait
  for it. Nothing beats the longest response: with 512 ranks and 20 % scored a rank has three or four scored rows.
- **work**: verl's estimate of all work of the rank with the most, by the mean. In the update the others wait for it.

"verl" is verl's own dealing, which knows nothing of scored rows, and filling up with the next rows: what this package did
before. Micro-batches with a fixed number of rows, of which a rank fills the last one up as well, are not in these figures.
"""


def batch(seed: int, share: float) -> tuple[list[int], list[bool]]:
    """Tokens of each row, and whether it is scored."""
    generator = np.random.default_rng(seed)
    prompt = generator.integers(60, 260, PROMPTS).repeat(RESPONSES)
    response = generator.lognormal(np.log(1500), 0.8, PROMPTS * RESPONSES).clip(10, LONGEST).astype(int)
    return (prompt + response).tolist(), (generator.random(PROMPTS) < share).repeat(RESPONSES).tolist()


def cost(
    lengths: Sequence[int], needed: Sequence[bool], ranks: int, ours: bool = True, fallbacks: float = 0.0
) -> dict[str, float]:
    """`tokens`, `rows`, `largest` and `work` of the page for one batch, of whose needed rows a share falls back."""
    work = calculate_workload(torch.tensor(lengths))
    if ours:
        partitions = balanced_partitions(lengths, needed, ranks)
    else:
        partitions = get_seqlen_balanced_partitions(work.tolist(), ranks, equal_size=True)
    length_B, scored_B = torch.tensor(lengths), torch.tensor(needed)
    scored_B &= torch.rand(len(scored_B), generator=torch.Generator().manual_seed(0)) >= fallbacks
    ahead = max(int(scored_B[partition].sum()) for partition in partitions)
    of_rank = []
    for partition in partitions:
        # By lengths that are all the same the next rows fill up.
        order = scored_first(scored_B[partition], length_B[partition] if ours else torch.ones(len(partition)), ahead)
        of_rank.append(int(length_B[partition][order[:ahead]].sum()))
    useful = int(length_B[scored_B].sum())
    works = [int(work[partition].sum()) for partition in partitions]
    return {
        "tokens": sum(of_rank) / useful,
        "rows": ahead * ranks / int(scored_B.sum()),
        "largest": max(of_rank) * ranks / useful,
        "work": max(works) * ranks / sum(works),
    }


def case(ranks: int, share: float) -> dict[str, float]:
    """Every figure of a row of the page: the worst of all seeds."""
    worst: dict[str, float] = {}
    for seed in range(SEEDS):
        made = batch(seed, share)
        found = [cost(*made, ranks), cost(*made, ranks, ours=False)]
        figures = {f"{name}{of}": one[name] for name in found[0] for one, of in zip(found, ("", ", verl"), strict=True)}
        figures["some fall back"] = cost(*made, ranks, fallbacks=FALLBACKS)["tokens"]
        worst = {name: max(figure, worst.get(name, 0.0)) for name, figure in figures.items()}
    return worst


def main() -> None:
    cases = {(ranks, share): case(ranks, share) for ranks in RANKS for share in SHARES}
    most = {name: max(one[name] for one in cases.values()) for name in ("tokens", "some fall back")}
    facts = {"prompts": PROMPTS, "responses": RESPONSES, "longest": LONGEST, "seeds": SEEDS, "fallbacks": FALLBACKS}
    facts |= {"worst": most["tokens"], "worst_fallbacks": most["some fall back"]}
    columns = ["ranks", "scored", *next(iter(cases.values()))]
    rows = [(f"{r}", f"{share:.0%}", *(f"{f:.2f}" for f in found.values())) for (r, share), found in cases.items()]
    print(TEXT.format(**facts), *Table("Every case", columns, rows).markdown()[:-1], sep="\n")


if __name__ == "__main__":
    main()
