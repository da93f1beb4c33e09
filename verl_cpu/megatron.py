"""Stand-ins for CUDA and TransformerEngine, with which verl's real Megatron engine runs on a CPU.

All else is real: megatron-core's schedules, parallel states, DDP, tensor- and sequence-parallel linears, recomputation and
pipeline communication (on gloo), the weight conversion of mbridge or Megatron-Bridge, verl's packing and vocabulary-parallel
log-probs. Each stand-in, with its reason, and when it can go:

* `torch.cuda.current_device`, `synchronize`: megatron-core always calls them to place tensors and to wait. When it asks for the
  device.
* `device="cuda"`: a literal in megatron-core's schedules, masks and optimizer. It is replaced in megatron's own view of `torch`
  only; wrapping `torch.zeros` itself breaks transformers' initialisation on the meta device. When megatron-core asks for the
  device.
* CUDA random states: checkpoints save and restore them; here the CPU's are used. When megatron-core asks for the device.
* RMSNorm under sequence parallelism: megatron's wrapper of torch's norm refuses it, and TransformerEngine's needs a GPU. When
  the wrapper accepts it.
* Fused norm and linear: both bridges map weights by the names of TransformerEngine's fused layer. When they map the names of
  megatron-core's local layers.
* Core attention: megatron-core's own supports neither packed sequences nor context parallelism, TransformerEngine's both. When
  megatron-core's does.
* TransformerEngine and modelopt, while Megatron-Bridge is imported: it imports names from them for adapters, distillation and
  quantisation. When it imports them where it uses them. An installed modelopt (verl's extras bring it) stays.
* Streams: Megatron-Bridge wraps the model in DDP on a CUDA stream, and megatron-core copies the numbers of tokens per expert to
  the CPU on one. When they ask for the device.
* `te_general_gemm`: megatron-core 0.16's router reads this name, which it imports from TransformerEngine only. With 0.18.
* Grouped experts: mbridge maps the weights of experts by the names of TransformerEngine's grouped layers. Here each expert is
  computed by itself, with `moe_grouped_gemm=False`. With megatron-core 0.18, whose bridge maps the names of its experts too.
* `nn.Module.cuda`, `Tensor.cuda`: the bridges move the model with them, and megatron-core an index of padded sequences under
  context parallelism. When they ask for the device.

The optimizer has to be megatron-core's ordinary one, without clipping: its distributed optimizer and its clipping take CUDA
tensors only. The config group `cpu/megatron` sets `use_distributed_optimizer=False` and `clip_grad=0`.

A run with these does not test TransformerEngine, flash-attention, NCCL, fused kernels or bf16.
"""

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ABSENT = ("transformer_engine.pytorch", "modelopt.torch.quantization.utils", "modelopt.torch.distill.plugins.megatron")


class _MegatronsTorch(types.ModuleType):
    """`torch` as megatron-core sees it: factories place tensors on the CPU instead of on `cuda`, and pin nothing."""

    FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in self.FACTORIES:
            return found

        def factory(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return found(*args, **kwargs)

        return factory


def _counts_on_cpu(dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Make arrays of the numbers of tokens that ranks exchange, as megatron-core does when it copies them from the GPU."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(counts := getattr(dispatcher, name), Tensor):
            setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert


class _GatherOverContext(torch.autograd.Function):
    """All-gather of `[t, ...]` to `[CP, t, ...]` over context-parallel ranks; its backward sums the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(gathered, x.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank()], None


def zigzag(lengths: list[int], size: int, rank: int) -> Tensor:
    """Return the positions of a padded pack that a context-parallel rank holds: a chunk of both ends of every sequence."""
    mine, start = [], 0
    for length in lengths:
        half = length // size // 2
        mine.append(torch.arange(start + rank * half, start + (rank + 1) * half))
        mine.append(torch.arange(start + length - (rank + 1) * half, start + length - rank * half))
        start += length
    return torch.cat(mine)


class DenseCoreAttention(nn.Module):
    """Causal attention over packed `[t, n, h]` or padded `[s, b, n, h]` sequences; keys and values are gathered over CP.

    It behaves like TransformerEngine's: in eval mode it keeps nothing for a backward; in train mode it applies dropout with a
    probability that it holds.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        from megatron.core import parallel_state

        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
            return self._packed(query, key, value, lengths).flatten(1)
        # Padding is on the right, where the causal mask hides it from the tokens before it.
        length = [query.shape[0] * parallel_state.get_context_parallel_world_size()]
        rows = [self._packed(query[:, i], key[:, i], value[:, i], length) for i in range(query.shape[1])]
        return torch.stack(rows, 1).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        from megatron.core import parallel_state

        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        position = torch.arange(sum(lengths))
        if size > 1:
            group = parallel_state.get_context_parallel_group()
            order = torch.cat([zigzag(lengths, size, r) for r in range(size)]).argsort()
            key, value = (_GatherOverContext.apply(x, group).flatten(0, 1)[order] for x in (key, value))
            position = zigzag(lengths, size, rank)
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        everywhere = torch.arange(sum(lengths))
        mask = (sequence[position][:, None] == sequence) & (position[:, None] >= everywhere)
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scores = torch.einsum("qnh,knh->nqk", query, key) * (self.scale or query.shape[-1] ** -0.5)
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = torch.einsum("nqk,knh->qnh", nn.functional.dropout(p, self.attention_dropout, self.training), value)
        return attended if self.training else attended.detach()


class RMSNorm(nn.Module):
    """RMSNorm of a slice of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _layer_spec(config: Any) -> Any:
    """Return the spec of one layer, whose parameters have the names of TransformerEngine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    class LayerNormColumnParallelLinear(ColumnParallelLinear):  # Megatron-Bridge recognises the class by this name
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self._eps = config.layernorm_epsilon

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            normed = nn.functional.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self._eps)
            return super().forward(normed, *args, **kwargs)

    experts = config.num_moe_experts
    spec = get_gpt_layer_local_spec(experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    attention = layer.self_attention.submodules
    attention.core_attention, attention.linear_qkv = DenseCoreAttention, LayerNormColumnParallelLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    mlp = getattr(layer.mlp, "keywords", vars(layer.mlp))["submodules"]  # a `partial` since megatron-core 0.18
    if experts is None:
        mlp.linear_fc1 = LayerNormColumnParallelLinear
    else:
        layer.pre_mlp_layernorm = RMSNorm
        if isinstance(mlp.experts, ModuleSpec):  # megatron-core 0.16, with mbridge
            mlp.experts.module = _grouped_experts()
    return spec


def _grouped_experts() -> type[nn.Module]:
    """Return megatron-core's experts, one after the other, whose parameters have the names of TransformerEngine's."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    class GroupedExperts(SequentialMLP):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.linear_fc1, self.linear_fc2 = nn.Module(), nn.Module()
            experts = list(self._modules.pop("local_experts"))
            for i, expert in enumerate(experts):
                self.linear_fc1.register_parameter(f"weight{i}", expert.linear_fc1.weight)
                self.linear_fc2.register_parameter(f"weight{i}", expert.linear_fc2.weight)
            self.local_experts = experts  # a list: its parameters are registered once

    return GroupedExperts


def admit_what_there_is(config: Any) -> None:
    """Allow fp32 in verl's Megatron engine, and select the bridge that is installed.

    On a CPU bf16 is slow, and in fp32 the actor can be compared with the rollout.
    """
    engine_config = config.McoreEngineConfig
    check = engine_config.__post_init__

    def post_init(self: Any) -> None:
        wanted = self.dtype
        object.__setattr__(self, "dtype", "bfloat16")
        check(self)
        object.__setattr__(self, "dtype", wanted)
        if not has_megatron_bridge():
            object.__setattr__(self, "vanilla_mbridge", True)

    engine_config.__post_init__ = post_init


def stand_in(engine: Any) -> None:
    """Put the stand-ins in place for the module of verl's engine, and register the engine for the device ``cpu``."""
    from verl.workers.engine.base import EngineRegistry

    install()
    for name in ("load_megatron_model_to_gpu", "offload_megatron_model_to_cpu"):
        setattr(engine, name, lambda *args, **kwargs: None)
    EngineRegistry.register("language_model", "megatron", device="cpu")(engine.MegatronEngineWithLMHead)


def importable(module: str) -> bool:
    """Return whether Python finds a module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing or broken
        return False


def has_megatron_bridge() -> bool:
    """Return whether Megatron-Bridge is installed to convert weights; without it mbridge does (`vanilla_mbridge=True`)."""
    return importable("megatron.bridge")


class _Absent(types.ModuleType):
    """A module that has every name, for packages that are imported and not used."""

    Linear = nn.Linear  # a base class in Megatron-Bridge

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)


@contextlib.contextmanager
def _absent_packages() -> Iterator[None]:
    """Stand in for the packages of `ABSENT` while Megatron-Bridge is imported, and no longer: other libraries look for these
    packages to learn what the machine can do."""
    absent = [name for name in ABSENT if not importable(name.split(".")[0])]
    stubs = {".".join(name.split(".")[: i + 1]): _Absent(name) for name in absent for i in range(name.count(".") + 1)}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


def _stand_in_for_layers() -> None:
    """Replace TransformerEngine's layers in both bridges."""
    import megatron.core.transformer.transformer_block

    megatron.core.transformer.transformer_block.LayerNormImpl = RMSNorm
    if has_megatron_bridge():
        # Before the stubs: megatron-core uses TransformerEngine's layers where it can import them.
        import megatron.core.models.hybrid.hybrid_layer_specs

        with _absent_packages():
            import megatron.bridge.models.gpt_provider
            import megatron.bridge.training.utils.train_utils
        import megatron.training.models.dist_utils

        megatron.bridge.models.gpt_provider.transformer_engine_layer_spec = _layer_spec
        seen = _MegatronsTorch("torch")
        setattr(seen, "cuda", torch.cpu)  # noqa: B010  it has streams as well
        megatron.training.models.dist_utils.torch = seen
    if importable("mbridge"):
        import mbridge.core.llm_bridge

        # mbridge looks for a parameter named vp_stage.
        mbridge.core.llm_bridge.get_gpt_decoder_block_spec = lambda config, use_transformer_engine=True, vp_stage=None: (
            _layer_spec(config)
        )


def install() -> None:
    """Put the stand-ins in place for megatron-core and its bridges. The second call does nothing.

    Raises:
        RuntimeError: torch sees a GPU, which needs no stand-ins.
    """
    if torch.cuda.is_available():
        raise RuntimeError("torch sees a GPU, which needs no stand-ins")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # jit_fuser of megatron-core is torch.compile
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # sequence parallelism requires it
    if isinstance(
        getattr(sys.modules.get("megatron.core.optimizer.distrib_optimizer"), "torch", None), _MegatronsTorch
    ):
        return
    _stand_in_for_layers()
    import megatron.core.distributed.finalize_model_grads
    import megatron.core.optimizer.distrib_optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args: None
    random.CudaRNGStatesTracker.add = lambda self, name, seed: setattr(self, "_is_initialized", True)
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    seen = _MegatronsTorch("torch")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module.__dict__.get("torch") is torch:
            setattr(module, "torch", seen)  # noqa: B010  a module has no such attribute, says mypy
    if not hasattr(moe_utils, "te_general_gemm"):
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = torch.cpu.Stream()
    dispatcher._maybe_dtoh_and_synchronize = _counts_on_cpu
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
