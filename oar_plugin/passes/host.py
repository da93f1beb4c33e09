"""What a host gives to `Schedule`: it runs its model over rows, and knows nothing of scores, choices and predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from oar_plugin.credit.importance import Forward
from oar_plugin.passes.gradient import Layout, Packed
from oar_plugin.passes.taps import Tap


class Tapped(Protocol):
    """One micro-batch, for all forwards of a `Work`."""

    def tap(self, forward: Forward) -> Tap:
        """What this forward computes."""


@dataclass(frozen=True)
class Work:
    """Forwards over some rows. For each micro-batch a host calls `begin`, runs its model once for each of `forwards`, in this
    order, under the taps of what `begin` returned, and calls `end`. Ranks that share rows call `end` in the same order.
    """

    forwards: list[Forward]
    begin: Callable[[Sequence[int], Layout], Tapped]  # numbers of the micro-batch's rows, and where their tokens are
    # also takes the log-prob of each packed token, on any device, if the host has them
    end: Callable[[Any, Tensor | None], None]

    @property
    def reads_only(self) -> bool:
        return all(forward.backward is None for forward in self.forwards)


class Host(Protocol):
    """One batch of a host. All ranks call the same methods in the same order."""

    device: torch.device
    prefixes: bool  # whether `masked_copies` runs copies, behind cached prefixes; else they are rows of `copies`
    gives_log_probs: bool  # whether `read` gives `Work.end` the host's own

    def read(self, rows: Sequence[int], work: Work | None) -> bool:
        """Runs the host's own log-prob forward over the whole batch; without one, these rows, if there is work. Returns whether
        memory sufficed.
        """

    def gradient(self, rows: Sequence[int], work: Work) -> bool:
        """Runs these rows with a graph, and their backwards. Returns whether memory sufficed."""

    def copies(self, copies: Packed, like: Sequence[int], work: Work) -> None:
        """Runs other sequences without a graph. `like`: the row that each one copies."""

    def masked_copies(self, packed: Packed) -> Tensor:
        """Importance per token from a copy for each unit of the reasoning, float32 `[T]`."""

    def whole(self, count: int) -> int:
        """The smallest number of rows of whole micro-batches, `count` or more."""

    def share(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the same rows. It may overwrite its argument."""

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold different rows. It may overwrite its argument."""

    def largest(self, count: int) -> int:
        """The maximum over the ranks that hold different rows."""
