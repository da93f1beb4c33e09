"""The hooks on a plain HuggingFace model: what they compute, what they save, and that they go away."""

import weakref

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from oar_plugin.passes.tap import Tap
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


class Reader:
    """Keeps the rows' logits, with a graph, and what the leaf delivers."""

    def __init__(self, scalar=lambda logits_NV: logits_NV.square().sum(), **tap):
        self.delivered = []
        self._scalar = scalar
        self.tap = Tap(ROWS, self._probe, receive=lambda *pair: self.delivered.append(pair), **tap)

    def _probe(self, project, hidden_NH):
        self.logits_NV = project(hidden_NH)
        return self._scalar(self.logits_NV)


def run(model, taps, reader, ids=IDS):
    taps.tap = reader.tap
    return model(input_ids=ids, use_cache=False)


def test_rows_are_the_models_own_logits_and_only_they_have_a_graph(model):
    want = model(input_ids=IDS).logits.detach()
    with ModelTaps(model) as taps:
        reader = Reader(rows_only=False)
        output = run(model, taps, reader)
        assert not output.logits.requires_grad
        torch.testing.assert_close(output.logits, want)
        assert reader.logits_NV.requires_grad
        torch.testing.assert_close(reader.logits_NV, want.flatten(0, 1)[ROWS])


def test_rows_only_projects_nothing_else(model):
    want = model(input_ids=IDS).logits.detach()
    with ModelTaps(model) as taps:
        reader = Reader()
        assert run(model, taps, reader).logits.shape == (1, 1, SIZE["vocab_size"])
        torch.testing.assert_close(reader.logits_NV, want.flatten(0, 1)[ROWS])


@pytest.mark.parametrize("rows_only", [False, True])
def test_the_gradient_equals_that_of_an_ordinary_forward_and_is_delivered_once(model, rows_only):
    embedding = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
    model(inputs_embeds=embedding).logits.flatten(0, 1)[ROWS].square().sum().backward()
    model.zero_grad(set_to_none=True)
    with ModelTaps(model) as taps:
        reader = Reader(rows_only=rows_only)
        run(model, taps, reader)
        torch.testing.assert_close(reader.tap.scalar, reader.logits_NV.square().sum())
        assert not reader.delivered
        reader.tap.scalar.backward()
        ((gradient, leaf),) = reader.delivered
        torch.testing.assert_close(gradient, embedding.grad)
        assert torch.equal(leaf, embedding)
        assert not leaf.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_noise_moves_the_forward_but_not_the_leaf(model):
    clean = model.get_input_embeddings()(IDS).detach()
    want = model(inputs_embeds=clean + 0.1).logits.detach().flatten(0, 1)[ROWS]
    with ModelTaps(model) as taps:
        reader = Reader(noise=lambda embedding: torch.full_like(embedding, 0.1))
        run(model, taps, reader)
        torch.testing.assert_close(reader.logits_NV.detach(), want)
        reader.tap.scalar.backward()
        assert torch.equal(reader.delivered[0][1], clean)
        silent = Reader(noise=reader.tap.noise)
        silent.tap.receive = None  # nobody wants a gradient: noise all the same
        run(model, taps, silent)
        torch.testing.assert_close(silent.logits_NV, want)
        assert not silent.logits_NV.requires_grad


def test_a_forward_without_a_scalar_or_a_receiver_has_no_graph(model):
    want = model(input_ids=IDS).logits.detach()
    with ModelTaps(model) as taps:
        reader = Reader(scalar=lambda logits_NV: None, rows_only=False)
        reader.tap.receive = None
        output = run(model, taps, reader)
        assert reader.tap.scalar is None
        assert not reader.logits_NV.requires_grad
        torch.testing.assert_close(output.logits, want)


def test_no_rows_at_all_still_give_a_backward(model):
    """A rank, or a micro-batch, without an answer: its gradient is zero, and it is delivered."""
    with ModelTaps(model) as taps:
        reader = Reader()
        reader.tap.row_position_N = torch.tensor([], dtype=torch.long)
        run(model, taps, reader)
        reader.tap.scalar.backward()
        assert not reader.delivered[0][0].any()


def test_hooks_let_forwards_pass_that_have_no_tap(model):
    want = model(input_ids=IDS).logits
    with ModelTaps(model) as taps:
        assert torch.equal(model(input_ids=IDS).logits, want)
        reader = Reader()
        run(model, taps, reader)
        taps.tap = None
        assert torch.equal(model(input_ids=IDS).logits, want)


def test_only_the_first_embedding_of_a_forward_is_the_leaf(model):
    """A model may embed something else on the way: prompts of an adapter, say."""
    layer, embed = model.model.layers[0], model.get_input_embeddings()
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.5 * embed(IDS.flip(1)), *args[1:]))
    embedding = embed(IDS).detach().requires_grad_(True)
    model(inputs_embeds=embedding).logits.flatten(0, 1)[ROWS].square().sum().backward()
    model.zero_grad(set_to_none=True)
    with ModelTaps(model) as taps:
        for _ in range(2):  # each forward has a leaf of its own
            reader = Reader()
            run(model, taps, reader)
            reader.tap.scalar.backward()
            ((gradient, leaf),) = reader.delivered
            torch.testing.assert_close(gradient, embedding.grad)
            assert torch.equal(leaf, embedding)


def test_two_forwards_may_go_on_before_their_backwards(model):
    """As a pipeline's schedule does: each gradient goes to its own tap."""
    with ModelTaps(model) as taps:
        alone = []
        for ids in (IDS, IDS.flip(0)):
            reader = Reader()
            run(model, taps, reader, ids)
            reader.tap.scalar.backward()
            alone.append(reader.delivered[0])
        readers = [Reader(), Reader()]
        for reader, ids in zip(readers, (IDS, IDS.flip(0)), strict=True):
            run(model, taps, reader, ids)
        for reader in readers:
            reader.tap.scalar.backward()
    for reader, pair in zip(readers, alone, strict=True):
        assert len(reader.delivered) == 1
        torch.testing.assert_close(reader.delivered[0], pair)


def test_nothing_of_a_micro_batch_stays_behind(model):
    """Not its hidden states, its leaf or its gradient, while the hooks wait for the next one."""
    kept = []

    def keep(*tensors):
        kept.extend(map(weakref.ref, tensors))

    model.model.norm.register_forward_hook(lambda module, args, output: keep(output))
    with ModelTaps(model) as taps:
        tap = taps.tap = Tap(ROWS, lambda project, hidden_NH: project(hidden_NH).sum(), receive=keep)
        model(input_ids=IDS, use_cache=False)
        tap.scalar.backward()
        assert [ref() for ref in kept] == [None] * 3


def test_checkpointing_recomputes_the_layers_and_leaves_dropout_off(model):
    calls = []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients = {}
    for checkpointing in (False, True):
        calls.clear()
        with ModelTaps(model, checkpoint_activations=checkpointing) as taps:
            reader = Reader(scalar=torch.sum)
            run(model, taps, reader)
            reader.tap.scalar.backward()
            gradients[checkpointing] = reader.delivered[0][0]
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
            run(model, taps, Reader())
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert state() == before
    assert taps.tap is None


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
