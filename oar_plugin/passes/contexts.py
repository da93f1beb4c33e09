"""Contexts: the same responses after prompts that show an answer, the right one or a wrong one (`Importance.contexts`).

The trainer makes the prompts, because it has the tokenizer; whoever runs the model gets tokens only. A prompt is the host's,
with `algorithm.oar.context.template` in place of the last user message. If the host's chat template does not return the
response's own prompt without the answer, the two would differ in more than the answer, and the response falls back to GRPO.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance.base import Importance, Shown
from oar_plugin.passes.segments import warn_once
from oar_plugin.passes.tokens import TokenBytes

NO_PROMPT = -1
"""The only token of a prompt that could not be made. (A row without tokens does not travel well.)"""


@dataclass(frozen=True)
class Contexts:
    """The contexts of B responses."""

    prompts: Mapping[Shown, Sequence[Tensor]]  # by what is shown: the tokens of each response's prompt, int64
    sign_B: Tensor  # int64, the sign of each response's advantage
    longest: int  # most tokens of a prompt and its response together

    def check(self, segments: Sequence[Tensor], status_B: Tensor) -> None:
        """Responses to score that have no contexts get a status that says why, and all their tokens OUTSIDE. In place.

        `segments` has a `Segment` per token of each response.
        """
        for row in (status_B == Status.SCORED).nonzero()[:, 0].tolist():
            prompts = [of_shown[row] for of_shown in self.prompts.values()]
            if not self.sign_B[row] or any(int(prompt[0]) == NO_PROMPT for prompt in prompts):
                status_B[row] = Status.NO_CONTEXT
            elif max(map(len, prompts)) + len(segments[row]) > self.longest:
                status_B[row] = Status.CONTEXT_TOO_LONG
            else:
                continue
            segments[row].fill_(int(Segment.OUTSIDE))


class PromptSource(NamedTuple):
    """What the prompts of a response's contexts are made of."""

    prompt: Any  # the host's: a text, or a list of messages
    prompt_ids: list[int]  # its tokens
    own_ids: list[int]  # the response's own tokens, without those that a tool wrote
    truth: object  # the right answer: a text or a number
    sign: int  # of the advantage; 0: the response is not scored


def longest_of(config: Any) -> int:
    """Most tokens of a sequence that a model with this configuration has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def contrast_of(
    importance: Importance, own_L: Tensor, shown: Mapping[Shown, Tensor], sign: int, segments_L: Tensor
) -> Tensor:
    """`Importance.contrast` at reasoning tokens, float32 `[L]`, 0 elsewhere. If it raises: NaN, which falls back to GRPO."""
    try:  # an actor that raised would leave the other ranks waiting for it
        contrast_L = importance.contrast(own_L, shown, sign).float().reshape(own_L.shape)
    except Exception:
        warn_once(f"importance={importance.name}: contrast raised")
        contrast_L = torch.full_like(own_L, torch.nan)
    return torch.where(segments_L == Segment.REASONING, contrast_L, 0.0)


class ContextPrompts:
    """Makes the prompts of contexts. `template`: keyword arguments with which the host calls `apply_chat_template`."""

    def __init__(self, config: OarConfig, tokenizer: Any, template: Mapping[str, Any] | None = None) -> None:
        self._config, self._tokenizer, self._find = config, tokenizer, make_finder(config.answer_patterns)
        self._template = {**(template or {}), "add_generation_prompt": True, "tokenize": False}

    @cached_property
    def _special(self) -> set[int]:
        """Special tokens, without the one of an unknown character, which any text may have."""
        return TokenBytes(self._tokenizer).special - {self._tokenizer.unk_token_id}

    def prompts(self, rows: Iterable[PromptSource]) -> dict[Shown, list[Tensor]]:
        """By what is shown: the tokens of each response's prompt, int64; `NO_PROMPT` if there is none. Raises nothing."""
        made: dict[Shown, list[Tensor]] = {shown: [] for shown in self._config.contexts}
        # Siblings share a prompt and its right answer.
        ways, known = dict[tuple[int, ...], bool | None](), dict[tuple[tuple[int, ...], str], list[int]]()
        for row in rows:
            truth, ids = _text(row.truth), (*row.prompt_ids,)
            for shown, prompts in made.items():
                tokens = None
                try:
                    answer = truth if shown == "truth" or not truth else self._wrong_answer(row, truth)
                    if answer and (ids, answer) not in known:
                        ways[ids] = ways[ids] if ids in ways else self._way(row)
                        known[ids, answer] = self._tokens(row.prompt, answer, ways[ids])
                    tokens = known.get((ids, answer))
                except Exception:  # of a chat template or a tokenizer, or the prompt is of another type
                    warn_once("a prompt that shows an answer could not be made")
                prompts.append(torch.tensor(tokens or [NO_PROMPT]))
        return made

    def _wrong_answer(self, row: PromptSource, truth: str) -> str:
        """The response's own answer; empty if there is none, or if it is not wrong by the reward and by its text."""
        text = self._tokenizer.decode(row.own_ids, skip_special_tokens=True) if row.sign == -1 else ""
        span = self._find(text)
        answer = "" if span is None else text[span.start : span.end].strip()
        return "" if answer == truth else answer

    def _way(self, row: PromptSource) -> bool | None:
        """Whether the host tokenizes the prompt with special tokens; None if it makes the prompt in another way.

        None too for a text that holds special tokens: it is a chat already, and an answer before it would be in no message.
        """
        if isinstance(row.prompt, str) and self._special & {*self._ids(row.prompt, False)}:
            return None
        return next((way for way in (True, False) if self._ids(row.prompt, way) == row.prompt_ids), None)

    def _tokens(self, prompt: Any, answer: str, way: bool | None) -> list[int]:
        """The tokens of the prompt that shows the answer; none if it cannot be made."""
        showing = self._showing(prompt, answer)
        if showing is None or way is None or len(self._ids(answer, False)) > self._config.max_answer_tokens:
            return []
        return self._ids(showing, way)

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
