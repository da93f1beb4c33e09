r"""The recipes' reward: 1 if math-verify finds a response's final answer equal to the ground truth, else 0.

verl's `reward.custom_reward_function` (`path=pkg://oar_plugin.runs.reward`, `name=compute_score`) calls it once per response,
in a thread. A comparison that hangs or uses too much memory is killed; the reward is 0. The answer of a response is its last
`\boxed{...}`. Without one, it is the last of `#### ...`, `<answer>...</answer>` and `the answer is ...`.
"""

import atexit
import importlib.util
import itertools
import logging
import threading
from typing import Any

from oar_plugin.output import INSTALL

if _missing := [name for name in ("math_verify", "pebble") if importlib.util.find_spec(name) is None]:
    raise ImportError(f"{__name__} requires {' and '.join(_missing)}; on every node, run {INSTALL} in a checkout")

from oar_plugin.runs.math.answer import compare, final_answer, warm_up
from oar_plugin.runs.math.pool import GuardedPool, TaskFailed

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 500  # in characters; longer ones are not compared: parsing time grows faster than the length

_pool: GuardedPool | None = None
_lock = threading.Lock()
_failures = itertools.count(1)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    *,
    timeout_s: float = 10.0,
    processes: int = 2,
    **_: Any,
) -> dict[str, float]:
    """Grade one response. The ground truth is plain text (`72`) or LaTeX.

    verl's `reward_kwargs` sets `timeout_s`, the limit of one comparison, and `processes`, which compare answers for each of its
    `reward.num_workers`. The first call in a process sets both; later values have no effect.

    Returns:
        `score` and `acc`: 1.0 or 0.0. `no_answer`, `unparsed` (too long, or not parsed by math-verify), `failed` (timed out or
        crashed): 1.0 if this is why no answer was compared, else 0.0. All keys are always present: verl makes a column of each.
    """
    answer, truth = final_answer(solution_str), str(ground_truth).strip()
    if answer is None:
        return _row(no_answer=1.0)
    if "".join(answer.text.split()) == "".join(truth.split()):
        return _row(score=1.0)
    if len(answer.text) > LONGEST_ANSWER:
        return _row(unparsed=1.0)
    try:
        equal = start_pool(processes, timeout_s).run(compare, truth, answer)
    except TaskFailed as error:
        count = next(_failures)
        if count & (count - 1) == 0:  # only the 1st, 2nd, 4th, 8th, ...: models repeat such answers
            logger.warning("failed comparison %d: %s (answer: %.200s); the reward is 0", count, error, answer.text)
        return _row(failed=1.0)
    return _row(unparsed=1.0) if equal is None else _row(score=float(equal))


def _row(score: float = 0.0, no_answer: float = 0.0, unparsed: float = 0.0, failed: float = 0.0) -> dict[str, float]:
    return {"score": score, "acc": score, "no_answer": no_answer, "unparsed": unparsed, "failed": failed}


def start_pool(processes: int, timeout_s: float) -> GuardedPool:
    """Return this process's pool for comparing answers. The first call creates it; later calls ignore their arguments."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = GuardedPool(processes, timeout_s, warm_up)
            atexit.register(_pool.close)
        return _pool
