"""How much memory the rows of an answer take: tensors are counted as they are made, not measured."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.machine import peak_bytes
from oar_plugin.credit.answer import Segment
from oar_plugin.passes import rows
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed
from oar_plugin.passes.plain import batch_importance
from tests.asked import asked
from tests.passes.batch import random_model

CHUNK, VOCABULARY, HIDDEN, CPU = 16, 20_000, 8, torch.device("cpu")
FLOAT32 = CHUNK * VOCABULARY * 4  # bytes of a chunk of logits
NAMES = ("fisher", "oar_g", "grail", "python:tests.own_importance:Saliency")
CASES = [(name, probe) for name in NAMES for probe in ("answer_mean", "answer_joint")]


class Largest(TorchDispatchMode):
    bytes = 0  # of the largest tensor that was made

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.bytes = max([self.bytes, *(one.untyped_storage().nbytes() for one in tensors)])
        return result


def measured(importance, probe, length):
    """Most bytes at once, and of one tensor, of the pass over a response with an answer of that length."""
    torch.manual_seed(0)
    total = length + 20
    segments_T = torch.full((total,), int(Segment.REASONING))
    segments_T[:4], segments_T[20:] = int(Segment.OUTSIDE), int(Segment.ANSWER)
    packed = Packed(torch.randint(VOCABULARY, (total,)), segments_T, torch.tensor([0, total]))
    where_T = torch.arange(total)
    one = MicroBatchPass(asked(importance, probe), packed, Layout(where_T, where_T, total))
    hidden_TH, head = torch.randn(total, HIDDEN, requires_grad=True), torch.nn.Linear(HIDDEN, VOCABULARY)
    head.requires_grad_(False)

    def run():
        for forward in one.importance.forwards(1):
            tap = one.tap(forward)
            with torch.set_grad_enabled(forward.backward is not None):
                tap.scalar = tap.probe(head, hidden_TH[tap.row_position_N])
            if tap.scalar is not None:
                tap.scalar.backward()
        assert hidden_TH.grad is not None

    with Largest() as largest:
        return peak_bytes(run, CPU), largest.bytes


@pytest.mark.parametrize(("importance", "probe"), CASES)
def test_an_answer_of_any_length_takes_a_few_chunks_of_logits(monkeypatch, importance, probe):
    """oar_g takes differences of distributions in float64."""
    monkeypatch.setattr(rows, "CHUNK", CHUNK)
    (short, _), (long, largest) = (measured(importance, probe, chunks * CHUNK) for chunks in (4, 40))
    assert 0 < largest <= (2 if importance == "oar_g" else 1) * FLOAT32
    assert 0 < long < 7 * FLOAT32
    assert long < 1.1 * short


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("probe", ["answer_mean", "answer_joint"])
def test_masked_copies_of_a_response_of_any_length_take_a_few_chunks(monkeypatch, probe, drawn):
    """Random numbers for replacements of the reasoning are drawn from its logits."""
    monkeypatch.setattr(rows, "CHUNK", CHUNK)
    model = random_model(vocab_size=VOCABULARY, max_position_embeddings=512).requires_grad_(False)

    def most(length):
        reasoning, answer = (length, 20) if drawn else (20, length)
        segments = torch.tensor([0] * 4 + [Segment.REASONING] * reasoning + [Segment.ANSWER] * answer)
        batch = torch.randint(VOCABULARY, (1, len(segments))), segments[None], torch.ones(1, len(segments)).bool()
        request = asked("oar_p", probe, replacement_token=None if drawn else 0, span=reasoning // 2)
        return peak_bytes(lambda: batch_importance(model, request, *batch, 4096), CPU)

    _, short, long = most(CHUNK), most(8 * CHUNK), most(16 * CHUNK)  # the first with the trial of the model
    assert 0 < long < (12 if drawn else 5) * FLOAT32
    assert long < 1.1 * short
