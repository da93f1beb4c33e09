"""What token credit adds to each of verl's trainers. `trainer` (v1) and `ray_trainer` know how their batches are held."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from oar_plugin import estimator
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.credit.noise import step_seed
from oar_plugin.hosts.verl.balancing import balanced_partitions
from oar_plugin.hosts.verl.handshake import check_nodes
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.hosts.verl.settings import STRATEGIES, ZERO_WHEN_EQUAL, length_limits
from oar_plugin.hosts.verl.viewer import QueuedBatch
from oar_plugin.passes.gradient import Packed
from oar_plugin.passes.prediction import Choice
from oar_plugin.passes.request import CHOSEN, SEGMENTS
from oar_plugin.token_credit import TokenCredit

LABELLED = torch.tensor([Status.SCORED, Status.LEARNING, Status.CONSTANT])  # of a chosen response, behind the gate


class TrainerCredit:
    # What the host's trainer provides.
    config: DictConfig
    global_steps: int
    tokenizer: Any
    actor_rollout_wg: Any  # a `RayWorkerGroup`, to which verl gives the methods of its workers

    def _make_credit(self, oar: OarConfig) -> None:
        # Ray runs the trainer on any node, in a folder of its own.
        self._credit = TokenCredit(oar, self.tokenizer, home=self.config.trainer.default_local_dir, offloads=True)

    @cached_property
    def _choice(self) -> Choice:
        return Choice(self._credit.config)

    def _check_nodes(self, oar: OarConfig, servers: Sequence[Any] = ()) -> None:
        engine = STRATEGIES[self.config.actor_rollout_ref.actor.strategy]
        check_nodes(self.actor_rollout_wg.workers, servers, engine, oar)

    def _warms_up(self) -> bool:
        """Whether verl does not update the actor in this step: weights would change nothing."""
        return int(self.config.trainer.get("critic_warmup") or 0) > self.global_steps

    def _ranks(self) -> int:
        """Returns the number of the actor's data-parallel ranks."""
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    def _needed_or_chosen(self, needed_B: Tensor, packed: Packed, own_B: Tensor) -> Tensor:
        """The field `NEEDED`, int64 `[B]`. `packed` has the tokens of all rows; `own_B` counts each one's own."""
        seed = step_seed(self._credit.config.seed, self.global_steps)
        chosen_B = self._choice.choose(packed, own_B, needed_B, seed)
        return needed_B.long().masked_fill(chosen_B, CHOSEN)

    def _learned(self, metrics: dict, chosen_B: Tensor, status_B: Tensor, own_B: Tensor) -> None:
        """Counts what the actor has learned from; the share of chosen responses that gave no labels is a metric."""
        if chosen_B.any():
            labelled_B = chosen_B & torch.isin(status_B, LABELLED)
            self._choice.learned(labelled_B, own_B)
            metrics["oar/amortize/unlabelled"] = 1 - labelled_B.sum().item() / chosen_B.sum().item()

    def _even_order(
        self, sampled_at: Sequence[int], lengths: Sequence[int], needed: Sequence[int], metrics: dict, prefix: str
    ) -> list[int] | None:
        """Returns an order of the rows in which each rank has as many rows to score; None: verl's own order is good.

        `needed` is the field `NEEDED`; if some are chosen, these are spread. `sampled_at` is each row's place before verl
        balanced the batch. `lengths` are tokens per row, prompt and response.
        """
        least = max(1, *needed)
        scored = [one >= least for one in needed]
        if all(scored) or not any(scored):
            return None
        # A rank's mini-batches are consecutive rows, so the rows are distributed from the order of sampling.
        rows = sorted(range(len(lengths)), key=sampled_at.__getitem__)
        dealt = balanced_partitions([lengths[row] for row in rows], [scored[row] for row in rows], self._ranks())
        partitions = [[rows[place] for place in partition] for partition in dealt]
        metrics.update(log_seqlen_unbalance(list(lengths), partitions, prefix))
        return [row for partition in partitions for row in partition]

    def _request(self, importance_only: bool) -> dict[str, Any]:
        (response, total), temperature = length_limits(self.config), self.config.actor_rollout_ref.rollout.temperature
        request = self._credit.request(self.global_steps, response, temperature, total)
        return replace(request, importance_only=importance_only).to_dict()

    def _count(self, metrics: dict, measure_BM: Tensor, status_B: Tensor, score_BL: Tensor, watch: bool = True) -> None:
        """Adds the metrics of a batch's weights, and with `watch` warns where due. `score_BL` sum up to rewards."""
        metrics.update({f"oar/{name}": value for name, value in summarize(measure_BM, status_B).items()})
        if watch:
            self._credit.watch.see(self.global_steps, metrics, score_BL.sum(-1).nanmean().item())


def needs_credit(oar: OarConfig | None, advantage_BL: Tensor, reward_BL: Tensor, groups: Sequence[Hashable]) -> Tensor:
    """`estimator.needs_credit`, with rewards where equal ones make advantages zero."""
    relative = oar is not None and oar.base_estimator in ZERO_WHEN_EQUAL
    return estimator.needs_credit(advantage_BL, reward_BL if relative else None, groups)


def answer_mismatch(credit: TokenCredit, batch: QueuedBatch) -> dict[str, float]:
    """Returns the share of scored responses whose answer the reward read otherwise, of the first 64; {} if it reports none."""
    names, differ, metrics = ("pred", "extracted_answer"), list[bool](), dict[str, float]()
    with credit.dumps.counted(batch.step, metrics, "comparing answers", "oar/answer_mismatch_failed"):
        rows = (batch.own_B & (batch.status_B == Status.SCORED)).nonzero()[:64, 0].tolist()
        fields = ["responses", SEGMENTS, ENGINE_FIELDS[SEGMENTS], "extra_fields", *names]
        columns = batch.columns(rows, fields) if rows else {}
        for place, row in enumerate(rows):
            one = {name: column[place] for name, column in columns.items()}
            extra = one.get("extra_fields")  # v1 trainers hold there what others have as fields
            known = one | (extra.get("reward_extra_info", {}) if isinstance(extra, Mapping) else {})
            segment_L = one.get(SEGMENTS if batch.by_actor_B[row] else ENGINE_FIELDS[SEGMENTS])
            read = [known[name] for name in names if known.get(name) is not None]
            if read and segment_L is not None:
                ours = credit.tokenizer.decode(one["responses"][segment_L == Segment.ANSWER])
                differ.append(_values(ours) != _values(str(read[0])))
    return metrics | ({"oar/answer_mismatch": sum(differ) / len(differ)} if differ else {})


def _values(answer: str) -> tuple[list[float], int] | str:
    """Returns the numbers of an answer, and how many minus signs it has; without numbers its letters."""
    answer = re.sub(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))", "", answer)
    plain = re.sub(r"[\s{}$\\_]", "", answer).casefold()
    numbers = [float(number) for number in re.findall(r"\d+\.?\d*|\.\d+", plain)]
    return (numbers, plain.count("-")) if numbers else re.sub(r"\W", "", plain)


def no_importance(step: int) -> str:
    reason = "Its workers do not run oar_plugin's engine; `oar doctor` on their nodes says what they have"
    return f"step {step}: the actor was asked for token importance and returned none. {reason}"
