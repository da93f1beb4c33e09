"""The hooks on a plain HuggingFace model: what they compute, what they save, and that they go away."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from oar_plugin.passes.taps import ModelTaps, Tap, UnsupportedModelError
from tests.passes.batch import SIZE, random_model

IDS = torch.arange(20).view(2, 10)
ROWS = torch.tensor([3, 4, 15])
PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request):
    return random_model(tie_word_embeddings=request.param, attention_dropout=0.5)


class Reader:
    """Keeps the rows' logits, with a graph, and what the leaf delivers."""

    def __init__(self, scalar=lambda logits_NV: logits_NV.square().sum(), **tap):
        self.delivered = []
        self._scalar = scalar
        self.tap = Tap(ROWS, self._probe, **{"receive": lambda *pair: self.delivered.append(pair), **tap})

    def _probe(self, project, hidden_NH):
        self.logits_NV = project(hidden_NH)
        return self._scalar(self.logits_NV)

    def run(self, model, taps):
        taps.tap = self.tap
        return model(input_ids=IDS, use_cache=False)

    def gradient(self, model, taps):
        self.run(model, taps)
        assert not self.delivered
        self.tap.scalar.backward()
        (pair,) = self.delivered
        return pair


def by_autograd(model):
    """The embeddings, with the gradient of the readers' scalar."""
    embedding = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
    model(inputs_embeds=embedding).logits.flatten(0, 1)[ROWS].square().sum().backward()
    model.zero_grad(set_to_none=True)
    return embedding


@pytest.mark.parametrize("rows_only", [False, True])
def test_rows_are_the_models_own_logits_with_the_gradient_of_a_plain_forward_delivered_once(model, rows_only):
    logits, embedding, reader = model(input_ids=IDS).logits.detach(), by_autograd(model), Reader(rows_only=rows_only)
    with ModelTaps(model) as taps:
        output = reader.run(model, taps)
        torch.testing.assert_close(reader.logits_NV, logits.flatten(0, 1)[ROWS])
        if rows_only:  # nothing else is projected
            assert output.logits.shape == (1, 1, SIZE["vocab_size"])
        else:
            assert not output.logits.requires_grad
            torch.testing.assert_close(output.logits, logits)
        assert not reader.delivered
        reader.tap.scalar.backward()
    ((gradient, leaf),) = reader.delivered
    torch.testing.assert_close(gradient, embedding.grad)
    assert torch.equal(leaf, embedding)
    assert not leaf.requires_grad
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("receiver", [{}, {"receive": None}], ids=["wanted", "unwanted"])
def test_noise_moves_the_forward_but_not_the_leaf(model, receiver):
    """Also where nobody wants a gradient."""
    clean = model.get_input_embeddings()(IDS).detach()
    want = model(inputs_embeds=clean + 0.1).logits.detach().flatten(0, 1)[ROWS]
    reader = Reader(noise=lambda embedding: torch.full_like(embedding, 0.1), **receiver)
    with ModelTaps(model) as taps:
        reader.run(model, taps)
        torch.testing.assert_close(reader.logits_NV.detach(), want)
        assert reader.logits_NV.requires_grad == (not receiver)
        if not receiver:
            reader.tap.scalar.backward()
            assert torch.equal(reader.delivered[0][1], clean)


def test_only_the_first_embedding_of_a_forward_is_the_leaf(model):
    """A model may embed something else on the way: prompts of an adapter, say."""
    layer, embed = model.model.layers[0], model.get_input_embeddings()
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.5 * embed(IDS.flip(1)), *args[1:]))
    embedding = by_autograd(model)
    with ModelTaps(model) as taps:
        for _ in range(2):  # each forward has a leaf of its own
            gradient, leaf = Reader().gradient(model, taps)
            torch.testing.assert_close(gradient, embedding.grad)
            assert torch.equal(leaf, embedding)


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
    calls, gradients = [], []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for checkpointing, forwards in ((False, 1), (True, 2)):
        calls.clear()
        with ModelTaps(model, checkpoint_activations=checkpointing) as taps:
            gradients.append(Reader(scalar=torch.sum).gradient(model, taps)[0])
        assert len(calls) == forwards
    torch.testing.assert_close(*gradients)


def state(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return hooks, [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]


@pytest.mark.parametrize("fails", [None, "the pass", "a hook's installation"])
def test_no_trace_is_left_even_after_an_error(model, fails, monkeypatch):
    model.model.norm.weight.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    taps, before = ModelTaps(model, checkpoint_activations=True), state(model)
    if fails == "a hook's installation":
        monkeypatch.setattr(model.lm_head, "register_forward_hook", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(), taps:
        assert state(model) != before
        Reader().run(model, taps)
        if fails:
            raise ZeroDivisionError
    assert state(model) == before
    assert taps.tap is None


def test_a_pending_gradient_is_refused(model):
    model(input_ids=IDS).logits.sum().backward()
    with pytest.raises(RuntimeError, match="pending"), ModelTaps(model):
        pass


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: get_peft_model(random_model(), PROMPTS), "PromptTuning"),
        (lambda: torch.nn.Linear(2, 2), "get_input_embeddings"),
        (lambda: random_model(return_dict=False), "return_dict=False"),
    ],
)
def test_models_with_virtual_tokens_or_no_embeddings_to_hook_are_refused(build, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelTaps(build())


def test_megatrons_recomputation_as_verl_patches_it_does_not_free_the_embeddings(monkeypatch):
    """The patch frees the storage of a layer's input after the layer's backward; the first layer's input is the embeddings.
    CUDA's streams and random states are stubbed."""
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    patch = pytest.importorskip("verl.models.mcore.patch")
    monkeypatch.setattr(random.CheckpointFunction, "backward", random.CheckpointFunction.backward)
    monkeypatch.setattr(random, "_fork_rng", contextlib.nullcontext)
    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *states: None)
    monkeypatch.setattr(torch.cuda, "current_stream", SimpleNamespace)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *stream: None)
    patch.apply_patch_megatron_recomputation_backward()
    host, sizes = torch.randn(4, 8), []

    def receive(gradient, embedding):
        sizes.append((gradient.untyped_storage().nbytes(), embedding.untyped_storage().nbytes()))

    layer_input = Tap(torch.arange(4), lambda *_: None, receive=receive).leaf(host)
    random.checkpoint(torch.square, False, layer_input).sum().backward()
    assert layer_input.untyped_storage().nbytes() == 0, "verl frees it no longer: the copy in Tap.leaf can go"
    assert sizes == [(host.nbytes, host.nbytes)]
    assert host.untyped_storage().nbytes() == host.nbytes
