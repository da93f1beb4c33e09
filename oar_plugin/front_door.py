"""Token credit for any HuggingFace causal LM, without a trainer: `oar_plugin.importance` and `oar_plugin.reshape`.

It uses the hosts' code: with the same settings and training step it returns the scores of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from oar_plugin import estimator
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.token_credit import PaddedBatch, TokenCredit


@dataclass(frozen=True)
class Credit:
    """The result of `importance`: B sequences of prompt and response, padded on the right to length L, on the CPU.

    `weights` are the gate's. They average 1 over a response's reasoning tokens. They are 1 at all other tokens, and at all
    tokens of a response that falls back to GRPO. `importance` is not negative, and 0 outside the reasoning.
    """

    input_ids: Tensor  # int64 `[B, L]`
    attention_mask: Tensor  # bool `[B, L]`, false at padding
    importance: Tensor  # float32 `[B, L]`
    weights: Tensor  # float32 `[B, L]`
    segments: Tensor  # int8 `[B, L]` of `oar_plugin.credit.answer.Segment`
    status: list[Status]  # one per response. All except SCORED say why the response falls back to GRPO
    metrics: dict[str, float]  # as a run logs them under `oar/`
    config: OarConfig


def importance(
    model: nn.Module,
    input_ids: Tensor | None = None,
    *,
    response_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    segments: Tensor | None = None,
    prompts: Sequence[Any] | None = None,
    responses: Sequence[Any] | None = None,
    tokenizer: Any = None,
    temperature: float = 1.0,
    step: int = 1,
    max_tokens: int = 8192,
    **settings: Any,
) -> Credit:
    """Returns how much each reasoning token of each response matters, and the weights that follow.

    Give `prompts` and `responses`, as texts or token ids, or `input_ids` and a `response_mask`.

    Args:
        model: causal LM of transformers, on any device, in any dtype. The call does not change it.
        input_ids: int64 `[B, T]`, prompts and responses, padded on any side.
        response_mask: bool or int `[B, T]`, true at the model's own tokens.
        attention_mask: bool or int `[B, T]`, false at padding. None: false at padding tokens at both ends of a row.
        segments: int `[B, T]` of `Segment`, OUTSIDE at prompts and padding. None: from the text, by `answer_patterns`.
        prompts: B texts (with the chat template applied) or sequences of token ids.
        responses: B texts or sequences of token ids.
        tokenizer: the model's tokenizer; not needed with `input_ids`, `attention_mask` and `segments`.
        temperature: the sampling temperature of the responses.
        step: training step, on which signs, noise and the probe's warm-up depend.
        max_tokens: maximum number of tokens per forward, with padding.
        settings: keys of `algorithm.oar`: `importance`, `gate`, `tau`, `probe`, `answer_patterns`, `perturbation`, ...

    Raises:
        OarConfigError: a setting cannot work. The message names the key, its value and what is allowed.
        ValueError: inputs are missing or have other shapes. The message says what is needed.
        UnsupportedModelError: importance cannot be computed with this model (`oar_plugin.passes.taps.check_model`).
        RuntimeError: a parameter has a `.grad`.

    Example:
        >>> import oar_plugin
        >>> credit = oar_plugin.importance(
        ...     model, tokenizer=tokenizer, importance="fisher",
        ...     prompts=["3+4=", "2+2="], responses=["3 and 4 is 7. #### 7<eos>", "I do not know<eos>"],
        ... )
        >>> [status.name for status in credit.status]
        ['SCORED', 'NO_ANSWER']
        >>> print(credit.weights.shape == credit.input_ids.shape, round(credit.weights.mean().item(), 4))
        True 1.0
        >>> paper = oar_plugin.reshape([1.0, -1.0], credit, gate="bi_level")
        >>> print(paper.advantage_BL[1].unique().tolist())
        [-1.0]
    """
    credit = TokenCredit(
        settings, tokenizer, "oar_plugin.importance", padding=model.config if tokenizer is None else None
    )
    request = credit.request(step, temperature=temperature, importance_only=True)
    if input_ids is None:
        rows = _tokenized(prompts, responses, tokenizer)
        segments_BL = None if segments is None else segments.cpu()
    else:
        if response_mask is None:
            raise ValueError("input_ids need a response_mask [B, T]; or give prompts and responses")
        mask_BT = _padding_mask(input_ids, tokenizer) if attention_mask is None else attention_mask.bool().cpu()
        rows = list(zip(_unpadded(input_ids, mask_BT), _unpadded(response_mask.bool(), mask_BT), strict=True))
        segments_BL = None if segments is None else pad_sequence(_unpadded(segments, mask_BT), True)
    token_BL, own_BL = (pad_sequence(list(column), True) for column in zip(*rows, strict=True))
    mask_BL = torch.arange(token_BL.shape[1]) < torch.tensor([len(ids) for ids, _ in rows])[:, None]
    batch = PaddedBatch(token_BL, mask_BL, mask_BL & (own_BL.cumsum(-1) > 0), own_BL)
    if segments_BL is None:
        segments_BL, status_B = credit.segments(batch, torch.ones(len(rows)), request)
    elif segments_BL.shape != token_BL.shape:
        raise ValueError(f"segments are {tuple(segments_BL.shape)}, wanted {tuple(token_BL.shape)} as the tokens")
    else:
        segments_BL, status_B = _checked_segments(segments_BL)
    segments_BL = segments_BL.to(torch.int8)
    importance_BL = credit.importance(model, batch, segments_BL, request, max_tokens=max_tokens)
    even = credit.reshape(step, torch.ones_like(importance_BL), importance_BL, segments_BL, status_B)
    status = [Status(int(value)) for value in even.status_B]
    return Credit(
        token_BL, mask_BL, importance_BL, even.weight_BL, segments_BL, status, even.metrics, config=credit.config
    )


def reshape(advantages: Tensor | Sequence[float], credit: Credit, **settings: Any) -> estimator.Reshaped:
    """Returns advantages times the weights of a gate, and these weights, float32 `[B, L]`. Each response keeps its total.

    Args:
        advantages: per response `[B]`, or per token `[B, L]`.
        credit: from `importance`.
        settings: `gate`, `tau`, `beta`, `floor`, in place of those in `credit`.

    Raises:
        OarConfigError: a setting cannot work.
    """
    advantage_BL = torch.as_tensor(advantages, dtype=torch.float32).cpu()
    if advantage_BL.dim() == 1:
        advantage_BL = advantage_BL[:, None].expand_as(credit.importance)
    config = OarConfig.parse(credit.config.model_dump() | settings, "oar_plugin.reshape")
    status_B = torch.tensor([int(status) for status in credit.status])
    return estimator.reshape(advantage_BL, credit.importance, credit.segments == Segment.REASONING, status_B, config)


def _tokenized(
    prompts: Sequence[Any] | None, responses: Sequence[Any] | None, tokenizer: Any
) -> list[tuple[Tensor, Tensor]]:
    """Per row: the token ids of prompt and response, concatenated, and a bool mask of the response."""
    if prompts is None or responses is None or len(prompts) != len(responses):
        raise ValueError("give prompts and as many responses, or input_ids with a response_mask")

    def ids(text: Any, **arguments: Any) -> Tensor:
        if not isinstance(text, str):
            return torch.as_tensor(text, dtype=torch.long).cpu()
        if tokenizer is None:
            raise ValueError("prompts and responses are texts: give the model's tokenizer")
        return torch.tensor(tokenizer(text, **arguments)["input_ids"], dtype=torch.long)

    pairs = [(ids(p), ids(r, add_special_tokens=False)) for p, r in zip(prompts, responses, strict=True)]
    return [(torch.cat([p, r]), torch.arange(len(p) + len(r)) >= len(p)) for p, r in pairs]


def _padding_mask(input_ids: Tensor, tokenizer: Any) -> Tensor:
    """Bool `[B, T]`, false at padding tokens at either end."""
    if tokenizer is None or tokenizer.pad_token_id is None:
        raise ValueError("give an attention_mask [B, T], or the tokenizer, whose padding token says what is padding")
    real_BT = (input_ids != tokenizer.pad_token_id).cpu()
    if tokenizer.pad_token_id == tokenizer.eos_token_id:  # the first one after a response belongs to it
        real_BT = real_BT | real_BT.roll(1, -1).index_fill(1, torch.tensor([0]), False)
    after_BT = real_BT.flip(-1).cumsum(-1).flip(-1) > 0
    return (real_BT.cumsum(-1) > 0) & after_BT


def _unpadded(values_BT: Tensor, mask_BT: Tensor) -> list[Tensor]:
    """Each row without its padding, on the CPU."""
    return [row[keep] for row, keep in zip(values_BT.cpu(), mask_BT, strict=True)]


def _checked_segments(segments_BL: Tensor) -> tuple[Tensor, Tensor]:
    """A user's segments, but OUTSIDE at all tokens of responses that cannot be scored, and int64 `[B]` of `Status`."""
    # A token after the answer cannot have moved the answer.
    after_BL = (segments_BL == Segment.ANSWER).flip(-1).cumsum(-1).flip(-1) == 0
    segments_BL = segments_BL.masked_fill(after_BL & (segments_BL == Segment.REASONING), int(Segment.AFTER))
    reasoned_B = (segments_BL == Segment.REASONING).any(-1)
    status_B = torch.where(reasoned_B, int(Status.SCORED), int(Status.NO_REASONING))
    status_B[after_BL.all(-1)] = int(Status.NO_ANSWER)
    return segments_BL.masked_fill(status_B[:, None] != Status.SCORED, int(Segment.OUTSIDE)), status_B
