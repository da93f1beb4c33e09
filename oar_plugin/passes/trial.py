"""One short forward per model object, before its first scores: does the model compute what the hooks assume?

The configuration cannot tell, because every new model has new keys. The trial compares the model's own logits with those of the
tapped rows, and the logits of a sequence's first tokens with those of the same tokens in a row where no more tokens follow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY
from oar_plugin.passes.gradient import Layout
from oar_plugin.passes.request import Request
from oar_plugin.passes.rows import Project
from oar_plugin.passes.taps import Tap, UnsupportedModelError, logit_changes, to_device, unwrapped

TOKENS = 32
_ACCEPTED: WeakSet[nn.Module] = WeakSet()


class Reading(Tap):
    """Reads the logits of some packed tokens, `[N, V]`, on every rank that shares the sequences. None: of all tokens.

    `fused`, of a model whose forward gives entropies and log-probs in place of logits (verl's fused kernels): the temperature,
    and the token after each packed token, int64 `[T]`; -1: the sequence ends.
    """

    def __init__(self, layout: Layout, row_N: Tensor | None = None, fused: tuple[float, Tensor] | None = None) -> None:
        chosen = slice(None) if row_N is None else row_N
        local_N = layout.local_T[chosen]
        self.layout, self.num_rows = layout, len(local_N)
        self.fused = fused and (fused[0], fused[1][chosen])
        position_N, self.held_N = to_device(layout.device, local_N[local_N >= 0], (local_N >= 0).nonzero()[:, 0])
        super().__init__(position_N, self._read, rows_only=False)
        self.tapped_NV = self.own_NV = torch.zeros(0)  # from the projection, from the model
        self.embeddings = self.eps = 0.0

    def leaf(self, embedding: Tensor) -> Tensor | None:
        self.embeddings, self.eps = embedding.shape[:-1].numel(), rounding(embedding)
        return super().leaf(embedding)

    def _read(self, project: Project, hidden_NH: Tensor) -> None:
        logits_NV = project(hidden_NH)
        self.tapped_NV, self.eps = self._whole(logits_NV), max(self.eps, rounding(hidden_NH), rounding(logits_NV))

    def see(self, output: Any) -> None:
        own = output.logits if self.fused is None else torch.stack([output.entropy, output.log_probs], -1)
        if own.shape[:-1].numel() == self.layout.num_embeddings:
            self.own_NV = self._whole(own.flatten(0, -2)[self.row_position_N])

    def _whole(self, logits_NV: Tensor) -> Tensor:
        whole_NV = logits_NV.new_zeros(self.num_rows, logits_NV.shape[-1])
        whole_NV[self.held_N] = logits_NV.detach()
        return self.layout.sum_over_sequence_ranks(whole_NV)


def rounding(tensor: Tensor) -> float:
    """The relative distance of two neighbouring numbers of the tensor, under its device's autocast. A GPU may use TF32."""
    kind, eps = tensor.device.type, torch.finfo(tensor.dtype).eps
    if torch.is_autocast_enabled(kind):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(kind)).eps)
    return eps if kind == "cpu" else max(eps, 2**-10)


def change(got_NV: Tensor, want_NV: Tensor, eps: float) -> str:
    """How the logits of rows change, relative to their spread; empty if rounding explains it.

    A wrong position, mask or state changes the logits of a trained model by 0.2 and more. The median over rows counts, because
    rounding may send single tokens to other experts.
    """
    got_NV, want_NV = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (got_NV, want_NV))
    got_NV, want_NV = (x.nan_to_num(0.0, 0.0, 0.0) for x in (got_NV, want_NV))
    got_NV, want_NV = (x - x.mean(-1, keepdim=True) for x in (got_NV, want_NV))  # a constant changes no probability
    figure = ((got_NV - want_NV).norm(dim=-1) / want_NV.norm(dim=-1)).nan_to_num(0.0).median().item()
    allowed = 16 * eps + 1e-4
    return f"they change by {figure:.2g} of their spread; rounding explains {allowed:.2g}" if figure > allowed else ""


def fault(trial: Reading, changes: Mapping[str, float]) -> str:
    """What differs; empty: nothing. `trial` has read the two sequences of `check_by_trial`, or the first `TOKENS` of one."""
    own_NV, tapped_NV = trial.own_NV.float(), trial.tapped_NV.float()
    shape = tapped_NV.shape if trial.fused is None else (len(tapped_NV), 2)
    if trial.embeddings != trial.layout.num_embeddings or own_NV.shape != shape:
        return "is not supported: it has not one embedding, hidden state and row of logits for each token"
    logits = torch.cat([own_NV.flatten(), tapped_NV.flatten()])
    # A model may return -inf for tokens that it never writes.
    if count := int((logits.isnan() | logits.isposinf()).sum()):
        advice = "are its weights finite, and all of them loaded? In fp16, try bfloat16 or float32"
        return f"gives outputs that are not finite (NaN or infinity in {count} of {len(logits)} logits): {advice}"
    if trial.fused is None:
        # Logits are made of the same hidden states and weights, and rounded once; the order of float32 sums may differ.
        found = _difference(own_NV, tapped_NV, tapped_NV, 2 * trial.eps + 1e-5)
    else:
        temperature, next_N = trial.fused
        sampled_NV, inside_N = tapped_NV / temperature, next_N >= 0
        entropy_N = WHOLE_VOCABULARY.entropy(sampled_NV)
        log_prob_N = WHOLE_VOCABULARY.log_prob(sampled_NV[inside_N], next_N[inside_N])
        # Kernels keep sums that logits round.
        found = _difference(own_NV[:, 0], entropy_N, entropy_N, 16 * trial.eps + 1e-4)
        # A logit less a mean of logits, each rounded at most three times by eps / 2: in the kernels, here, by the temperature.
        found = found or _difference(own_NV[inside_N, 1], log_prob_N, sampled_NV, 3 * trial.eps + 1e-4)
    if found:
        said = ", ".join(f"{name}={value}" for name, value in changes.items())
        does = f"its logits are not changed as its configuration says ({said})"
        return f"is not supported: {does if said else 'it changes its logits after the vocabulary projection'}: {found}"
    again_NV = tapped_NV[TOKENS:]
    moved = change(again_NV, tapped_NV[: len(again_NV)], trial.eps) if len(again_NV) else ""
    return moved and f"is not supported: logits depend on padding, other rows or later tokens: {moved}"


def _difference(own: Tensor, want: Tensor, scale: Tensor, allowed: float) -> str:
    """How the model's values `own` differ from those of the projection, `want`; empty if by no more than `allowed`.

    The difference is measured relative to the largest absolute number in `scale`, of any shape.
    """
    # Equal infinities do not differ.
    difference = torch.where(own == want, 0.0, (own - want).abs())
    largest = scale.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    figure = (difference.max() / largest).item()
    return "" if figure <= allowed else f"they differ by {figure:.2g} of the largest; rounding explains {allowed:.2g}"


def check_by_trial(
    model: nn.Module,
    request: Request,
    token_T: Tensor,
    read: Callable[[list[Tensor]], Sequence[Reading]],
    max_over_ranks: Callable[[int], int],
) -> None:
    """Runs the trial, unless this model object passed one or the importance runs no model. All ranks that share the model's
    weights must call this together. `read` takes two sequences, the first tokens of `token_T`, runs the host's model on them,
    and returns a `Reading` of all tokens, and perhaps others. `max_over_ranks` returns a count's maximum over ranks.
    UnsupportedModelError: names the model's class, what differs, and by how much; or that its outputs are not finite.
    """
    inner, kind = unwrapped(model), request.importance_object
    if inner in _ACCEPTED or not (kind.backwards or kind.reads or kind.copies):
        return
    sequence = trial_tokens(token_T)
    trials, changes = read([sequence, sequence[: TOKENS // 2]]), logit_changes(getattr(inner, "config", None))
    found = next(filter(None, (fault(trial, changes) for trial in trials)), "")
    if max_over_ranks(int(bool(found))):
        raise UnsupportedModelError(f"{type(inner).__name__} {found or 'is not supported: another rank says why'}")
    _ACCEPTED.add(inner)


def trial_tokens(token_T: Tensor) -> Tensor:
    """The first `TOKENS` tokens; token 0 where there are fewer."""
    return torch.cat([token_T[:TOKENS], token_T.new_zeros(TOKENS)])[:TOKENS]
