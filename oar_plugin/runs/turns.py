"""Which part of a transcript the model wrote itself: verl gives a reward all that was decoded, with tools' and users' turns."""

import re
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from oar_plugin.output import warn_once

_BEFORE = r"(?:^|\n|<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>)"
# How decoded transcripts tell turns, with special tokens or without: tags around a tool's text, or chat formats' roles (ChatML,
# Gemma; Llama's roles follow the text before without a new line).
_HEAD = re.compile(
    r"(?P<others><(?:tool_(?:response|result|output)|information|interpreter|observation)>|\[TOOL_RESULTS\]|<\|observation\|>)"
    r"|(?P<own></(?:tool_(?:response|result|output)|information|interpreter|observation)>|\[/TOOL_RESULTS\]|<\|assistant\|>)"
    rf"|(?P<user>{_BEFORE}(?:user|tool|system|function|observation)(?:<\|end_header_id\|>\n)?\n|ipython(?:<\|end_header_id\|>)?\n\n)"
    rf"|(?P<assistant>{_BEFORE}(?:assistant|model)\n|assistant(?:<\|end_header_id\|>)?\n\n)"
)


def own_turns(transcript: str, extra_info: Any = None) -> list[str]:
    """Return the model's own turns, none of them blank: at most the whole transcript.

    They are the assistant's `messages` of `extra_info`, or what the chat format tells. Where neither does and its `num_turns`
    counts more than two, the whole is one turn, and a warning says so once.
    """
    known = extra_info if isinstance(extra_info, Mapping) else {}
    said, count = known.get("messages"), known.get("num_turns")
    count = count if isinstance(count, Integral) else None
    if count is not None and count <= 2:  # verl's agent loops count a question and its answer as two
        return [transcript]
    messages = [one for one in (said if isinstance(said, list) else ()) if isinstance(one, Mapping)]
    contents = [one.get("content") for one in messages if one.get("role") == "assistant"]
    if turns := [text for text in contents if isinstance(text, str) and text.strip() and text in transcript]:
        return turns
    heads = list(_HEAD.finditer(transcript))
    if all(head.lastgroup != "assistant" for head in heads):  # then a line "user" is the model's own
        heads = [head for head in heads if head.lastgroup != "user"]
    begin, own = 0, True
    for head in heads:
        turns += [transcript[begin : head.start()]] * own
        begin, own = head.end(), head.lastgroup in ("own", "assistant")
    turns += [transcript[begin:]] * own
    if count is not None and not heads:
        text = "the reward cannot tell the model's turns from others' (num_turns=%s): an answer in a tool's text may be"
        warn_once(f"{text} rewarded; see oar/answer_mismatch. Put the chat's `messages` into extra_info", count)
    return [turn for turn in turns if turn.strip()]
