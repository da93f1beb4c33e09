"""Floating-point operations of a step, a multiplication and an addition counted as two.

Matrix products after Kaplan et al. 2020 (arXiv 2001.08361, section 2.1): two a weight and token in a forward, twice that in a
backward with weight gradients (PaLM, arXiv 2204.02311, appendix B, and Narayanan et al. 2021, arXiv 2104.04473, appendix, add
attention and recomputation). A backward to activations only, as in an importance pass or under frozen weights, takes
one forward. Attention: two products of `query x length` a token forward, five backward, because flash attention computes the
scores again (arXiv 2205.14135); a causal mask leaves half of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import Backward
from oar_plugin.plan.layout import Recompute, Setup, Workload
from oar_plugin.plan.shape import ModelShape

CAUSAL = 0.5
BACKWARD_ATTENTION = 2.5  # products of the backward over those of the forward


def layers_forward(shape: ModelShape, tokens: float, length: float, causal: float = CAUSAL) -> float:
    """FLOPs of all layers on `tokens` tokens in sequences of `length`."""
    return tokens * (2.0 * shape.active_weights + attention(shape, length, causal))


def attention(shape: ModelShape, length: float, causal: float = CAUSAL) -> float:
    """FLOPs of attention scores and values in all layers, for one token of a sequence of `length`."""
    return shape.layers * 4.0 * shape.query * length * causal


def head(shape: ModelShape, rows: float) -> float:
    """FLOPs of the vocabulary projection of some rows."""
    return 2.0 * shape.hidden * shape.vocab * rows


def forward(shape: ModelShape, tokens: float, length: float, causal: float = CAUSAL) -> float:
    """FLOPs of a forward with logits of every token."""
    return layers_forward(shape, tokens, length, causal) + head(shape, tokens)


def recomputed(
    shape: ModelShape,
    tokens: float,
    length: float,
    recompute: Recompute,
    stops_early: bool = True,
    causal: float = CAUSAL,
) -> float:
    """FLOPs of recomputing the layers in a backward.

    Args:
        shape: the model.
        tokens: of the pass.
        length: of a sequence.
        recompute: what is recomputed; `selective` does attention.
        stops_early: torch's checkpointing ends where nothing that follows was saved: before the last projection of the MLP.
        causal: share of the scores that is computed.
    """
    if recompute == "none":
        return 0.0
    if recompute == "selective":
        return tokens * attention(shape, length, causal)
    whole = layers_forward(shape, tokens, length, causal)
    dense = (shape.layers - shape.moe_layers) * shape.hidden * shape.intermediate
    # Of experts the last projection's output is scaled, and so saved: it is computed again.
    return whole - 2.0 * tokens * dense if stops_early else whole


def update(
    shape: ModelShape,
    tokens: float,
    length: float,
    recompute: Recompute,
    lora_rank: int = 0,
    stops_early: bool = True,
    causal: float = CAUSAL,
) -> float:
    """FLOPs of forward and backward of an update, recomputation included; the optimizer's are negligible."""
    weights = 2.0 * (shape.active_weights * tokens) + head(shape, tokens)
    scores = tokens * attention(shape, length, causal)
    backward = (1.0 if lora_rank else 2.0) * weights + BACKWARD_ATTENTION * scores
    adapters = 6.0 * shape.lora_parameters(lora_rank) * tokens
    return weights + scores + backward + adapters + recomputed(shape, tokens, length, recompute, stops_early, causal)


def importance_backward(
    shape: ModelShape,
    tokens: float,
    length: float,
    rows: float,
    recompute: Recompute,
    stops_early: bool = True,
    causal: float = CAUSAL,
) -> float:
    """FLOPs that one draw adds to a forward: the answer's rows, and the backward to the input embeddings."""
    linear = 2.0 * shape.active_weights * tokens
    scores = BACKWARD_ATTENTION * tokens * attention(shape, length, causal)
    return linear + scores + 2 * head(shape, rows) + recomputed(shape, tokens, length, recompute, stops_early, causal)


def reasoning_tokens(work: Workload) -> float:
    return max(1.0, work.mean_response - work.answer)


def answer_rows(oar: OarConfig, work: Workload) -> int:
    """Rows of logits of a response that the probe reads."""
    return 1 if oar.probe == "last" else work.answer


def rows_of(backward: Backward, oar: OarConfig, work: Workload) -> float:
    """Rows of logits of a response that a backward starts from."""
    return reasoning_tokens(work) if backward.rows == "reasoning" else answer_rows(oar, work)


def rows_read(oar: OarConfig, work: Workload) -> float:
    """Rows of logits of a response that are read and no backward starts from."""
    importance = oar.importance_object
    alone = all(backward.rows != "reasoning" for backward in importance.backwards)
    return reasoning_tokens(work) if importance.reads and alone else 0.0


def masked_copies(shape: ModelShape, oar: OarConfig, work: Workload, shares_prefix: bool) -> float:
    """FLOPs of the masked copies of one response (OAR-P), its own forward for the reference included.

    A unit of the reasoning gets a copy; a copy computes what comes after its first masked token, half of the reasoning on
    average, up to the end of the answer (`passes/masked_copies.py`), or all of it where a prefix cannot be shared.
    """
    reasoning = reasoning_tokens(work)
    units = max(1.0, reasoning / oar.perturbation.span)
    budget = oar.budget
    copies = budget * units if budget <= 1 else min(units, budget)
    computed = reasoning / 2 + work.answer if shares_prefix else work.mean_length
    # Its keys reach back to the prompt: three quarters of the sequence on average where the prefix is shared.
    seen = work.mean_prompt + 0.75 * reasoning + work.answer if shares_prefix else work.mean_length * CAUSAL
    one = computed * (2.0 * shape.active_weights + attention(shape, seen, 1.0)) + head(shape, work.answer)
    return copies * one + layers_forward(shape, work.mean_length, work.mean_length)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step over all GPUs.

    Attributes:
        generation: prefill of each prompt once, and decoding.
        log_prob: forward for log-probs and entropy of every response.
        reference: the same of a reference model.
        importance: what importance adds to that forward, masked copies left out.
        copies: what masked copies add.
        update: forward, backward and recomputation, over all epochs.
    """

    generation: float
    log_prob: float
    reference: float
    importance: float
    copies: float
    update: float

    @property
    def total(self) -> float:
        return self.generation + self.log_prob + self.reference + self.importance + self.copies + self.update


def step_flops(setup: Setup) -> StepFlops:
    """FLOPs of a step by phase."""
    shape, work, training = setup.shape, setup.workload, setup.training
    length, tokens = work.mean_length, work.tokens
    prefill = work.prompts * (layers_forward(shape, work.mean_prompt, work.mean_prompt) + head(shape, 1))
    decoded = work.sequences * work.mean_response
    seen = work.mean_prompt + work.mean_response / 2
    decoding = decoded * (2.0 * shape.active_weights + attention(shape, seen, 1.0)) + head(shape, decoded)
    log_prob = forward(shape, tokens, length)
    early = setup.layout.engine == "fsdp"
    return StepFlops(
        generation=prefill + decoding,
        log_prob=log_prob,
        reference=log_prob if training.reference else 0.0,
        importance=_importance(setup, early),
        copies=_copies(setup),
        update=work.epochs * update(shape, tokens, length, training.recompute, training.lora_rank, early),
    )


def _scored(setup: Setup) -> float:
    return setup.workload.sequences * setup.workload.scored_share


def _importance(setup: Setup, early: bool) -> float:
    oar, shape, work, scored = setup.oar, setup.shape, setup.workload, _scored(setup)
    if oar is None:
        return 0.0
    length, tokens = work.mean_length, scored * work.mean_length
    added = oar.extra_forwards * layers_forward(shape, tokens, length) + head(shape, scored * rows_read(oar, work))
    for backward in oar.importance_object.backwards:
        rows = scored * rows_of(backward, oar, work)
        one = importance_backward(shape, tokens, length, rows, setup.training.recompute, early)
        added += oar.num_draws * one
    return added


def _copies(setup: Setup) -> float:
    if setup.oar is None or setup.oar.copies is None:
        return 0.0
    shares = setup.oar.offloads or setup.layout.ulysses == 1
    return _scored(setup) * masked_copies(setup.shape, setup.oar, setup.workload, shares)
