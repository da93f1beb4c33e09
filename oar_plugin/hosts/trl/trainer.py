"""TRL's `GRPOTrainer` with token credit.

TRL computes the group's advantages in `_generate_and_score_completions`, one number a response, and its loss takes one a token
as well. This subclass makes one a token: it scores the responses whose advantage is not zero with a pass of its own (TRL's
log-probs come from a fused vocabulary projection, which gives no logits to start from), and multiplies. Everything else is
TRL's.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from accelerate.utils.modeling import is_peft_model
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.estimator import Reshaped, reshape
from oar_plugin.page.dumps import DUMP_FAILED, Dumps, choose
from oar_plugin.page.record import Response, header_for
from oar_plugin.passes.plain import batch_importance, in_eval_mode
from oar_plugin.passes.request import Request, replacement_token
from oar_plugin.passes.segments import segment_rows
from oar_plugin.passes.taps import check_model
from oar_plugin.passes.tokens import TokenBytes

PREFIX = "oar"
PAY_TOKENS = ("cispo", "vespo")
"""Losses whose gradient goes through each token's own log-prob, also where the ratio is the whole response's."""
TRUTH = ("ground_truth", "solution", "answer")
"""Columns of the data that may hold the right answer, for dumps: the first one that is there."""


class OarGRPOTrainer(GRPOTrainer):
    """TRL's GRPO, with each token's advantage times its weight.

    Args:
        oar: settings, by the names that they have below `algorithm.oar`: `{"importance": "fisher", "dump": {"dir": "credit"}}`.
            A relative `dump.dir` is below `args.output_dir`.

    All other arguments are TRL's. Metrics are in its log, under `oar/`.

    Raises:
        OarConfigError: a setting, of OAR or of TRL, that cannot work; names it, its value and what is allowed.
        UnsupportedModelError: logits of this model cannot be read (see `oar_plugin.passes.taps.check_model`).

    Example:
        >>> trainer = OarGRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=data)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *arguments: Any, oar: Mapping[str, Any] | OarConfig | None = None, **named: Any) -> None:
        if not isinstance(oar, Mapping | OarConfig | None):
            raise OarConfigError(f'{PREFIX}={oar!r}: must be a mapping of settings, such as {{"importance": "fisher"}}')
        self.oar = oar if isinstance(oar, OarConfig) else OarConfig.parse(oar, PREFIX)
        super().__init__(*arguments, **named)
        if faults := list(self._faults()):
            raise OarConfigError("\n".join(faults))
        check_model(self.model)
        self._replacement = replacement_token(self.oar, self._tokenizer)
        self._bytes = TokenBytes(self._tokenizer)
        # One process writes; all of them must know when.
        here = {} if self.accelerator.is_main_process else {"dir": None}
        self._dumps = Dumps(self.oar.dump.model_copy(update=here), self.args.output_dir, PREFIX)

    def _faults(self) -> Iterator[str]:
        args = self.args
        no = "not served by OAR; allowed: False"
        if self.oar.offloads:
            yield f"{PREFIX}.perturbation.backend=rollout: TRL's engines score no copies; allowed: actor"
        if self.oar.base_estimator != "grpo":
            yield (
                f"{PREFIX}.base_estimator={self.oar.base_estimator}: the advantage is TRL's own (scale_rewards, "
                "multi_objective_aggregation); allowed: grpo"
            )
        if args.use_liger_kernel:
            yield f"use_liger_kernel=True: Liger's layers were not tested with a backward to the embeddings, {no}"
        if args.torch_compile:
            yield f"torch_compile=True: a compiled model does not call the hooks that importance is read with, {no}"
        if self._is_vlm:
            yield f"model={type(self.model).__name__}: models with images are not served by OAR; allowed: text models"
        if args.importance_sampling_level == "sequence" and args.loss_type not in PAY_TOKENS:
            yield (
                f"importance_sampling_level=sequence with loss_type={args.loss_type}: its gradient is the same for all tokens "
                f"of a response, so their weights cancel; allowed: token, or loss_type={' or '.join(PAY_TOKENS)}"
            )
        if getattr(args.parallelism_config, "tp_size", 1) > 1:
            size = args.parallelism_config.tp_size
            yield f"parallelism_config.tp_size={size}: layers in parts are not served by OAR under TRL; allowed: 1"
        if len(places := set(getattr(self.model, "hf_device_map", {}).values())) > 1:
            yield f"device_map over {len(places)} devices: layers on several devices are not served by OAR; allowed: one"
        offload = getattr(getattr(self.accelerator.state, "fsdp_plugin", None), "cpu_offload", None)
        if getattr(offload, "offload_params", "CPU" in type(offload).__name__):
            yield f"fsdp_config.offload_params=True: weights that wait on the CPU are {no}"
        every, accumulated = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
        if every % accumulated:
            yield (
                f"steps_per_generation={args.steps_per_generation}, times num_iterations={args.num_iterations}: rows would "
                "be scored between gradients that are being accumulated; allowed: a multiple of "
                f"gradient_accumulation_steps={accumulated}"
            )

    # ---- TRL's two steps that this adds to

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        reward_GF: Tensor = super()._calculate_rewards(*arguments, **named)
        self._reward_G: Tensor = (reward_GF * self.reward_weights.to(reward_GF.device)).nansum(1).cpu()  # for dumps
        return reward_GF

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:  # an evaluation has a loss, but learns nothing from it
            return output
        started, step = time.perf_counter(), self.state.global_step + 1
        longest = self.max_completion_length or sys.maxsize
        request = Request.from_config(self.oar, step, longest, False, self._replacement, self.temperature)
        segments_BL, status_B = self._segments(output, request)
        importance_BL = self._importance(output, segments_BL, request)
        reasoning_BL = segments_BL == Segment.REASONING
        advantage_BL = output["advantages"][:, None].expand(segments_BL.shape)
        reshaped = reshape(advantage_BL, importance_BL, reasoning_BL, status_B, self.oar)
        weight_GL, usable_GL, status_G = self._of_all_processes(reshaped, reasoning_BL)
        metrics = {f"oar/{name}": value for name, value in summarize(weight_GL, usable_GL, status_G).items()}
        metrics["oar/seconds"] = time.perf_counter() - started
        if self.oar.dump.dir is not None:
            metrics[DUMP_FAILED] = 0.0
            if self._dumps.due(step):
                columns = {"segments": segments_BL, "importance": importance_BL}
                self._dump(step, inputs, output, columns, reshaped, status_G, metrics)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return output | {"advantages": reshaped.advantage_BL}

    # ---- importance of this process's responses

    def _segments(self, output: dict[str, Any], request: Request) -> tuple[Tensor, Tensor]:
        """int64 `[B, L]` of `Segment`, and int64 `[B]` of `Status`."""
        token_BL, mask_BL = output["completion_ids"], output["completion_mask"]
        own_BL = output.get("tool_mask", mask_BL).bool()
        length_B = mask_BL.sum(-1).tolist()  # 0 where TRL masks what was cut off (`mask_truncated_completions`)
        needed_B = ((output["advantages"] != 0) & mask_BL.any(-1)).tolist()
        rows = (
            (ids[:length].tolist(), own[:length].cpu().numpy(), needed)
            for ids, own, length, needed in zip(token_BL, own_BL, length_B, needed_B, strict=True)
        )
        found, status_B = segment_rows(rows, request, self._bytes, self.eos_token_ids)
        segments_BL = torch.zeros_like(token_BL)
        for row, segments in zip(segments_BL, found, strict=True):
            row[: len(segments)] = segments
        return segments_BL, status_B.to(token_BL.device)

    def _importance(self, output: dict[str, Any], segments_BL: Tensor, request: Request) -> Tensor:
        """float32 `[B, L]`."""
        token_BT = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask_BT = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        length = segments_BL.shape[1]
        segments_BT = pad(segments_BL, (token_BT.shape[1] - length, 0), value=int(Segment.OUTSIDE))
        if self._dist.is_zero3:
            self._share_head()
        # No more tokens at a time than TRL's own forwards have.
        most_tokens = self.args.per_device_train_batch_size * token_BT.shape[1]
        with in_eval_mode(self.model), self.accelerator.autocast(), torch.enable_grad():
            importance_BT = batch_importance(
                self.model,
                request,
                token_BT,
                segments_BT,
                mask_BT,
                most_tokens,
                checkpoint_activations=self.args.gradient_checkpointing,
                max_over_ranks=self._most,
            )
        return importance_BT[:, -length:]

    def _share_head(self) -> None:
        """TRL's loss reads the head's weight outside of the head. DeepSpeed notices, and keeps it for the backward, unless a
        forward through the head came first, as ours does: then it has to be told.
        """
        from deepspeed.runtime.zero import register_external_parameter

        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        register_external_parameter(model, model.get_output_embeddings().weight)

    def _most(self, count: int) -> int:
        """Sharded weights are gathered layer by layer: all processes must make as many forwards."""
        return int(self.accelerator.gather(torch.tensor([count], device=self.accelerator.device)).max())

    # ---- what to look at

    def _of_all_processes(self, reshaped: Reshaped, reasoning_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, bool "has credit", and status of every response; processes' batches differ in length."""
        accelerator, credited_BL = self.accelerator, reasoning_BL & (reshaped.status_B == Status.SCORED)[:, None]
        weight_GL, credited_GL = (
            accelerator.gather(accelerator.pad_across_processes(x, dim=1)).cpu()
            for x in (reshaped.weight_BL, credited_BL.long())
        )
        return weight_GL, credited_GL.bool(), accelerator.gather(reshaped.status_B).cpu()

    def _dump(
        self,
        step: int,
        inputs: list[dict[str, Any]],
        output: dict[str, Any],
        columns: dict[str, Tensor],
        reshaped: Reshaped,
        status_G: Tensor,
        metrics: dict[str, float],
    ) -> None:
        """Every process sends the responses that it has of the groups to look at; one of them writes.

        Args:
            inputs: rows of the data.
            output: TRL's, its advantages as they were.
            columns: importance and segments, `[B, L]`.
        """
        counted = partial(self._dumps.counted, step, metrics)
        first, group = self.accelerator.process_index * len(inputs), self.num_generations

        def response(place: int) -> Response:
            """`place` is its row among all processes'."""
            row = place - first
            length = int(output["completion_mask"][row].sum())

            def numbers(values_BL: Tensor | None) -> Any:
                return None if values_BL is None else values_BL[row, :length].tolist()

            ids = numbers(output["completion_ids"])
            truth = next((inputs[row][name] for name in TRUTH if inputs[row].get(name) is not None), None)
            return Response(
                step=step,
                group=str(place // group),
                uid=f"{step}_{place}",
                prompt=self._tokenizer.decode(output["prompt_ids"][row][output["prompt_mask"][row].bool()]),
                truth=None if truth is None else str(truth),
                token_ids=ids,
                tokens=self._bytes.texts(ids),
                segments=numbers(columns["segments"]),
                importance={self.oar.importance_object.name: numbers(columns["importance"])},
                weights=numbers(reshaped.weight_BL),
                log_probs=numbers(output.get("old_per_token_logps", output.get("sampling_per_token_logps"))),
                mask=numbers(output.get("tool_mask")),
                advantage=output["advantages"][row].item(),
                reward=self._reward_G[place].item(),
                status=Status(int(reshaped.status_B[row])).name.lower(),
            )

        siblings = [range(at, at + group) for at in range(0, len(status_G), group)]
        chosen: list[int] = []
        own: list[tuple[int, Response]] = []
        with counted("reading responses", DUMP_FAILED):
            groups = choose(siblings, self._reward_G, status_G, self.oar.dump.groups)
            chosen = [row for rows in groups for row in rows]
            own = [(place, response(place)) for place in chosen if first <= place < first + len(inputs)]
        found = dict(gather_object(own))
        metrics[DUMP_FAILED] = float(metrics[DUMP_FAILED] or len(found) < len(chosen))  # another process's, it may be
        if self._dumps.folder is not None:
            with counted(f"writing into {self._dumps.folder}", DUMP_FAILED):
                self._dumps.write(header_for(self.oar), step, [found[place] for place in chosen if place in found])
