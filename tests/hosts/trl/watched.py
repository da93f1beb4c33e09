"""A trainer that keeps what it computed, beside what the front door says of the same tokens; and two importances of our own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import oar_plugin
from oar_plugin.credit.importance import Parts
from oar_plugin.hosts.trl import OarGRPOTrainer
from oar_plugin.passes.request import Request
from oar_plugin.token_credit import PaddedBatch, ReshapedBatch
from tests.hosts.trl import tiny
from tests.own_importance import Saliency

BAD = "python:tests.hosts.trl.watched:Bad"


class Bad(Saliency):
    """What a mistake in a user's class may return."""

    name = "bad"
    value = 1.0

    def combine(self, parts: Parts) -> Tensor:
        return torch.full_like(parts.score_KBL[0], self.value)


@dataclass
class Seen:
    """One generation batch: what the loss gets, the importance, and, if it was asked, the front door's credit."""

    step: int
    output: dict[str, Any]
    plain_B: Tensor
    importance_BL: Tensor
    segments_BL: Tensor
    status_B: Tensor
    credit: Any = None

    def ask(self, model: PreTrainedModel, **settings: Any) -> None:
        """The front door, for credit of these tokens with this model."""
        output = self.output
        own = output.get("tool_mask", output["completion_mask"]) * output["completion_mask"]
        self.credit = oar_plugin.importance(
            model,
            torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
            response_mask=torch.cat([torch.zeros_like(output["prompt_ids"]), own], 1),
            attention_mask=torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
            tokenizer=tiny.TOKENIZER,
            step=self.step,
            **{key: value for key, value in settings.items() if not key.startswith("dump")},  # it writes no files
        )

    def error(self) -> float:
        """Largest error of a score, as a share of the largest score, over the rows that were scored; and that some were."""
        rows = (self.segments_BL == 1).any(-1).nonzero()[:, 0].tolist()
        assert rows
        return max(relative(self.importance_BL[row], self.front(self.credit.importance, row)) for row in rows)

    def front(self, values_BT: Tensor, row: int) -> Tensor:
        """A row of the front door's, which has no padding in front, as the response's."""
        width = self.output["completion_ids"].shape[1]
        begin = int(self.output["prompt_mask"][row].sum())
        found = values_BT[row, begin : begin + width]
        return torch.nn.functional.pad(found, (0, width - len(found)))


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


class Watched(OarGRPOTrainer):
    """Keeps what it computes. `compare`: settings to ask the front door with as well, before the weights change."""

    compare: dict[str, Any] | None = None
    predictor: Any = None  # the front door's, of the batch before

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen: list[Seen] = []

    def _importance(self, batch: PaddedBatch, segments_BL: Tensor, request: Request) -> Tensor:
        before, old = self._state(), tiny.weights(self)
        found = super()._importance(batch, segments_BL, request)
        changed = [name for name, state in self._state().items() if state != before[name]]
        assert not changed, changed
        assert tiny.same_weights(tiny.weights(self), old)
        return found

    def _credit_metrics(self, reshaped: ReshapedBatch) -> dict[str, float]:
        self._reshaped = reshaped
        return super()._credit_metrics(reshaped)

    def _state(self) -> dict[str, Any]:
        """What a pass must leave as it found it, beside the weights."""
        modules = {name: (module.training, len(module._forward_hooks)) for name, module in self.model.named_modules()}
        flags = {name: (one.requires_grad, one.grad is None) for name, one in self.model.named_parameters()}
        return modules | flags | {"random numbers": torch.get_rng_state().tolist()}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            done = self._reshaped
            plain_B = done.host_advantage_BL[:, 0]
            seen = Seen(done.step, output, plain_B, done.importance_BL, done.segments_BL, done.status_B)
            self.seen.append(seen)
            if self.compare is not None:
                known = {"predictor": self.predictor} if self._credit.schedule.predictor else {}
                with self.accelerator.autocast():
                    seen.ask(self.model, temperature=self.temperature, **known, **self.compare)
                self.predictor = seen.credit.predictor
        return output


def watched(folder: Path, oar: dict[str, Any], **changes: Any) -> Watched:
    """A run that compared each of its batches with the front door."""
    trainer = tiny.make(Watched, folder, oar=oar, **changes)
    trainer.compare = {name: value for name, value in tiny.settled(oar).items() if name != "dump"}
    trainer.train()
    return trainer
