"""How much memory the rows of an answer take: tensors are counted as they are made, not measured."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oar_plugin.credit.answer import Segment
from oar_plugin.passes import rows
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed
from oar_plugin.passes.plain import batch_importance
from tests.asked import asked
from tests.passes.batch import random_model

CHUNK, VOCABULARY, HIDDEN = 16, 20_000, 8
FLOAT32 = CHUNK * VOCABULARY * 4  # bytes of a chunk of logits
NAMES = ("fisher", "oar_g", "grail", "python:tests.own_importance:Saliency")
CASES = [(name, probe) for name in NAMES for probe in ("answer_mean", "answer_joint")]


class Counted(TorchDispatchMode):
    """Bytes of the largest tensor that was made, and the most that were there at one time."""

    def __init__(self):
        super().__init__()
        self.largest = self.most = 0
        self._alive = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result


def counted(importance, probe, length):
    """The pass over one response with an answer of that length, from hidden states to their gradient."""
    torch.manual_seed(0)
    total = length + 20
    segments_T = torch.full((total,), int(Segment.REASONING))
    segments_T[:4], segments_T[20:] = int(Segment.OUTSIDE), int(Segment.ANSWER)
    packed = Packed(torch.randint(VOCABULARY, (total,)), segments_T, torch.tensor([0, total]))
    where_T = torch.arange(total)
    one = MicroBatchPass(asked(importance, probe), packed, Layout(where_T, where_T, total))
    hidden_TH, head = torch.randn(total, HIDDEN, requires_grad=True), torch.nn.Linear(HIDDEN, VOCABULARY)
    head.requires_grad_(False)
    with Counted() as memory:
        for forward in one.importance.forwards(1):
            tap = one.tap(forward)
            with torch.set_grad_enabled(forward.backward is not None):
                tap.scalar = tap.probe(head, hidden_TH[tap.row_position_N])
            if tap.scalar is not None:
                tap.scalar.backward()
    assert hidden_TH.grad is not None
    return memory


@pytest.mark.parametrize(("importance", "probe"), CASES)
def test_an_answer_of_any_length_takes_a_few_chunks_of_logits(monkeypatch, importance, probe):
    """oar_g takes differences of distributions in float64."""
    monkeypatch.setattr(rows, "CHUNK", CHUNK)
    short, long = counted(importance, probe, 4 * CHUNK), counted(importance, probe, 40 * CHUNK)
    assert long.largest <= (2 if importance == "oar_g" else 1) * FLOAT32
    assert long.most < 7 * FLOAT32
    assert long.most < 1.1 * short.most


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
        with Counted() as memory:
            batch_importance(model, request, *batch, 4096)
        return memory.most

    short, long = most(8 * CHUNK), most(16 * CHUNK)
    assert long < (12 if drawn else 7) * FLOAT32
    assert long < 1.1 * short
