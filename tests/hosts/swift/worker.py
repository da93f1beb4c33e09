"""One of two processes that train, started by `ranks`. Where importance is compared, the learning rate is 0."""

import os
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import _init_utils

from tests.hosts.siblings import EVEN, logged
from tests.hosts.swift import tiny
from tests.processes import worker

LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": {"fsdp": "fsdp2"}}


def main(layout: str, folder: str) -> tuple[float, list[float], Any, Any]:
    """The largest error of a score, what was scored, and weights without OAR and with even credit."""
    place, start = Path(folder) / os.environ["RANK"], tiny.Scripted.__init__
    place.mkdir()

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        if layout == "fsdp2":  # accelerate does not offer it on a CPU
            _init_utils._get_device_from_device_id = lambda *_, **__: None
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        start(self, *arguments, **named)

    tiny.Scripted.__init__ = begin

    def run(kind: type, oar: Any = None, **more: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        sizes = {"per_device_train_batch_size": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
        paths = {
            "model": Path(folder) / "model",
            "dataset": Path(folder) / "data.jsonl",
            "output_dir": Path(folder) / "out",
        }
        return tiny.train(kind, place, oar, **sizes | paths | LAYOUTS[layout] | more)

    def whole(trainer: Any) -> dict[str, Any]:
        found = trainer.model.named_parameters()
        return {name: getattr(one, "full_tensor", one.detach)().detach().clone() for name, one in found}

    compared = run(tiny.Oar, learning_rate=0.0)
    tiny.Scripted.drawn = True
    plain = whole(run(tiny.Plain))
    return compared.error, logged(compared, "oar/scored"), plain, whole(run(tiny.Oar, {"importance": EVEN}))


if __name__ == "__main__":
    worker(main)
