"""Assigns rows to data-parallel ranks if some rows are scored and others are not.

Scored rows have masked copies, or a backward in a pass of their own, of which every rank runs as many as the one with the most.
So the ranks get equal numbers of scored rows, besides equal numbers of rows and even work, as in verl.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


def balanced_partitions(lengths: Sequence[int], scored: Sequence[bool], ranks: int) -> list[list[int]]:
    """The rows of each rank, in batch order; every rank gets the same number of rows, which `ranks` divides.

    `lengths` are tokens per row, prompt and response. The ranks' numbers of scored rows differ by at most one. Ranks with one
    less get the shortest of the other rows, which `filled_up` adds to the pass.
    """
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])
    ahead, others = ([row for row in by_length if bool(scored[row]) is wanted] for wanted in (True, False))
    extra = len(ahead) % ranks  # number of ranks with one more
    mixed = ahead[:extra] + others[: (ranks - extra) % ranks]
    order = mixed + ahead[extra:] + others[len(mixed) - extra :]
    # verl sorts rows by work, and each rank gets one of the first `ranks` rows, one of the next, and so on. A common offset
    # keeps such a group of rows together, and adds the same work to every rank.
    work = calculate_workload(torch.tensor([lengths[row] for row in order], dtype=torch.int64)).tolist()
    offset = max(work) + 1
    lifted = [one + place // ranks * offset for place, one in enumerate(work)]
    return [sorted(order[place] for place in dealt) for dealt in get_seqlen_balanced_partitions(lifted, ranks, True)]


def filled_up(rows: Sequence[int], length_B: Tensor, count: int) -> Tensor:
    """`count` of a rank's rows: these, and the shortest others."""
    others = torch.ones(len(length_B), dtype=torch.bool)
    others[list(rows)] = False
    by_length = others.nonzero()[:, 0][length_B[others].argsort(stable=True)]
    return torch.cat([torch.tensor(rows, dtype=torch.long), by_length[: count - len(rows)]])
