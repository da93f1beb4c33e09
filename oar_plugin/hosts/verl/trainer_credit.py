"""What token credit adds to each of verl's trainers. `trainer` (v1) and `ray_trainer` know how their batches are held."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from oar_plugin.config import PREFIX, OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.credit.importance import importance_of, without_contexts
from oar_plugin.credit.importance.contrast import Contrast
from oar_plugin.estimator import weigh_rows
from oar_plugin.hosts.verl.balancing import balanced_partitions, largest_divisor
from oar_plugin.hosts.verl.handshake import check_nodes
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.hosts.verl.settings import STRATEGIES, length_limits
from oar_plugin.hosts.verl.viewer import QueuedBatch
from oar_plugin.passes.contexts import ContextPrompts, PromptSource, longest_of
from oar_plugin.passes.request import SEGMENTS, nested
from oar_plugin.token_credit import TokenCredit

SOURCES = ("prompts", "responses", "response_mask", "raw_prompt", "reward_model")
"""Fields of verl's rows that the prompts of contexts are made of."""
_ULYSSES = "ulysses_sequence_parallel_size"
SEQUENCE_RANKS = (_ULYSSES, f"fsdp_config.{_ULYSSES}", "megatron.context_parallel_size")
"""Keys of the actor: ranks that share a sequence."""


class TrainerCredit:
    # What the host's trainer provides.
    config: DictConfig
    global_steps: int
    tokenizer: Any
    actor_rollout_wg: Any  # a `RayWorkerGroup`, to which verl gives the methods of its workers

    def _make_credit(self, oar: OarConfig) -> None:
        # Ray runs the trainer on any node, in a folder of its own.
        home = self.config.trainer.default_local_dir
        self._credit = TokenCredit(oar, self.tokenizer, home=home, offloads=True, contexts=True)
        # verl's agent loops give it to their own tokenizers.
        template = {"chat_template": OmegaConf.select(self.config, "actor_rollout_ref.model.custom_chat_template")}
        template |= OmegaConf.select(self.config, "data.apply_chat_template_kwargs") or {}
        self._context_prompts = ContextPrompts(oar, self.tokenizer, self._longest if oar.contexts else 0, template)

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

    @cached_property
    def _longest(self) -> int:
        """Most tokens of a sequence: the model's positions, and those of a micro-batch if these are limited in tokens."""
        rollout, actor = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.actor
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model).hf_config
        if hasattr(model, "vision_config"):
            raise OarConfigError(
                f"{PREFIX}.importance={self._credit.config.importance} with a vision-language model: prompts that show "
                f"an answer carry no images; allowed: {without_contexts()}"
            )
        longest = longest_of(model)
        if rollout.log_prob_use_dynamic_bsz:
            ranks = (OmegaConf.select(actor, key) or 1 for key in SEQUENCE_RANKS)
            longest = min(longest, max(ranks) * rollout.log_prob_max_token_len_per_gpu)
        return longest

    def _contrasted(
        self, sign_B: Tensor, of_actor: Sequence[Tensor], batch: QueuedBatch, own: Sequence[Tensor] | None
    ) -> dict[str, Tensor]:
        """Returns the nested fields of an actor's answer, with the importance of contexts and its weights.

        `sign_B` has the marks of `NEEDED`; `of_actor` are the actor's `SEGMENTS`. For `own` see `Contexts.importance`.
        """
        rows, sources = sign_B.nonzero()[:, 0].tolist(), list[PromptSource | None]([None] * len(sign_B))
        found = batch.columns(rows, SOURCES) if rows else {}
        columns = (found.get(name, [None] * len(rows)) for name in SOURCES)
        for row, prompt_L, response_L, own_L, messages, data in zip(rows, *columns, strict=True):
            truth = data.get("ground_truth") if isinstance(data, Mapping) else None
            sources[row] = PromptSource(messages, prompt_L, response_L, own_L.bool(), truth, int(sign_B[row]))
        segments = [row.clone() for row in of_actor]
        # The actor's importance is 0 at every token. So it calls responses that can be scored CONSTANT.
        status_B = batch.status_B.masked_fill(batch.status_B == Status.CONSTANT, int(Status.SCORED))
        config, contexts = self._credit.config, self._context_prompts.contexts(sources)
        kind = importance_of(config.actor_importance or config.importance)
        assert isinstance(kind, Contrast)
        importance = contexts.importance(kind, segments, status_B, self._log_probs_after, own)
        weighed = weigh_rows(importance, segments, status_B, config, kind)
        return {name: nested(found) for name, found in weighed.items()}

    def _log_probs_after(self, rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """`LogProbs` of verl's own pass."""
        input_ids, responses = [torch.cat(row) for row in rows], [response for _, response in rows]
        masks = [torch.ones_like(response) for response in responses]
        columns = {
            "prompts": [prompt for prompt, _ in rows],
            "responses": responses,
            "response_mask": masks,
            "loss_mask": masks,  # Megatron's schedule reads it
            "input_ids": input_ids,
            "position_ids": [torch.arange(len(ids)) for ids in input_ids],
        }
        data = tu.get_tensordict({name: nested(column) for name, column in columns.items()})
        rollout = self.config.actor_rollout_ref.rollout
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=rollout.temperature)
        if not rollout.log_prob_use_dynamic_bsz:  # verl makes whole micro-batches; its own pass may be filled up
            each, most = len(rows) // self._ranks(), rollout.log_prob_micro_batch_size_per_gpu
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=largest_divisor(each, most))
        log_probs = self.actor_rollout_wg.compute_log_prob(data)["log_probs"].cpu()
        # The log-prob of a token is where the token before it is.
        return [row[-len(response) - 1 : -1] for row, response in zip(log_probs.unbind(), responses, strict=True)]

    def _request(self, importance_only: bool) -> dict[str, Any]:
        (response, total), temperature = length_limits(self.config), self.config.actor_rollout_ref.rollout.temperature
        return self._credit.request(self.global_steps, response, temperature, importance_only, total).to_dict()


def signs(advantage_BL: Tensor) -> Tensor:
    """Returns the sign of each row's advantage, int64 `[B]`; 0 if it is zero at every token, or NaN or infinite at one."""
    least_B, most_B = advantage_BL.aminmax(dim=-1)  # one pass: the driver does this for all ranks
    finite_B = least_B.isfinite() & most_B.isfinite()
    return torch.where(most_B >= -least_B, 1, -1) * (finite_B & ((least_B != 0) | (most_B != 0)))


def credit_metrics(measure_B4: Tensor, status_B: Tensor) -> dict[str, float]:
    """Returns the metrics of a batch's weights, by the names of a run's log."""
    return {f"oar/{name}": value for name, value in summarize(measure_B4, status_B).items()}


def answer_mismatch(credit: TokenCredit, batch: QueuedBatch) -> dict[str, float]:
    """Returns the share of scored responses whose answer the reward read otherwise, of the first 64; {} if it reports none.

    Reward functions report it as `pred` or `extracted_answer`. Numbers are compared by value, other texts by their letters.
    """
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
    return (
        f"step {step}: the actor was asked for token importance and returned none. Its workers do not run oar_plugin's engine; "
        "`oar doctor` on their nodes says what they have"
    )
