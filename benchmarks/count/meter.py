"""A meter of FLOPs, live bytes and collectives of the operations that PyTorch runs, for real or fake tensors."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

Numbers = defaultdict[str, defaultdict[str, float]]


def _attention(products: int, first: int) -> Callable[..., int]:
    """Return the FLOPs of causal attention: `products` of two matrices, half of each, with the query as argument `first`."""

    def formula(*args: Any, **_: Any) -> int:
        query, key = args[first : first + 2]
        batch, heads, length, size = query.shape
        return int(products * batch * heads * length * key.shape[-2] * size)  # half of 2 x products x length^2

    return formula


def _grouped(rows: Tensor, weights: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    # Rows by experts, or the gradient of the weights: two matrices whose common dimension is that of rows.
    return 2 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1]


_aten = torch.ops.aten
KERNELS = "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"
FORMULAS = {
    **flop_registry,
    **{getattr(_aten, f"_scaled_dot_product_{kernel}"): _attention(2, 0) for kernel in KERNELS},
    **{getattr(_aten, f"_scaled_dot_product_{kernel}_backward"): _attention(5, 1) for kernel in KERNELS},
}
if hasattr(_aten, "_grouped_mm"):
    FORMULAS[_aten._grouped_mm] = _grouped


class Meter(TorchDispatchMode):
    """Counts FLOPs, bytes of storages until they are freed, and collectives inside of `with`, as sections of `shapes.Counts`.

    Storages that existed before count nothing, nor does scratch memory that a kernel allocates and frees within one operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0.0
        self.seen = WeakIdKeyDictionary()  # storage -> [bytes]
        self.numbers: Numbers = defaultdict(lambda: defaultdict(float))
        self.begin(None)

    def begin(self, phase: str | None, part: str = "first layer") -> None:
        """Start a phase; what runs in None is not noted."""
        self.phase, self.start = phase, self.live
        self.at(part)

    def at(self, part: str) -> None:
        self.part = part
        self._note_peak()

    def _note_peak(self) -> None:
        if self.phase is not None:
            parts = self.numbers[self.phase]
            parts[self.part] = max(parts[self.part], self.live - self.start)

    def __enter__(self) -> "Meter":
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2 frees and allocates gathered weights so
            result = self._resize(storage, size)
            if storage in self.seen:
                self._set(self.seen[storage], float(size))
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _set(self, held: list[float], size: float) -> None:
        self.live += size - held[0]
        held[0] = size
        self._note_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local tensors come here again
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self.seen:
                self.seen[storage] = [float(storage.nbytes())]  # it was there before
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(leaf.is_meta and not isinstance(leaf, FakeTensor) for leaf in leaves):
            return result  # DTensor runs operations on tensors of the whole shape, to learn the shape of their result
        if self.phase is not None and (formula := FORMULAS.get(func._overloadpacket)) is not None:
            self.numbers["flops"][self.phase] += formula(*args, **(kwargs or {}), out_val=result)
        if self.phase is not None and func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.numbers["collectives"][self.phase] += 1
            self.numbers["sent"][self.phase] += max((one.nbytes for one in tensors), default=0)
        for tensor in leaves:
            storage = tensor.untyped_storage()
            if storage not in self.seen:
                self.seen[storage] = held = [0.0]
                weakref.finalize(storage, self._set, held, 0.0)
                self._set(held, float(storage.nbytes()))
        return result
