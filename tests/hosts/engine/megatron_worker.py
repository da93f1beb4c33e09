"""Run by torchrun: verl's real Megatron engine with importance, in several layouts; results go to a file.

CPU stand-ins: see `oar_plugin/hosts/verl/cpu/megatron.py`.
"""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import verl  # noqa: F401  loads the plugin, as in a run

from oar_plugin.hosts.verl.cpu import megatron
from tests.hosts.engine import cases, world
from tests.hosts.engine.launch import differences
from tests.hosts.engine.worker import EVERY, UNEVEN, batch, disturb, gather, kinds, main, random_states, run, train_step

megatron.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402

LAYOUT_WORDS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "sp": {"sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "vpp2": {"virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "padded": {"use_remove_padding": False},
    "full": {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    "selective": {"recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}},
    **{word: {} for word in ("dp2", "vocabulary", "tied")},
}
BYTES = {"tp2": ["fisher", "oar_g", "onward"], "tp2 sp": ["fisher"], "cp2": ["fisher", "fisher joint"]}


def build(
    folder: str,
    host_only: bool = False,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    use_remove_padding: bool = True,
    recompute: dict[str, Any] | None = None,
    **engine: Any,
) -> Any:
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    config = McoreEngineConfig(
        sequence_parallel=sequence_parallel,
        context_parallel_size=context_parallel_size,
        use_remove_padding=use_remove_padding,
        use_distributed_optimizer=False,  # it takes CUDA tensors only
        vanilla_mbridge=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=90 // context_parallel_size,
        override_transformer_config={
            "use_cpu_initialization": True,
            "attention_backend": "auto",
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "sequence_parallel": sequence_parallel,
            **(recompute or {}),
        },
        **engine,
    )
    object.__setattr__(config, "dtype", "float32")  # verl's config admits half precision only
    # megatron-core clips tensors on CUDA only: on a CPU its optimizer steps without clipping.
    optimizer = McoreOptimizerConfig(lr=1e-3, clip_grad=0.0, lr_decay_steps=10, total_training_steps=10)
    cls = EngineRegistry.get_engine_cls("language_model", "megatron")
    if host_only:
        cls = cls.__bases__[1]  # what is registered, less our mixin
    model = HFModelConfig(path=folder, use_remove_padding=use_remove_padding)
    built = cls(model, config, optimizer, CheckpointConfig())
    built.initialize()
    return built


def state(engine: Any) -> dict[str, Any]:
    """Everything that the pass must leave as it was."""
    chunks = engine.module
    named = {f"{i}.{n}": p for i, chunk in enumerate(chunks) for n, p in chunk.named_parameters()}
    modules = {f"{i}.{n}": m for i, chunk in enumerate(chunks) for n, m in chunk.named_modules()}
    buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return {
        "weights": {n: p.detach().clone() for n, p in named.items()},
        "requires_grad": {n: p.requires_grad for n, p in named.items()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in named.items()},
        "grad_buffers": dict(enumerate(buffer.grad_data.clone() for buffer in buffers)),
        "training": {n: m.training for n, m in modules.items()},
        "hooks": {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in modules.items()},
        "config": {i: dict(vars(get_model_config(chunk))) for i, chunk in enumerate(chunks)},
        "optimizer": {
            i: {j: dict(v) for j, v in enumerate(o.optimizer.state.values())} for i, o in enumerate(optimizers)
        },
        **random_states(),
    }


def half_way(engine: Any) -> None:
    """A half-accumulated training gradient: sentinels in DDP's buffers, and a pending `.grad`."""
    for chunk in engine.module:
        for buffer in chunk.buffers:
            buffer.grad_data.fill_(7.0 + dist.get_rank())
        parameter = next(chunk.parameters())
        parameter.grad = torch.full_like(parameter, 3.0)


def score(engine: Any, words: str = "fisher", rows: list[int] = EVERY, packed: bool = True) -> list[dict[str, Any]]:
    """The result on every rank, with how often attention was computed for it: more often with recomputation."""
    half_way(engine)
    attention, forward = megatron.DenseCoreAttention, megatron.DenseCoreAttention.forward
    with mock.patch.object(attention, "forward", autospec=True, side_effect=forward) as counted:
        result = run(engine, rows, packed, look=state, **cases.request(words))
    return gather(result | {"attention": counted.call_count})


def bytes_moved(engine: Any, words: str) -> dict[str, int]:
    """Payload of the all-reduces that the pass adds, by what they carry: of a pass without log-probs, which have their own.

    The model's own reductions are of three dimensions, `[s, b, H]`, and verl's counts are integers or scalars. Each kind is
    counted on the rank that moves most of it.
    """
    moved = {"rows": 0, "vocabulary": 0, "sequence": 0, "scores": 0}
    hidden = engine.tf_config.hidden_size
    original = dist.all_reduce
    looks = []

    def look(engine: Any) -> dict[str, Any]:
        if not looks:  # so far it was the ordinary pass that `run` compares with
            moved.update(dict.fromkeys(moved, 0))
        looks.append(1)
        return {}

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and tensor.dim() in (1, 2) and kwargs["group"].size() > 1:
            widths = {1: "vocabulary", 2: "vocabulary", hidden: "rows"}
            kind = "scores" if tensor.dim() == 1 else widths.get(tensor.shape[1], "sequence")
            moved[kind] += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counted):
        run(engine, look=look, **cases.request(f"{words} only"))
    everywhere = gather(moved)
    return {kind: max(rank[kind] for rank in everywhere) for kind in moved}


def refusals(engine: Any) -> dict[str, str]:
    """What is said of each setting that is not served."""
    from oar_plugin.hosts.verl.megatron import check_chunks

    config, said = get_model_config(engine.module[0]), {}
    for name, value in {
        "num_moe_experts": 4,
        "mtp_num_layers": 1,
        "fp8": "e4m3",
        "overlap_moe_expert_parallel_comm": True,
        "defer_embedding_wgrad_compute": True,
        "cuda_graph_impl": "local",
        "importance": "oar_p",
    }.items():
        try:
            if name == "importance":
                run(engine, look=state, **cases.request(value))
            else:
                with mock.patch.object(config, name, value):
                    check_chunks(engine.module)
        except ValueError as error:
            said[f"{name}={value}"] = str(error)
    return said


def noticed(engine: Any) -> list[str]:
    """Negative control: what `state` says of a pass that leaves a trace of every kind."""
    half_way(engine)
    before = state(engine)
    chunk = engine.module[0]
    chunk.buffers[0].grad_data[0] = 1.0
    get_model_config(chunk).finalize_model_grads_func = print
    optimizer = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])[0]
    disturb(chunk, next(chunk.parameters()), optimizer.optimizer)
    return kinds(differences(before, state(engine)))


def unfrozen(engine: Any) -> list[str]:
    """Negative control for freezing: traces of a pass whose taps leave the parameters as they are."""
    from oar_plugin.passes.tap import Taps

    with mock.patch.object(Taps, "freeze"):
        return kinds(score(engine)[0]["traces"])


def ordinary(engine: Any) -> dict[str, Any]:
    """Log-probs of a batch without a request."""
    with engine.eval_mode():
        output = engine.infer_batch(batch(EVERY)).get("model_output", {})
    return {"class": type(engine).__name__, "log_probs": output["log_probs"].values() if output else None}


def engine_of(folder: str, layout: str, host_only: bool = False) -> Any:
    words = layout.split()
    arguments = {name: value for word in words for name, value in LAYOUT_WORDS[word].items()}
    engine = build(f"{folder}/tied" if "tied" in words else folder, host_only, **arguments)
    if "vocabulary" in words:
        engine.model_config.hf_config.vocab_size = world.COLUMNS
    return engine


def scored(engine: Any, layout: str, asked: list[str]) -> dict[str, Any]:
    rows = UNEVEN[dist.get_rank()] if layout == "dp2" else EVERY
    return {f"{layout} {words}": score(engine, words, rows, "padded" not in layout) for words in asked}


def two(folder: str) -> dict[str, Any]:
    """One layout after the other."""
    out: dict[str, Any] = {}
    for layout, asked in cases.MEGATRON.items():
        engine = engine_of(folder, layout)
        before = ordinary(engine) if layout == "tp2 sp" else None
        out |= scored(engine, layout, asked)
        out |= {f"{layout} {words} bytes": bytes_moved(engine, words) for words in BYTES.get(layout, [])}
        if layout == "tp2 sp":
            out["refusals"] = refusals(engine)
            after = [train_step(engine, EVERY) for _ in range(2)]
            out["noticed"] = noticed(engine)
            fresh = engine_of(folder, layout)
            out["grad_norms"] = [after, [train_step(fresh, EVERY) for _ in range(2)]]
            out["inert"] = [before, ordinary(engine_of(folder, layout, host_only=True))]
        if layout == "pp2":
            out["unfrozen"] = unfrozen(engine)
    return out


def eight(folder: str) -> dict[str, Any]:
    """Tensor, sequence, pipeline and context parallel at once."""
    ((layout, asked),) = cases.EIGHT.items()
    engine = engine_of(folder, layout)
    return {**scored(engine, layout, asked), "bytes": bytes_moved(engine, "fisher")}


if __name__ == "__main__":
    main(megatron=two, eight=eight)
