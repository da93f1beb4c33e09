"""Contexts: the same responses behind prompts that show an answer, the right one or a wrong one (`Importance.contexts`).

The trainer makes the prompts, because it has the tokenizer; whoever runs the model gets tokens only. A prompt is the host's,
with `algorithm.oar.context.template` in place of the last user message. If the host's chat template does not return the
response's own prompt without the answer, the two would differ in more than the answer, and the response falls back to GRPO.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import SearchFailed, Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.importance.base import Shown

NO_PROMPT = -1
"""The only token of a prompt that could not be made. (A row without tokens does not travel well.)"""
UNSIGNED = 2
"""The mark of a response whose advantage is not known yet, where the mark of others is the advantage's sign."""


@dataclass(frozen=True)
class Contexts:
    """The contexts of B responses."""

    prompts: Mapping[Shown, Sequence[Tensor]]  # by what is shown: the tokens of each response's prompt, int64
    sign_B: Tensor  # int64, the sign of each response's advantage, or `UNSIGNED`
    longest: int  # most tokens of a prompt and response

    def check(self, segments: Sequence[Tensor], status_B: Tensor) -> None:
        """Gives scored responses without contexts a status that says so, and the segment OUTSIDE to their tokens. In place.

        `segments` has a `Segment` per token of each response.
        """
        for row in (status_B == Status.SCORED).nonzero()[:, 0].tolist():
            prompts = [of_shown[row] for of_shown in self.prompts.values()]
            if abs(int(self.sign_B[row])) != 1 or any(int(prompt[0]) == NO_PROMPT for prompt in prompts):
                status_B[row] = Status.NO_CONTEXT
            elif max(map(len, prompts)) + len(segments[row]) > self.longest:
                status_B[row] = Status.CONTEXT_TOO_LONG
            else:
                continue
            segments[row].fill_(int(Segment.OUTSIDE))


class Asked(NamedTuple):
    """What the prompts of a response's contexts are made of."""

    prompt: Any  # the host's: a text, or a list of messages
    prompt_ids: list[int]  # its tokens
    own_ids: list[int]  # the response's own tokens, without those that a tool wrote
    truth: object  # the right answer
    sign: int  # of the advantage, or `UNSIGNED`; 0: the response is not scored


def longest_of(config: Any) -> int:
    """Most tokens of a sequence that a model with this configuration has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


class ContextPrompts:
    """Makes the prompts of contexts. `template`: keyword arguments with which the host calls `apply_chat_template`."""

    def __init__(self, config: OarConfig, tokenizer: Any, template: Mapping[str, Any] | None = None) -> None:
        self._config, self._tokenizer, self._template = config, tokenizer, template or {}
        self._find = make_finder(config.answer_patterns)

    def prompts(self, rows: Iterable[Asked]) -> dict[Shown, list[Tensor]]:
        """By what is shown: the tokens of each response's prompt, int64; `NO_PROMPT` if there is none."""
        made: dict[Shown, list[Tensor]] = {shown: [] for shown in self._config.contexts}
        known = dict[tuple[tuple[int, ...], str], list[int]]()  # siblings share a prompt and its right answer
        for row in rows:
            truth = str(row.truth).strip() if isinstance(row.truth, str | int | float) else ""
            for shown, prompts in made.items():
                answer = truth if shown == "truth" else self._wrong_answer(row, truth)
                key = (*row.prompt_ids,), answer
                if answer and truth and key not in known:
                    known[key] = self._tokens(row, answer)
                prompts.append(torch.tensor(known.get(key) or [NO_PROMPT]))
        return made

    def _wrong_answer(self, row: Asked, truth: str) -> str:
        """The response's own answer; empty if there is none, or if it is not wrong by the reward and by its text."""
        if row.sign != -1:
            return ""
        text = self._tokenizer.decode(row.own_ids, skip_special_tokens=True)
        try:
            span = self._find(text)
        except SearchFailed:  # the actor counts it
            return ""
        answer = "" if span is None else text[span.start : span.end].strip()
        return "" if answer == truth else answer

    def _tokens(self, row: Asked, answer: str) -> list[int]:
        """The tokens of the prompt that shows the answer; none if it cannot be made."""
        if (showing := self._showing(row.prompt, answer)) is None:
            return []
        # Hosts tokenize texts with special tokens or without; a chat template writes its own.
        ways = (True, False) if isinstance(row.prompt, str) else (False,)
        special = next((way for way in ways if self._ids(row.prompt, way) == row.prompt_ids), None)
        return [] if special is None else self._ids(showing, special)

    def _showing(self, prompt: Any, answer: str) -> Any:
        """The prompt with the answer; None if it is neither a text nor a chat with a user's text."""
        if isinstance(prompt, str):
            return self._config.context.template.format(prompt=prompt, answer=answer)
        messages = [dict(message) for message in prompt or () if isinstance(message, Mapping)]
        last: dict[str, Any] = next((message for message in reversed(messages) if message.get("role") == "user"), {})
        if not isinstance(last.get("content"), str):
            return None
        last["content"] = self._showing(last["content"], answer)
        return messages

    def _ids(self, prompt: Any, special: bool) -> list[int]:
        if not isinstance(prompt, str):
            prompt = self._tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=False, **self._template
            )
        return list(self._tokenizer(prompt, add_special_tokens=special)["input_ids"])
