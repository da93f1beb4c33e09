r"""The recipes' reward: 1 if math-verify finds a response's final answer equal to the ground truth, else 0.

verl's `reward.custom_reward_function` (`path=pkg://oar_plugin.runs.reward`, `name=compute_score`) calls it once per response,
in a thread. A comparison that hangs or uses too much memory is killed; the reward is 0. The answer of a response is its last
`\boxed{...}`. Without one, it is the last of `#### ...`, `<answer>...</answer>` and `the answer is ...`.

`reward.custom_reward_function.reward_kwargs` sets `timeout_s` (default 10), the time limit of one comparison in seconds, and
`processes` (default 2), the number of processes that compare answers for each of verl's `reward.num_workers`. The first call
in a process sets both; other values in later calls have no effect.
"""

import atexit
import importlib.util
import logging
import threading
from collections import Counter
from typing import Any

from oar_plugin.output import INSTALL

_missing = [name for name in ("math_verify", "pebble") if importlib.util.find_spec(name) is None]
if _missing:
    needs = f"the reward oar_plugin.runs.reward requires {' and '.join(_missing)}"
    raise ImportError(f"{needs}; on every node, run {INSTALL} in a checkout of this plugin")

from oar_plugin.runs.math.answer import compare, final_answer, warm_up  # noqa: E402
from oar_plugin.runs.math.pool import GuardedPool, TaskCrashed, TaskTimedOut  # noqa: E402

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 500
"""In characters. Longer answers are not compared: parsing time grows faster than the length."""

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
    """Grade one response. The ground truth is plain text (`72`) or LaTeX.

    Returns:
        `score` and `acc`: 1.0 or 0.0. `no_answer`, `unparsed` (the answer is too long, or math-verify cannot parse it) and
        `failed` (the comparison timed out or crashed): 1.0 if this is why no answer was compared, else 0.0. All keys are always
        present, because verl makes a column of each.
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
    """Return this process's pool for comparing answers. The first call creates it; later calls ignore their arguments."""
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
    if count & (count - 1) == 0:  # only the 1st, 2nd, 4th, 8th, ...: models repeat such answers
        logger.warning("failed comparison number %d: %s (answer: %.200s); the reward is 0", count, error, answer)
