"""Which steps of a measured run are whose, and the names under which its trainer reports them."""

ORDER = "goog"
"""Whose steps they are, GRPO's or OAR's, repeated. Each pair of steps has one of each, and who is first alternates."""

WARM_UP = 2
"""Steps at the beginning of a run that do not count: one of each method. The first one of each imports and allocates."""

METHOD = "bench/oar"  # 1 in an OAR step, 0 in a GRPO step
CPU_SECONDS = "bench/cpu_seconds"  # processor seconds of all processes of the run since the step before was over
HOST_ADVANTAGE = "bench_host_advantage"  # timer around verl's own part of the advantage


def is_oar(step: int) -> bool:
    """Whether that step, counted from 1, is OAR's."""
    return ORDER[(step - 1) % len(ORDER)] == "o"
