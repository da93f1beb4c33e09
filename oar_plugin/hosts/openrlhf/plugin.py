"""The hook's three methods: which responses are scored, the actor's forward, and advantages times weights.

All responses of a step are reshaped at once, before OpenRLHF splits and balances them anew. In its tensors `[B, A]` the first
token has no entry.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import Reshaped, reshape
from oar_plugin.hosts.openrlhf.actor import ActorPass
from oar_plugin.hosts.openrlhf.settings import OPTION, settings_of
from oar_plugin.page.dumps import DUMP_FAILED, Dumps, choose
from oar_plugin.page.record import Response, header_for
from oar_plugin.passes.request import Request, replacement_token
from oar_plugin.passes.segments import segment_rows
from oar_plugin.passes.tokens import TokenBytes


class Batch(NamedTuple):
    """All responses of a step, those of a micro-batch behind those of the one before, padded on the right to `[B, L]`."""

    step: int
    token_BL: Tensor
    own_BL: Tensor  # bool, the model's own tokens
    segments_BL: Tensor  # int8, `Segment`
    status_B: Tensor
    spans: list[slice]  # the response in a row, from its first own token to its last: no prompt, no padding; or empty


class OarAdvantage:
    """What OpenRLHF's `--algo.advantage.plugin` names: made of its arguments and the actor's tokenizer, in the trainer and in
    each actor. OarConfigError: a setting or an argument that cannot work.
    """

    def __init__(self, args: Any, tokenizer: Any) -> None:
        self.args, self.oar = args, settings_of(args)
        self._bytes = TokenBytes(tokenizer)
        self._replacement = replacement_token(self.oar, tokenizer)
        self._dumps: Dumps | None = None

    def actor_inputs(self, experience_maker: Any, samples_list: Sequence[Any]) -> list[dict[str, Any]]:
        """In the trainer, before the actor's forward: for each micro-batch the request and its segments, int8 `[B, A]`."""
        if self._dumps is None:  # not in the actors
            self._dumps = Dumps(self.oar.dump, self.args.ckpt.path, OPTION)
        needed_B, longest = _has_an_advantage(experience_maker, samples_list), self.args.data.max_len
        cut_B = torch.cat([s.truncated.bool() | (s.total_length >= longest) for s in samples_list])
        own_BL = _whole([s.action_mask for s in samples_list]).bool()
        token_BL = _whole([s.sequences[:, -s.action_mask.shape[1] :] for s in samples_list])
        step, temperature = experience_maker.global_step + 1, self.args.rollout.temperature
        # `cut_B` says which were cut off, not their length.
        request = Request.from_config(self.oar, step, sys.maxsize, False, self._replacement, temperature)
        ends, scorable_B = (own_L.nonzero()[:, 0].tolist() or [0, -1] for own_L in own_BL), needed_B & ~cut_B
        spans = [slice(own[0], own[-1] + 1) for own in ends]
        rows = ((token_BL[r, at].tolist(), own_BL[r, at].numpy(), bool(scorable_B[r])) for r, at in enumerate(spans))
        found, status_B = segment_rows(rows, request, self._bytes, ())
        status_B[needed_B & cut_B] = int(Status.TRUNCATED)
        segments_BL = torch.full_like(token_BL, int(Segment.OUTSIDE), dtype=torch.int8)
        for segments_L, at, part_L in zip(segments_BL, spans, found, strict=True):
            segments_L[at] = part_L
        self._batch = Batch(step, token_BL, own_BL, segments_BL, status_B, spans)
        parts = segments_BL.split([len(s.sequences) for s in samples_list])
        segments = (part[:, : s.action_mask.shape[1]].clone() for part, s in zip(parts, samples_list, strict=True))
        return [{"request": request.to_dict(), "segments": segments_BA} for segments_BA in segments]

    def actor_forward(
        self, actor: Any, plugin_inputs: dict[str, Any], sequences: Tensor, *masks: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """In the actor: see `ActorPass.run`."""
        request, segments_BA = Request.from_dict(plugin_inputs["request"]), plugin_inputs["segments"].long()
        before = sequences.shape[1] - segments_BA.shape[1]
        segments_BT = pad(segments_BA, (before, 0), value=int(Segment.OUTSIDE)).to(sequences.device)
        return ActorPass(actor, request, self.args, more).run(sequences, segments_BT, *masks)

    def update_advantages(self, experiences: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """In the trainer: advantages times weights, and metrics in `info`, which OpenRLHF averages over responses."""
        batch, advantage_BL, importance_BL = self._batch, _whole([e.advantages for e in experiences]), _whole(outputs)
        reasoning_BL = batch.segments_BL == Segment.REASONING
        reshaped = reshape(advantage_BL, importance_BL, reasoning_BL, batch.status_B, self.oar)
        metrics = {f"oar/{name}": value for name, value in reshaped.metrics.items()}
        if (dumps := self._dumps) is not None and dumps.folder is not None:
            metrics[DUMP_FAILED] = 0.0
            if dumps.due(batch.step):
                with dumps.counted(batch.step, metrics, f"writing into {dumps.folder}", DUMP_FAILED):
                    responses = self._chosen(experiences, advantage_BL, importance_BL, reshaped)
                    dumps.write(header_for(self.oar), batch.step, responses)
        parts = reshaped.advantage_BL.split([len(e.advantages) for e in experiences])
        for experience, part_BL in zip(experiences, parts, strict=True):
            experience.advantages = part_BL[:, : experience.advantages.shape[1]].clone()
            experience.info.update({name: torch.full((len(part_BL),), value) for name, value in metrics.items()})

    def _chosen(
        self, experiences: Sequence[Any], advantage_BL: Tensor, importance_BL: Tensor, reshaped: Reshaped
    ) -> list[Response]:
        """Whole groups, for people to look at."""
        batch, siblings, names = self._batch, self.args.rollout.n_samples_per_prompt, ("index", "prompts", "labels")
        index, prompts, labels = ([x for e in experiences for x in getattr(e, name)] for name in names)
        reward_B = torch.cat([e.info["reward"] for e in experiences]).float()
        log_prob_BL = _whole([e.action_log_probs for e in experiences])
        rows_of: dict[int, list[int]] = {}
        for row in sorted(batch.own_BL.any(-1).nonzero()[:, 0].tolist(), key=index.__getitem__):
            rows_of.setdefault(index[row] // siblings, []).append(row)

        def response(row: int) -> Response:
            at = row, batch.spans[row]
            return Response(
                step=batch.step,
                group=str(index[row] // siblings),
                uid=f"{batch.step}_{index[row]}",
                prompt=prompts[row],
                truth=None if labels[row] is None else str(labels[row]),
                token_ids=batch.token_BL[at].tolist(),
                tokens=self._bytes.texts(batch.token_BL[at].tolist()),
                segments=batch.segments_BL[at].tolist(),
                importance={self.oar.importance_object.name: importance_BL[at].tolist()},
                weights=reshaped.weight_BL[at].tolist(),
                log_probs=log_prob_BL[at].tolist(),
                mask=batch.own_BL[at].long().tolist(),
                advantage=max(advantage_BL[at].tolist(), key=abs),  # 0 at a tool's tokens
                reward=reward_B[row].item(),
                status=Status(int(reshaped.status_B[row])).name.lower(),
            )

        groups = choose(rows_of.values(), reward_B, reshaped.status_B, self.oar.dump.groups)
        return [response(row) for group in groups for row in group]


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Micro-batches `[B, A]` behind one another, padded on the right."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, longest - part.shape[1])) for part in parts])


def _has_an_advantage(maker: Any, samples: Sequence[Any]) -> Tensor:
    """Which responses can matter, bool `[B]`: those whose advantage is not exactly zero, or all while there are no rewards."""
    if samples[0].rewards is None:
        return torch.cat([s.action_mask.bool().any(-1) for s in samples])
    copies = [replace(s, rewards=s.rewards.clone(), kl=s.action_mask * 0.0, info=dict(s.info)) for s in samples]
    copies = maker.compute_advantages_and_returns(copies)
    return torch.cat([(copy.advantages * copy.action_mask != 0).any(-1) for copy in copies])
