r"""The recipes' reward: 1 if math-verify finds a response's final answer equal to the ground truth, else 0.

verl's `reward.custom_reward_function` (`path=pkg://oar_plugin.runs.reward`, `name=compute_score`) calls it once per response,
in a thread. A comparison that hangs or uses too much memory is killed; the reward is 0. The answer of a response is what the
default of `algorithm.oar.answer_patterns` finds: a box before `#### ...` and `the answer is ...`.
"""

import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from numbers import Integral
from typing import Any

import numpy as np

from oar_plugin.output import INSTALL, cause, logger, times, warn_once
from oar_plugin.runs.math.sources import messages_of

try:
    from oar_plugin.runs.math.answer import compare, final_answer, warm_up
    from oar_plugin.runs.math.pool import GuardedPool, TaskFailed

    warm_up()  # here and not in the pool alone: a grader that cannot grade must stop a run, not pay 0
except Exception as error:  # a parser made for another antlr4 raises anything
    raise ImportError(f"no answer can be compared here: {cause(error)}; run {INSTALL}") from None

LONGEST_ANSWER = 500  # in characters; longer ones are not compared: parsing time grows faster than the length

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

_pool: GuardedPool | None = None
_lock = threading.Lock()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    timeout_s: float = 10.0,
    processes: int = 2,
    **_: Any,
) -> dict[str, Any]:
    """Grade a model's own turns of a response. The ground truth is text (`72`), LaTeX or a number; of several, any is right.

    verl's `reward_kwargs` sets `timeout_s`, the limit of one comparison, and `processes`, which compare answers for each of its
    `reward.num_workers`. The first call in a process sets both; later values have no effect.

    Returns:
        `score` and `acc`: 1.0 or 0.0. `no_truth` (the row has none), `no_answer`, `unparsed` (too long, or not parsed by
        math-verify), `failed` (timed out or crashed): 1.0 if this is why no answer was compared, else 0.0. `extracted_answer`:
        the answer's text. All keys are always present: verl makes a column of each.
    """
    truths, pool, answer = _truths(ground_truth), start_pool(processes, timeout_s), None
    row: dict[str, Any] = dict.fromkeys(("score", "acc", "no_truth", "no_answer", "unparsed", "failed"), 0.0)
    try:
        answer = pool.run(final_answer, own_turns(solution_str or "", extra_info), truths)
    except TaskFailed as error:
        _say("failed search %d: %s; the reward is 0", "search", error)
        row["failed"] = 1.0
    row["extracted_answer"] = answer or ""
    if not truths:
        index = extra_info.get("index", "?") if isinstance(extra_info, dict) else "?"
        _say("ground truth %d is missing: %s, row %s of %.80s", "no_truth", repr(ground_truth)[:80], index, data_source)
        return row | {"no_truth": 1.0}
    if answer is None:
        return row | {"no_answer": 1.0 - row["failed"]}
    if any("".join(answer.split()) == "".join(truth.split()) for truth in truths):
        return row | {"score": 1.0, "acc": 1.0}
    row["unparsed"] = 1.0
    for truth in truths if len(answer) <= LONGEST_ANSWER else ():
        try:
            equal = pool.run(compare, truth, answer)
        except TaskFailed as error:
            _say("failed comparison %d: %s (answer: %.200s); the reward is 0", "failed", error, answer)
            row |= {"failed": 1.0, "unparsed": 0.0}
            continue
        if equal:
            return row | {"score": 1.0, "acc": 1.0, "failed": 0.0, "unparsed": 0.0}
        row["unparsed"] *= equal is None
    return row


def own_turns(transcript: str, extra_info: Any = None) -> list[str]:
    """Return the texts that the model wrote, in order. verl's transcript is all that was decoded, with tools' and users' turns.

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


def _truths(value: Any) -> list[str]:
    """Return each ground truth as text. Only text, finite numbers and lists of them have any."""
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [text for each in value for text in _truths(each)]
    text = str(value).strip() if isinstance(value, (str, int, float, Decimal)) else ""
    # The text of a finite number has no "n", as those of NaN and infinity have.
    return [text] if text and (isinstance(value, (str, int)) or "n" not in text.lower()) else []


def _say(message: str, kind: str, *values: Any) -> None:
    """Warn of the 1st, 2nd, 4th, 8th, ... fault of a kind: there can be many."""
    if not (count := times("reward", kind)) & (count - 1):
        logger.warning(message, count, *values)


def start_pool(processes: int, timeout_s: float) -> GuardedPool:
    """Return this process's pool for comparing answers. The first call creates it; later calls ignore their arguments."""
    global _pool
    with _lock:
        _pool = _pool or GuardedPool(processes, timeout_s, warm_up)  # pebble ends its processes when this one ends
        return _pool
