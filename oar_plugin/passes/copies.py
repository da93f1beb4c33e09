"""Masked copies as rows of a host's own forward: they work wherever log-probs do.

The read gives the outcomes without replacements, and with `replacement=sampled` the tokens to put in. Then copies run, in
chunks, shortened to the end of the answer; an outcome becomes a score at once. Shape suffix U: units, each with one copy.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import Forward
from oar_plugin.credit.importance.oar_p import divergence
from oar_plugin.credit.noise import position_seeds, response_seeds
from oar_plugin.credit.perturbation import sample_replacements
from oar_plugin.credit.probe import AnswerRows, Probe, answer_rows, pool
from oar_plugin.passes.gradient import Layout, Packed, pooled
from oar_plugin.passes.host import Host, MicroBatch, Work
from oar_plugin.passes.prediction import Units
from oar_plugin.passes.request import Request
from oar_plugin.passes.rows import Project, read_logits
from oar_plugin.passes.taps import Tap, to_device

CHUNK = 256  # copies whose tokens are held at once


class Outcomes:
    """Reads the outcomes of a micro-batch's responses with an answer; `wanted_B` (bool) may name some of them."""

    def __init__(self, packed: Packed, layout: Layout, probe: Probe, wanted_B: Tensor | None = None) -> None:
        response_T, count = packed.response_T, len(packed.offsets) - 1
        answer_T = packed.segments_T == Segment.ANSWER
        answer_T &= True if wanted_B is None else wanted_B[response_T]
        rows = answer_rows(answer_T, response_T, packed.token_T, count, probe)
        rows = rows.select(layout.local_T[rows.position_N] >= 0)
        self.position_N, table_5N = to_device(layout.device, layout.local_T[rows.position_N], rows.table_5N)
        self._rows, self._layout, self._joint = AnswerRows(table_5N, count), layout, probe == "answer_joint"

    def read(self, project: Project, hidden_NH: Tensor) -> Tensor:
        """This rank's columns of the log-distributions, float64 `[B, V]`; for `answer_joint` mean log-probabilities, `[B]`."""
        vocabulary = self._layout.vocabulary
        if not self._joint:
            return vocabulary.log_softmax(pooled(project, hidden_NH, self._rows, self._layout).double())
        parts = list[Tensor]()

        def add(logits_NV: Tensor, chosen: slice) -> None:
            rows = self._rows.select(chosen)
            quarters = (of.split(max(1, len(rows) // 4)) for of in (logits_NV, rows.token_N))  # float64 is large
            log_prob_N = torch.cat([vocabulary.log_prob(z.double(), own) for z, own in zip(*quarters, strict=True)])
            parts.append(pool(log_prob_N[:, None], rows)[:, 0])

        read_logits(project, hidden_NH, add)
        return self._layout.sum_over_sequence_ranks(torch.stack(parts).sum(0))


class CopyRows:
    """The copies of a batch: one of each unit of `labelled_T` (bool `[T]`)."""

    def __init__(self, request: Request, packed: Packed, labelled_T: Tensor) -> None:
        self.request, self.packed, self._labelled_T = request, packed, labelled_T
        self._at_Us = (units := Units(packed, request.config.perturbation.span, labelled_T)).at_Us
        self._row_U = torch.arange(len(units.count_B)).repeat_interleave(units.count_B)
        self._copied_B = units.count_B > 0
        self._reference: dict[int, Tensor] = {}  # outcome of each row without replacements, where there are logits
        self._drawn = list[tuple[Tensor, Tensor]]()  # positions, tokens
        self._scores = list[tuple[list[int], Tensor]]()  # numbers of units, scores

    @cached_property
    def _end_B(self) -> Tensor:
        """The end of each copy: after the token that the probe's last row predicts. 0 without an answer."""
        packed = self.packed
        answer_T = packed.segments_T == Segment.ANSWER
        rows = answer_rows(answer_T, packed.response_T, packed.token_T, len(packed.offsets) - 1, self.request.probe)
        end_B = torch.zeros(rows.num_responses, dtype=torch.long)
        return end_B.scatter_reduce(0, rows.response_N, packed.place_T[rows.position_N] + 2, "amax")

    @cached_property
    def _seed_B(self) -> Tensor:
        """Seeds of draws: hashes of each sequence up to the end of its answer."""
        packed, count = self.packed, len(self.packed.offsets) - 1
        answer_T = packed.segments_T == Segment.ANSWER
        at_answer = 0, packed.response_T[answer_T], packed.place_T[answer_T]
        last_B = torch.full((count,), -1).scatter_reduce(*at_answer, "amax")
        until_T = packed.place_T <= last_B[packed.response_T]
        return response_seeds(packed.token_T[until_T], packed.response_T[until_T], count, self.request.seed)

    def tap(self, rows: Sequence[int], packed: Packed, layout: Layout) -> Tap | None:
        """What a forward of these rows, `packed`, reads for their copies; None: nothing."""
        copied_b, at_t = self._copied_B[list(rows)], self.packed.at(rows)
        if not copied_b.any():
            return None
        outcomes = Outcomes(packed, layout, self.request.probe, copied_b)
        drawn_t = self._labelled_T[at_t] & (packed.place_T > 0) & (self.request.replacement_token is None)
        drawn_R = drawn_t.nonzero()[:, 0]
        drawn_R = drawn_R[layout.local_T[drawn_R - 1] >= 0]
        seed_R = position_seeds(self._seed_B[list(rows)][packed.response_T[drawn_R]], packed.place_T[drawn_R])
        drawn = layout.local_T[drawn_R - 1], packed.token_T[drawn_R], seed_R
        local_R, token_R, seed_R = to_device(layout.device, *drawn)
        count = len(outcomes.position_N)

        def probe(project: Project, hidden_NH: Tensor) -> None:
            outcome_b = outcomes.read(project, hidden_NH[:count])
            self._reference |= {row: outcome_b[i].clone() for i, row in enumerate(rows) if copied_b[i]}

            def draw(logits_NV: Tensor, chosen: slice) -> None:
                some = logits_NV, token_R[chosen], seed_R[chosen], layout.vocabulary
                self._drawn.append((at_t[drawn_R[chosen]], sample_replacements(*some)))

            if self.request.replacement_token is None:
                read_logits(project, hidden_NH[count:], draw)

        return Tap(torch.cat([outcomes.position_N, local_R]), probe)

    def run(self, host: Host) -> Tensor:
        """Importance per token, float32 `[T]`; 0 at tokens without a copy."""
        importance_T, there_Us = torch.zeros(len(self.packed.token_T)), self._at_Us >= 0
        # A copy with a more likely answer has not shown that its unit helped.
        each_U = self.scores(host).clamp_min(0.0) / there_Us.sum(1)
        importance_T[self._at_Us[there_Us]] = each_U[:, None].expand_as(there_Us)[there_Us]
        return importance_T

    def scores(self, host: Host) -> Tensor:
        """The score of each unit, float32 `[U]`, after the read."""
        replacement_T = self._replacements(host)
        start, most = 0, host.largest(len(self._row_U))
        while start < most:
            size = host.whole(min(CHUNK, most - start))
            copies, like = self._copies(range(start, min(start + size, len(self._row_U))), size, replacement_T)
            host.copies(copies, like, self._work(start, copies))
            start += size
        known_2U = torch.zeros(2, len(self._row_U), device=host.device)
        if self._scores:
            (number_u,) = to_device(host.device, torch.tensor([number for held, _ in self._scores for number in held]))
            score_u = torch.cat([score_k.float() for _, score_k in self._scores])
            known_2U[:, number_u] = torch.stack([score_u, torch.ones_like(score_u)])
        score_U, ranks_U = host.share(known_2U).cpu()
        return score_U / ranks_U

    def _replacements(self, host: Host) -> Tensor:
        """What is put in the place of each token, int64 `[T]`, on all ranks that share the rows."""
        if (token := self.request.replacement_token) is not None:
            return torch.full_like(self.packed.token_T, token)
        known_2T = torch.zeros(2, len(self.packed.token_T), dtype=torch.long)
        for at_R, token_R in self._drawn:
            known_2T[:, at_R] = torch.stack([token_R.cpu(), torch.ones_like(at_R)])
        token_T, ranks_T = host.share(known_2T.to(host.device)).cpu()
        return torch.where(ranks_T > 0, token_T // ranks_T.clamp_min(1), self.packed.token_T)

    def _copies(self, numbers: range, size: int, replacement_T: Tensor) -> tuple[Packed, list[int]]:
        """Some copies, and as many more rows as are missing for `size`: the shortest one, which is not read."""
        token_T, begin_B, shortest = self.packed.token_T, self.packed.offsets, int(self.packed.offsets.diff().argmin())
        rows, tokens, segments = [], list[Tensor](), list[Tensor]()
        for number in numbers:
            row = int(self._row_U[number])
            where = slice(int(begin_B[row]), int(begin_B[row] + self._end_B[row]))
            token_t, at_s = token_T[where].clone(), self._at_Us[number]
            token_t[at_s[at_s >= 0] - where.start] = replacement_T[at_s[at_s >= 0]]
            rows.append(row)
            tokens.append(token_t)
            segments.append(self.packed.segments_T[where])
        for _ in range(size - len(numbers)):
            where = slice(*begin_B[shortest : shortest + 2].tolist())
            rows.append(shortest)
            tokens.append(token_T[where])
            segments.append(torch.full_like(token_T[where], int(Segment.OUTSIDE)))
        lengths = torch.tensor([len(token_t) for token_t in tokens])
        return Packed(torch.cat(tokens), torch.cat(segments), pad(lengths.cumsum(0), (1, 0))), rows

    def _work(self, start: int, copies: Packed) -> Work:
        def begin(numbers: Sequence[int], layout: Layout) -> MicroBatch:
            packed, probe = copies.select(numbers), self.request.probe
            outcomes = Outcomes(packed, layout, probe)
            places = [place for place, number in enumerate(numbers) if start + number < len(self._row_U)]
            held = [start + numbers[place] for place in places]
            (place_K,) = to_device(layout.device, torch.tensor(places, dtype=torch.long))

            def score(project: Project, hidden_NH: Tensor) -> None:
                outcome_K = outcomes.read(project, hidden_NH)[place_K]
                if held:
                    reference_K = torch.stack([self._reference[row] for row in self._row_U[held].tolist()])
                    self._scores.append((held, divergence(reference_K, outcome_K, probe, layout.vocabulary)))

            tap = Tap(outcomes.position_N, score, columns=layout.columns)
            return MicroBatch(lambda forward: tap)

        return Work([Forward(None)], begin)
