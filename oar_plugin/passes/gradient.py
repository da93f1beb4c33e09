"""The gradient pass: forwards and backwards through the model that give each token of a micro-batch its scores.

`Request.forwards` lists the forwards, which the schedule puts into a `Work`. A host runs its model once for each of them:

    for forward in work.forwards:
        with taps.running(forward):
            taps.tap = micro_batch.tap(forward)
            model(...)

The tap tells the hooks on the model to compute a scalar: the sum of some logits, each times a coefficient. The backward, at
the end of the `with` block, computes its gradient at the input embeddings, and `Importance.score` a score per token from it.

After the last forward, `total` sums `Scores` over the ranks that share the sequences. `importance_of_scores` then returns the
importance per token. Megatron's schedules run forward and backward themselves, each forward for all micro-batches.
Between the constructor and `importance_of_scores`, nothing here makes the CPU wait for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Backward, Forward, Importance, Parts, Rows
from oar_plugin.credit.noise import gaussian, position_seeds, response_seeds
from oar_plugin.credit.probe import AnswerRows, Probe, answer_rows, pool
from oar_plugin.credit.regression import COLUMNS, projected
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard
from oar_plugin.passes.request import Request
from oar_plugin.passes.rows import CHUNK, Project, projected_back, read_logits, scalar_with
from oar_plugin.passes.taps import Tap, to_device

SEEN = 4096  # hidden states that are projected at a time
FP16_EXPONENT = 6
"""In fp16, the gradient at the hidden states is scaled to a norm below `2 ** FP16_EXPONENT`.

The backward to the embeddings can multiply this norm by 2^10 before the gradient overflows, and divide it by about 2^20
before the gradient is subnormal."""


@dataclass(frozen=True)
class Packed:
    """B sequences of prompt and response, concatenated, on the CPU. They have T tokens in total."""

    token_T: Tensor  # int64
    segments_T: Tensor  # int64, a `Segment` per token; OUTSIDE in prompts and in responses that are not scored
    offsets: Tensor  # int64 `[B + 1]`, position of each sequence's first token, then T

    @property
    def response_T(self) -> Tensor:
        """Index of each token's sequence, int64."""
        return torch.arange(len(self.offsets) - 1).repeat_interleave(self.offsets.diff())

    @property
    def place_T(self) -> Tensor:
        """Position of each token in its sequence, int64."""
        return torch.arange(len(self.token_T)) - self.offsets[self.response_T]

    def at(self, rows: Sequence[int]) -> Tensor:
        """The positions of some sequences' tokens, concatenated in this order."""
        bounds = self.offsets.tolist()
        return torch.cat([torch.arange(0), *(torch.arange(bounds[row], bounds[row + 1]) for row in rows)])

    def select(self, rows: Sequence[int]) -> "Packed":
        """Some sequences, in this order."""
        at_t, length_b = self.at(rows), self.offsets.diff()[list(rows)]
        return Packed(self.token_T[at_t], self.segments_T[at_t], pad(length_b.cumsum(0), (1, 0)))

    @property
    def reasoning_T(self) -> Tensor:
        return self.segments_T == Segment.REASONING


@dataclass(frozen=True)
class Layout:
    """Where this rank holds the hidden states, embeddings and logits of a packed micro-batch. Its tensors are on the CPU."""

    local_T: Tensor  # int64, position of each token in this rank's flattened hidden states; -1: on another rank
    embedding_T: Tensor  # the same for embeddings; only Megatron's sequence parallelism, which splits them, has another
    num_embeddings: int  # number of embeddings on this rank, with padding
    device: torch.device = field(default=torch.device("cpu"))  # of hidden states, embeddings and logits
    vocabulary: VocabularyShard = WHOLE_VOCABULARY  # the columns of the logits on this rank
    columns: int | None = None  # see `Tap.columns`
    # returns the sum of a tensor over the ranks that share the sequences; may overwrite the tensor
    sum_over_sequence_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor
    rows_again: bool = False  # another rank also reads this rank's rows, and its values count
    embeddings_again: bool = False  # the same for gradients at the embeddings


class Scores:
    """Results of this rank's forwards and backwards, float32, one value per packed token.

    `score_KT` has the scores from each of the importance's K backwards, summed over the draws of random signs or noise.
    `entropy_T` and `log_prob_T` (`Parts`) are computed if they are read, at reasoning tokens. At all other tokens they are 0.
    `hidden_TP`: the projected hidden states of reasoning tokens and of the tokens before these, `[0, P]` if they are not read.
    """

    def __init__(
        self,
        importance: Importance,
        num_tokens: int,
        device: torch.device,
        reads_hidden: bool = False,
        reads: frozenset[str] | None = None,
    ) -> None:
        count, names = len(importance.backwards), sorted(importance.reads if reads is None else reads)
        self.hidden_TP = torch.zeros(num_tokens * reads_hidden, COLUMNS, device=device)
        self.all_NT = torch.zeros(count + len(names), num_tokens, device=device)
        self.score_KT, self.reads_NT = self.all_NT[:count], self.all_NT[count:]
        self.readings = dict(zip(names, self.reads_NT, strict=True))
        nothing_T = torch.zeros(num_tokens, device=device)
        self.entropy_T, self.log_prob_T = (self.readings.get(name, nothing_T) for name in ("entropy", "log_prob"))


def pooled(project: Project, hidden_NH: Tensor, rows: AnswerRows, layout: Layout) -> Tensor:
    """Logits of the rows, averaged per response, `[B, V]`, at least float32, on all ranks that share the sequences."""
    pooled_BV: Tensor | None = None

    def add(logits_NV: Tensor, chosen: slice) -> None:
        nonlocal pooled_BV
        part_BV = pool(logits_NV, rows.select(chosen))
        pooled_BV = part_BV if pooled_BV is None else pooled_BV.add_(part_BV)

    read_logits(project, hidden_NH, add)  # `add` runs on ranks without rows too: they take part in the sum
    assert pooled_BV is not None
    return layout.sum_over_sequence_ranks(pooled_BV)


class MicroBatchPass:
    """Forwards of one micro-batch: those of the gradient pass, or one that only reads. `scores` has the results, on the device
    of the layout.

    With `reads`, which may be empty, there is no backward: `Forward(None)` reads what it names, and with `hidden` also hidden
    states. The constructor copies the indices that forwards and backwards need to the device.
    """

    def __init__(
        self,
        request: Request,
        packed: Packed,
        layout: Layout,
        reads: frozenset[str] | None = None,
        hidden: bool = False,
    ) -> None:
        self.request, self.packed, self.layout, self._hidden = request, packed, layout, hidden
        self.importance = request.importance_object if reads is None else Importance()
        self.reads = self.importance.reads if reads is None else reads
        # Entropies and log-probs need logits without noise. If no backward has noise and a backward starts from
        # reasoning rows, its forward computes these logits anyway. Otherwise the first forward (noise-free) does.
        noisy, backwards = self.importance.noisy, self.importance.backwards
        self._read_first = bool(self.reads) and (noisy or not any(b.rows == "reasoning" for b in backwards))
        self._first = None if noisy or not backwards else 0
        # Values from one forward that its backward or a later forward needs.
        self._noise_free_BV: Tensor | None = None  # pooled logits of the probe without noise
        self._scale: Tensor | None = None  # in fp16: factor of the scalar, by which its gradient is divided
        num_tokens, num_responses = len(packed.token_T), len(packed.offsets) - 1
        self.scores = Scores(self.importance, num_tokens, layout.device, hidden, self.reads)
        response_T, reasoning_T = packed.response_T, packed.reasoning_T
        seed_B = response_seeds(packed.token_T, response_T, num_responses, request.seed)

        def local_rows(wanted_T: Tensor, probe: Probe) -> AnswerRows:
            rows = answer_rows(wanted_T, response_T, packed.token_T, num_responses, probe)
            return rows.select(layout.local_T[rows.position_N] >= 0)

        answer = local_rows(packed.segments_T == Segment.ANSWER, request.probe)
        reasoning = local_rows(reasoning_T & (self.importance.reasoning_rows or bool(self.reads)), "answer_joint")
        seen_T = reasoning_T | reasoning_T.roll(-1)  # and the token before; a response does not open a sequence
        seen_N = (seen_T & (layout.local_T >= 0) & hidden).nonzero()[:, 0]
        held_N = (layout.embedding_T >= 0).nonzero()[:, 0]  # the tokens whose embeddings are here
        noisy_N = held_N[reasoning_T[held_N]]
        held = layout.embedding_T[held_N], held_N
        noise = layout.embedding_T[noisy_N], response_T[noisy_N], packed.place_T[noisy_N]
        tables = (rows.table_5N for rows in (answer, reasoning))
        seen = layout.local_T[seen_N], seen_N
        copied = to_device(layout.device, layout.local_T, seed_B, *seen, *held, *noise, *tables)
        self._local_T, self._seed_B, *of_tokens = copied[:-2]
        self._seen_N, self._seen_place_N, self._held_N, self._held_place_N, *self._noisy = of_tokens
        self._answer, self._reasoning = (AnswerRows(table_5N, num_responses) for table_5N in copied[-2:])

    def total(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Replaces all scores by their sums over the ranks that share the sequences. `summed` returns the sum of a vector."""
        scores, layout = self.scores, self.layout
        for again, values in (
            (layout.rows_again, scores.reads_NT),
            (layout.rows_again, scores.hidden_TP),
            (layout.embeddings_again, scores.score_KT),
        ):
            if again:
                values.zero_()
        for values in (scores.all_NT, scores.hidden_TP):
            if values.numel():
                values.copy_(summed(values.flatten()).view_as(values))

    def tap(self, forward: Forward) -> Tap:
        """Returns the tap for `forward`. Each forward and its backward run before the tap of the next one is made."""
        first = forward.draw == 0 and forward.backward == self._first
        reads, sees = self._read_first and first, self._hidden and first
        backward = None if forward.backward is None else self.importance.backwards[forward.backward]
        rows = self._reasoning if backward is not None and backward.rows == "reasoning" else self._answer
        positions = [self._local_T[rows.position_N], *([self._local_T[self._reasoning.position_N]] if reads else [])]
        count, read = len(rows), sum(map(len, positions))

        def probe(project: Project, hidden_NH: Tensor) -> Tensor | None:
            if sees:
                chunks = self._seen_place_N.split(SEEN), hidden_NH[read:].detach().split(SEEN)
                for chosen_N, chunk_NH in zip(*chunks, strict=True):
                    self.scores.hidden_TP[chosen_N] = projected(chunk_NH)
            if reads:
                read_N = self._reasoning
                read_logits(project, hidden_NH[count:read], lambda z, at: self._read(read_N.select(at), z.float()))
            if backward is None:
                if any(b.noise and self._pools(b) for b in self.importance.backwards):
                    self._noise_free_BV = pooled(project, hidden_NH[:count], self._answer, self.layout)
                return None
            if self._pools(backward):
                compared_BV = self._noise_free_BV if backward.noise else None
                gradient_NH = self._pooled_gradient(forward, project, hidden_NH[:count], compared_BV)
            else:
                gradient_NH = projected_back(
                    project,
                    hidden_NH[:count],
                    lambda logits_NV, chosen: self._row_coefficients(forward, backward, rows.select(chosen), logits_NV),
                )
            if backward.rows == "probe":
                gradient_NH *= rows.share_N[:, None]
            self._scale = self._fp16_scale(gradient_NH, hidden_NH)
            if self._scale is not None:
                gradient_NH = gradient_NH * self._scale
            return scalar_with(gradient_NH, hidden_NH[:count])

        row_N, rows_only = torch.cat([*positions, self._seen_N] if sees else positions), not forward.log_probs
        receive = None if backward is None else partial(self._receive, forward.backward)
        noise = self.noise(forward.draw) if backward is not None and backward.noise else None
        return Tap(row_N, probe, rows_only, receive, noise, self.layout.columns)

    def noise(self, draw: int) -> Callable[[Tensor], Tensor]:
        """Returns a function from embeddings `[..., H]` to Gaussian noise `[..., H]`, 0 except at reasoning tokens."""
        at_N, response_N, place_N = self._noisy
        seed_N = position_seeds(self._seed_B[response_N], place_N, draw)

        def make(embedding: Tensor) -> Tensor:
            size = embedding.shape[-1]
            flat = torch.zeros(self.layout.num_embeddings, size, device=embedding.device)
            flat[at_N] = self.request.config.sigma * gaussian(seed_N, size)
            return flat.view_as(embedding)

        return make

    def _pooled_gradient(
        self, forward: Forward, project: Project, hidden_NH: Tensor, noise_free_BV: Tensor | None
    ) -> Tensor:
        """Gradient of the scalar at the probe's rows of hidden states, as if each were its response's only row, `[N, H]`."""
        pooled_BV, seed_B = pooled(project, hidden_NH, self._answer, self.layout), self._seeds(forward)
        with torch.autocast(pooled_BV.device.type, enabled=False):
            for start in range(0, len(pooled_BV), CHUNK):
                part = slice(start, start + CHUNK)
                clean_NV = None if noise_free_BV is None else noise_free_BV[part]
                # The coefficients take the place of the logits, to save memory.
                pooled_BV[part] = self._coefficients(forward, pooled_BV[part], seed_B[part], clean_NV=clean_NV)
        response_N = self._answer.response_N
        if getattr(project, "linear", True):
            # The gradient does not depend on the hidden states: one row of zeros per response is enough.
            zeros_BH = hidden_NH.new_zeros(len(pooled_BV), hidden_NH.shape[-1])
            return projected_back(project, zeros_BH, lambda _, chosen: pooled_BV[chosen])[response_N]
        return projected_back(project, hidden_NH, lambda _, chosen: pooled_BV[response_N[chosen]])

    def _fp16_scale(self, gradient_NH: Tensor, hidden_NH: Tensor) -> Tensor | None:
        """Returns the power of two that brings gradients into the range of fp16; None if the model does not run in fp16.

        Ranks that share the sequences use the same power, because the backward sums their gradients.
        """
        kind = hidden_NH.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if torch.float16 not in (hidden_NH.dtype, autocast):
            return None
        # Non-finite gradients count as 0 here: one bad response must not change the scale of the others.
        square = gradient_NH.square().sum(-1).nan_to_num(0.0, 0.0, 0.0).sum()
        norm = self.layout.sum_over_sequence_ranks(square).sqrt()
        exponent = FP16_EXPONENT - torch.frexp(norm).exponent
        return torch.ldexp(torch.ones_like(norm), exponent.clamp_max(60))

    def _row_coefficients(self, forward: Forward, backward: Backward, rows: AnswerRows, logits_NV: Tensor) -> Tensor:
        """Coefficients `[N, V]` of rows that are not pooled. Stores entropies and log-probs if the first forward did not."""
        with torch.autocast(logits_NV.device.type, enabled=False):
            logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
            entropy_N = None
            if backward.rows == "reasoning" and self.reads:
                if not self._read_first:
                    self._read(rows, logits_NV)
                if "entropy" in self.reads:
                    entropy_N = self.scores.entropy_T[rows.position_N + 1]
            seed_N = position_seeds(self._seeds(forward)[rows.response_N], rows.ordinal_N)
            return self._coefficients(forward, logits_NV, seed_N, rows.token_N, entropy_N=entropy_N)

    def _coefficients(
        self, forward: Forward, logits_NV: Tensor, seed_N: Tensor, token_N: Tensor | None = None, **more: Tensor | None
    ) -> Tensor:
        assert forward.backward is not None
        sigma, vocabulary = self.request.config.sigma, self.layout.vocabulary
        rows = Rows(logits_NV, token_N, seed_N, sigma=sigma, vocabulary=vocabulary, **more)
        return self.importance.coefficients(forward.backward, rows)

    def _seeds(self, forward: Forward) -> Tensor:
        """One seed per response for the random signs of a forward, int64 `[B]`."""
        if forward.backward == forward.draw == 0:
            return self._seed_B
        return position_seeds(self._seed_B, torch.full_like(self._seed_B, forward.backward or 0), forward.draw)

    def _read(self, rows: AnswerRows, logits_NV: Tensor) -> None:
        """Stores the entropies and log-probs that the importance needs, at the sampling temperature, in `scores`."""
        vocabulary, temperature = self.layout.vocabulary, self.request.temperature
        with torch.autocast(logits_NV.device.type, enabled=False):
            sampled_NV = logits_NV if temperature == 1 else logits_NV / temperature
            at_N = rows.position_N + 1
            if "entropy" in self.reads:
                self.scores.entropy_T[at_N] = vocabulary.entropy(sampled_NV)
            if "log_prob" in self.reads:
                self.scores.log_prob_T[at_N] = vocabulary.log_prob(sampled_NV, rows.token_N)

    def _pools(self, backward: Backward) -> bool:
        """Whether the backward starts from one averaged row per response."""
        return backward.rows == "probe" and self.request.probe != "answer_joint"

    def _receive(self, backward: int | None, gradient: Tensor, embedding: Tensor) -> None:
        if self._scale is not None:
            gradient = gradient.float() / self._scale
        score_N = self.importance.score(gradient, embedding).flatten()[self._held_N]
        self.scores.score_KT[backward, self._held_place_N] += score_N


def importance_of_scores(request: Request, packed: Packed, scores: Scores) -> Tensor:
    """Importance per packed token, float32 `[T]`, on the CPU; 0 outside the reasoning. `scores` are the sums over ranks."""
    importance, reasoning_T = request.importance_object, packed.reasoning_T
    if importance.copies:  # which give the scores later
        return torch.zeros(len(reasoning_T))
    all_NT, count = scores.all_NT.cpu(), len(scores.score_KT)
    length_B = packed.offsets.diff()
    keep_BL = torch.arange(max([1, *length_B.tolist()])) < length_B[:, None]

    def padded(values: Tensor) -> Tensor:
        full = values.new_zeros(*values.shape[:-1], *keep_BL.shape)
        full[..., keep_BL] = values
        return full

    seed_B = response_seeds(packed.token_T, packed.response_T, len(length_B), request.seed)
    score_KT = all_NT[:count] / request.config.num_draws
    seed_T = position_seeds(seed_B[packed.response_T], packed.place_T)
    readings = {name: padded(values_T) for name, values_T in zip(scores.readings, all_NT[count:], strict=True)}
    parts = Parts(padded(score_KT), padded(reasoning_T), padded(seed_T), readings, request.config.sigma)
    return torch.where(reasoning_T, importance.combine(parts)[keep_BL].float(), 0.0)
