"""One of the processes that train, started by `ranks`, with a key of `LAYOUTS` and a folder.

The learning rate is 0 where importance is compared, so that a fresh model is the one that was scored.
"""

import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import _init_utils
from trl import GRPOTrainer

from tests.hosts.trl import tiny
from tests.hosts.trl.watched import Watched
from tests.processes import worker

ZERO_3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_force_ds_cpu_optimizer": False,
}
WRAP = {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "torch": {
        "ddp": {},
        "fsdp2": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, **WRAP}},
        "fsdp1": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1, "sync_module_states": False, **WRAP}},
    },
    "deepspeed": {"zero3": {"deepspeed": ZERO_3, "use_cpu": False}},
}
IMPORTANCES = ["fisher", "oar_p"]
COPIES = {"span": 2}


def allow_on_a_cpu() -> None:
    """What TRL's libraries leave out there; all else is theirs. FSDP in `train`: accelerate does it on MULTI_GPU and its like,
    and a CPU is MULTI_CPU."""
    # FSDP1 compares accelerate's device `cpu`, which it has made `cpu:0`, with its own `cpu`.
    _init_utils._get_device_from_device_id = lambda *_, **__: None
    # accelerate asks GPUs which backend DeepSpeed is to have.
    if "deepspeed" in sys.argv:
        import deepspeed

        # DeepSpeed would compile a kernel for collectives; killed compilers leave a lock for which later ranks wait forever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Of eight siblings each process has four. At step 2 the second one has nothing to score."""
    made = tiny.scripted(prompts, trainer)
    if trainer.accelerator.process_index and trainer.state.global_step:
        made["completion_ids"] = [tiny.ids(" well" * (2 + row) + "<eos>") for row in range(len(prompts))]
    return made


def train(kind: type, folder: Path, layout: dict[str, Any], **changes: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)

    def construct(*arguments: Any, **named: Any) -> Any:
        if "fsdp" in layout:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return kind(*arguments, **named)

    sizes = {"num_generations": 8, "per_device_train_batch_size": 2}
    steps = {"steps_per_generation": 2, "gradient_accumulation_steps": 2}
    trainer = tiny.make(construct, folder, **sizes | steps | layout | changes)
    trainer.train()
    return trainer


def whole(trainer: Any) -> dict[str, Tensor]:
    """Weights of a model that may be in shards."""
    parameters = dict(trainer.model.named_parameters())
    with trainer._dist.gather_params(list(parameters.values())), trainer._dist.summon_full_params(trainer.model):
        found = trainer.model.named_parameters()
        return {name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for name, one in found}


def main(kind: str, folder: str) -> dict[tuple[str, str], Any]:
    """By layout and importance: the wrapper's class, what was scored, and the log. By layout and "even": weights without OAR,
    and with even weights."""
    allow_on_a_cpu()
    results: dict[tuple[str, str], Any] = {}
    for name, layout in LAYOUTS[kind].items():
        for importance in IMPORTANCES:
            dump = {"dir": f"{name}-{importance}", "every": 1}
            oar = {"importance": importance, "perturbation": COPIES, "dump": dump}
            trainer = train(Watched, Path(folder), layout, rollout=rollout, learning_rate=0.0, oar=oar)
            log = [line for line in trainer.state.log_history if "oar/scored" in line]
            results[name, importance] = type(trainer.model_wrapped).__name__, trainer.seen, log
        # As TRL's defaults are. Under DeepSpeed its own settings would have to say bf16.
        defaults = {"gradient_checkpointing": True, "bf16": kind == "torch", "rollout": tiny.drawn}
        plain = whole(train(GRPOTrainer, Path(folder), layout, **defaults))
        oar = {"importance": "oar_p", "perturbation": COPIES, "beta": 0.0}
        even = whole(train(Watched, Path(folder), layout, oar=oar, **defaults))
        results[name, "even"] = plain, even
    return results


if __name__ == "__main__":
    worker(main)
