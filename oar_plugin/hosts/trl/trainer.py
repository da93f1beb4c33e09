"""TRL's `GRPOTrainer` with token credit.

TRL computes advantages in `_generate_and_score_completions`, one per response, and its loss takes one per token as well. This
subclass scores the responses that need credit with a pass of its own (TRL's log-probs come from a fused vocabulary
projection, which gives no logits to start from) and makes an advantage per token. Everything else is TRL's.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils.modeling import is_peft_model
from torch import Tensor
from trl import GRPOTrainer

from oar_plugin.config import OarConfig
from oar_plugin.hosts.accelerated import PREFIX, TRUTH, AcceleratedCredit, judged
from oar_plugin.passes.request import Request
from oar_plugin.passes.segments import longest_of
from oar_plugin.passes.taps import logit_changes
from oar_plugin.token_credit import PaddedBatch

UNCAPPED = ("logits_soft_cap", "output_logit_soft_cap")  # caps that TRL 1.16 does not know: RecurrentGemma's, xLSTM's
PAY_TOKENS = ("cispo", "vespo")  # losses with a gradient through each token's log-prob, also with ratios per response


class OarGRPOTrainer(AcceleratedCredit, GRPOTrainer):
    """TRL's GRPO, with each token's advantage times its weight.

    Args:
        oar: settings, by the names that they have below `algorithm.oar`: `{"importance": "fisher", "dump.dir": "credit"}`.
            A relative `dump.dir` is below `args.output_dir`.

    All other arguments are TRL's. Metrics are in its log, under `oar/`.

    Raises:
        OarConfigError: a setting, of OAR or of TRL, that cannot work. The message names it, its value and what is allowed.
        UnsupportedModelError: logits of this model cannot be read (see `oar_plugin.passes.taps.check_model`).

    Examples:
        >>> trainer = OarGRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=data)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    host = "TRL"

    def __init__(self, *arguments: Any, oar: Mapping[str, Any] | OarConfig | None = None, **named: Any) -> None:
        self.oar = oar if isinstance(oar, OarConfig) else OarConfig.parse(oar, PREFIX)
        super().__init__(*arguments, **named)
        self._add_credit(self._tokenizer)

    def _refused(self) -> list[tuple[str, Any, str]]:
        level, loss = self.args.importance_sampling_level, self.args.loss_type
        return [
            *super()._refused(),
            *((f"{name}={value} in the model's config", name in UNCAPPED,
               "TRL's loss does not cap the logits: scores would be those of another model; allowed: models without this cap")
              for name, value in logit_changes(self.model.config).items()),
            (f"model={type(self.model).__name__}", self._is_vlm, "models with images are refused; allowed: text models"),
            (f"importance_sampling_level=sequence with loss_type={loss}", level == "sequence" and loss not in PAY_TOKENS,
             "its gradient is the same for all tokens of a response, so their weights cancel; allowed: token, or "
             f"loss_type={' or '.join(PAY_TOKENS)}"),
        ]  # fmt: skip

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        reward_GF: Tensor = super()._calculate_rewards(*arguments, **named)
        if not self.model.training:  # an evaluation may have groups of another size
            return reward_GF
        each = self.multi_objective_aggregation == "normalize_then_sum"
        how = self.num_generations, each, self.scale_rewards == "batch"
        self._judged = judged(reward_GF, self.reward_weights, *how)
        return reward_GF

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:  # an evaluation has a loss, but learns nothing from it
            return output
        batch = PaddedBatch(
            torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
            output["completion_mask"].bool(),  # false where TRL masks what was cut off (`mask_truncated_completions`)
            output.get("tool_mask"),
        )
        args, asked, longest = self.args, self.args.generation_kwargs or {}, self.max_completion_length
        longest = min(longest, *(asked.get(name) or longest for name in ("max_tokens", "max_new_tokens")))
        # vLLM takes the model's positions where it is told nothing; transformers' own generation has no such limit.
        total = (args.vllm_max_model_length or longest_of(self.model.config)) if args.use_vllm else None
        request = self._credit.request(self.state.global_step + 1, longest, self.temperature, max_length=total)
        advantage_B, known = output["advantages"], partial(self._known, inputs, output)
        advantage_BL = advantage_B[:, None].expand(batch.response_BL.shape)
        reshaped = self._weigh(batch, advantage_BL, advantage_B != 0, self._judged, request, known)
        return output | {"advantages": reshaped.advantage_BL}

    def _importance(self, batch: PaddedBatch, segments_BL: Tensor, request: Request) -> Tensor:
        if self._dist.is_zero3:
            # TRL's loss reads the head's weight outside of the head. DeepSpeed notices that by itself, and keeps the weight for
            # the backward, unless a forward through the head came first. The forward for importance is one.
            from deepspeed.runtime.zero import register_external_parameter

            model = self.model.get_base_model() if is_peft_model(self.model) else self.model
            register_external_parameter(model, model.get_output_embeddings().weight)
        return super()._importance(batch, segments_BL, request)

    def _known(self, inputs: list[dict[str, Any]], output: dict[str, Any], row: int) -> dict[str, Any]:
        """The fields of a response's record that come from the data (`inputs`) and from TRL (`output`)."""
        log_prob_BL = output.get("old_per_token_logps", output.get("sampling_per_token_logps"))
        return {
            "prompt": self._tokenizer.decode(output["prompt_ids"][row][output["prompt_mask"][row].bool()]),
            "truth": next((inputs[row][name] for name in TRUTH if inputs[row].get(name) is not None), None),
            "log_probs": None if log_prob_BL is None else log_prob_BL[row],
        }
