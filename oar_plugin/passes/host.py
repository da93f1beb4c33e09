"""What a host gives to `Schedule`: it runs its model over rows, and knows nothing of scores, choices and predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oar_plugin.credit.importance import Forward
from oar_plugin.passes.gradient import Layout, Packed
from oar_plugin.passes.taps import Tap


@dataclass(frozen=True)
class MicroBatch:
    """`tap` returns what a forward computes. `end` takes the log-prob of each packed token, on any device, or None."""

    tap: Callable[[Forward], Tap]
    end: Callable[[Tensor | None], None] = lambda log_prob_T: None


@dataclass(frozen=True)
class Work:
    """Forwards over some rows. For each micro-batch a host calls `begin` with the numbers of its rows and where their tokens
    are, then runs its model once for each of `forwards`, in this order, under `MicroBatch.tap`, and calls `MicroBatch.end`.
    Ranks that share rows call `end` in the same order.
    """

    forwards: list[Forward]
    begin: Callable[[Sequence[int], Layout], MicroBatch]

    @property
    def reads_only(self) -> bool:
        return all(forward.backward is None for forward in self.forwards)


class Host(Protocol):
    """One batch of a host. All ranks call the same methods in the same order."""

    device: torch.device
    gives_log_probs: bool  # whether `read` gives them to `MicroBatch.end`

    def read(self, rows: Sequence[int], work: Work | None) -> bool:
        """Runs the host's own log-prob forward over the whole batch; without one, these rows, if there is work. Returns whether
        memory sufficed.
        """

    def gradient(self, rows: Sequence[int], work: Work) -> bool:
        """Runs these rows with a graph, and their backwards. Returns whether memory sufficed."""

    def copies(self, copies: Packed, like: Sequence[int], work: Work) -> None:
        """Runs other sequences without a graph. `like`: the row that each one copies."""

    def whole(self, count: int) -> int:
        """The smallest number of rows, `count` or more, that fills whole micro-batches."""

    def share(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the same rows. It may overwrite its argument."""

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold different rows. It may overwrite its argument."""

    def largest(self, count: int) -> int:
        """The maximum over the ranks that hold different rows."""
