"""Token credit in a training framework: the steps that every host takes, from a batch to advantages and dumps.

A host makes one `TokenCredit`. In every step it calls `request`, `segments`, `importance`, `reshape` and `dump`, in this order.
A host whose actor computes importance elsewhere (verl, OpenRLHF) leaves out `importance`.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from oar_plugin import estimator
from oar_plugin.config import PREFIX, OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.page.dumps import DUMP_FAILED, Dumps, Sibling, choose
from oar_plugin.page.record import Response, header_for
from oar_plugin.passes.plain import batch_importance, in_eval_mode
from oar_plugin.passes.request import Request, replacement_token
from oar_plugin.passes.segments import end_of_sequence_tokens, segment_rows
from oar_plugin.passes.tokens import TokenBytes


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts and responses, padded on any side to T tokens. Responses are in the last L of the T columns."""

    token_BT: Tensor  # int64
    mask_BT: Tensor  # bool, false at padding
    response_BL: Tensor  # bool, true at the tokens of the response, which are consecutive
    own_BL: Tensor | None = None  # bool, false where a tool wrote a token. None: the model wrote every response token

    @property
    def prompt_columns(self) -> int:
        """How many columns come before those of the responses: `T - L`."""
        return self.token_BT.shape[1] - self.response_BL.shape[1]

    @cached_property
    def responses(self) -> list[tuple[slice, Tensor, Tensor]]:
        """For each row, on the CPU: the columns of its response (of L), its token ids, and bool, which the model wrote."""
        token_BL, response_BL = self.token_BT[:, self.prompt_columns :].cpu(), self.response_BL.bool().cpu()
        own_BL = response_BL if self.own_BL is None else self.own_BL.bool().cpu()
        columns = (row.nonzero()[:, 0].tolist() or [0, -1] for row in response_BL)
        spans = [slice(places[0], places[-1] + 1) for places in columns]
        return [(span, token_BL[row, span], own_BL[row, span]) for row, span in enumerate(spans)]


@dataclass(frozen=True)
class ReshapedBatch:
    """What `TokenCredit.reshape` got, and what `estimator.reshape` made of it."""

    step: int
    host_advantage_BL: Tensor  # before reshaping
    importance_BL: Tensor
    segments_BL: Tensor  # a `Segment` for each token
    advantage_BL: Tensor  # for the loss
    weight_BL: Tensor  # 1 everywhere in a response that falls back to GRPO
    status_B: Tensor  # int64, a `Status` for each response
    metrics: dict[str, float]  # by name, without the prefix `oar/`


class TokenCredit:
    """Token credit of one run.

    Args:
        settings: keys of `algorithm.oar`, or the settings parsed.
        tokenizer: the model's. None: for a caller that knows the segments.
        prefix: how the user calls the settings, for messages.
        generation_config: the model's, which may have more end-of-sequence tokens than the tokenizer.
        padding: has the `pad_token_id` that replaces masked tokens. None: the tokenizer.
        home: a relative `dump.dir` is below it. None: this process writes no files.
        offloads: whether this host's rollout engines can score masked copies.

    Attributes:
        config: the settings.
        dumps: the folder of the run's dumps.

    Raises:
        OarConfigError: a setting that cannot work. The message names the key, its value and what is allowed.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | OarConfig | None,
        tokenizer: Any,
        prefix: str = PREFIX,
        *,
        generation_config: Any = None,
        padding: Any = None,
        home: str | Path | None = None,
        offloads: bool = False,
    ) -> None:
        self.config = settings if isinstance(settings, OarConfig) else OarConfig.parse(settings, prefix)
        if self.config.offloads and not offloads:
            raise OarConfigError(
                f"{prefix}.perturbation.backend=rollout: there are no rollout engines here; allowed: actor"
            )
        self.tokenizer = tokenizer
        self._token_bytes, self._eos_token_ids = None, set[int]()
        if tokenizer is not None:
            self._token_bytes = TokenBytes(tokenizer)
            self._eos_token_ids = end_of_sequence_tokens(tokenizer, generation_config)
        self._replacement = replacement_token(self.config, padding or tokenizer)
        config = self.config.dump
        self.dumps = Dumps(config if home is not None else config.model_copy(update={"dir": None}), home or "", prefix)

    def request(
        self, step: int, max_response_length: int | None = None, temperature: float = 1.0, importance_only: bool = False
    ) -> Request:
        """Returns what to compute at training step `step` (from 1).

        Args:
            max_response_length: a response of so many tokens without an end-of-sequence token at its end is truncated. None: no
                response is truncated, or the host knows which ones are.
            temperature: of sampling.
            importance_only: whether nobody needs the pass's log-probs and entropy.
        """
        longest = max_response_length or sys.maxsize
        return Request.from_config(self.config, step, longest, importance_only, self._replacement, temperature)

    def segments(self, batch: PaddedBatch, needed_B: Tensor, request: Request) -> tuple[Tensor, Tensor]:
        """Finds the answer of each response and marks the tokens before it as reasoning.

        Args:
            needed_B: bool, responses whose advantage is not zero; the others are not scored.

        Returns:
            int8 `[B, L]` of `Segment`, OUTSIDE everywhere in a response that is not scored, and int64 `[B]` of `Status`, on
            the batch's device.
        """
        if self._token_bytes is None:
            raise ValueError("give segments [B, T], or the tokenizer: the answer is found in the text")
        rows = (
            (token_L.tolist(), own_L.numpy(), needed)
            for (_, token_L, own_L), needed in zip(batch.responses, needed_B.tolist(), strict=True)
        )
        parts, status_B = segment_rows(rows, request, self._token_bytes, self._eos_token_ids)
        segments_BL = torch.full(batch.response_BL.shape, int(Segment.OUTSIDE), dtype=torch.int8)
        for segments_L, (span, *_), part in zip(segments_BL, batch.responses, parts, strict=True):
            segments_L[span] = part
        device = batch.response_BL.device
        return segments_BL.to(device), status_B.to(device)

    def importance(
        self,
        model: nn.Module,
        batch: PaddedBatch,
        segments_BL: Tensor,
        request: Request,
        *,
        max_tokens: int,
        max_over_ranks: Callable[[int], int] = lambda count: count,
        checkpoint_activations: bool = False,
    ) -> Tensor:
        """Importance of each response token, float32 `[B, L]`; 0 where nothing is scored.

        Every rank calls it, with nothing to score too: where a model is sharded, all ranks make equally many forwards.

        Args:
            model: causal LM without pending gradients, under the autocast of the host's log-probs. It is left as it was.
            max_tokens: of one forward, padding included, unless a single row has more.
            max_over_ranks: returns the maximum over ranks of a count.
            checkpoint_activations: recompute activations in the backward, to save memory.

        Raises:
            UnsupportedModelError: logits of this model cannot be read (see `oar_plugin.passes.taps.check_model`).
            RuntimeError: the model has pending gradients.
        """
        before = batch.prompt_columns
        segments_BT = pad(segments_BL, (before, 0), value=int(Segment.OUTSIDE))
        with in_eval_mode(model), torch.enable_grad():
            importance_BT = batch_importance(
                model,
                request,
                batch.token_BT,
                segments_BT,
                batch.mask_BT,
                max_tokens,
                checkpoint_activations=checkpoint_activations,
                max_over_ranks=max_over_ranks,
            )
        return importance_BT[:, before:]

    def reshape(
        self, step: int, advantage_BL: Tensor, importance_BL: Tensor, segments_BL: Tensor, status_B: Tensor
    ) -> ReshapedBatch:
        """The host's advantages, after all of its normalisation, times the gate's weights (see `estimator.reshape`)."""
        reasoning_BL = segments_BL == Segment.REASONING
        reshaped = estimator.reshape(advantage_BL, importance_BL, reasoning_BL, status_B, self.config)
        return ReshapedBatch(step, advantage_BL, importance_BL, segments_BL, *reshaped)

    def record(
        self,
        reshaped: ReshapedBatch,
        row: int,
        span: slice,
        token_ids: list[int],
        *,
        importance: str | None = None,
        truth: object = None,
        **known: Any,
    ) -> Response:
        """A response with its credit, for people to look at.

        Args:
            span: columns of the response, of L.
            token_ids: of the response.
            importance: name of the importance. None: that of the settings.
            truth: the right answer.
            known: other fields of `Response` that the host knows; of a tensor `[L]`, what is in `span`.
        """
        assert self._token_bytes is not None
        # A response without tokens has an advantage, too.
        advantages = reshaped.host_advantage_BL[row, span].tolist() or reshaped.host_advantage_BL[row].tolist()
        scores = {importance or self.config.importance_object.name: reshaped.importance_BL[row, span].tolist()}
        fields: dict[str, Any] = {
            name: value[span].tolist() if isinstance(value, Tensor) else value for name, value in known.items()
        }
        return Response(
            step=reshaped.step,
            truth=None if truth is None else str(truth),
            token_ids=token_ids,
            tokens=self._token_bytes.texts(token_ids),
            segments=reshaped.segments_BL[row, span].tolist(),
            importance=scores,
            weights=reshaped.weight_BL[row, span].tolist(),
            advantage=max(advantages, key=abs),  # 0 at a tool's tokens, the same at all others
            status=Status(int(reshaped.status_B[row])).name.lower(),
            **fields,
        )

    def dump(
        self,
        batch: PaddedBatch,
        reshaped: ReshapedBatch,
        metrics: dict[str, float],
        rows: Iterable[tuple[int, str, str, float]],
        known: Callable[[int], Mapping[str, Any]],
        gather: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        """Writes whole groups of responses into a file, if `dump` asks for this step. Every rank calls it.

        No fault in it stops the run; the metric `DUMP_FAILED` counts it.

        Args:
            metrics: where that metric goes.
            rows: for each response of this rank its row, group, own id and reward, siblings in the order in which they are
                shown. It is iterated over at the steps to dump only.
            known: given a row, the fields of `Response` that the host knows (see `record`).
            gather: returns the lists of all ranks, concatenated.
        """
        if self.config.dump.dir is None:
            return
        metrics[DUMP_FAILED] = 0.0
        if not self.dumps.due(reshaped.step):
            return
        counted = partial(self.dumps.counted, reshaped.step, metrics)
        siblings, own, chosen, records = list[Sibling](), dict[str, int](), list[Sibling](), list[Response]()
        with counted("reading responses", DUMP_FAILED):
            for row, group, uid, reward in rows:
                own[uid] = row
                siblings.append(Sibling(group, uid, reward, int(reshaped.status_B[row])))
        # Every rank takes part in both exchanges, whatever failed on it.
        siblings = gather(siblings)
        with counted("reading responses", DUMP_FAILED):
            chosen = [sibling for group in choose(siblings, self.config.dump.groups) for sibling in group]
            for group, uid, reward, _ in (sibling for sibling in chosen if sibling.uid in own):
                span, token_L, own_L = batch.responses[row := own[uid]]
                mask = None if batch.own_BL is None else own_L.long().tolist()
                fields = {"group": group, "uid": uid, "reward": reward, "mask": mask, **known(row)}
                records.append(self.record(reshaped, row, span, token_L.tolist(), **fields))
        record_of = {record.uid: record for record in gather(records)}
        failed = metrics[DUMP_FAILED] or len(record_of) < len(chosen)  # perhaps on another rank
        metrics[DUMP_FAILED] = float(failed)
        if self.dumps.folder is not None and (record_of or not failed):
            with counted(f"writing into {self.dumps.folder}", DUMP_FAILED):
                responses = [record_of[uid] for _, uid, *_ in chosen if uid in record_of]
                self.dumps.write(header_for(self.config), reshaped.step, responses)
