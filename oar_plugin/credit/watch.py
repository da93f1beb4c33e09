"""Warns on the console about a run in which OAR does little or nothing, or in which credit or responses go astray."""

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping

from oar_plugin.credit.diagnostics import Status

STEPS = 20  # warnings are about means over so many. The first one alone is judged only if every response fell back
LOW_ANSWER_FOUND, SOME_REWARD = 0.1, 0.1
ROUNDING = 1e-6

_ENGINES = "read the engines' log, raise perturbation.timeout_s or rollout.max_model_len, or set backend=actor"
ADVICE = {
    Status.NO_ANSWER: "set answer_patterns to what your reward reads as the answer",
    Status.TRUNCATED: "responses end at the length limit; raise it",
    Status.NO_REASONING: "the answer opens the response; do answer_patterns match too early?",
    Status.NON_FINITE: "importance or gate returned NaN or infinity; are weights finite, and does importance=fisher work?",
    Status.CONSTANT: "the importance gives all tokens one score; compare with importance=fisher",
    Status.NOT_SCORED: "no scores arrived; run `oar doctor` on the nodes of the actor",
    **dict.fromkeys((Status.TIMED_OUT, Status.TOO_LONG, Status.ABORTED, Status.ENGINE_FAILED), _ENGINES),
    Status.ANSWER_TOO_LONG: "do answer_patterns match too much? else raise max_answer_tokens",
    Status.OUT_OF_MEMORY: "lower the tokens or responses per micro-batch of the actor's update",
    Status.SEARCH_FAILED: "the log names what failed in the search for the answer",
    Status.LEARNING: "too few labels; give a call of `oar_plugin.importance` the `predictor` of the one before",
    Status.BAD_REWARD: "what does the reward function return? A dump (dump.dir) shows these responses without a reward",
}
"""What to do about each reason for a fallback."""

logger = logging.getLogger("oar_plugin")


class Watch:
    """Reads the metrics of each step, `oar/...` and the mean reward, and logs a warning when one is due.

    A warning is repeated after twice as many steps as the last time. `share` is `algorithm.oar.fallback_warning`, of `steps`.
    """

    def __init__(self, share: float, steps: int = STEPS) -> None:
        self._share = share
        self._seen: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=steps)
        self._steps, self._quiet_until = 0, Counter[str]()

    def see(self, step: int, metrics: Mapping[str, float], reward: float | None = None) -> None:
        """Read the metrics of training step `step`, by name with the prefix `oar/`, and its mean reward; None: not known."""
        if "oar/answer_found" not in metrics:  # no response needs credit
            return
        self._steps += 1
        mean = reward if reward is not None and math.isfinite(reward) else 0.0
        self._seen.append((step, {**metrics, "reward": mean}))
        fallback, learning = self._mean("oar/fallback/any"), self._mean("oar/fallback/learning")
        found, rewarded = self._mean("oar/answer_found"), self._mean("reward")
        whole = len(self._seen) == self._seen.maxlen
        # Metrics are sums of shares, which rounding may move past a limit.
        if (fallback > self._share + ROUNDING) if whole else (self._steps == 1 and fallback - learning > 1 - ROUNDING):
            shares = {reason: self._mean(f"oar/fallback/{reason.name.lower()}") for reason in ADVICE}
            reasons = sorted((reason for reason in ADVICE if shares[reason]), key=shares.__getitem__, reverse=True)
            told = ", ".join(f"{reason.name.lower()} {shares[reason]:.0%}" for reason in reasons)
            text = f"{fallback:.0%} of the responses that need credit fall back to plain GRPO: {told}"
            self._warn("fallback", f"{text}. {reasons[0].name.lower()}: {ADVICE[reasons[0]]}")
        elif whole and found < LOW_ANSWER_FOUND and rewarded > SOME_REWARD:
            text = f"the mean reward is {rewarded:.2f}, but only {found:.0%} of the responses have an answer that OAR finds"
            self._warn("answer_found", f"{text}; {ADVICE[Status.NO_ANSWER]}")
        if 0 < (bad := self._mean("oar/fallback/bad_reward")) < 1:  # where all are, it is said above
            text = f"{bad:.1%} of the responses have a reward that is missing, NaN or infinite, or a sibling with one"
            self._warn("reward", f"{text}, and keep plain GRPO; {ADVICE[Status.BAD_REWARD]}")
        if lost := self._mean("oar/lost_responses"):
            text = f"{lost:.1%} of the responses are lost, and the rest of their groups is trained on"
            self._warn("lost", f"{text}; did a reward function or an engine fail? The log has the error")

    def _mean(self, name: str) -> float:
        return sum(metrics.get(name, 0.0) for _, metrics in self._seen) / len(self._seen)

    def _warn(self, kind: str, text: str) -> None:
        if self._steps < self._quiet_until[kind]:
            return
        self._quiet_until[kind] = max(STEPS, 2 * self._steps)
        first, last = self._seen[0][0], self._seen[-1][0]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        logger.warning("OAR, %s: %s", steps, text)
