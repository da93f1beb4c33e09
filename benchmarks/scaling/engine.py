"""verl's engine for a layout, and the batch in verl's form. One process of a launch; the process group is there already."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import verl  # noqa: F401  loads the plugin, and on a machine without an accelerator its CPU pieces
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from benchmarks.scaling.layouts import Layout, Work
from benchmarks.tiny.random_models import Batch
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import Reshaped, reshape
from oar_plugin.passes.request import FIELDS, NEEDED, REPORT, REQUEST, Request

_LEARNING_RATE = 1e-6
_STEPS = 1_000_000  # of the learning-rate schedule: more than there will be


def build_engine(layout: Layout, work: Work, folder: Path, device: torch.device) -> Any:
    """verl's engine with its optimizer, initialized, through the registry as in a run.

    On a CPU it has the stand-ins of `oar_plugin.hosts.verl.cpu`, and Megatron's optimizer is the ordinary one without clipping.
    """
    strategy, configs = ("fsdp2", _fsdp) if layout.engine == "fsdp" else ("megatron", _megatron)
    parts = configs(layout, work, folder, device.type == "cpu")
    built = EngineRegistry.new("language_model", strategy, *parts, CheckpointConfig())
    built.initialize()
    return built


def _fsdp(layout: Layout, work: Work, folder: Path, cpu: bool) -> tuple[Any, Any, Any]:
    attention = "flash_attention_2"
    if cpu:
        from oar_plugin.hosts.verl.cpu import ulysses

        ulysses.install()
        attention = ulysses.ATTENTION
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    model = HFModelConfig(
        path=str(folder),
        override_config={"attn_implementation": attention},
        enable_gradient_checkpointing=work.checkpointing,
        use_remove_padding=True,
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        ulysses_sequence_parallel_size=layout.sequence,
        use_dynamic_bsz=False,
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=not cpu,
        micro_batch_size_per_gpu=work.micro_batch,
    )
    return model, engine, FSDPOptimizerConfig(lr=_LEARNING_RATE, total_training_steps=_STEPS)


def _megatron(layout: Layout, work: Work, folder: Path, cpu: bool) -> tuple[Any, Any, Any]:
    transformer: dict[str, Any] = {"sequence_parallel": layout.tensor > 1}
    if work.checkpointing:
        transformer |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if cpu:
        transformer |= {"use_cpu_initialization": True, "attention_backend": "auto"}
        transformer |= {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False}
    engine = McoreEngineConfig(
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        use_distributed_optimizer=not cpu,
        vanilla_mbridge=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=work.micro_batch,
        override_transformer_config=transformer,
        dtype=work.dtype,
    )
    steps = {"lr_decay_steps": _STEPS, "total_training_steps": _STEPS}
    optimizer = McoreOptimizerConfig(lr=_LEARNING_RATE, clip_grad=0.0 if cpu else 1.0, **steps)
    return HFModelConfig(path=str(folder), use_remove_padding=True), engine, optimizer


class Actor:
    """The three phases of a step on one rank's rows, every `layout.data`-th: the rows to score are spread evenly."""

    def __init__(self, engine: Any, layout: Layout, work: Work, batch: Batch) -> None:
        self.engine, self.layout, self.work = engine, layout, work
        mine = slice(engine.get_data_parallel_rank(), None, layout.data)
        self.token_BL, self.prompt_length, self.total = batch.token_BL[mine], batch.prompt_length, len(batch)
        self.needed_B = torch.arange(len(batch))[mine] < batch.scored
        self.config = OarConfig.parse({"importance": work.importance})
        self.request = Request.from_config(self.config, 1, work.response_length).to_dict()
        strategy, size = engine.engine_config.strategy, work.micro_batch
        self.loss = partial(ppo_loss, ActorConfig(strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=size))
        sign_B = 1.0 - 2.0 * (torch.arange(len(self.token_BL)) % 2)
        self.advantage_BL = (sign_B * self.needed_B)[:, None].expand(-1, work.response_length).contiguous()

    def data(self, importance: bool = False) -> TensorDict:
        """A fresh batch for a log-prob pass, with a request when importance is wanted. verl writes into what it is given."""
        response_BL = self.token_BL[:, self.prompt_length :]
        rows = {
            "prompts": self.token_BL[:, : self.prompt_length],
            "responses": response_BL,
            "response_mask": torch.ones_like(response_BL),
            "loss_mask": torch.ones_like(response_BL),
            "input_ids": self.token_BL,
            "position_ids": torch.arange(self.token_BL.shape[1]).expand_as(self.token_BL),
            NEEDED: self.needed_B.long()[:, None],
        }
        data = TensorDict({name: _nested(values) for name, values in rows.items()}, batch_size=[len(response_BL)])
        self._flag(data, calculate_entropy=True)
        if importance:
            tu.assign_non_tensor_data(data, REQUEST, self.request)
        return data

    def training_data(self, output: dict[str, Any], advantage_BL: Tensor) -> TensorDict:
        """A fresh batch for the update, on-policy."""
        data = self.data()
        # Only the last stage of a pipeline has log-probs, and only it looks at them here.
        known = "log_probs" in output
        old_BL = no_padding_2_padding(output["log_probs"].cpu(), data) if known else torch.zeros_like(advantage_BL)
        data["old_log_probs"], data["advantages"] = _nested(old_BL), _nested(advantage_BL)
        self._flag(data, calculate_entropy=False, global_batch_size=self.total)
        return data

    def log_prob(self, data: TensorDict) -> dict[str, Any]:
        """The log-prob pass; with a request in `data`, importance comes out of it too."""
        with self.engine.eval_mode():
            output: dict[str, Any] = self.engine.infer_batch(data).get("model_output", {})
        return output

    def update(self, data: TensorDict) -> None:
        """verl's PPO loss on the whole batch, one optimizer step."""
        with self.engine.train_mode():
            self.engine.train_batch(data, self.loss)

    def gate(self, output: dict[str, Any], times: int = 1) -> Reshaped:
        """Reshaped advantages of this rank's rows, or of as many as `times` ranks have: the driver reshapes the whole batch."""
        importance_BL, segments_BL, report_BN = (torch.stack(list(output[x].unbind())).repeat(times, 1) for x in FIELDS)
        advantage_BL, status_B = self.advantage_BL.repeat(times, 1), report_BN[:, 0].long()
        return reshape(advantage_BL, importance_BL, segments_BL == Segment.REASONING, status_B, self.config)

    def check(self, output: dict[str, Any]) -> None:
        """Raises: RuntimeError when a row that was to be scored was not, or the other way round."""
        status_B = torch.stack(list(output[REPORT].unbind()))[:, 0].long()
        if not torch.equal(status_B == Status.SCORED, self.needed_B):
            raise RuntimeError(f"not every row that was to be scored was: {[Status(int(x)).name for x in status_B]}")

    def _flag(self, data: TensorDict, **flags: Any) -> None:
        tu.assign_non_tensor(
            data,
            use_remove_padding=True,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=self.work.micro_batch,
            use_fused_kernels=False,
            temperature=1.0,
            **flags,
        )


def _nested(rows: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
