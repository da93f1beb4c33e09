"""ms-swift's `GRPOTrainer` with token credit.

ms-swift writes an advantage per token into each micro-batch in `_postprocess_batch`, after all else that it does with
advantages. This subclass then scores the responses that need credit with a pass of its own, all micro-batches of a generation
at once, and multiplies. Everything else is ms-swift's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.hosts.accelerated import TRUTH, AcceleratedCredit, judged
from oar_plugin.hosts.swift import settings
from oar_plugin.output import warn_once
from oar_plugin.token_credit import PaddedBatch

TWICE = "two credits would be multiplied; allowed: train with one of them at a time"


class OarGRPOTrainer(AcceleratedCredit, GRPOTrainer):
    """ms-swift's GRPO, with each token's advantage times its weight. Metrics are in ms-swift's log, under `oar/`.

    Raises:
        OarConfigError: a setting, of OAR or of ms-swift, that cannot work. The message names it, its value and what is allowed.
        UnsupportedModelError: logits of this model cannot be read (see `oar_plugin.passes.taps.check_model`).
    """

    host = "ms-swift"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.oar = settings()
        super().__init__(*arguments, **named)
        self._add_credit(self.tokenizer)

    def _refused(self) -> list[tuple[str, Any, str]]:
        level, loss, parallel = self.importance_sampling_level, self.loss_type, self.template.sequence_parallel_size
        columns, delta = getattr(self.train_dataset, "column_names", None) or [], self.off_policy_sequence_mask_delta
        return [
            *super()._refused(),
            (f"advantage_reweight={self.advantage_reweight}", self.advantage_reweight, TWICE),
            (f"sdar_loss_coef={self.sdar_loss_coef}", self.sdar_loss_coef > 0, TWICE),
            (f"loss_type={loss}", loss == "fipo", TWICE),
            ("loss_type=real", loss == "real",
             "it takes one advantage per response, and of that the sign; allowed: another loss_type"),
            ("a teacher, or a column teacher_prompt", self._has_teacher_explicit() or "teacher_prompt" in columns,
             "its part of an advantage would be weighted too; allowed: none"),
            (f"off_policy_sequence_mask_delta={delta}", delta is not None,
             "it masks by a response's mean advantage, whose sign says what the whole response was worth; allowed: unset"),
            (f"importance_sampling_level=sequence with loss_type={loss}", level == "sequence" and loss != "cispo",
             "its gradient is the same for all tokens of a response, so their weights cancel; allowed: token, "
             "sequence_token, or loss_type=cispo"),
            (f"model={type(self.model).__name__}", self.is_multimodal, "models with images are refused; allowed: text models"),
            (f"sequence_parallel_size={parallel}", parallel > 1, "responses in parts are refused; allowed: 1"),
            ("padding_free=True", self.template.padding_free, "rows are scored with padding; allowed: False"),
        ]  # fmt: skip

    def _postprocess_batch(self, samples: list[Any], batch_encoded_inputs: list[dict[str, Any]]) -> None:
        super()._postprocess_batch(samples, batch_encoded_inputs)
        if not self.model.training:  # an evaluation has a loss, but learns nothing from it
            return
        if self.dynamic_num_samples:
            warn_once("oar: a scheduler made several samples of one response; they are trained as plain GRPO")
            return
        made = [one["grpo_batch"] for one in batch_encoded_inputs]
        batch = _joined([one["model_inputs"] for one in batch_encoded_inputs], made)
        length, device = batch.response_BL.shape[1], batch.response_BL.device
        how = self.num_generations, self.scale_rewards == "gdpo", self.scale_rewards == "batch"
        reward_G, bad_G, differ_G = judged(self._rewards_per_func, self.reward_weights, *how)
        if self.kl_in_reward and self.beta:  # equal rewards do not mean equal advantages
            differ_G = torch.ones_like(differ_G)
        advantage_BL, log_prob_BL = (
            _left([getattr(one, name) for one in made], length) for name in ("advantages", "old_per_token_logps")
        )
        needed_B = torch.stack([one.advantages for one in samples]).to(device) != 0
        request = self._credit.request(self.state.global_step + 1, temperature=self.temperature)
        known = partial(self._known, samples, batch, log_prob_BL)
        cut_B = torch.cat([one.truncated_mask for one in made])
        of_all = reward_G, bad_G, differ_G
        reshaped = self._weigh(batch, advantage_BL, needed_B, of_all, request, known, cut_B.to(device))
        parts = reshaped.advantage_BL.split([len(one.advantages) for one in made])
        for one, advantage_bL in zip(made, parts, strict=True):
            one.advantages = advantage_bL[:, length - one.advantages.shape[1] :]

    def _known(self, samples: list[Any], batch: PaddedBatch, log_prob_BL: Tensor, row: int) -> dict[str, Any]:
        """The fields of a response's record that come from the data and from ms-swift."""
        end = batch.prompt_columns + batch.responses[row][0].start
        prompt = batch.token_BT[row, :end][batch.mask_BT[row, :end].bool()]
        data = samples[row].extra
        return {
            "prompt": self.tokenizer.decode(prompt),
            "truth": next((data[name] for name in TRUTH if data.get(name) is not None), None),
            "log_probs": log_prob_BL[row],
        }


def _left(rows: Sequence[Tensor], width: int) -> Tensor:
    """Concatenates batches, each padded on the left to `width` columns."""
    return torch.cat([pad(one, (width - one.shape[1], 0)) for one in rows])


def _joined(inputs: Sequence[dict[str, Any]], made: Sequence[Any]) -> PaddedBatch:
    """The micro-batches as one batch. Its L last columns have each response, and before a shorter one the end of its prompt."""
    tokens, masks = ([one[name] for one in inputs] for name in ("input_ids", "attention_mask"))
    own = [one.completion_mask.bool() for one in made]
    length = max(mask_bL.shape[1] for mask_bL in own)
    width = max(length, *(token_bT.shape[1] for token_bT in tokens))
    token_BT, mask_BT, own_BL = _left(tokens, width), _left(masks, width), _left(own, length)
    # A response goes from a row's first token with a loss to its last one. Between them, tokens without are the environment's.
    response_BL = (own_BL.cumsum(1) > 0) & (own_BL.flip(1).cumsum(1).flip(1) > 0)
    return PaddedBatch(token_BT, mask_BT, response_BL, own_BL)
