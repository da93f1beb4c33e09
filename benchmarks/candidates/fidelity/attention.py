"""Candidates for `python -m benchmarks fidelity --also`: attention patching along more directions, which finds more for a
backward each, and the best of those that read the gradient at the embeddings alone."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.fidelity.attention import attention_patching
from benchmarks.fidelity.estimators import by_importance
from benchmarks.fidelity.responses import MicroBatch
from benchmarks.tiny.words import PAD


def norm_times_pad(model: nn.Module, batch: MicroBatch) -> Tensor:
    """||g||^2 ||e_pad - e||^2 with Fisher's g; 1 + 1."""
    host: Any = model
    table_VH = host.get_input_embeddings().weight.detach().float()
    distance_BT = (table_VH[PAD] - table_VH[batch.token_BT]).square().sum(-1)
    return by_importance(model, batch, "fisher") * distance_BT


ESTIMATORS = {
    "attention x2": partial(attention_patching, directions=2),
    "attention x3": partial(attention_patching, directions=3),
    "norm x pad": norm_times_pad,
}
