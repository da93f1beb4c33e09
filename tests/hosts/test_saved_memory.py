"""The importance pass under verl's ways to save memory in training."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from oar_plugin.passes.taps import Tap


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
