"""TRL's `GRPOTrainer` with token credit.

TRL computes advantages in `_generate_and_score_completions`, one per response, and its loss takes one per token as well. This
subclass scores the responses that need credit with a pass of its own (TRL's log-probs come from a fused vocabulary
projection, which gives no logits to start from) and makes an advantage per token. Everything else is TRL's.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from accelerate.utils.modeling import is_peft_model
from torch import Tensor
from trl import GRPOTrainer

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.estimator import needs_credit
from oar_plugin.passes.request import Request
from oar_plugin.passes.segments import longest_of
from oar_plugin.passes.taps import check_model, logit_changes
from oar_plugin.token_credit import PaddedBatch, ReshapedBatch, TokenCredit

PREFIX = "oar"
UNCAPPED = ("logits_soft_cap", "output_logit_soft_cap")  # caps that TRL 1.16 does not know: RecurrentGemma's, xLSTM's
PAY_TOKENS = ("cispo", "vespo")  # losses with a gradient through each token's log-prob, also with ratios per response
TRUTH = ("ground_truth", "solution", "answer")  # columns with the right answer, for dumps; the first that exists counts


class OarGRPOTrainer(GRPOTrainer):
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

    def __init__(self, *arguments: Any, oar: Mapping[str, Any] | OarConfig | None = None, **named: Any) -> None:
        if not isinstance(oar, Mapping | OarConfig | None):
            raise OarConfigError(f'{PREFIX}={oar!r}: must be a mapping of settings, such as {{"importance": "fisher"}}')
        self.oar = oar if isinstance(oar, OarConfig) else OarConfig.parse(oar, PREFIX)
        super().__init__(*arguments, **named)
        if faults := self._faults():
            raise OarConfigError("\n".join(faults))
        check_model(self.model)
        home, ends = self.args.output_dir if self.accelerator.is_main_process else None, self.model.generation_config
        self._credit = TokenCredit(self.oar, self._tokenizer, PREFIX, generation_config=ends, home=home)

    def _faults(self) -> list[str]:
        """What cannot work of OAR's and TRL's settings: key, value and what is allowed."""
        args, oar = self.args, self.oar
        tp_size = getattr(args.parallelism_config, "tp_size", 1)
        devices = len(set(getattr(self.model, "hf_device_map", {}).values()))
        offload = getattr(getattr(self.accelerator.state, "fsdp_plugin", None), "cpu_offload", None)
        every, accumulated = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
        level, loss = args.importance_sampling_level, args.loss_type
        refused = [
            (f"{PREFIX}.perturbation.backend=rollout", oar.offloads, "TRL's engines score no copies; allowed: actor"),
            (f"{PREFIX}.base_estimator={oar.base_estimator}", oar.base_estimator != "grpo",
             "the advantage is TRL's own (scale_rewards, multi_objective_aggregation); allowed: grpo"),
            ("use_liger_kernel=True", args.use_liger_kernel,
             "Liger's layers were not tested with a backward to the embeddings; allowed: False"),
            ("torch_compile=True", args.torch_compile,
             "a compiled model does not call the hooks that importance is read with; allowed: False"),
            *((f"{name}={value} in the model's config", name in UNCAPPED,
               "TRL's loss does not cap the logits: scores would be those of another model; allowed: models without this cap")
              for name, value in logit_changes(self.model.config).items()),
            (f"model={type(self.model).__name__}", self._is_vlm, "models with images are refused; allowed: text models"),
            (f"importance_sampling_level=sequence with loss_type={loss}", level == "sequence" and loss not in PAY_TOKENS,
             "its gradient is the same for all tokens of a response, so their weights cancel; allowed: token, or "
             f"loss_type={' or '.join(PAY_TOKENS)}"),
            (f"parallelism_config.tp_size={tp_size}", tp_size > 1, "layers in parts are refused; allowed: 1"),
            (f"device_map over {devices} devices", devices > 1, "layers on several devices are refused; allowed: one"),
            ("fsdp_config.offload_params=True", getattr(offload, "offload_params", "CPU" in type(offload).__name__),
             "weights that wait on the CPU are refused; allowed: False"),
            (f"steps_per_generation={args.steps_per_generation}, times num_iterations={args.num_iterations}",
             every % accumulated, "rows would be scored between gradients that are being accumulated; allowed: a multiple of "
             f"gradient_accumulation_steps={accumulated}"),
        ]  # fmt: skip
        return [f"{setting}: {why}" for setting, wrong, why in refused if wrong]

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        reward_GF: Tensor = super()._calculate_rewards(*arguments, **named)
        if not self.model.training:  # an evaluation may have groups of another size
            return reward_GF
        # NaN where no function gave a reward: TRL leaves it out. An infinite one spoils all that it is normalised with.
        part_GF = (reward_GF * self.reward_weights.to(reward_GF.device)).nan_to_num(0.0, torch.inf, -torch.inf)
        part_GF = part_GF.masked_fill(reward_GF.isnan().all(1, keepdim=True), torch.nan).cpu()
        self._reward_G = part_GF.sum(1)
        each = self.multi_objective_aggregation == "normalize_then_sum"  # compares the rewards of each function
        whole = each or self.scale_rewards == "batch"
        infinite_NG = self._reward_G.isinf().view(-1, len(part_GF) if whole else self.num_generations)
        groups, some_G1 = [row // self.num_generations for row in range(len(part_GF))], torch.ones(len(part_GF), 1)
        parts = part_GF.split(1, 1) if each else [part_GF]
        self._differ_G = torch.stack([needs_credit(some_G1, part, groups) for part in parts]).any(0)
        self._bad_G = self._reward_G.isnan() | infinite_NG.any(1, keepdim=True).expand_as(infinite_NG).flatten()
        return reward_GF

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:  # an evaluation has a loss, but learns nothing from it
            return output
        started, step, credit = time.perf_counter(), self.state.global_step + 1, self._credit
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
        request = credit.request(step, longest, self.temperature, max_length=total)
        first = self.accelerator.process_index * len(inputs)  # row 0 in the batch of all processes
        known_2B = torch.stack([self._bad_G, self._differ_G])[:, first : first + len(inputs)]
        bad_B, differ_B = known_2B.to(batch.response_BL.device)
        needed_B = (output["advantages"] != 0) & differ_B & batch.response_BL.any(-1) & ~bad_B
        segments_BL, status_B = credit.segments(batch, needed_B, request)
        status_B[bad_B] = int(Status.BAD_REWARD)
        importance_BL = self._importance(batch, segments_BL, request)
        advantage_BL = output["advantages"][:, None].expand(segments_BL.shape)
        reshaped = credit.reshape(step, advantage_BL, importance_BL, segments_BL, status_B)
        metrics = self._credit_metrics(reshaped) | {"oar/seconds": time.perf_counter() - started}

        reward_B, size = self._reward_G[first : first + len(inputs)].tolist(), self.num_generations
        rows = ((row, str((first + row) // size), f"{step}_{first + row}", one) for row, one in enumerate(reward_B))
        credit.dump(batch, reshaped, metrics, rows, partial(self._known, inputs, output), gather_object)
        if self.accelerator.is_main_process:
            credit.watch.see(step, metrics, self._reward_G.nanmean().item())
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return output | {"advantages": reshaped.advantage_BL}

    def _importance(self, batch: PaddedBatch, segments_BL: Tensor, request: Request) -> Tensor:
        """float32 `[B, L]`, of this process's responses."""
        if self._dist.is_zero3:
            # TRL's loss reads the head's weight outside of the head. DeepSpeed notices that by itself, and keeps the weight for
            # the backward, unless a forward through the head came first. The forward for importance is one.
            from deepspeed.runtime.zero import register_external_parameter

            model = self.model.get_base_model() if is_peft_model(self.model) else self.model
            register_external_parameter(model, model.get_output_embeddings().weight)
        accelerator = self.accelerator
        with accelerator.autocast():
            return self._credit.importance(
                *(self.model, batch, segments_BL, request),
                # No more than TRL's own forwards have.
                max_tokens=self.args.per_device_train_batch_size * batch.token_BT.shape[1],
                max_over_ranks=lambda n: int(accelerator.gather(torch.tensor([n], device=accelerator.device)).max()),
                checkpoint_activations=self.args.gradient_checkpointing,
                sum_over_ranks=partial(accelerator.reduce, reduction="sum"),
            )

    def _credit_metrics(self, reshaped: ReshapedBatch) -> dict[str, float]:
        """Metrics over the responses of all processes."""
        measure_GM, status_G = (self.accelerator.gather(x).cpu() for x in (reshaped.measure_BM, reshaped.status_B))
        return {f"oar/{name}": value for name, value in summarize(measure_GM, status_G).items()}

    def _known(self, inputs: list[dict[str, Any]], output: dict[str, Any], row: int) -> dict[str, Any]:
        """The fields of a response's record that come from the data (`inputs`) and from TRL (`output`)."""
        log_prob_BL = output.get("old_per_token_logps", output.get("sampling_per_token_logps"))
        return {
            "prompt": self._tokenizer.decode(output["prompt_ids"][row][output["prompt_mask"][row].bool()]),
            "truth": next((inputs[row][name] for name in TRUTH if inputs[row].get(name) is not None), None),
            "log_probs": None if log_prob_BL is None else log_prob_BL[row],
        }
