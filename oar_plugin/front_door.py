"""Token credit for any HuggingFace causal LM, without a trainer: `oar_plugin.importance` and `oar_plugin.reshape`.

It uses the hosts' code: with the same settings and training step it returns the scores of a run.
"""

import copy
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from oar_plugin import estimator
from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.watch import Watch
from oar_plugin.passes.prediction import Predictor
from oar_plugin.passes.tokens import TokenBytes
from oar_plugin.token_credit import PaddedBatch, TokenCredit

GATE_SETTINGS = ("gate", "tau", "beta", "floor")
Texts = Sequence[Any] | Mapping[str, Any]
SHOWN = 8  # responses that a notebook shows of one `Credit`


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
    predicted: Tensor  # bool `[B]`: its weights come from predicted scores (`amortize.share`)
    metrics: dict[str, float]  # as a run logs them under `oar/`
    config: OarConfig
    predictor: Predictor | None = field(default=None, repr=False, compare=False)  # what was learned, for the next call
    tokenizer: Any = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        rows = zip(self.status, self.predicted.tolist(), strict=True)
        names = Counter(status.name + " (predicted)" * predicted for status, predicted in rows)
        found = ", ".join(f"{name} {count}" for name, count in names.items())
        low, high = self.weights.min().item(), self.weights.max().item()
        settings = f"importance={self.config.importance}, gate={self.config.gate}"
        return f"Credit({len(self.status)} responses: {found}; {settings}; weights from {low:.2f} to {high:.2f})"

    def _repr_html_(self) -> str:
        """The first responses for a notebook: orange tokens have more than equal credit, blue tokens less."""
        read = None if self.tokenizer is None else TokenBytes(self.tokenizer)
        rows = []
        for row, status in enumerate(self.status[:SHOWN]):
            ids, weights = self.input_ids[row, self.attention_mask[row]].tolist(), self.weights[row].tolist()
            texts = [f"{token} " for token in ids] if read is None else read.texts(ids)
            tokens = (_shaded(text, weight) for text, weight in zip(texts, weights, strict=False))
            predicted = " (predicted)" * bool(self.predicted[row])
            rows.append(f"<p><b>{row}: {status.name}{predicted}</b> {''.join(tokens)}</p>")
        return f"<p>{html.escape(repr(self))}</p><div style='white-space:pre-wrap'>{''.join(rows)}</div>"


def _shaded(text: str, weight: float) -> str:
    colour, strength = ("240,140,0", min(0.8, (weight - 1) / 2)) if weight > 1 else ("0,110,220", (1 - weight) / 2)
    colour = f"rgba({colour},{strength:.2f})"
    return f"<span style='background:{colour}' title='weight {weight:.2f}'>{html.escape(text)}</span>"


@torch.inference_mode(False)  # the caller's mode would forbid gradients
def importance(
    model: nn.Module,
    input_ids: Tensor | Mapping[str, Any] | None = None,
    *,
    response_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    segments: Tensor | None = None,
    prompts: Texts | None = None,
    responses: Texts | None = None,
    tokenizer: Any = None,
    temperature: float = 1.0,
    step: int = 1,
    max_tokens: int | None = None,
    predictor: Predictor | None = None,
    **settings: Any,
) -> Credit:
    """Returns how much each reasoning token of each response matters, and the weights that follow.

    Give `prompts` and `responses`, or `input_ids` with a `response_mask` and an `attention_mask`.

    Args:
        model: causal LM of transformers, on any device, in any dtype. The call does not change it.
        input_ids: int64 `[B, T]`, prompts and responses, padded on any side; or a tokenizer's output, whose mask counts.
        response_mask: bool or int `[B, T]`, true at the model's own tokens.
        attention_mask: bool or int `[B, T]`, false at padding.
        segments: int `[B, T]` of `Segment`, OUTSIDE at prompts and padding. None: from the text, by `answer_patterns`.
        prompts: B texts, chats (lists of messages, for the tokenizer's chat template) or sequences of token ids; also what the
            tokenizer, or its chat template, returns for one of them, or for all. Its padding is left out.
        responses: B texts or sequences of token ids, without special tokens before them; also a tokenizer's output.
        tokenizer: the model's tokenizer; not needed with token ids and `segments`.
        temperature: the sampling temperature of the responses.
        step: training step, on which signs, noise and the probe's warm-up depend.
        max_tokens: maximum number of tokens per forward, with padding; a longer row runs alone. None: as many as take 2 GiB.
        predictor: that of an earlier call's result, which learns on. None: a new one, if `amortize.share` needs one.
        settings: keys of `algorithm.oar`: `importance`, `gate`, `tau`, `probe`, `answer_patterns`, `perturbation`, ...

    Raises:
        OarConfigError: a setting cannot work. The message names the key, its value and what is allowed.
        ValueError: inputs are missing or have other shapes. The message says what is needed.
        UnsupportedModelError: importance cannot be computed with this model (`oar_plugin.passes.taps.check_model`).
        RuntimeError: a parameter has a `.grad`.

    Examples:
        >>> import oar_plugin
        >>> credit = oar_plugin.importance(
        ...     model, tokenizer=tokenizer, importance="fisher",
        ...     prompts=["3+4=", "2+2="], responses=["3 and 4 is 7. #### 7<eos>", "I do not know<eos>"],
        ... )
        >>> [status.name for status in credit.status]
        ['SCORED', 'NO_ANSWER']
        >>> print(credit.weights.shape == credit.input_ids.shape, round(credit.weights.mean().item(), 4))
        True 1.0
    """
    _check(not isinstance(model, str), f"model={model!r}", "give the loaded model, not its name")
    config: Any = model.config
    text, padding = config.get_text_config(), config if tokenizer is None else None
    asked = OarConfig.parse(settings, "oar_plugin.importance", predicts=predictor is not None)
    credit = TokenCredit(asked, tokenizer, "oar_plugin.importance", padding=padding)
    if (folder := credit.config.dump.dir) is not None:
        fault = "a call writes no files; leave it out. `oar inspect FILE --model NAME` makes a page"
        raise OarConfigError(f"oar_plugin.importance.dump.dir={folder!r}: {fault}")
    if predictor is not None:
        _check(credit.schedule.predictor is not None, "predictor", "nothing is predicted without amortize.share")
        credit.schedule.predictor = copy.deepcopy(predictor)  # a call that fails, or is repeated, leaves it as it was
    if max_tokens is None:
        # A layer keeps about 10 states of a token for a backward, and 3 of its MLP, which are wider.
        graph = 32 * text.hidden_size * text.num_hidden_layers * next(model.parameters()).element_size()
        max_tokens = max(1, min(8192, 2**31 // (graph * credit.config.backwards + 8 * text.vocab_size)))
    for name, value in {"temperature": temperature, "max_tokens": max_tokens, "step": step}.items():
        _check(value > 0, f"{name}={value!r}", "must be above 0")
    usable = not any(parameter.is_inference() for parameter in model.parameters())
    _check(usable, "model", "it was loaded in torch.inference_mode(), and has no gradients; load it outside of it")
    request = credit.request(step, temperature=temperature)
    segments_BL = None if segments is None else torch.as_tensor(segments).cpu()
    if input_ids is None:
        rows = _tokenized(prompts, responses, tokenizer)
    else:
        if isinstance(input_ids, Mapping) and attention_mask is None:
            attention_mask = input_ids.get("attention_mask")
        ids_BT = _token_ids("input_ids", input_ids, 2, "must be [B, T], token ids; for one response input_ids[None]")
        masked = response_mask is not None and attention_mask is not None
        _check(masked, "input_ids", "need a response_mask and an attention_mask [B, T]; or give prompts and responses")
        given = {"response_mask": response_mask, "attention_mask": attention_mask, "segments": segments_BL}
        # Clones: tensors made in inference mode cannot be saved for a backward.
        masks = {name: torch.as_tensor(value).cpu().clone() for name, value in given.items() if value is not None}
        for name, mask in masks.items():
            _check(mask.shape == ids_BT.shape, _shape(name, mask), f"must be {tuple(ids_BT.shape)}, as input_ids")
        keep_BT, own_BT = masks["attention_mask"].bool(), masks["response_mask"].bool()
        rows = [(ids_BT[row, keep_T], own_BT[row, keep_T]) for row, keep_T in enumerate(keep_BT)]
        if segments_BL is not None:
            segments_BL = pad_sequence([masks["segments"][row, keep_T] for row, keep_T in enumerate(keep_BT)], True)
    _check(len(rows) > 0, "input_ids or prompts", "there is no response")
    for row, (ids_L, own_L) in enumerate(rows):
        fault = "there is no token before it, from which its first token could be predicted"
        _check(len(own_L) > 0 and not own_L[0], f"response {row}", fault)
        if outside := ids_L[(ids_L < 0) | (ids_L >= text.vocab_size)].tolist():
            fault = f"token id {outside[0]} in response {row} or its prompt: the model has 0 to {text.vocab_size - 1}"
            raise ValueError(f"{fault}; use its own tokenizer, and mask padding")
    token_BL, own_BL = (pad_sequence(list(column), True) for column in zip(*rows, strict=True))
    mask_BL = torch.arange(token_BL.shape[1]) < torch.tensor([len(ids) for ids, _ in rows])[:, None]
    batch = PaddedBatch(token_BL, mask_BL, mask_BL & (own_BL.cumsum(-1) > 0), own_BL)
    if segments_BL is None:
        segments_BL, status_B = credit.segments(batch, torch.ones(len(rows)), request)
    else:
        _check(segments_BL.shape == token_BL.shape, _shape("segments", segments_BL), f"must be {tuple(token_BL.shape)}")
        segments_BL, status_B = _checked_segments(segments_BL)
    segments_BL = segments_BL.to(torch.int8)
    importance_BL = credit.importance(model, batch, segments_BL, request, max_tokens=max_tokens)
    even = credit.reshape(step, torch.ones_like(importance_BL), importance_BL, segments_BL, status_B)
    status = [Status(int(value)) for value in even.status_B]
    Watch(credit.config.fallback_warning, 1).see(step, {f"oar/{name}": value for name, value in even.metrics.items()})
    found = token_BL, mask_BL, importance_BL, even.weight_BL, segments_BL, status, even.predicted_B, even.metrics
    return Credit(*found, credit.config, credit.schedule.predictor, tokenizer)


def reshape(advantages: Tensor | Sequence[float], credit: Credit, **settings: Any) -> estimator.Reshaped:
    """Returns advantages times the weights of a gate, and these weights, float32 `[B, L]`. Each response keeps its total.

    Args:
        advantages: per response `[B]`, or per token `[B, L]`.
        credit: from `importance`.
        settings: `gate`, `tau`, `beta`, `floor`, in place of those in `credit`.

    Raises:
        OarConfigError: a setting cannot work, or needs another call of `importance`.
        ValueError: `advantages` have another shape.
    """
    others = OarConfig.model_fields.keys() - GATE_SETTINGS
    if made_before := sorted(key for key in settings if key.partition(".")[0] in others):
        fault = "importance was computed before; give this setting to oar_plugin.importance"
        raise OarConfigError(f"oar_plugin.reshape.{made_before[0]}: {fault}; allowed here: {', '.join(GATE_SETTINGS)}")
    advantage_BL = torch.as_tensor(advantages, dtype=torch.float32).cpu()
    rows, tokens = (len(credit.status),), tuple(credit.importance.shape)
    _check(advantage_BL.shape in (rows, tokens), _shape("advantages", advantage_BL), f"must be {rows} or {tokens}")
    if advantage_BL.dim() == 1:
        advantage_BL = advantage_BL[:, None].expand_as(credit.importance)
    config = OarConfig.parse(credit.config.model_dump() | settings, "oar_plugin.reshape")
    status_B = torch.tensor([int(status) for status in credit.status])
    return estimator.reshape(advantage_BL, credit.importance, credit.segments == Segment.REASONING, status_B, config)


def _tokenized(prompts: Texts | None, responses: Texts | None, tokenizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Per row: the token ids of prompt and response, concatenated, and a bool mask of the response."""
    prompts, responses = _each("prompts", prompts), _each("responses", responses)
    for name, given in {"prompts": prompts, "responses": responses}.items():
        # The rows of a tensor could have padding, which would count as tokens.
        single = isinstance(given, str | Mapping) or getattr(given, "ndim", 1) != 1
        _check(not single, f"{name}={given!r:.60}", f"must be a list; for one response {name}=[...]")
    if prompts is None or responses is None or len(prompts) != len(responses):
        raise ValueError("give prompts and as many responses, or input_ids with a response_mask")

    def ids(name: str, given: Any) -> Tensor:
        prompt = name.startswith("prompts")
        chat = prompt and isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], Mapping)
        if not (chat or isinstance(given, str)):
            wanted = f"a text,{' a list of messages,' * prompt} token ids [L] or a tokenizer's output for one text"
            return _token_ids(name, given, 1, f"must be {wanted}")
        if tokenizer is None:
            raise ValueError("prompts and responses are texts: give the model's tokenizer")
        if chat:  # ValueError: the tokenizer has no chat template. Mistral's own needs none.
            return torch.tensor(tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False))
        bos_token = getattr(tokenizer, "bos_token", None)  # the text of a chat begins with it
        special = prompt and not (bos_token and given.startswith(bos_token))
        return torch.tensor(tokenizer(given, add_special_tokens=special)["input_ids"], dtype=torch.long)

    rows = list[tuple[Tensor, Tensor]]()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        begin_P, end_R = ids(f"prompts[{row}]", prompt), ids(f"responses[{row}]", response)
        own_L = torch.arange(len(begin_P) + len(end_R)) >= len(begin_P)
        rows.append((torch.cat([begin_P, end_R]), own_L))
    return rows


def _each(name: str, given: Any) -> Any:
    """A tokenizer's output for several texts as a list of one for each; anything else as it is."""
    rows: Any = given.get("input_ids") if isinstance(given, Mapping) else None
    if not (hasattr(rows, "__len__") and all(hasattr(ids, "__len__") and getattr(ids, "ndim", 1) for ids in rows)):
        return given
    if (masks := given.get("attention_mask")) is None:  # rows of different lengths have no padding
        _check(len({*map(len, rows)}) > 1, f"{name}={given!r:.60}", "give a tokenizer's output with its attention_mask")
        return [{"input_ids": ids} for ids in rows]
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(rows, masks, strict=True)]


def _token_ids(name: str, given: Any, dim: int, wanted: str) -> Tensor:
    """Int64 on the CPU, not the caller's. ValueError: these are no whole numbers, or have not `dim` dimensions."""
    try:
        ids = torch.as_tensor(given["input_ids"] if isinstance(given, Mapping) else given).cpu()
        if isinstance(given, Mapping) and dim == 1 and (ids.dim() == 1 or len(ids) == 1):
            ids = ids[torch.as_tensor(given.get("attention_mask", torch.ones_like(ids))).cpu().bool()]
        fits = ids.dim() == dim and (torch.can_cast(ids.dtype, torch.long) or ids.numel() == 0)
    except (TypeError, ValueError, RuntimeError, LookupError):  # None, texts, rows or masks of another length
        fits = False
    _check(fits, f"{name}={given!r:.60}", wanted)
    return ids.long().clone()


def _check(holds: bool, what: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{what}: {wanted}")


def _shape(name: str, tensor: Tensor) -> str:
    return f"{name} of shape {tuple(tensor.shape)}"


def _checked_segments(segments_BL: Tensor) -> tuple[Tensor, Tensor]:
    """A user's segments, but OUTSIDE at all tokens of responses that cannot be scored, and int64 `[B]` of `Status`."""
    wrong = sorted({*segments_BL.unique().tolist()} - {*map(int, Segment)})
    known = ", ".join(f"{segment.name} {int(segment)}" for segment in Segment)
    _check(not wrong, f"segments hold {wrong[:1]}", f"allowed: {known}")
    # A token after the answer cannot have moved the answer.
    after_BL = (segments_BL == Segment.ANSWER).flip(-1).cumsum(-1).flip(-1) == 0
    segments_BL = segments_BL.masked_fill(after_BL & (segments_BL == Segment.REASONING), int(Segment.AFTER))
    reasoned_B = (segments_BL == Segment.REASONING).any(-1)
    status_B = torch.where(reasoned_B, int(Status.SCORED), int(Status.NO_REASONING))
    status_B[after_BL.all(-1)] = int(Status.NO_ANSWER)
    return segments_BL.masked_fill(status_B[:, None] != Status.SCORED, int(Segment.OUTSIDE)), status_B
