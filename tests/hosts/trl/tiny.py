"""A tiny model, scripted responses and a trainer.

Responses come from `rollout_func`, TRL's own way to bring them, so that they have answers; one test samples with the model.
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.tiny.words import make_tokenizer
from tests.hosts import siblings
from tests.hosts.engine.world import new_model
from tests.hosts.siblings import PROMPTS, SIBLINGS, logged, same_weights  # noqa: F401

TOKENIZER = make_tokenizer(384)
TOKENIZER.padding_side = "left"
LENGTH = 16


def make_model(**config: Any) -> PreTrainedModel:
    """The same weights each time."""
    return new_model(TOKENIZER, attention_dropout=0.1, **config)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def scripted(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Siblings in turn; TRL repeats a prompt as often as it wants siblings."""
    first = trainer.accelerator.process_index * len(prompts)
    texts = [SIBLINGS[(first + row) % trainer.num_generations % len(SIBLINGS)] for row in range(len(prompts))]
    return {"prompt_ids": [ids(p) for p in prompts], "completion_ids": [ids(t) for t in texts], "logprobs": None}


def drawn(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Tokens from torch's random numbers: what else draws some would be noticed."""
    made = [[*torch.randint(0, 30, (int(torch.randint(3, 12, ())),)).tolist(), *ids(" #### 7<eos>")] for _ in prompts]
    return {"prompt_ids": [ids(p) for p in prompts], "completion_ids": made, "logprobs": None}


def paid(completions: list[str], **_: Any) -> list[float]:
    return [siblings.paid(str(text)) for text in completions]


def data(prompts: list[Any], count: int = 32) -> Dataset:
    rows = [prompts[at % len(prompts)] for at in range(count)]
    return Dataset.from_dict({"prompt": rows, "answer": ["5"] * count})


def arguments(folder: Path, **changes: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "beta": 0.0,
        "shuffle_dataset": False,
    }
    return GRPOConfig(**settings | changes)


def settled(oar: Any) -> Any:
    """Settings with `fisher` in place of the default, and all scores computed, where they do not say otherwise."""
    if not isinstance(oar, dict):
        return oar
    return {"importance": "fisher"} | ({} if "amortize.share" in oar else {"amortize.share": None}) | oar


def make(
    kind: type[GRPOTrainer],
    folder: Path,
    *,
    model: Any = None,
    rollout: Any = scripted,
    prompts: list[Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer. `changes` are of the configuration, but for arguments of trainers."""
    of_trainer = {name: changes.pop(name) for name in ("oar", "peft_config", "tools", "callbacks") if name in changes}
    if "oar" in of_trainer:
        of_trainer["oar"] = settled(of_trainer["oar"])
    trainer = kind(
        make_model() if model is None else model,
        reward_funcs=paid,
        args=arguments(folder, **changes),
        train_dataset=data(prompts or PROMPTS),
        processing_class=TOKENIZER,
        rollout_func=rollout,
        **of_trainer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    """As they are kept; under ZeRO-3 this process's parts."""
    return {name: getattr(one, "ds_tensor", one).detach().clone() for name, one in trainer.model.named_parameters()}
