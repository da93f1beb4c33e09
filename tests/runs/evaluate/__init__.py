"""What several tests of `oar eval` ask."""

from oar_plugin.runs.evaluate.generate import Sampling
from oar_plugin.runs.evaluate.grade import Problem, ProblemSet

SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_tokens=8, seed=0)


def problem_set(*truths, name="ours"):
    return ProblemSet(name, [Problem([{"role": "user", "content": f"Say {truth}."}], truth) for truth in truths])
