"""The hook's three methods: which responses are scored, the actor's forward, and advantages times weights. All responses of a
step are reshaped at once, before OpenRLHF splits and balances them anew. In its tensors `[B, A]` the first token has no entry.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import needs_credit
from oar_plugin.hosts.openrlhf.settings import OPTION, settings_of
from oar_plugin.page.dumps import Dumps
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request
from oar_plugin.token_credit import PaddedBatch, TokenCredit

ZERO_WHEN_EQUAL = ("group_norm", "rloo", "dr_grpo")  # the estimators under which equal rewards have no advantage


class OarAdvantage:
    """The class that OpenRLHF's `--algo.advantage.plugin` names. OpenRLHF makes one in the trainer and one in each actor, with
    its own arguments and the actor's tokenizer. OarConfigError: a setting or an argument that cannot work.
    """

    def __init__(self, args: Any, tokenizer: Any) -> None:
        self._args = args
        self._credit = TokenCredit(settings_of(args), tokenizer, OPTION)

    def actor_inputs(self, experience_maker: Any, samples_list: Sequence[Any]) -> list[dict[str, Any]]:
        """In the trainer, before the actor's forward: for each micro-batch the request and the segments, int8 `[B, A]`."""
        credit, args = self._credit, self._args
        if credit.dumps.folder is None:  # the trainer alone writes files
            credit.dumps = Dumps(credit.config.dump, args.ckpt.path, OPTION)
        self._step = experience_maker.global_step + 1
        request = credit.request(self._step, temperature=args.rollout.temperature)
        own_BL = _whole([s.action_mask for s in samples_list]).bool()
        token_BL = _whole([s.sequences[:, -s.action_mask.shape[1] :] for s in samples_list])
        mask_BL = _whole([s.attention_mask[:, -s.action_mask.shape[1] :] for s in samples_list])
        # A response reaches from its first own token to its last.
        response_BL = (own_BL.cumsum(-1) > 0) & (own_BL.flip(-1).cumsum(-1).flip(-1) > 0)
        self._batch = PaddedBatch(token_BL, mask_BL, response_BL, own_BL)
        needed_B = self._needs_credit(experience_maker, samples_list)
        cut_B = torch.cat([s.truncated.bool() | (s.total_length >= args.data.max_len) for s in samples_list])
        self._segments_BL, self._status_B = credit.segments(self._batch, needed_B & ~cut_B, request)
        self._status_B[needed_B & cut_B] = int(Status.TRUNCATED)
        parts = self._segments_BL.split([len(s.sequences) for s in samples_list])
        segments = (part[:, : s.action_mask.shape[1]].clone() for part, s in zip(parts, samples_list, strict=True))
        return [{"request": request.to_dict(), "segments": segments_BA} for segments_BA in segments]

    def actor_forward(
        self,
        actor: Any,
        plugin_inputs: dict[str, Any],
        sequences: Tensor,
        action_mask: Tensor,
        mask: Tensor,
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        """In the actor, in eval mode: log-probs as it returns them, and importance (0 where nothing is scored), on the CPU.

        Both are `[B, A]`. Rows that are scored run in micro-batches as large as the update's.
        """
        request, segments_BA = Request.from_dict(plugin_inputs["request"]), plugin_inputs["segments"].long()
        before, train = sequences.shape[1] - segments_BA.shape[1], self._args.train
        segments_BT = pad(segments_BA, (before, 0), value=int(Segment.OUTSIDE)).to(sequences.device)
        with torch.no_grad():
            log_prob_BA = actor(sequences, action_mask, mask, **more)
        # DeepSpeed's engine takes every backward for one of training, and reduces gradients at the end of it. ZeRO-3's hooks,
        # which gather weights, are on the HuggingFace model's modules and still run.
        model = getattr(actor.model, "module", actor.model)
        fixed, dynamic = train.micro_batch_size * sequences.shape[1], train.dynamic_batch_enable
        how = self._args.actor.gradient_checkpointing_enable, self._max_over_ranks
        most = train.max_tokens_per_gpu if dynamic else fixed
        importance_BT = batch_importance(model, request, sequences, segments_BT, mask, most, *how)
        return log_prob_BA.cpu(), importance_BT[:, before:].cpu()

    def _max_over_ranks(self, count: int) -> int:
        """The maximum of a count over ranks if weights are sharded, else the count."""
        if self._args.ds.zero_stage < 3:
            return count
        counts = torch.tensor(count, device=torch.accelerator.current_accelerator() or "cpu")
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)
        return int(counts)

    def update_advantages(self, experiences: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """In the trainer: advantages times weights, and metrics in `info`, which OpenRLHF averages over responses.

        RuntimeError: the experiences are not those of the samples that `actor_inputs` was called with.
        """
        advantage_BL, importance_BL = _whole([e.advantages for e in experiences]), _whole(outputs)
        if not advantage_BL.shape == importance_BL.shape == self._segments_BL.shape:
            shapes = [tuple(whole.shape) for whole in (advantage_BL, importance_BL, self._segments_BL)]
            fault = f"advantages, importance and the samples of `actor_inputs` have the shapes {shapes}, which must be equal"
            advice = "OpenRLHF must pass on all samples of the step, in their order"
            raise RuntimeError(f"step {self._step}: {fault}: {advice}")
        reshaped = self._credit.reshape(self._step, advantage_BL, importance_BL, self._segments_BL, self._status_B)
        metrics = {f"oar/{name}": value for name, value in reshaped.metrics.items()}
        rewards = torch.cat([e.info["reward"] for e in experiences]).float()
        self._credit.watch.see(self._step, metrics, rewards.nanmean().item())
        self._credit.dump(self._batch, reshaped, metrics, self._rows(experiences), partial(self._known, experiences))
        parts = reshaped.advantage_BL.split([len(e.advantages) for e in experiences])
        for experience, part_BL in zip(experiences, parts, strict=True):
            experience.advantages = part_BL[:, : experience.advantages.shape[1]].clone()
            experience.info.update({name: torch.full((len(part_BL),), value) for name, value in metrics.items()})

    def _needs_credit(self, maker: Any, samples: Sequence[Any]) -> Tensor:
        """`estimator.needs_credit` of each response, bool `[B]`; all need it while there are no rewards."""
        if samples[0].rewards is None:
            return torch.cat([s.action_mask.bool().any(-1) for s in samples])
        copies = [replace(s, rewards=s.rewards.clone(), kl=s.action_mask * 0.0, info=dict(s.info)) for s in samples]
        copies = maker.compute_advantages_and_returns(copies)
        advantage_BL = _whole([copy.advantages * copy.action_mask for copy in copies])
        if self._args.algo.advantage.estimator not in ZERO_WHEN_EQUAL:
            return needs_credit(advantage_BL)
        groups = [index // self._args.rollout.n_samples_per_prompt for index in _column(copies, "index")]
        return needs_credit(advantage_BL, torch.cat([copy.rewards for copy in copies])[:, None], groups)

    def _rows(self, experiences: Sequence[Any]) -> Iterator[tuple[int, str, str, float]]:
        """Row, group, id and reward of each response with a token of its own, in the order of the samples."""
        index, reward_B = _column(experiences, "index"), torch.cat([e.info["reward"] for e in experiences]).float()
        for row in sorted(self._batch.response_BL.any(-1).nonzero()[:, 0].tolist(), key=index.__getitem__):
            group = index[row] // self._args.rollout.n_samples_per_prompt
            yield row, str(group), f"{self._step}_{index[row]}", reward_B[row].item()

    def _known(self, experiences: Sequence[Any], row: int) -> dict[str, Any]:
        names = {"prompt": "prompts", "truth": "labels", "log_probs": "action_log_probs"}
        return {field: _column(experiences, name)[row] for field, name in names.items()}


def _column(experiences: Sequence[Any], name: str) -> list[Any]:
    return [value for experience in experiences for value in getattr(experience, name)]


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Micro-batches `[B, A]` as one batch, padded on the right."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, longest - part.shape[1])) for part in parts])
