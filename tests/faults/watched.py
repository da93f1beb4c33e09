"""Count the objects of a process of a run from within, every `EVERY_S`: for `VERL_USE_EXTERNAL_MODULES`."""

import gc
import json
import os
import threading
import time
from pathlib import Path

import torch

FOLDER = "OAR_WATCHED"
"""The variable that names the folder of the counts; each process has a file."""
EVERY_S = 30.0
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def held() -> dict[str, int]:
    gc.collect()  # garbage does not count
    modules = tensors = objects = hooks = 0
    for thing in gc.get_objects():
        objects += 1
        if issubclass(type(thing), torch.nn.Module):
            modules += 1
            hooks += sum(len(thing.__dict__.get(kind, ())) for kind in _HOOKS)
        tensors += issubclass(type(thing), torch.Tensor)
    return {"modules": modules, "hooks": hooks, "tensors": tensors, "objects": objects} | _of_ray()


def _of_ray() -> dict[str, int]:
    import ray

    if not ray.is_initialized():
        return {}
    worker = ray._private.worker.global_worker.core_worker
    return {"references": len(worker.get_all_reference_counts())}


def _watch(file: Path) -> None:
    while True:
        time.sleep(EVERY_S)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": time.time(), **held()}) + "\n")


if FOLDER in os.environ:
    threading.Thread(target=_watch, args=(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl",), daemon=True).start()
