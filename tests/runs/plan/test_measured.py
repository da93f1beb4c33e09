"""The planner's formulas against FLOPs that torch counts and bytes that small models take on a CPU, in float32."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.machine import peak_bytes
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.passes.plain import gradient_importance
from oar_plugin.passes.request import Request
from oar_plugin.runs.plan.costs import (
    IMPORTANCE,
    LOG_PROB,
    UPDATE,
    activations,
    cache_bytes,
    forward_logits,
    states,
    step_flops,
)
from oar_plugin.runs.plan.setup import Expected, Setup
from tests.runs.plan.conftest import with_overrides

SEQUENCES, PROMPT, RESPONSE, ANSWER = 2, 64, 192, 8
CPU = torch.device("cpu")
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 4096, "max_position_embeddings": 256}
EXPERTS = {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS = {
    "qwen2": {"intermediate_size": 704, "tie_word_embeddings": True},
    "qwen3_moe": {"intermediate_size": 512, "tie_word_embeddings": False, **EXPERTS},
}


@pytest.fixture(params=MODELS)
def model(request):
    config = AutoConfig.for_model(request.param, **SMALL, **MODELS[request.param])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(params=[False, True], ids=["", "recomputation"])
def setup(request, model, fsdp, tmp_path):
    """One GPU, one step of `SEQUENCES` responses, in float32."""
    model.config.save_pretrained(tmp_path)
    if request.param:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    values = {
        **{"trainer.n_gpus_per_node": 1, "data.max_prompt_length": PROMPT, "data.max_response_length": RESPONSE},
        **{"data.train_batch_size": 1, f"{actor}.ppo_mini_batch_size": 1, f"{rollout}.n": SEQUENCES},
        **{f"{rollout}.max_model_len": PROMPT + RESPONSE, f"{rollout}.tensor_model_parallel_size": 1},
        f"{actor}.fsdp_config.dtype": "float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing": request.param,
    }
    return Setup(with_overrides(fsdp, values), Expected(RESPONSE, PROMPT, 1.0, str(tmp_path)))


@pytest.fixture
def token_BL():
    return torch.randint(0, 4096, (SEQUENCES, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(0))


def importance(model, setup, token_BL, on_logits=None):
    segments_BL = torch.full_like(token_BL, Segment.OUTSIDE)
    segments_BL[:, PROMPT:-ANSWER], segments_BL[:, -ANSWER:] = Segment.REASONING, Segment.ANSWER
    model.eval()
    request = Request.from_config(OarConfig.parse({}), 1, RESPONSE)
    gradient_importance(model, request, token_BL, segments_BL, None, on_logits, setup.recompute)


def counted(work):
    """FLOPs; torch counts no attention on a CPU, nor the half that a causal mask leaves out, nor heads shared by groups."""

    def like(query, other):
        return torch.Size((other[0], query[1], *other[2:]))

    def forward(query, key, value, *args, **kwargs):
        return sdpa_flop_count(query, like(query, key), like(query, value)) // 2

    def backward(gradient, query, key, value, *args, **kwargs):
        return sdpa_backward_flop_count(gradient, query, like(query, key), like(query, value)) // 2

    name = "_scaled_dot_product_flash_attention_for_cpu"
    mapping = {getattr(torch.ops.aten, name): forward, getattr(torch.ops.aten, f"{name}_backward"): backward}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    return counter.get_total_flops()


def test_flops(model, setup, token_BL):
    predicted = step_flops(setup)
    if setup.model.experts:
        model.set_experts_implementation("eager")  # torch counts no grouped products
    if not setup.recompute:
        with torch.no_grad():
            assert predicted[LOG_PROB] == pytest.approx(counted(lambda: model(token_BL)), rel=0.01)
    fused = counted(lambda: importance(model, setup, token_BL, lambda logits: None))
    assert predicted[LOG_PROB] + predicted[IMPORTANCE] == pytest.approx(fused, rel=0.03)
    model.train()
    update = counted(lambda: model(token_BL).logits.sum().backward())
    assert predicted[UPDATE] == pytest.approx(update, rel=0.03)


def test_parameters_weights_gradients_and_optimizer(model, setup, token_BL):
    assert setup.model.parameters == sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model(token_BL[:, :8]).logits.sum().backward()
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    taken = [model.parameters(), (p.grad for p in model.parameters()), moments]
    assert states(setup) == tuple(sum(x.nbytes for x in tensors) for tensors in taken)


def test_activations_of_importance(model, setup, token_BL):
    head, layer = activations(setup, trained=False)
    rows = (4 + 8) * SEQUENCES * ANSWER * setup.model.vocab
    predicted = max(head * token_BL.numel() + rows, (layer + 4 * setup.model.hidden) * token_BL.numel())
    assert predicted == pytest.approx(peak_bytes(lambda: importance(model, setup, token_BL), CPU), rel=0.1)


def test_activations_of_an_update(model, setup, token_BL):
    model.train()
    decoder = model.get_decoder()

    def work():
        decoder(token_BL).last_hidden_state.sum().backward()

    work()  # gradients exist from the first micro-batch on
    assert max(activations(setup, trained=True)) * token_BL.numel() == pytest.approx(peak_bytes(work, CPU), rel=0.1)


def test_logits_of_the_log_prob_pass(fsdp):
    from verl.utils.torch_functional import entropy_from_logits_with_chunking

    actor, rows, chunk = "actor_rollout_ref.actor", 64, 16
    keys = {f"{actor}.entropy_from_logits_chunk_size": chunk, f"{actor}.fsdp_config.dtype": "float32"}
    setup = Setup(with_overrides(fsdp, keys))
    found = peak_bytes(lambda: entropy_from_logits_with_chunking(torch.zeros(rows, setup.model.vocab), chunk), CPU)
    assert forward_logits(setup, rows) == pytest.approx(found, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("Qwen/Qwen2.5-7B", 2), ("Qwen/Qwen2.5-1.5B", 4), ("Qwen/Qwen3-30B-A3B", 8)])
def test_a_token_in_vllms_cache(fsdp, name, tp):
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    setup = Setup(with_overrides(fsdp, {key: tp}), Expected(model=name))
    heads, size = max(1, setup.model.kv_heads // tp), setup.model.head_dim
    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)
    assert cache_bytes(setup) == spec.page_size_bytes / 16 * setup.model.layers
