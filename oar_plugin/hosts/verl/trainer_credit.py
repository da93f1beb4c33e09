"""What token credit adds to each of verl's trainers. `trainer` (v1) and `ray_trainer` know how their batches are held."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import summarize
from oar_plugin.hosts.verl.balancing import balanced_partitions
from oar_plugin.hosts.verl.handshake import check_nodes
from oar_plugin.hosts.verl.settings import STRATEGIES
from oar_plugin.passes.contexts import NO_PROMPT, ContextPrompts, PromptSource
from oar_plugin.passes.request import CONTEXT
from oar_plugin.token_credit import TokenCredit

if TYPE_CHECKING:
    from verl.single_controller.ray.base import RayWorkerGroup
    from verl.workers.engine_workers import ActorRolloutRefWorker

SOURCES = ("prompts", "responses", "response_mask", "raw_prompt", "reward_model")
"""Fields of verl's rows that the prompts of contexts are made of."""


class TrainerCredit:
    # What the host's trainer provides.
    config: DictConfig
    global_steps: int
    tokenizer: Any
    actor_rollout_wg: "RayWorkerGroup | ActorRolloutRefWorker"  # verl gives the group the methods of its workers

    def _make_credit(self, oar: OarConfig) -> None:
        # Ray runs the trainer on any node, in a folder of its own.
        home = self.config.trainer.default_local_dir
        self._credit = TokenCredit(oar, self.tokenizer, home=home, offloads=True, contexts=True)
        # verl's agent loops give it to their own tokenizers.
        template = {"chat_template": OmegaConf.select(self.config, "actor_rollout_ref.model.custom_chat_template")}
        template |= OmegaConf.select(self.config, "data.apply_chat_template_kwargs") or {}
        self._context_prompts = ContextPrompts(oar, self.tokenizer, template)

    def _check_nodes(self, oar: OarConfig, servers: Sequence[Any] = ()) -> None:
        strategy = self.config.actor_rollout_ref.actor.strategy
        check_nodes(self.actor_rollout_wg.workers, servers, STRATEGIES[strategy], oar)

    def _warms_up(self) -> bool:
        """Whether verl does not update the actor in this step: weights would change nothing."""
        return int(self.config.trainer.get("critic_warmup") or 0) > self.global_steps

    def _ranks(self) -> int:
        """Returns the number of the actor's data-parallel ranks."""
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    def _even_order(
        self, sampled_at: Sequence[int], lengths: Sequence[int], needed: Sequence[bool], metrics: dict, prefix: str
    ) -> list[int] | None:
        """Returns an order of the rows in which each rank has as many rows to score; None: verl's own order is good.

        `sampled_at` is each row's place before verl balanced the batch. `lengths` are tokens per row, prompt and response.
        """
        if all(needed) or not any(needed):
            return None
        # A rank's mini-batches are consecutive rows, so the rows are distributed from the order of sampling.
        rows = sorted(range(len(lengths)), key=sampled_at.__getitem__)
        dealt = balanced_partitions([lengths[row] for row in rows], [needed[row] for row in rows], self._ranks())
        partitions = [[rows[place] for place in partition] for partition in dealt]
        metrics.update(log_seqlen_unbalance(list(lengths), partitions, prefix))
        return [row for partition in partitions for row in partition]

    def _context_fields(self, sign_B: Tensor, keys: Sequence[str], read: Callable[..., Any]) -> dict[str, Tensor]:
        """Returns the prompts of contexts as nested fields of the batch; none if the actor reads no contexts.

        `sign_B` has the marks of `NEEDED`. For `keys` and `read` see `QueuedBatch`.
        """
        if not self._credit.config.contexts:
            return {}
        rows, sources = sign_B.nonzero()[:, 0].tolist(), list[PromptSource]()
        fields = read(keys=[keys[row] for row in rows], select_fields=list(SOURCES)) if rows else {}
        found = {name: f.unbind() if isinstance(f, Tensor) else f.tolist() for name, f in fields.items()}
        columns = (found.get(name, [None] * len(rows)) for name in SOURCES)
        for sign, prompt, response, own, messages, data in zip(sign_B[rows].tolist(), *columns, strict=True):
            truth = data.get("ground_truth") if isinstance(data, Mapping) else None
            sources.append(PromptSource(messages, prompt.tolist(), response[own.bool()].tolist(), truth, sign))
        made = dict[str, Tensor]()
        for shown, prompts in self._context_prompts.prompts(sources).items():
            of_row = dict(zip(rows, prompts, strict=True))
            every = [of_row.get(row, torch.tensor([NO_PROMPT])) for row in range(len(keys))]
            made[f"{CONTEXT}{shown}"] = torch.nested.as_nested_tensor(every, layout=torch.jagged)
        return made

    def _request(self, importance_only: bool) -> dict[str, Any]:
        longest, temperature = self.config.data.max_response_length, self.config.actor_rollout_ref.rollout.temperature
        return self._credit.request(self.global_steps, longest, temperature, importance_only).to_dict()


def signs(advantage_BL: Tensor) -> Tensor:
    """Returns the sign of each row's advantage, int64 `[B]`; 0 if it is zero at every token."""
    least_B, most_B = advantage_BL.aminmax(dim=-1)  # one pass: the driver does this for all ranks
    return torch.where(most_B >= -least_B, 1, -1) * ((least_B != 0) | (most_B != 0))


def credit_metrics(measure_B4: Tensor, status_B: Tensor) -> dict[str, float]:
    """Returns the metrics of a batch's weights, by the names of a run's log."""
    return {f"oar/{name}": value for name, value in summarize(measure_B4, status_B).items()}


def no_importance(step: int) -> str:
    return (
        f"step {step}: the actor was asked for token importance and returned none. Its workers do not run oar_plugin's engine; "
        "`oar doctor` on their nodes says what they have"
    )
