"""The hooks on a plain HuggingFace model: what they compute, what they save, and that they go away."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from oar_plugin.passes.taps import ModelTaps, UnsupportedModelError

SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = torch.arange(20).view(2, 10)
ROWS = torch.tensor([3, 4, 15])


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=request.param, attention_dropout=0.5)).eval()


def test_rows_are_the_models_own_logits_and_only_they_have_a_graph(model):
    want = model(input_ids=IDS).logits.detach()
    with ModelTaps(model) as taps:
        taps.prepare(ROWS)
        output = model(input_ids=IDS, use_cache=False)
        assert not output.logits.requires_grad
        torch.testing.assert_close(output.logits, want)
        assert taps.answer_logits.requires_grad
        torch.testing.assert_close(taps.answer_logits, want.flatten(0, 1)[ROWS])


def test_rows_only_projects_nothing_else(model):
    want = model(input_ids=IDS).logits.detach()
    with ModelTaps(model) as taps:
        taps.prepare(ROWS, rows_only=True)
        assert model(input_ids=IDS, use_cache=False).logits.shape == (1, 3, SIZE["vocab_size"])
        torch.testing.assert_close(taps.answer_logits, want.flatten(0, 1)[ROWS])


def test_the_gradient_equals_that_of_an_ordinary_forward(model):
    embedding = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
    model(inputs_embeds=embedding).logits.flatten(0, 1)[ROWS].square().sum().backward()
    model.zero_grad(set_to_none=True)
    for rows_only in (False, True):
        with ModelTaps(model) as taps:
            taps.prepare(ROWS, rows_only=rows_only)
            model(input_ids=IDS, use_cache=False)
            taps.answer_logits.square().sum().backward()
            torch.testing.assert_close(taps.embedding.grad, embedding.grad)
        assert all(p.grad is None for p in model.parameters())


def test_noise_moves_the_forward_but_not_the_leaf(model):
    clean = model.get_input_embeddings()(IDS).detach()
    with ModelTaps(model) as taps:
        taps.prepare(ROWS, noise=lambda embedding: torch.full_like(embedding, 0.1))
        model(input_ids=IDS, use_cache=False)
        assert torch.equal(taps.embedding.detach(), clean)
        noisy = taps.answer_logits.detach()
    want = model(inputs_embeds=clean + 0.1).logits.detach().flatten(0, 1)[ROWS]
    torch.testing.assert_close(noisy, want)


def test_checkpointing_recomputes_the_layers_and_leaves_dropout_off(model):
    calls = []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients = {}
    for checkpointing in (False, True):
        calls.clear()
        with ModelTaps(model, checkpoint_activations=checkpointing) as taps:
            taps.prepare(ROWS)
            model(input_ids=IDS, use_cache=False)
            taps.answer_logits.sum().backward()
            gradients[checkpointing] = taps.embedding.grad
        assert len(calls) == (2 if checkpointing else 1)
    torch.testing.assert_close(gradients[True], gradients[False])


@pytest.mark.parametrize("fails", [False, True])
def test_no_trace_is_left_even_after_an_error(model, fails):
    model.model.norm.weight.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def state():
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return hooks, [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]

    before = state()
    try:
        with ModelTaps(model, checkpoint_activations=True) as taps:
            assert state() != before
            taps.prepare(ROWS)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert state() == before


def test_a_pending_gradient_is_refused(model):
    model(input_ids=IDS).logits.sum().backward()
    with pytest.raises(RuntimeError, match="pending"), ModelTaps(model):
        pass


def test_models_that_transform_their_logits_are_refused():
    model = Gemma2ForCausalLM(Gemma2Config(**SIZE, head_dim=8, final_logit_softcapping=30.0))
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping=30"):
        ModelTaps(model)


def test_models_without_embeddings_to_hook_are_refused():
    with pytest.raises(UnsupportedModelError, match="get_input_embeddings"):
        ModelTaps(torch.nn.Linear(2, 2))
