"""What the trainers for TRL and ms-swift share: both run on accelerate, and a prompt's responses are consecutive rows."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.estimator import needs_credit
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import check_model
from oar_plugin.token_credit import PaddedBatch, ReshapedBatch, TokenCredit

PREFIX = "oar"  # of settings, in messages
TRUTH = ("ground_truth", "solution", "answer")  # columns with the right answer, for dumps; the first that exists counts


def judged(reward_GF: Tensor, weight_F: Tensor, size: int, each: bool, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What the rewards say of the G responses of all processes, `[G]` each, on the CPU: the weighted sum; whether it is NaN, or
    is normalised together with an infinite one (bool); whether the rewards of the response's group differ (bool).

    `reward_GF`: from F functions; NaN where a function gave none. `size`: responses to a prompt. `each`: the host compares the
    rewards of each function, not their sum. `whole`: it normalises over all prompts.
    """
    # Hosts leave NaN out, unless no function gave a reward. An infinite one spoils all that it is normalised with.
    part_GF = (reward_GF * weight_F.to(reward_GF.device)).nan_to_num(0.0, torch.inf, -torch.inf)
    part_GF = part_GF.masked_fill(reward_GF.isnan().all(1, keepdim=True), torch.nan).cpu()
    reward_G = part_GF.sum(1)
    infinite_NG = reward_G.isinf().view(-1, len(part_GF) if each or whole else size)
    bad_G = reward_G.isnan() | infinite_NG.any(1, keepdim=True).expand_as(infinite_NG).flatten()
    groups, some_G1 = [row // size for row in range(len(part_GF))], torch.ones(len(part_GF), 1)
    parts = part_GF.split(1, 1) if each else [part_GF]
    return reward_G, bad_G, torch.stack([needs_credit(some_G1, part, groups) for part in parts]).any(0)


class AcceleratedCredit:
    """What OAR adds to such a trainer: a base class that comes before the host's trainer."""

    host: ClassVar[str]  # its name
    oar: OarConfig
    _credit: TokenCredit

    # What the host's trainer provides.
    accelerator: Any
    args: Any
    state: Any
    model: Any
    num_generations: int
    num_iterations: int
    _metrics: dict[str, Any]

    def _add_credit(self, tokenizer: Any) -> None:
        """Ends the constructor. OarConfigError, UnsupportedModelError: what cannot work, and what is allowed."""
        if faults := self._faults():
            raise OarConfigError("\n".join(faults))
        check_model(self.model)
        home, ends = self.args.output_dir if self.accelerator.is_main_process else None, self.model.generation_config
        self._credit = TokenCredit(self.oar, tokenizer, PREFIX, generation_config=ends, home=home)

    def _faults(self) -> list[str]:
        return [f"{setting}: {why}" for setting, wrong, why in self._refused() if wrong]

    def _refused(self) -> list[tuple[str, Any, str]]:
        """Settings of OAR and the host: name and value, whether it cannot work, and why, with what is allowed."""
        args, oar = self.args, self.oar
        model = self.accelerator.unwrap_model(self.model)
        tp_size = getattr(args.parallelism_config, "tp_size", 1)
        devices = len(set(getattr(model, "hf_device_map", {}).values()))
        offload = getattr(getattr(self.accelerator.state, "fsdp_plugin", None), "cpu_offload", None)
        every, accumulated = args.steps_per_generation * self.num_iterations, args.gradient_accumulation_steps
        return [
            (f"{PREFIX}.perturbation.backend=rollout", oar.offloads, f"{self.host}'s engines score no copies; allowed: actor"),
            (f"{PREFIX}.base_estimator={oar.base_estimator}", oar.base_estimator != "grpo",
             f"the advantage is {self.host}'s own, by its own settings; allowed: grpo"),
            ("use_liger_kernel=True", args.use_liger_kernel,
             "Liger's layers were not tested with a backward to the embeddings, and a loss of it may take one advantage for "
             "all tokens of a response; allowed: False"),
            ("torch_compile=True", args.torch_compile,
             "a compiled model does not call the hooks that importance is read with; allowed: False"),
            (f"parallelism_config.tp_size={tp_size}", tp_size > 1, "layers in parts are refused; allowed: 1"),
            (f"device_map over {devices} devices", devices > 1,
             "layers on several devices are refused; allowed: one device for each process"),
            ("fsdp_config.offload_params=True", getattr(offload, "offload_params", "CPU" in type(offload).__name__),
             "weights that wait on the CPU are refused; allowed: False"),
            (f"steps_per_generation={args.steps_per_generation}, times num_iterations={self.num_iterations}",
             every % accumulated, "rows would be scored between gradients that are being accumulated; allowed: a multiple of "
             f"gradient_accumulation_steps={accumulated}"),
        ]  # fmt: skip

    def _weigh(
        self,
        batch: PaddedBatch,
        advantage_BL: Tensor,
        needed_B: Tensor,
        judged: tuple[Tensor, Tensor, Tensor],
        request: Request,
        known: Callable[[int], dict[str, Any]],
        cut_B: Tensor | None = None,
    ) -> ReshapedBatch:
        """Scores this process's responses and weighs their advantages; writes metrics and dumps.

        `needed_B` (bool): responses with an advantage; of these, a group whose rewards are equal is not scored. `judged`: what
        the function of this name returns. `cut_B` (bool): responses that the host knows to be truncated. `known`: of a row's
        record, the fields that the host knows.
        """
        started, credit, step = time.perf_counter(), self._credit, self.state.global_step + 1
        reward_G, bad_G, differ_G = judged
        first = self.accelerator.process_index * len(needed_B)  # row 0 in the batch of all processes
        here = slice(first, first + len(needed_B))
        bad_B, differ_B = torch.stack([bad_G, differ_G])[:, here].to(needed_B.device)
        needed_B = needed_B & differ_B & ~bad_B & batch.response_BL.any(-1)
        cut_B = torch.zeros_like(needed_B) if cut_B is None else cut_B
        segments_BL, status_B = credit.segments(batch, needed_B & ~cut_B, request)
        status_B[needed_B & cut_B] = int(Status.TRUNCATED)
        status_B[bad_B] = int(Status.BAD_REWARD)
        importance_BL = self._importance(batch, segments_BL, request)
        reshaped = credit.reshape(step, advantage_BL, importance_BL, segments_BL, status_B)
        metrics = self._credit_metrics(reshaped) | {"oar/seconds": time.perf_counter() - started}
        numbered, size = enumerate(reward_G[here].tolist()), self.num_generations
        rows = ((row, str((first + row) // size), f"{step}_{first + row}", reward) for row, reward in numbered)
        credit.dump(batch, reshaped, metrics, rows, known, gather_object)
        if self.accelerator.is_main_process:
            credit.watch.see(step, metrics, reward_G.nanmean().item())
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return reshaped

    def _importance(self, batch: PaddedBatch, segments_BL: Tensor, request: Request) -> Tensor:
        """float32 `[B, L]`, of this process's responses."""
        accelerator = self.accelerator
        with accelerator.autocast():
            return self._credit.importance(
                *(self.model, batch, segments_BL, request),
                # No more than the host's own forwards have.
                max_tokens=self.args.per_device_train_batch_size * int(batch.mask_BT.sum(1).max()),
                max_over_ranks=lambda n: int(accelerator.gather(torch.tensor([n], device=accelerator.device)).max()),
                checkpoint_activations=getattr(self.model, "is_gradient_checkpointing", False),
                sum_over_ranks=partial(accelerator.reduce, reduction="sum"),
            )

    def _credit_metrics(self, reshaped: ReshapedBatch) -> dict[str, float]:
        """Metrics over the responses of all processes."""
        measure_GM, status_G = (self.accelerator.gather(x).cpu() for x in (reshaped.measure_BM, reshaped.status_B))
        return {f"oar/{name}": value for name, value in summarize(measure_GM, status_G).items()}
