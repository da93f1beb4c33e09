"""Settings of every test: one thread for torch, and no limit on an example's seconds."""

import hypothesis
import torch

torch.set_num_threads(1)  # tests use tiny tensors, on which a second thread only costs time
hypothesis.settings.register_profile("here", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("here")


def pytest_collection_modifyitems(config, items):
    """Beside another worker (`-n 2 --dist loadfile`): what takes longest first, so that none is left over at the end."""
    if not hasattr(config, "workerinput"):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name != "test_smoke.py", item.path not in slow))
