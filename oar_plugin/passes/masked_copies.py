"""Runs the masked copies of OAR-P through a HuggingFace causal LM, plain or wrapped by FSDP.

A masked copy is a response with a unit of tokens replaced. All copies of a response have the same length, so a forward runs a
group of them without padding. If the cache keeps keys and values of all positions, a group computes only the tokens from its
first replaced one; a forward without replacements fills the cache. Only the rows of the answer are projected to logits.
Shape suffixes: K copies, m answer rows of one copy, R replaced positions.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import named
from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import Unit, importance_of_units, replacement_seeds, sample_replacements, units
from oar_plugin.credit.probe import Probe
from oar_plugin.output import logger
from oar_plugin.passes.request import Request
from oar_plugin.passes.rows import CHUNK, Project, read_logits
from oar_plugin.passes.taps import ModelTaps, Tap, UnsupportedModelError, to_device, unwrapped
from oar_plugin.passes.trial import TOKENS, change, rounding, trial_tokens

ROW_VALUES = 2**28  # most answer logits of one forward, unless a single copy has more; computed in chunks of rows
WASTE = 1 / 16  # most of `max_tokens` that a forward spends on tokens before the first replaced one of their copy
Result = TypeVar("Result")
Reduce = Callable[[Project, Tensor], Result]
_SHARES_PREFIX: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class Candidate:
    """A response to score. Positions in a unit count from the start of the response."""

    token_T: Tensor  # int64, prompt and response up to the last token of the answer, on the model's device
    prompt_length: int
    answer_start: int  # index in `token_T` of the first token of the answer

    @classmethod
    def of(cls, token_T: Tensor, segments_L: Tensor) -> "Candidate":
        """`token_T`: prompt and response. `segments_L`: a `Segment` per token of the response, which must have an answer."""
        prompt_length = len(token_T) - len(segments_L)
        answer = (segments_L == Segment.ANSWER).nonzero()[:, 0]
        return cls(token_T[: prompt_length + int(answer[-1]) + 1], prompt_length, prompt_length + int(answer[0]))

    def rows(self, probe: Probe) -> tuple[int, int]:
        """The first of the probe's rows, and the end of their range. The logits of row `t` predict token `t + 1`."""
        first = self.answer_start - 1
        return first, first + 1 if probe == "last" else len(self.token_T) - 1


class MaskedCopies:
    """Scores units of responses, with at most `max_tokens` per forward. `module` must be in eval mode."""

    def __init__(self, module: nn.Module, request: Request, max_tokens: int) -> None:
        self.module, self.request, self.max_tokens = module, request, max_tokens
        self.tokens = 0  # computed so far
        model: Any = unwrapped(module)
        config, base = model.config, getattr(model, "get_base_model", lambda: model)()  # PEFT's forward hands all on
        self._cache_name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
        self._vocabulary: int = config.get_text_config().vocab_size
        self._shares_prefix = hasattr(config.get_text_config(), "num_hidden_layers") and all(
            type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers
        )

    def importance(
        self, wanted: Mapping[int, tuple[Tensor, Tensor]], max_over_ranks: Callable[[int], int]
    ) -> dict[int, Tensor]:
        """Returns the importance of some responses by row, float32 `[L]` each.

        `wanted` has by row the tokens of prompt and response, on the model's device, and the response's segments, on the CPU.
        `max_over_ranks` returns a count's maximum over all ranks: under FSDP, all must run equal numbers of forwards.
        """
        nothing = torch.zeros(0, dtype=torch.long, device=next(self.module.parameters()).device)
        self._try_prefix(next((token_T for token_T, _ in wanted.values()), nothing), max_over_ranks)
        span, copies = self.request.config.perturbation.span, dict[int, tuple[Candidate, list[Unit]]]()
        for row, (token_T, segments_L) in wanted.items():
            unit_list = units((segments_L == Segment.REASONING).tolist(), span)
            copies[row] = Candidate.of(token_T, segments_L), unit_list
        forwards = self.forwards(list(copies.values()))
        idle, importance = max_over_ranks(forwards) - forwards, dict[int, Tensor]()
        for row, (candidate, unit_list) in copies.items():
            importance[row] = importance_of_units(unit_list, self.run(candidate, unit_list), len(wanted[row][1]))
        for _ in range(idle):  # other ranks run more forwards
            self._forward(nothing.new_zeros(1, 1), torch.zeros(1, dtype=torch.long), None, _projected)
        return importance

    def _try_prefix(self, token_T: Tensor, max_over_ranks: Callable[[int], int]) -> None:
        """Compares a copy behind a cached prefix with a whole copy, once per model. If they differ, copies run whole.

        UnsupportedModelError: a forward with a cache fails. Afterwards a sharded model may not run again.
        """
        model = unwrapped(self.module)
        if self._shares_prefix and model not in _SHARES_PREFIX:
            middle, cache, token = TOKENS // 2, DynamicCache(), self.request.replacement_token
            pair_2T = trial_tokens(token_T).repeat(2, 1)
            pair_2T[1, middle] = (pair_2T[0, middle] + 1) % self._vocabulary if token is None else token
            row_N = torch.arange(TOKENS + middle, 2 * TOKENS)
            try:
                whole_NV = self._forward(pair_2T, row_N, cache, _projected)
                behind_NV = self._forward(pair_2T[:, middle:], row_N - TOKENS, _shared(cache, middle), _projected)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                fault = f"{type(model).__name__}: its forward with a cache, for masked copies, fails ({error!r})"
                allowed = f"algorithm.oar.importance={named(copies=False)}"
                raise UnsupportedModelError(f"{fault}; allowed: {allowed}") from error
            differs = change(behind_NV, whole_NV, rounding(whole_NV))
            if differs:
                message = "%s: logits behind a cached prefix are wrong: %s; masked copies run whole, which takes longer"
                logger.warning(message, type(model).__name__, differs)
            _SHARES_PREFIX[model] = not max_over_ranks(int(bool(differs)))
        self._shares_prefix = self._shares_prefix and _SHARES_PREFIX[model]

    def forwards(self, wanted: Sequence[tuple[Candidate, list[Unit]]]) -> int:
        """Number of forwards that `run` needs for these responses and units."""
        return sum(1 + len(self._groups(candidate, unit_list)) for candidate, unit_list in wanted)

    def run(self, candidate: Candidate, unit_list: list[Unit]) -> list[float]:
        """Scores of the units of one response, in order (`oar_plugin.credit.importance.oar_p.divergence`)."""
        start, token = candidate.prompt_length, self.request.replacement_token
        masked = [start + t for unit in unit_list for t in unit]
        # No row predicts the first token of the sequence, so this token is not replaced.
        drawn_R = torch.arange(max(1, min(masked)), max(masked) + 1) if token is None else torch.arange(0)
        cache = DynamicCache() if self._shares_prefix else None
        row_first, row_end = candidate.rows(self.request.probe)
        row_N, device = torch.cat([torch.arange(row_first, row_end), drawn_R - 1]), candidate.token_T.device
        answer = row_end - row_first

        def noise_free(project: Project, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
            reference = self._outcomes(project, hidden_NH[None, :answer], candidate)[0]
            if token is not None:
                return reference, torch.full_like(candidate.token_T, token)
            return reference, self._drawn(project, hidden_NH[answer:], candidate, drawn_R)

        def of_copies(project: Project, hidden_NH: Tensor) -> Tensor:
            return self._outcomes(project, hidden_NH.unflatten(0, (-1, answer)), candidate)

        reference, replacement_T = self._forward(candidate.token_T[None, :row_end], row_N, cache, noise_free)

        groups, scores_K = self._groups(candidate, unit_list), list[Tensor]()
        for group in groups:
            begin = start + unit_list[group[0]][0] if cache is not None else 0
            copy_KT = candidate.token_T[begin:row_end].repeat(len(group), 1)
            pairs = [(place, start + t) for place, index in enumerate(group) for t in unit_list[index]]
            place_M, position_M = to_device(device, *torch.tensor(pairs).T)
            copy_KT[place_M, position_M - begin] = replacement_T[position_M]
            rows_Km = torch.arange(len(group))[:, None] * copy_KT.shape[1] + torch.arange(row_first, row_end) - begin
            outcome_K = self._forward(copy_KT, rows_Km.flatten(), _shared(cache, begin), of_copies)
            scores_K.append(divergence(reference, outcome_K, self.request.probe))
        # In the order of `unit_list`. The CPU waits for the device here only.
        return torch.cat(scores_K).cpu()[torch.tensor(list(chain(*groups))).argsort()].tolist()

    def _drawn(self, project: Project, hidden_RH: Tensor, candidate: Candidate, position_R: Tensor) -> Tensor:
        """`token_T` with other tokens at `position_R`, drawn from the logits that predict them, int64 `[T]`."""
        token_T = candidate.token_T.clone()
        (position_R,) = to_device(token_T.device, position_R)
        seed_R = replacement_seeds(candidate.token_T, position_R, self.request.seed)

        def draw(logits_NV: Tensor, chosen: slice) -> None:
            here_N = position_R[chosen]
            token_T[here_N] = sample_replacements(logits_NV, candidate.token_T[here_N], seed_R[chosen])

        read_logits(project, hidden_RH, draw)
        return token_T

    def _groups(self, candidate: Candidate, unit_list: list[Unit]) -> list[list[int]]:
        """Splits units into groups that share a forward. A group has indices in `unit_list`, sorted by position."""
        order = sorted(range(len(unit_list)), key=lambda i: unit_list[i])
        row_first, row_end = candidate.rows(self.request.probe)
        most = max(1, ROW_VALUES // ((row_end - row_first) * self._vocabulary))
        groups, begin, size, waste = list[list[int]](), 0, 0, 0
        for index in order:
            start = candidate.prompt_length + unit_list[index][0] if self._shares_prefix else 0
            waste += start - begin
            if not groups or len(groups[-1]) == size or waste > WASTE * self.max_tokens:
                groups.append([])
                begin, waste, size = start, 0, max(1, min(most, self.max_tokens // (row_end - start)))
            groups[-1].append(index)
        return groups

    def _forward(self, token_KT: Tensor, row_N: Tensor, cache: DynamicCache | None, reduce: Reduce[Result]) -> Result:
        """`reduce(projection, hidden_NH)` of rows `row_N` of the flat batch. Extends an empty `cache`, reads a filled one."""
        self.tokens += token_KT.numel()
        results: list[Result] = []
        with torch.no_grad(), ModelTaps(self.module) as taps:
            (row_N,) = to_device(token_KT.device, row_N)
            taps.tap = Tap(row_N, lambda project, hidden_NH: results.append(reduce(project, hidden_NH)))
            # Without positions: the model counts its own, which need not begin with 0.
            self.module(input_ids=token_KT, use_cache=cache is not None, **{self._cache_name: cache})
        return results[0]

    def _outcomes(self, project: Project, hidden_KmH: Tensor, candidate: Candidate) -> Tensor:
        """Log-distribution of the answer per copy, float64 `[K, V]`; for `answer_joint` its mean log-probability, `[K]`."""
        joint, length = self.request.probe == "answer_joint", hidden_KmH.shape[1]
        token_m, outcomes = candidate.token_T[candidate.answer_start :], list[Tensor]()

        def summed(hidden_KnH: Tensor, token_n: Tensor) -> Tensor:
            logits_KnV = project(hidden_KnH.flatten(0, 1)).unflatten(0, hidden_KnH.shape[:2])
            wide_KnV = logits_KnV.to(torch.promote_types(logits_KnV.dtype, torch.float32))
            if not joint:
                return wide_KnV.sum(1)
            chosen_Kn = wide_KnV.gather(-1, token_n[None, :, None].expand(len(wide_KnV), -1, 1))[..., 0]
            return (chosen_Kn.double() - wide_KnV.logsumexp(-1).double()).sum(1)

        # Logits of one chunk of rows at a time: of several copies, or of a part of one.
        for some_KmH in hidden_KmH.split(max(1, CHUNK // length)):
            parts = zip(some_KmH.split(CHUNK, 1), token_m.split(CHUNK), strict=False)  # `last`: one row
            mean_K = functools.reduce(Tensor.add_, starmap(summed, parts)) / length
            outcomes.append(mean_K if joint else log_distribution(mean_K))
        return torch.cat(outcomes)


def _projected(project: Project, hidden_NH: Tensor) -> Tensor:
    return project(hidden_NH)


class _PrefixLayer(DynamicLayer):
    """Cached keys and values of a prefix `[1, heads, P, D]`, which all copies share. Those of the copies are not kept."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = (one.expand(len(key_states), -1, -1, -1) for one in (self.keys, self.values))
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def _shared(cache: DynamicCache | None, length: int) -> DynamicCache | None:
    """The first `length` positions of `cache`, for any number of copies."""
    if cache is None:
        return None
    prefix = DynamicCache()
    prefix.layers = [_PrefixLayer(layer.keys[..., :length, :], layer.values[..., :length, :]) for layer in cache.layers]
    return prefix
