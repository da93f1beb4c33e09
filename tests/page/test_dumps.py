"""When a host that does not look at every step shows responses. What files hold is in `tests/hosts/test_dump.py`."""

from oar_plugin.config import DumpConfig
from oar_plugin.page.dumps import Dumps, Sibling, choose


def test_a_step_that_nobody_asked_about_is_made_up_for_at_the_next(tmp_path):
    for steps, due in (
        (range(1, 22), [1, 10, 20]),
        ([1, 5, 9, 13, 17, 21], [1, 13, 21]),  # generations serve four steps: the first one after each tenth
        ([14, 15, 20], [20]),  # after a resume: what stood before is an earlier process's
        ([1, 1, 9, 12, 12, 13], [1, 1, 12, 12]),  # two batches of one step
    ):
        dumps = Dumps(DumpConfig(every=10), tmp_path)
        assert [step for step in steps if dumps.due(step)] == due


def test_a_reward_that_is_not_finite_is_neither_right_nor_wrong():
    rewards = ("absent", 1.0), ("absent", float("nan")), ("both", 1.0), ("both", 0.0)
    assert choose([Sibling(group, group, reward, 0) for group, reward in rewards], 1)[0][0].group == "both"
