"""Token credit for a training framework (a host).

The host makes one `TokenCredit` per run. In each training step it calls `request`, `segments`, `importance`, `reshape` and
`dump`, in this order (`docs/your-own-host.md`). For verl and OpenRLHF, some of these steps run in the actors instead: verl's
actors compute importance and weights (`oar_plugin.hosts.verl.importance_pass`, which calls `weigh_rows` of `estimator.py`).
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad

from oar_plugin import estimator
from oar_plugin.config import PREFIX, OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.watch import Watch
from oar_plugin.output import warn_once
from oar_plugin.page.dumps import DUMP_FAILED, Dumps, Sibling, choose
from oar_plugin.page.record import PREDICTED, Header, Response, header_for
from oar_plugin.passes.plain import batch_importance, in_eval_mode
from oar_plugin.passes.request import Request, replacement_fault, replacement_token
from oar_plugin.passes.schedule import Schedule
from oar_plugin.passes.segments import end_of_sequence_tokens, segment_rows
from oar_plugin.passes.tokens import TokenBytes


@dataclass(frozen=True)
class PaddedBatch:
    """B prompts and responses, padded on any side to T columns. The responses are in the last L columns."""

    token_BT: Tensor  # int64
    mask_BT: Tensor  # bool, false at padding
    response_BL: Tensor  # bool, true at the tokens of the response, which must be consecutive
    own_BL: Tensor | None = None  # bool, true at the model's own tokens, false at tool output. None: no tool output

    @property
    def prompt_columns(self) -> int:
        """Number of columns before the responses, `T - L`."""
        return self.token_BT.shape[1] - self.response_BL.shape[1]

    @cached_property
    def responses(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Per row, on the CPU: the response's slice of L columns, token ids, and mask of the model's own tokens."""
        token_BL, response_BL = self.token_BT[:, self.prompt_columns :].cpu(), self.response_BL.bool().cpu()
        own_BL = response_BL if self.own_BL is None else self.own_BL.bool().cpu()
        columns = (row.nonzero()[:, 0].tolist() or [0, -1] for row in response_BL)
        spans = [slice(places[0], places[-1] + 1) for places in columns]
        return [(span, token_BL[row, span], own_BL[row, span]) for row, span in enumerate(spans)]


@dataclass(frozen=True)
class CreditedBatch:
    """Responses with their credit, for `TokenCredit.record`."""

    step: int
    host_advantage_BL: Tensor  # before reshaping
    importance_BL: Tensor
    segments_BL: Tensor  # a `Segment` per token
    weight_BL: Tensor  # 1 at all tokens of a response that falls back to GRPO
    status_B: Tensor  # int64, a `Status` per response
    predicted_B: Tensor  # bool, whether importance was predicted


@dataclass(frozen=True)
class ReshapedBatch(CreditedBatch):
    """What `TokenCredit.reshape` returns: its inputs and results."""

    advantage_BL: Tensor  # after reshaping, for the loss
    # float32, `MEASURE_NAMES` of each response, and if importance is predicted `PREDICTION_NAMES` (`credit/diagnostics.py`)
    measure_BM: Tensor
    metrics: dict[str, float]  # by name, without the prefix `oar/`


class TokenCredit:
    """Token credit of one run. `config` has the parsed settings, `dumps` writes dump files, `watch` warns about fallbacks.

    Args:
        settings: the settings of `algorithm.oar`, as a mapping or parsed.
        tokenizer: the model's tokenizer. None: `segments` and `record` cannot be called.
        prefix: the name of the settings in error messages.
        generation_config: the model's generation config. It can name more end-of-sequence tokens than the tokenizer.
        padding: an object with the `pad_token_id` that replaces masked tokens. None: the tokenizer.
        home: the parent folder of a relative `dump.dir`. None: this process writes no files.
        offloads: true if the host's rollout engines can score masked copies.

    Raises:
        OarConfigError: a setting cannot work. The message names the key, its value and the allowed values.
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
            fault = "there are no rollout engines here; allowed: actor"
            raise OarConfigError(f"{prefix}.perturbation.backend=rollout: {fault}")
        self.tokenizer = tokenizer
        self._token_bytes = None if tokenizer is None else TokenBytes(tokenizer)
        self._eos_token_ids = set() if tokenizer is None else end_of_sequence_tokens(tokenizer, generation_config)
        self.watch, self.schedule = Watch(self.config.fallback_warning), Schedule(self.config)
        self._replacement = replacement_token(self.config, padding or tokenizer)
        if tokenizer and (ends := replacement_fault(self._replacement, tokenizer, self._eos_token_ids)):
            warn_once("%s.perturbation.replacement=pad: %s", prefix, ends)
        config = self.config.dump
        self.dumps = Dumps(config if home is not None else config.model_copy(update={"dir": None}), home or "", prefix)

    def request(
        self, step: int, max_response_length: int | None = None, temperature: float = 1.0, max_length: int | None = None
    ) -> Request:
        """Returns the request for training step `step` (from 1): what to compute, and how.

        Args:
            max_response_length: a response with at least this many tokens counts as truncated, unless its last token is
                an end-of-sequence token. None: no limit.
            max_length: the same of prompt and response together: the length at which the host's engine stops.
            temperature: the sampling temperature of the responses.
        """
        limits = {"max_response_length": max_response_length or sys.maxsize, "max_length": max_length or sys.maxsize}
        how = {"temperature": temperature, "replacement_token": self._replacement}
        return Request.of_step(self.config, step, **limits, **how)

    def segments(self, batch: PaddedBatch, needed_B: Tensor, request: Request) -> tuple[Tensor, Tensor]:
        """Finds the answer of each response. The model's own tokens before the answer are its reasoning.

        `needed_B` (bool) is true for responses that need credit (`estimator.needs_credit`). Others are not scored.

        Returns:
            A `Segment` per token, int8 `[B, L]`, and a `Status` per response, int64 `[B]`, on the batch's device. In a response
            that is not scored, the segment of all tokens is OUTSIDE.
        """
        if self._token_bytes is None:
            raise ValueError("pass segments [B, T], or a tokenizer to search the text for the answer")
        prompts = batch.mask_BT[:, : batch.prompt_columns].sum(-1).tolist()
        columns = zip(batch.responses, needed_B.tolist(), prompts, strict=True)
        rows = ((token_L.tolist(), own_L.numpy(), needed, prompt) for (_, token_L, own_L), needed, prompt in columns)
        parts, status_B = segment_rows(rows, request, self._token_bytes, self._eos_token_ids)
        segments_BL = torch.full(batch.response_BL.shape, int(Segment.OUTSIDE), dtype=torch.int8)
        for row, ((span, *_), part) in enumerate(zip(batch.responses, parts, strict=True)):
            segments_BL[row, span] = part
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
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Returns the importance of each response token, float32 `[B, L]`; 0 at tokens that are not scored.

        All ranks of a sharded model must call this method, even if a rank has nothing to score. Call it under the autocast that
        the host uses for log-probs.

        Args:
            model: causal LM whose parameters have no `.grad`. The call does not change the model.
            max_tokens: maximum number of tokens per forward, with padding. A longer row runs alone.
            max_over_ranks: takes a count, returns the maximum of this count over all ranks.
            checkpoint_activations: recompute activations in the backward, to save memory.
            sum_over_ranks: takes a tensor, returns its sum over all ranks. Needed if importance is predicted.

        Raises:
            UnsupportedModelError: importance cannot be computed with this model (`oar_plugin.passes.taps.check_model`).
            RuntimeError: a parameter has a `.grad`.
            ValueError: importance is predicted on several ranks, without `sum_over_ranks`.
        """
        several = distributed.is_initialized() and distributed.get_world_size() > 1
        if sum_over_ranks is None and self.schedule.predictor and several:
            raise ValueError("importance is predicted: give sum_over_ranks, or set amortize.share=null")
        before = batch.prompt_columns
        rows = batch.token_BT, pad(segments_BL, (before, 0), value=int(Segment.OUTSIDE)), batch.mask_BT
        total = sum_over_ranks or (lambda tensor: tensor)
        with in_eval_mode(model), torch.enable_grad():
            importance_BT = batch_importance(
                model, request, *rows, max_tokens, checkpoint_activations, max_over_ranks, total, self.schedule
            )
        return importance_BT[:, before:]

    def reshape(
        self, step: int, advantage_BL: Tensor, importance_BL: Tensor, segments_BL: Tensor, status_B: Tensor
    ) -> ReshapedBatch:
        """`oar_plugin.estimator.reshape` of the host's normalised advantages, with what records and dumps need."""
        prediction_3 = self.schedule.prediction_3
        given = importance_BL, segments_BL == Segment.REASONING, status_B, self.config, prediction_3
        made = estimator.reshape(advantage_BL, *given)
        predicted_B = (made.status_B == Status.SCORED) & (prediction_3 is not None)
        credited = step, advantage_BL, importance_BL, segments_BL, made.weight_BL, made.status_B, predicted_B
        return ReshapedBatch(*credited, made.advantage_BL, made.measure_BM, made.metrics)

    def record(
        self,
        credited: CreditedBatch,
        row: int,
        span: slice,
        token_ids: list[int],
        *,
        importance: str | None = None,
        truth: object = None,
        **known: Any,
    ) -> Response:
        """Returns the response in row `row`, with its credit, for dump files and the inspector.

        Args:
            span: the response's slice of the L columns.
            importance: name of the importance. None: the name in the settings.
            truth: the right answer.
            known: other fields of `Response`. A tensor `[L]` is cut to `span`.
        """
        assert self._token_bytes is not None
        # All own tokens have the same advantage; it is 0 at tool output. A response without tokens has an empty span. Its
        # advantage is then read from all columns of the row, if there are any.
        advantages = credited.host_advantage_BL[row, span].tolist() or credited.host_advantage_BL[row].tolist()
        name = (importance or self.config.importance_object.name) + PREDICTED * bool(credited.predicted_B[row])
        scores = {name: credited.importance_BL[row, span].tolist()}
        fields = known | {name: value[span].tolist() for name, value in known.items() if isinstance(value, Tensor)}
        return Response(
            step=int(credited.step),
            truth=None if truth is None else str(truth),
            token_ids=token_ids,
            tokens=self._token_bytes.texts(token_ids),
            segments=credited.segments_BL[row, span].tolist(),
            importance=scores,
            weights=credited.weight_BL[row, span].tolist(),
            advantage=max(advantages, key=abs, default=0.0),
            status=Status(int(credited.status_B[row])).name.lower(),
            **fields,
        )

    def header(self, **versions: str) -> Header:
        """Returns `header_for` with the name of the run, and with the model that the tokenizer was loaded from."""
        model = str(getattr(self.tokenizer, "name_or_path", ""))
        return header_for([self.config], run=self.dumps.run, model=model, **versions)

    def dump(
        self,
        batch: PaddedBatch,
        credited: CreditedBatch,
        metrics: dict[str, float],
        rows: Iterable[tuple[int, Any, Any, Any]],
        known: Callable[[int], Mapping[str, Any]],
        gather: Callable[[list[Any]], list[Any]] = list,
        *,
        header: Header | None = None,
        always: bool = False,
    ) -> list[Response]:
        """Writes the responses of some groups into a file, at the steps that the settings `dump` select, and returns them.

        All ranks must call this method. If writing fails, the run continues, and `metrics` gets `DUMP_FAILED` = 1.

        Args:
            rows: (row, group, id, reward) per response of this rank, in the order of the dump. Group and id may be numbers; the
                id is unique over all ranks. NaN or None: it has no reward. Used only at steps with a dump.
            known: takes a row, returns other fields of its `Response` (see `record`).
            gather: takes the list of this rank, returns the concatenated lists of all ranks.
            header: of the file. None: `self.header()`.
            always: return the responses also where the settings name no folder, for a host that shows them elsewhere.
        """
        if self.config.dump.dir is None and not always:
            return []
        metrics[DUMP_FAILED] = 0.0
        if not self.dumps.due(credited.step):
            return []
        counted = partial(self.dumps.counted, credited.step, metrics)
        siblings, row_of_uid, chosen, records = list[Sibling](), dict[str, int](), list[Sibling](), list[Response]()
        with counted("reading responses", DUMP_FAILED):
            for row, *ids, given in rows:  # hosts have numbers too, also numpy's and torch's
                group, uid = (str(one.item() if hasattr(one, "item") else one) for one in ids)
                row_of_uid[uid], reward = row, math.nan if given is None else float(given)
                siblings.append(Sibling(group, uid, reward, int(credited.status_B[row])))
        # `gather` is a collective operation. A rank that failed must call it too, here and below.
        siblings = gather(siblings)
        with counted("reading responses", DUMP_FAILED):
            chosen = [sibling for group in choose(siblings, self.config.dump.groups) for sibling in group]
            for group, uid, reward, _ in (sibling for sibling in chosen if sibling.uid in row_of_uid):
                span, token_L, own_L = batch.responses[row := row_of_uid[uid]]
                mask = None if batch.own_BL is None else own_L.long().tolist()
                fields = {"group": group, "uid": uid, "reward": reward, "mask": mask, **known(row)}
                records.append(self.record(credited, row, span, token_L.tolist(), **fields))
        record_of = {record.uid: record for record in gather(records)}
        responses = [record_of[uid] for _, uid, *_ in chosen if uid in record_of]
        # Records are missing if another rank failed, or if two responses have one id.
        failed = metrics[DUMP_FAILED] or len(record_of) < len(chosen)
        metrics[DUMP_FAILED] = float(failed)
        if self.dumps.folder is not None and (responses or not failed):
            with counted(f"writing into {self.dumps.folder}", DUMP_FAILED):
                self.dumps.write(header or self.header(), credited.step, responses)
        return responses
