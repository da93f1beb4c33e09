"""Cached keys and values of what the masked copies of a response share: the tokens before the first replaced one.

For a HuggingFace causal LM, plain or wrapped by FSDP, that keeps keys and values of all positions.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from oar_plugin.credit.importance import named
from oar_plugin.output import logger
from oar_plugin.passes.taps import ModelTaps, Tap, UnsupportedModelError, unwrapped
from oar_plugin.passes.trial import TOKENS, change, rounding, trial_tokens

WASTE = 1 / 16  # largest share of `max_tokens` that a forward computes although a longer prefix would have it
WORKS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a copy behind a cached prefix gives what a whole copy gives, of models that were tried."""


class Prefixes:
    """Caches of a model, and whether it works with them."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._model = module, unwrapped(module)
        config: Any = self._model.config
        base: Any = getattr(self._model, "get_base_model", lambda: self._model)()  # PEFT's forward hands all on
        self._name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
        self._vocabulary: int = config.get_text_config().vocab_size
        self._keeps_all = hasattr(config.get_text_config(), "num_hidden_layers") and all(
            type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers
        )

    def usable(self, token_T: Tensor, replacement_token: int | None, max_over_ranks: Callable[[int], int]) -> bool:
        """Whether copies may run behind a prefix. The first call for a model tries it: all ranks make this call together.

        UnsupportedModelError: a forward with a cache fails. Afterwards a sharded model may not run again.
        """
        if self._keeps_all and self._model not in WORKS:
            middle, cache = TOKENS // 2, DynamicCache()
            pair_2T = trial_tokens(token_T).repeat(2, 1)
            other = (pair_2T[0, middle] + 1) % self._vocabulary
            pair_2T[1, middle] = other if replacement_token is None else replacement_token
            row_N = torch.arange(TOKENS + middle, 2 * TOKENS, device=token_T.device)
            try:
                whole_NV = self._logits(pair_2T, row_N, cache)
                behind_NV = self._logits(pair_2T[:, middle:], row_N - TOKENS, _shared(cache, middle))
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                fault = f"{type(self._model).__name__}: its forward with a cache, for masked copies, fails ({error!r})"
                allowed = f"algorithm.oar.importance={named(copies=False)}"
                raise UnsupportedModelError(f"{fault}; allowed: {allowed}") from error
            differs = change(behind_NV, whole_NV, rounding(whole_NV))
            if differs:
                message = "%s: logits behind a cached prefix are wrong: %s; masked copies run whole, which takes longer"
                logger.warning(message, type(self._model).__name__, differs)
            WORKS[self._model] = not max_over_ranks(int(bool(differs)))
        return self._keeps_all and WORKS[self._model]

    def of(self, token_T: Tensor) -> DynamicCache:
        """Runs the model over the tokens and returns what it cached."""
        cache = DynamicCache()
        self._logits(token_T[None], torch.arange(0, device=token_T.device), cache)
        return cache

    def behind(self, cache: DynamicCache, length: int) -> dict[str, Any]:
        """Arguments of a forward of copies, any number of them, whose first `length` positions are in `cache`."""
        return {"use_cache": True, self._name: _shared(cache, length)}

    def _logits(self, token_KT: Tensor, row_N: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of rows `row_N` of the flat batch. Extends an empty `cache`, reads a filled one."""
        logits: list[Tensor] = []
        with torch.no_grad(), ModelTaps(self._module, reads_only=True) as taps:
            taps.tap = Tap(row_N, lambda project, hidden_NH: logits.append(project(hidden_NH)))
            # Without positions: the model counts its own, which need not begin with 0.
            self._module(input_ids=token_KT, use_cache=True, **{self._name: cache})
        return logits[0]


def groups_behind(begins: Sequence[int], length: int, max_tokens: int) -> list[list[int]]:
    """Splits copies of one response into groups that share a forward. `begins`: where each one's computation must begin.

    A group has indices into `begins`, sorted by position. It computes the tokens from its smallest position to `length`.
    """
    groups, begin, size, waste = list[list[int]](), 0, 0, 0
    for index in sorted(range(len(begins)), key=begins.__getitem__):
        waste += begins[index] - begin
        if not groups or len(groups[-1]) == size or waste > WASTE * max_tokens:
            groups.append([])
            begin, waste, size = begins[index], 0, max(1, max_tokens // (length - begins[index]))
        groups[-1].append(index)
    return groups


class _PrefixLayer(DynamicLayer):
    """Cached keys and values of a prefix `[1, heads, P, D]`, which all copies share. Those of the copies are not kept."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = (one.expand(len(key_states), -1, -1, -1) for one in (self.keys, self.values))
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def _shared(cache: DynamicCache, length: int) -> DynamicCache:
    prefix = DynamicCache()
    prefix.layers = [_PrefixLayer(layer.keys[..., :length, :], layer.values[..., :length, :]) for layer in cache.layers]
    return prefix
