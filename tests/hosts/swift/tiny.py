"""Real `swift rlhf`, in this process or in others, on a tiny model with scripted responses."""

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
)
from swift.pipelines import rlhf_main
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory

import oar_plugin
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.credit.answer import Segment
from oar_plugin.hosts.swift import VARIABLE
from oar_plugin.hosts.swift.trainer import OarGRPOTrainer
from tests.hosts.engine.world import new_model
from tests.hosts.siblings import PROMPTS, SIBLINGS, paid

FLAGS = {
    "rlhf_type": "grpo", "model_type": "qwen2", "template": "dummy", "tuner_type": "full", "torch_dtype": "float32",
    "attn_impl": "sdpa", "split_dataset_ratio": 0, "load_from_cache_file": "false", "reward_funcs": "paid",
    "check_model": "false", "num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
    "max_completion_length": 16, "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "beta": 0,
    "save_strategy": "no", "report_to": "none", "gradient_checkpointing": "false", "use_cpu": "true", "bf16": "false",
    "fp16": "false", "dataloader_num_workers": 0, "dataset_num_proc": 1, "dataloader_persistent_workers": "false",
    "seed": 0, "add_version": "false", "use_hf": "true",
}  # fmt: skip
VALUES = {"paid": lambda text: paid(text) + 0.01 * len(text), "equal": lambda text: 0.3}
VALUES |= {"none": lambda text: None if "hmm" in text else float("5" in text)}
VALUES |= {"infinite": lambda text: math.inf if "hmm" in text else float("5" in text)}
for _name, _value in VALUES.items():
    orms[_name] = type(
        _name, (ORM,), {"__call__": lambda self, completions, _value=_value, **_: [*map(_value, completions)]}
    )


def files(folder: Path) -> None:
    """A model, its tokenizer, and data with and without a prompt for a teacher."""
    tokenizer = make_tokenizer(384)
    tokenizer.padding_side = "left"
    for part in (new_model(tokenizer, attention_dropout=0.0), tokenizer):
        part.save_pretrained(folder / "model")
    told = [
        {"messages": [{"role": "user", "content": PROMPTS[n % 4] + " so" * (n // 4)}], "solution": "5"}
        for n in range(32)
    ]
    for name, more in (("data", {}), ("teacher", {"teacher_prompt": " 5 ="})):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(one | more) for one in told))


def words(folder: Path, **flags: Any) -> list[str]:
    given = FLAGS | {"model": folder / "model", "dataset": folder / "data.jsonl", "output_dir": folder / "out"} | flags
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    return [word for name, value in lists.items() for word in (f"--{name}", *map(str, value))]


class Scripted:
    """Writes `SIBLINGS`; with `drawn`, tokens from torch's random numbers: anything else that draws some is noticed. With
    `masks`, second tokens are the environment's, and the third response is cut off."""

    last: Any = None
    drawn = masks = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        Scripted.last = self

    def _rollout(self, samples: list[Any], request_config: Any, is_global_inputs: bool = False) -> list[RolloutOutput]:
        first, made = self.accelerator.process_index * len(samples), []
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        for row, sample in enumerate(samples):
            ids = encode(SIBLINGS[(first + row) % 4])
            if self.drawn:
                ids = [*torch.randint(0, 30, (int(torch.randint(3, 12, ())),)).tolist(), *encode(" #### 7<eos>")]
            said = ChatMessage("assistant", self.tokenizer.decode(ids, skip_special_tokens=True))
            choice = ChatCompletionResponseChoice(0, said, "length" if self.masks and row == 2 else "stop", None, ids)
            made.append(RolloutOutput(response=ChatCompletionResponse("tiny", [choice], UsageInfo(1, 1, 2))))
            if self.masks:
                made[-1].response_token_ids, made[-1].response_loss_mask = [ids], [[1, 0, *[1] * (len(ids) - 2)]]
                made[-1].messages = [*sample.messages, {"role": "assistant", "content": said.content}]
        return made


class Plain(Scripted, GRPOTrainer):
    pass


class Oar(Scripted, OarGRPOTrainer):
    """Keeps each batch, its segments, its importance, and what the front door says of the same tokens."""

    compare: ClassVar[dict[str, Any]] = {}

    def _importance(self, batch: Any, segments_BL: Any, request: Any) -> Any:
        got_BL = super()._importance(batch, segments_BL, request)
        self.seen = [*getattr(self, "seen", []), (batch, segments_BL, got_BL)]
        own_BT = torch.cat([torch.zeros_like(batch.token_BT[:, : batch.prompt_columns]), batch.own_BL.long()], 1)
        how = {"response_mask": own_BT, "attention_mask": batch.mask_BT, "tokenizer": self.tokenizer, **self.compare}
        how |= {"step": self.state.global_step + 1, "temperature": self.temperature}
        with self.accelerator.autocast():
            found_BT = oar_plugin.importance(self.model, batch.token_BT, **how).importance
        want_BL = torch.zeros_like(got_BL)
        for row, mask_T in enumerate(batch.mask_BT.bool()):  # the front door's rows have no padding in front
            whole_T = torch.zeros(len(mask_T))
            whole_T[mask_T] = found_BT[row, : int(mask_T.sum())]
            if (segments_BL[row] == Segment.REASONING).any():  # it does not know what was cut off
                want_BL[row] = whole_T[batch.prompt_columns :]
        if want_BL.any():
            self.error = max(getattr(self, "error", 0.0), ((got_BL - want_BL).abs().max() / want_BL.max()).item())
        return got_BL


def train(kind: type, folder: Path, oar: Any = None, **flags: Any) -> Any:
    """The trainer, after its run. `oar`: settings; by default exact scores of `fisher`."""
    settings = {"importance": "fisher", "amortize.share": None} | (oar or {})
    Oar.compare = {name: value for name, value in settings.items() if not name.startswith("dump")}
    (folder / "oar.yaml").write_text(json.dumps(settings))
    place, named = {"grpo": f"{__name__}.{kind.__name__}"}, {VARIABLE: str(folder / "oar.yaml")}
    with mock.patch.dict(os.environ, named), mock.patch.dict(TrainerFactory.TRAINER_MAPPING, place):
        rlhf_main(words(folder, **flags))
    return Scripted.last


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: one.detach().clone() for name, one in model.named_parameters()}
