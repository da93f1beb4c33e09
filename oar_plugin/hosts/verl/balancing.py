"""Which data-parallel rank gets which rows, where some rows are scored and the others are not.

Scored rows take a pass of their own, into which every rank takes as many rows as the rank that has most. So the ranks get equal
numbers of them, beside the equal numbers of rows and the even work that verl gives them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


def balanced_partitions(lengths: Sequence[int], scored: Sequence[bool], ranks: int) -> list[list[int]]:
    """Rows of each rank, as many for each, in the order in which they stand in the batch.

    The ranks' numbers of scored rows differ by at most one, and those with one less have the shortest of the other rows, with
    which `scored_first` makes up the difference.

    Args:
        lengths: tokens of each row, prompt and response.
        scored: whether the row is to be scored.
        ranks: number of data-parallel ranks; it divides the number of rows.
    """
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])
    ahead, others = ([row for row in by_length if bool(scored[row]) is wanted] for wanted in (True, False))
    extra = len(ahead) % ranks  # ranks that have one more
    mixed = ahead[:extra] + others[: (ranks - extra) % ranks]
    order = mixed + ahead[extra:] + others[len(mixed) - extra :]
    # verl sorts rows by work, and each rank gets one of the first `ranks` rows, one of the next, and so on. An offset that
    # they have in common keeps them together, and adds the same to every rank.
    work = calculate_workload(torch.tensor([lengths[row] for row in order], dtype=torch.int64)).tolist()
    offset = max(work) + 1
    lifted = [one + place // ranks * offset for place, one in enumerate(work)]
    return [sorted(order[place] for place in dealt) for dealt in get_seqlen_balanced_partitions(lifted, ranks, True)]


def scored_first(scored_B: Tensor, length_B: Tensor, ahead: int) -> Tensor:
    """An order of a rank's rows: the scored ones, the shortest others up to `ahead` rows, and the rest as they stood."""
    scored, others = scored_B.nonzero()[:, 0], (~scored_B).nonzero()[:, 0]
    by_length = others[length_B[others].argsort(stable=True)]
    filling = max(0, ahead - len(scored))
    return torch.cat([scored, by_length[:filling], by_length[filling:].sort().values])
