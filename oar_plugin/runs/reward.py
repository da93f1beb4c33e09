r"""The recipes' reward: 1 if math-verify finds a response's final answer equal to the ground truth, else 0.

verl's `reward.custom_reward_function` (`path=pkg://oar_plugin.runs.reward`, `name=compute_score`) calls it once per response,
in a thread. A comparison that hangs or takes all memory is killed and pays 0. The answer of a response is its last
`\boxed{...}`, else the last of `#### ...`, `<answer>...</answer>` and `the answer is ...`.

`reward.custom_reward_function.reward_kwargs` sets `timeout_s` (10), seconds of one comparison, and `processes` (2), which
compare for each of verl's `reward.num_workers`. The first call of a process fixes both.
"""

import atexit
import importlib.util
import logging
import threading
from collections import Counter
from typing import Any

_missing = [name for name in ("math_verify", "pebble") if importlib.util.find_spec(name) is None]
if _missing:
    raise ImportError(
        f"the reward oar_plugin.runs.reward needs {' and '.join(_missing)}: install them on every node with "
        "pip install '.[recipes]' in a checkout of this plugin"
    )

from oar_plugin.runs.math.answer import compare, final_answer, warm_up  # noqa: E402
from oar_plugin.runs.math.pool import GuardedPool, TaskCrashed, TaskTimedOut  # noqa: E402

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 500
"""Characters. No sensible answer is longer, and parsing takes more than linear time."""

_pool: GuardedPool | None = None
_lock = threading.Lock()
_failures: Counter[str] = Counter()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float = 10.0,
    processes: int = 2,
    **_: Any,
) -> dict[str, float]:
    """Grade one response; the ground truth is plain (`72`) or LaTeX.

    Returns:
        `score` and `acc`, 1.0 or 0.0; and why an answer was not compared, each 1.0 or 0.0: `no_answer`, `unparsed` (math-verify
        cannot read it), `failed` (the comparison timed out or crashed). verl makes a column of each key, so all are there.
    """
    answer = final_answer(solution_str)
    if answer is None:
        return _row(no_answer=1.0)
    truth = str(ground_truth).strip()
    if _squeezed(answer.text) == _squeezed(truth):
        return _row(score=1.0)
    if len(answer.text) > LONGEST_ANSWER:
        return _row(unparsed=1.0)
    try:
        equal = start_pool(processes, timeout_s).run(compare, truth, answer)
    except (TaskTimedOut, TaskCrashed) as error:
        _count(type(error).__name__, error, answer.text)
        return _row(failed=1.0)
    return _row(unparsed=1.0) if equal is None else _row(score=float(equal))


def _row(score: float = 0.0, no_answer: float = 0.0, unparsed: float = 0.0, failed: float = 0.0) -> dict[str, float]:
    return {"score": score, "acc": score, "no_answer": no_answer, "unparsed": unparsed, "failed": failed}


def _squeezed(text: str) -> str:
    return "".join(text.split())


def start_pool(processes: int, timeout_s: float) -> GuardedPool:
    """Return the pool that compares, which the first call of this process creates with its settings."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = GuardedPool(processes, timeout_s, warm_up)
            atexit.register(_pool.close)
        return _pool


def _count(kind: str, error: Exception, answer: str) -> None:
    with _lock:
        _failures[kind] += 1
        count = _failures[kind]
    if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: a model repeats such an answer
        logger.warning("comparison %d that failed: %s (answer: %.200s); it pays 0", count, error, answer)
