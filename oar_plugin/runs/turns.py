"""Which part of a transcript the model wrote itself: verl gives a reward all that was decoded, with tools' and users' turns."""

import re
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral
from typing import Any

from oar_plugin.output import warn_once
from oar_plugin.runs.math.sources import messages_of

_TAGS = r"(?:(?:tool|function|execution|search)_?(?:response|result|output)s?|documents?|information|interpreter|observation)>"
_BEFORE = r"(?:^|\n|<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>)"
# How decoded transcripts tell turns, with special tokens or without: tags around a tool's text, or chat formats' roles (ChatML,
# Gemma; Llama's roles follow the text before without a new line).
_HEAD = re.compile(
    rf"(?P<others><{_TAGS}|\[TOOL_RESULTS\]|<\|(?:user|tool|system|observation|tool_response)\|?>"
    r"|<｜(?:User|tool▁outputs▁begin)｜>|to=assistant(?=<\|channel))"
    rf"|(?P<own></{_TAGS}|\[/TOOL_RESULTS\]|<(?:\|assistant|tool_response)\|>|<｜(?:Assistant|tool▁outputs▁end)｜>|<\|start\|>assistant)"
    rf"|(?P<user>{_BEFORE}(?:user|tool)(?:<\|end_header_id\|>\n)?\n|(?:ipython|user|tool)(?:<\|end_header_id\|>)?\n\n)"
    rf"|(?P<assistant>{_BEFORE}(?:assistant|model)\n|assistant(?:<\|end_header_id\|>)?\n\n)"
)


def own_turns(transcript: str, extra_info: Any = None) -> list[str]:
    """Return the texts that the model wrote, in order: at most the whole transcript.

    They are the assistant's `messages` of `extra_info`, or what the marks of the chat format show. If neither shows turns but
    `num_turns` is above two, the whole transcript is one turn, and a warning says so once.
    """
    known = extra_info if isinstance(extra_info, Mapping) else {}
    count = number if isinstance(number := known.get("num_turns"), Integral) else None
    if count is not None and count <= 2:  # verl's agent loops count a question and its answer as two
        return [transcript]
    with suppress(ValueError, TypeError, AttributeError):  # something else by this name
        told = [one["content"] for one in messages_of(known.get("messages")) if one["role"] == "assistant"]
        turns = [text for text in told if text.strip()]
        if turns and all(text in transcript for text in turns) and transcript.rstrip().endswith(turns[-1].rstrip()):
            return turns
    turns, heads = [], list(_HEAD.finditer(transcript))
    if count is None and all(head.lastgroup != "assistant" for head in heads):  # then a line "user" is the model's own
        heads = [head for head in heads if head.lastgroup != "user"]
    while count is None and heads and heads[-1].lastgroup == "others":  # a tag that nothing closes is its own
        heads.pop()
    begin, own = 0, True
    for head in heads:
        turns += [transcript[begin : head.start()]] * own
        begin, own = head.end(), head.lastgroup in ("own", "assistant")
    turns += [transcript[begin:]] * own
    if count is not None and not any(head.lastgroup in ("others", "user") for head in heads):
        text = "the reward cannot distinguish the model's turns from others, and may reward an answer in a tool's text;"
        warn_once(f"{text} see oar/answer_mismatch. Put the chat's `messages` into extra_info")
    return [turn for turn in turns if turn.strip()]
