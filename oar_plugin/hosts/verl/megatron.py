"""verl's Megatron engine with importance: log-probs, entropy and importance from one run of the pipeline schedule.

`importance_pass.py` chooses the rows and makes the result's fields; this is the pass itself. Megatron's schedules run
forward and backward of all micro-batches in an order of their own, so the pass is one or several whole schedules:

* `fisher`: one schedule with a backward gives log-probs, entropy and the first draw; each further draw is one more.
* `onward`: one schedule with a backward gives log-probs, entropy and the answer's part, a second one the reasoning's.
* `oar_g`: one schedule without a backward gives log-probs, entropy and the clean distribution P of every micro-batch, then
  one for each draw. They cannot be one: the gradient of a noisy forward needs P, which exists on the last stage only when
  the clean forward of that micro-batch has gone through the whole pipeline, and verl's log-probs are those without noise.

Two of verl's methods are overridden, and act only during such a pass: `forward_step`, to say what a forward is for and to
hand the schedule the probe's scalar for a loss, and `_lm_head_logits_processor`, to skip log-probs that nobody asked for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.utils import detach_tree

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.vocabulary import VocabularyShard
from oar_plugin.hosts.megatron_taps import MegatronTaps, Tap, check_chunks, unwrapped
from oar_plugin.hosts.micro_batch import MicroBatchScorer
from oar_plugin.hosts.onward import combined_importance
from oar_plugin.hosts.request import IMPORTANCE, Part, Request
from oar_plugin.hosts.taps import UnsupportedModelError, check_logits
from oar_plugin.hosts.verl.importance_pass import SECONDS, ImportancePass, elapsed, nested
from oar_plugin.hosts.verl.segments import SEQUENCE_SEGMENTS, end_of_sequence_tokens
from oar_plugin.tokens import TokenBytes

_ROW = "oar_row"  # int64 [B]: dynamic batching reorders the rows


@dataclass
class _Pass:
    """One importance pass: what outlives its micro-batches.

    Attributes:
        request: what to compute.
        first: where each row of the batch begins in `score_T`, and the end of the last.
        score_T: of each part, float32, a token of the batch each: the scores that this rank has computed so far.
        entropy_T: float32, a token of the batch each: of the rows of `onward` that this rank has projected.
        draw: the draw that the schedule under way is for; None in the clean one of `oar_g`.
        part: what its backward starts from.
        rows_only: nobody wants log-probs of the schedule under way.
        forward_seconds: spent in forwards that gave log-probs, where that can be told (see `_score`).
        scorers: of each micro-batch, by its rows, with what `_scorer` returns beside.
    """

    request: Request
    first: list[int]
    score_T: dict[Part, Tensor]
    entropy_T: Tensor
    draw: int | None = None
    part: Part = "answer"
    rows_only: bool = False
    forward_seconds: float = 0.0
    scorers: dict[tuple[int, ...], tuple[MicroBatchScorer, Tensor, Tensor]] = field(default_factory=dict)


class OarMegatronMixin(ImportancePass):
    """Importance for verl's Megatron engine. Put it before the engine in the list of bases."""

    # What the host's engine provides.
    module: list[nn.Module]
    tf_config: Any
    peft_cls: Any
    forward_backward_batch: Callable[..., dict[str, Any]]

    _pass: _Pass | None = None
    _taps: MegatronTaps | None = None

    def _score(self, data: TensorDict, request: Request) -> dict[str, Any]:
        """Scores of every row on every rank; log-probs and entropy on the ranks where verl has them.

        The seconds are what importance adds to the forward that log-probs need anyway. In a pipeline, where stages wait for
        one another, a fused forward cannot be told from its backward: there they are an upper bound, the whole schedule.
        """
        self._limit_micro_batches(data)
        data[_ROW] = torch.arange(len(data))
        offsets = data["input_ids"].offsets().to(get_device_id())
        first: list[int] = data["input_ids"].offsets().tolist()
        zeros_T = torch.zeros(first[-1], device=offsets.device)
        scoring = _Pass(request, first, {part: zeros_T.clone() for part in request.parts}, zeros_T.clone())
        started = time.perf_counter()
        output: dict[str, Any] = {}
        with MegatronTaps(self.module) as taps:
            self._taps, self._pass = taps, scoring
            try:
                if request.importance == "oar_g":
                    scoring.rows_only = request.importance_only
                    with torch.no_grad():
                        output = self.forward_backward_batch(data, None, forward_only=True)
                    if not request.importance_only:
                        scoring.forward_seconds = elapsed(started)
                for number, (draw, part) in enumerate(itertools.product(range(request.num_draws), request.parts)):
                    fused = number == 0 and request.importance != "oar_g" and not request.importance_only
                    scoring.draw, scoring.part, scoring.rows_only = draw, part, not fused
                    with torch.enable_grad():
                        drawn = self.forward_backward_batch(data, None, forward_only=False)
                    output = output or drawn
            finally:
                self._taps = self._pass = None
        mean_T = {part: self._sum_over_ranks(score_T) / request.num_draws for part, score_T in scoring.score_T.items()}
        reasoning_T = data[SEQUENCE_SEGMENTS].values().to(offsets.device) == Segment.REASONING
        scores_T = mean_T["answer"]
        if "onward" in mean_T:
            # Unlike scores, each tensor-parallel rank of the last stage has the entropies of all its rows.
            entropy_T = self._sum_over_ranks(scoring.entropy_T, scattered=False)
            scores_T = combined_importance(scores_T, mean_T["onward"], entropy_T, reasoning_T, offsets)
        seconds = (elapsed(started) - scoring.forward_seconds) / len(data)
        model_output = output.setdefault("model_output", {})
        model_output[IMPORTANCE] = torch.nested.nested_tensor_from_jagged(
            torch.where(reasoning_T, scores_T, 0.0), offsets
        )
        model_output[SECONDS] = nested([torch.tensor([seconds])] * len(data))
        return output

    # ---- verl's engine, during a pass

    def forward_step(
        self,
        batch_iter: Iterator[TensorDict],
        model: nn.Module,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Any,
    ) -> Any:
        """verl's forward of one micro-batch; in a pass, with taps and with the probe's scalar for a loss."""
        step = partial(
            super().forward_step,  # type: ignore[misc]
            model=model,
            logits_processor_func=logits_processor_func,
            postprocess_micro_batch_func=postprocess_micro_batch_func,
        )
        scoring, taps, chunk = self._pass, self._taps, unwrapped(model)
        if scoring is None or taps is None or not (chunk.pre_process or chunk.post_process):
            return step(batch_iter)
        started = time.perf_counter()
        micro_batch = next(batch_iter)
        rows = tuple(micro_batch[_ROW].tolist())
        micro_batch = micro_batch.to(get_device_id())
        scorer, embedding_N, batch_N = self._scorer(rows, micro_batch, chunk, scoring)
        row_position_N, noise, coefficients = scorer.tap(scoring.draw, scoring.part)
        columns = max(0, self.model_config.hf_config.vocab_size - scorer.vocabulary.start)
        tap = Tap(row_position_N, scoring.rows_only, noise=noise, coefficients=coefficients, columns=columns)
        if scoring.draw is not None:
            tap.receive = partial(self._receive, scoring, scorer, embedding_N, batch_N)
        taps.tap = tap
        try:
            output, _ = step(iter([micro_batch]))
        finally:
            taps.tap = None
        return output, partial(self._finish, scoring, scorer, tap, micro_batch, started)

    def _lm_head_logits_processor(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """verl's log-probs and entropy; nothing when only the answer's rows were projected."""
        if self._pass is not None and self._pass.rows_only:
            return {}
        output: dict[str, Tensor] = super()._lm_head_logits_processor(*args, **kwargs)  # type: ignore[misc]
        return output

    def _finish(
        self,
        scoring: _Pass,
        scorer: MicroBatchScorer,
        tap: Tap,
        micro_batch: TensorDict,
        started: float,
        output: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Any]]:
        """What the schedule calls on the last stage after a forward: the scalar to differentiate, and verl's outputs."""
        if tap.weighted_sum is not None:
            scalar = tap.weighted_sum
            assert scorer.onward is not None
            scoring.entropy_T[self._places(scoring, micro_batch)] = scorer.onward.entropy_T
        else:
            assert tap.answer_logits is not None
            logits_NV, tap.answer_logits = tap.answer_logits, None
            if scoring.draw is None:
                scorer.remember_clean(logits_NV)
                scalar = logits_NV.new_zeros(())
            else:
                scalar = scorer.scalar(logits_NV, scoring.draw)
        if scoring.draw == 0 and not scoring.rows_only and parallel_state.get_pipeline_model_parallel_world_size() == 1:
            scoring.forward_seconds += elapsed(started)
        # The schedule multiplies a loss by the context-parallel size and divides it by the number of micro-batches.
        scale = micro_batch["num_micro_batch"] / parallel_state.get_context_parallel_world_size()
        reported = {
            "loss": 1.0,
            "metrics": {},
            "model_output": detach_tree(output),
        }  # 1.0: verl's, where there is no loss
        return scalar * scale, reported

    def _receive(
        self,
        scoring: _Pass,
        scorer: MicroBatchScorer,
        embedding_N: Tensor,
        batch_N: Tensor,
        gradient: Tensor,
        embedding: Tensor,
    ) -> None:
        """Scores of a micro-batch from the gradient of its embeddings `[s, b, H]`, on the first stage, in its backward."""
        with torch.no_grad():
            scoring.score_T[scoring.part][batch_N] += scorer.importance(gradient, embedding).flatten()[embedding_N]

    # ---- where things are

    def _scorer(
        self, rows: tuple[int, ...], micro_batch: TensorDict, chunk: Any, scoring: _Pass
    ) -> tuple[MicroBatchScorer, Tensor, Tensor]:
        """The scorer of a micro-batch, and for the tokens whose embeddings this rank holds: where they are in them, and where
        in `score_T`, int64 `[N]` each.
        """
        if rows not in scoring.scorers:
            local_T, local_size = self._local_positions(micro_batch)
            embedding_T, embedding_size = local_T, local_size
            if get_model_config(chunk).sequence_parallel:
                embedding_size = local_size // parallel_state.get_tensor_model_parallel_world_size()
                embedding_T = local_T - parallel_state.get_tensor_model_parallel_rank() * embedding_size
                embedding_T = torch.where((embedding_T >= 0) & (embedding_T < embedding_size), embedding_T, -1)
                embedding_T = torch.where(local_T >= 0, embedding_T, -1)
            input_ids = micro_batch["input_ids"]
            scorer = MicroBatchScorer(
                scoring.request,
                micro_batch[SEQUENCE_SEGMENTS].values(),
                input_ids.values(),
                input_ids.offsets(),
                local_T,
                embedding_size,
                partial(_all_reduced, parallel_state.get_context_parallel_group()),
                embedding_T,
                _vocabulary(chunk) if chunk.post_process else VocabularyShard(),
            )
            batch_T = self._places(scoring, micro_batch)
            scoring.scorers[rows] = scorer, embedding_T[embedding_T >= 0], batch_T[embedding_T >= 0]
        return scoring.scorers[rows]

    @staticmethod
    def _places(scoring: _Pass, micro_batch: TensorDict) -> Tensor:
        """Where the tokens of a micro-batch are in the batch, int64 `[T]`."""
        rows = micro_batch[_ROW].tolist()
        return torch.cat([torch.arange(*scoring.first[row : row + 2]) for row in rows]).to(get_device_id())

    def _local_positions(self, micro_batch: TensorDict) -> tuple[Tensor, int]:
        """Where each packed token is in this rank's flattened hidden states `[s * b]` (before sequence parallelism).

        verl's own packing says so: it is given the numbers 1 .. T for token ids, and 0 is its padding.

        Returns:
            int64 `[T]`, -1 where another context-parallel rank holds the token; and s * b.
        """
        input_ids = micro_batch["input_ids"]
        number_T = torch.arange(1, len(input_ids.values()) + 1, device=input_ids.device)
        numbers = torch.nested.nested_tensor_from_jagged(number_T, input_ids.offsets())
        if self.engine_config.use_remove_padding:
            bucket = self.engine_config.pad_to_length_bucket if self.engine_config.pad_to_length else None
            local = preprocess_thd_engine(numbers, pad_to_length_bucket=bucket)[0]
        else:
            longest = tu.get_non_tensor_data(data=micro_batch, key="forced_max_seqlen", default=None)
            local = preprocess_bshd_engine(numbers, forced_max_seqlen=longest)[0]
        flat = local.t().flatten()
        local_T = torch.full_like(number_T, -1)
        local_T[flat[flat > 0] - 1] = (flat > 0).nonzero()[:, 0]
        return local_T, len(flat)

    def _sum_over_ranks(self, score_T: Tensor, scattered: bool | None = None) -> Tensor:
        """The scores of all ranks that share the batch, on each of them: `[T]` float32 twice over the wire.

        Args:
            score_T: this rank's.
            scattered: each tensor-parallel rank has some of them; None: as the embeddings are.
        """
        if scattered is None:
            scattered = get_model_config(self.module[0]).sequence_parallel
        if not scattered and parallel_state.get_tensor_model_parallel_rank() > 0:
            score_T.zero_()  # without sequence parallelism each tensor-parallel rank has them all
        score_T = _all_reduced(parallel_state.get_context_parallel_group(), score_T)
        return _all_reduced(parallel_state.get_model_parallel_group(), score_T)

    # ---- what this engine is

    def _micro_batches_divided_by(self) -> int:
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is None:
            return 1
        group: int = self.tf_config.microbatch_group_size_per_vp_stage
        return group

    def _check_served(self, request: Request) -> None:
        """Once: refuse a model whose importance would be wrong (see `check_chunks`)."""
        if request.perturbation is not None:
            raise UnsupportedModelError(
                f"algorithm.oar.importance={request.importance} in a Megatron actor: masked copies were not built for it; "
                "allowed: fisher, oar_g, onward, or oar_p with algorithm.oar.perturbation.backend=rollout"
            )
        if self.token_bytes is not None:
            return
        if self.peft_cls is not None:
            raise UnsupportedModelError(
                "actor_rollout_ref.model.lora with Megatron: not served by OAR; allowed: actor_rollout_ref.model.lora.rank=0"
            )
        check_chunks(self.module)
        check_logits(self.model_config.hf_config)
        self.token_bytes = TokenBytes(self.model_config.tokenizer)
        self._eos_ids = end_of_sequence_tokens(self.model_config)


def _vocabulary(chunk: Any) -> VocabularyShard:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return VocabularyShard()
    return VocabularyShard(
        start=group.rank() * chunk.output_layer.output_size_per_partition,
        total=partial(_all_reduced, group),
        largest=partial(_all_reduced, group, op=distributed.ReduceOp.MAX),
    )


def _all_reduced(group: Any, tensor: Tensor, op: Any = distributed.ReduceOp.SUM) -> Tensor:
    if group.size() > 1:
        distributed.all_reduce(tensor, op=op, group=group)
    return tensor


def register(transformer_impl: ModuleType) -> None:
    """Register the engine for this machine's device, ahead of verl's own (a vendor's entry wins over a device's)."""
    if get_device_name() == "npu":  # verl's engine there is another class, MindSpeed's
        return
    bases = (OarMegatronMixin, transformer_impl.MegatronEngineWithLMHead)
    engine = type("OarMegatronEngineWithLMHead", bases, {"__module__": __name__})
    EngineRegistry.register(
        model_type="language_model", backend="megatron", device=get_device_name(), vendor=get_vendor()
    )(engine)
