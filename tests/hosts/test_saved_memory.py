"""The importance pass under verl's ways to save memory in training."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from oar_plugin.passes.taps import ModelTaps, Tap
from tests.passes.batch import random_model

activation_offload = pytest.importorskip("verl.utils.activation_offload")

IDS = torch.arange(40).view(2, 20)


def importance_gradient(model, recomputing=True):
    """The gradient that a pass receives, and the bytes of activations that it kept for its backward."""
    received, kept = [], []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with ModelTaps(model, checkpoint_activations=recomputing) as taps:
        tap = taps.tap = Tap(
            torch.tensor([3, 25]),
            lambda project, hidden_NH: hidden_NH.square().sum(),
            receive=lambda *pair: received.append(pair),
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=IDS, use_cache=False)
        tap.scalar.backward()
    ((gradient, _),) = received
    return gradient, sum(kept)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_offload_does_not_act_and_the_layers_are_recomputed(monkeypatch, checkpointing):
    """verl's real offload, on transformers' layers in place of layers that FSDP2 wraps, and without CUDA's streams."""
    model, plain = random_model(num_hidden_layers=4), random_model(num_hidden_layers=4)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    monkeypatch.setattr(activation_offload, "FSDP2", GradientCheckpointingLayer)
    monkeypatch.setattr(activation_offload, "get_torch_device", mock.MagicMock)
    activation_offload.enable_activation_offloading(model, "fsdp2", checkpointing)
    assert not model.is_gradient_checkpointing
    entered = mock.Mock(side_effect=AssertionError("the offload of training was entered"))
    monkeypatch.setattr(activation_offload.CpuOffloadHookWithOffloadHandler, "__enter__", entered)
    (got, kept), (want, everything) = importance_gradient(model), importance_gradient(plain, recomputing=False)
    torch.testing.assert_close(got, want)
    assert kept < everything / 4
    model.model.layers[0].training = True
    with pytest.raises(AssertionError, match="was entered"):
        model(input_ids=IDS, use_cache=False)


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
