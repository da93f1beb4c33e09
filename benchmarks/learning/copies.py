"""Importance from masked copies for the small trainer: the package's units and scores, for many responses in one forward.

The package runs one response's copies at a time, behind a cached prefix. In models this small, calls cost more than tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.tiny.fast import head_of, micro_batches, rows_of
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import replacement_seeds, sample_replacements, units
from oar_plugin.credit.probe import Probe
from oar_plugin.passes.request import Request

ROWS = 256
"""Copies in one forward."""


@torch.no_grad()
def masked_importance(model: PreTrainedModel, request: Request, token_BL: Tensor, segments_BL: Tensor) -> Tensor:
    """Importance `[B, L]`, 0 outside the reasoning. `request.replacement_token`, or a draw, stands where a copy masks."""
    reasoning_BL = segments_BL == Segment.REASONING
    span = request.config.perturbation.span
    wanted = [
        (row, list(unit))
        for row in reasoning_BL.any(-1).nonzero()[:, 0].tolist()
        for unit in units(reasoning_BL[row].tolist(), span)
    ]
    importance_BL = torch.zeros(token_BL.shape)
    if not wanted:  # a share of few responses may be none
        return importance_BL
    row_K = torch.tensor([row for row, _ in wanted])
    if request.replacement_token is None:
        other_BL = _drawn(model, request, token_BL, segments_BL)
    else:
        other_BL = torch.full_like(token_BL, request.replacement_token)
    copy_KL = token_BL[row_K]
    for place, (row, unit) in enumerate(wanted):
        copy_KL[place, unit] = other_BL[row, unit]
    reference_BV = _outcomes(model, request.probe, token_BL, segments_BL)
    outcome_KV = _outcomes(model, request.probe, copy_KL, segments_BL[row_K])
    score_K = divergence(reference_BV[row_K], outcome_KV, request.probe).clamp_min(0.0)
    for (row, unit), score in zip(wanted, score_K.tolist(), strict=True):
        importance_BL[row, unit] = score / len(unit)
    return importance_BL


def _drawn(model: PreTrainedModel, request: Request, token_BL: Tensor, segments_BL: Tensor) -> Tensor:
    """The tokens, with draws from the model's own predictions in the reasoning, as the package makes them."""
    other_BL, head_VH = token_BL.clone(), head_of(model)
    end_B = _ends(segments_BL)
    for rows, longest in micro_batches(end_B, ROWS):
        hidden_bLH = rows_of(model, model.get_input_embeddings()(token_BL[rows, :longest]))
        for row, hidden_LH in zip(rows.tolist(), hidden_bLH, strict=True):
            at_R = (segments_BL[row] == Segment.REASONING).nonzero()[:, 0]
            seed_R = replacement_seeds(token_BL[row, : end_B[row]], at_R, request.seed)
            logits_RV = F.linear(hidden_LH[at_R - 1], head_VH)
            other_BL[row, at_R] = sample_replacements(logits_RV, token_BL[row, at_R], seed_R)
    return other_BL


def _ends(segments_BL: Tensor) -> Tensor:
    """Where each row's answer ends, `[B]`."""
    return ((segments_BL == Segment.ANSWER) * torch.arange(1, segments_BL.shape[1] + 1)).amax(-1)


def _outcomes(model: PreTrainedModel, probe: Probe, token_KL: Tensor, segments_KL: Tensor) -> Tensor:
    """Log-distribution of each row's answer, `[K, V]`; for `answer_joint` the answer's mean log-probability, `[K]`."""
    answer_KL = segments_KL == Segment.ANSWER
    if probe == "last":
        answer_KL = answer_KL & (answer_KL.cumsum(-1) == 1)
    end_K = _ends(segments_KL.masked_fill(~answer_KL, int(Segment.OUTSIDE)))
    joint, head_VH = probe == "answer_joint", head_of(model)
    found_KV = torch.zeros(len(token_KL), 1 if joint else len(head_VH), dtype=torch.float64)
    for rows, longest in micro_batches(end_K, ROWS):
        token_kL, predicts_kl = token_KL[rows, :longest], answer_KL[rows, 1:longest]
        hidden_NH = rows_of(model, model.get_input_embeddings()(token_kL))[:, :-1][predicts_kl]
        logits_NV, row_N = F.linear(hidden_NH, head_VH), predicts_kl.nonzero()[:, 0]
        if joint:
            logits_NV = logits_NV.log_softmax(-1).gather(-1, token_kL[:, 1:][predicts_kl][:, None])
        found_KV.index_add_(0, rows[row_N], logits_NV.double() / predicts_kl.sum(-1)[row_N, None])
    return found_KV[:, 0] if joint else log_distribution(found_KV)
