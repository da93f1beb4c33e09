"""Contexts: the same responses after prompts that show an answer, the right one or a wrong one (`Importance.contexts`).

A contrast needs log-probs alone. So the trainer, which has the tokenizer, makes the prompts, calls the host's own log-prob pass
once more for each context, and makes the importance of the results. The actor only finds the answers. A prompt is the host's,
with `algorithm.oar.context.template` in place of the last user message. If the host's chat template does not return the
response's own prompt without the answer, the two would differ in more than the answer, and the response falls back to GRPO.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance.base import Shown
from oar_plugin.credit.importance.contrast import Contrast
from oar_plugin.passes.segments import warn_once
from oar_plugin.passes.tokens import TokenBytes

LogProbs = Callable[[Sequence[tuple[Tensor, Tensor]]], Sequence[Tensor]]
"""One log-prob pass of the host's: takes the tokens of prompt and response of each row of a batch, int64, returns the
log-probs of the responses' tokens, `[L]` each, at the sampling temperature. All ranks of a sharded model must call it."""

NOTHING = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
"""Prompt and response of a row that is not scored: it costs nothing, and the batch keeps the number of rows that ranks need."""


class PromptSource(NamedTuple):
    """What the prompts of a response's contexts are made of."""

    prompt: Any  # the host's: a text, or a list of messages
    prompt_L: Tensor  # its tokens, int64
    response_L: Tensor  # the response's tokens, int64
    own_L: Tensor  # bool, false at tokens that a tool wrote
    truth: object  # the right answer: a text or a number
    sign: int  # of the advantage, -1 or 1


@dataclass(frozen=True)
class Contexts:
    """The contexts of B responses. A response without a source is not scored."""

    sources: Sequence[PromptSource | None]
    prompts: Mapping[Shown, Sequence[Tensor | None]]  # by what they show, int64 per response; None: cannot be made
    longest: int  # most tokens of a prompt and its response together

    def importance(
        self,
        importance: Contrast,
        segments: Sequence[Tensor],
        status_B: Tensor,
        log_probs: LogProbs,
        own: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Importance of each response token, float32 `[L]` per response.

        Responses to score that have no contexts get a status that says why, and all their tokens OUTSIDE, in place. `segments`
        has a `Segment` per token. `own`: log-probs after the responses' own prompts. None: from `log_probs`, the host's pass.
        """
        names: tuple[Shown, ...] = ("own", *self.prompts)
        pairs = {name: [NOTHING] * len(segments) for name in names}
        for row in (status_B == Status.SCORED).nonzero()[:, 0].tolist():
            source, prompts = self.sources[row], {name: of_name[row] for name, of_name in self.prompts.items()}
            shown = {name: prompt_L for name, prompt_L in prompts.items() if prompt_L is not None}
            if source is None or len(shown) < len(prompts):
                status_B[row] = Status.NO_CONTEXT
            elif max(map(len, shown.values())) + len(segments[row]) > self.longest:
                status_B[row] = Status.CONTEXT_TOO_LONG
            else:
                for name in pairs:
                    pairs[name][row] = shown.get(name, source.prompt_L), source.response_L
                continue
            segments[row].fill_(int(Segment.OUTSIDE))
        found = {name: own if own and name not in self.prompts else log_probs(rows) for name, rows in pairs.items()}
        result = [torch.zeros(len(segments_L)) for segments_L in segments]
        for row in (status_B == Status.SCORED).nonzero()[:, 0].tolist():
            source = self.sources[row]
            assert source is not None
            log_probs_of_row = {name: rows[row].float().cpu() for name, rows in found.items()}
            contrast_L = importance.contrast(log_probs_of_row, source.sign)
            result[row] = torch.where(segments[row] == Segment.REASONING, contrast_L, 0.0)
        return result


def longest_of(config: Any) -> int:
    """Most tokens of a sequence that a model with this configuration has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


class ContextPrompts:
    """Makes the prompts of contexts.

    `longest`: most tokens of a sequence. `template`: keyword arguments with which the host calls `apply_chat_template`.
    """

    def __init__(
        self, config: OarConfig, tokenizer: Any, longest: int, template: Mapping[str, Any] | None = None
    ) -> None:
        self._config, self._tokenizer, self._longest = config, tokenizer, longest
        self._find = make_finder(config.answer_patterns)
        self._template = {**(template or {}), "add_generation_prompt": True, "tokenize": False}

    @cached_property
    def _special(self) -> set[int]:
        """Special tokens, without the one of an unknown character, which any text may have."""
        return TokenBytes(self._tokenizer).special - {self._tokenizer.unk_token_id}

    def contexts(self, sources: Sequence[PromptSource | None]) -> Contexts:
        """The contexts of some responses. Raises nothing: a prompt that cannot be made is None."""
        made: dict[Shown, list[Tensor | None]] = {shown: [] for shown in self._config.contexts}
        known = dict[tuple[str, str], Tensor | None]()  # siblings share a prompt and its right answer
        for source in sources:
            truth = "" if source is None else _text(source.truth)
            for shown, prompts in made.items():
                prompt_L = None
                try:
                    answer = truth if source is None or shown == "truth" else self._wrong_answer(source, truth)
                    if source is not None and answer:
                        key = str(source.prompt_L.tolist()), answer
                        known[key] = prompt_L = known[key] if key in known else self._tokens(source, answer)
                except Exception:  # of a chat template or a tokenizer, or the prompt is of another type
                    warn_once("a prompt that shows an answer could not be made; such responses keep plain GRPO")
                prompts.append(prompt_L)
        return Contexts(sources, made, self._longest)

    def _wrong_answer(self, row: PromptSource, truth: str) -> str:
        """The response's own answer; empty if there is none, or if it is not wrong by the reward and by its text."""
        if row.sign > 0 or not truth:
            return ""
        text = self._tokenizer.decode(row.response_L[row.own_L], skip_special_tokens=True)
        span = self._find(text)
        answer = "" if span is None else text[span.start : span.end].strip()
        return "" if answer == truth else answer

    def _tokens(self, row: PromptSource, answer: str) -> Tensor | None:
        """The tokens of the prompt that shows the answer; None if it cannot be made.

        It cannot if the host makes the prompt in another way, or if a text holds special tokens: it is a chat already, and an
        answer before it would be in no message.
        """
        if isinstance(row.prompt, str) and self._special & {*self._ids(row.prompt, False)}:
            return None
        showing, own = self._showing(row.prompt, answer), row.prompt_L.tolist()
        special = next((special for special in (True, False) if self._ids(row.prompt, special) == own), None)
        if showing is None or special is None or len(self._ids(answer, False)) > self._config.max_answer_tokens:
            return None
        return torch.tensor(self._ids(showing, special))

    def _showing(self, prompt: Any, answer: str) -> Any:
        """The prompt with the answer; None if it is a chat without a user's text."""
        if isinstance(prompt, str):
            return self._config.context.template.format(prompt=prompt, answer=answer)
        messages = [dict(message) for message in prompt]
        last: dict[str, Any] = next((message for message in reversed(messages) if message.get("role") == "user"), {})
        if not isinstance(last.get("content"), str):
            return None
        last["content"] = self._showing(last["content"], answer)
        return messages

    def _ids(self, prompt: Any, special: bool) -> list[int]:
        if not isinstance(prompt, str):
            prompt = self._tokenizer.apply_chat_template(list(prompt), **self._template)
        return list(self._tokenizer(prompt, add_special_tokens=special)["input_ids"])


def _text(truth: object) -> str:
    """A text or a finite number as one would write it (7.0: "7"); empty for anything else, such as a list of answers."""
    number = isinstance(truth, Real) and not isinstance(truth, bool) and truth - truth == 0
    return str(truth).removesuffix(".0") if number else truth.strip() if isinstance(truth, str) else ""
