"""On a device that is not the CPU: no tensor is on the wrong one, and in a gradient pass the CPU does not wait for it.

The device is pretended: tensors hold CPU memory and say that they are on `meta`, which every build of PyTorch has. They cannot
be mixed with others. `events` has what a GPU would do, in order: "kernel", "copy" to the device, and, by operator, what the CPU
would wait for. tests/gpu/check_engines.py asks a GPU the same.
"""

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import masking_utils

from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.gate import GATES
from oar_plugin.credit.importance import IMPORTANCES
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes import rows as rows_module
from oar_plugin.passes.gradient import MicroBatchPass, importance_of_scores
from oar_plugin.passes.host import MicroBatch, Work
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.taps import to_device
from oar_plugin.token_credit import TokenCredit
from tests.asked import asked
from tests.hosts.engine import world
from tests.passes.batch import gradient_pass, padded, random_model, rows_of

DEVICE, CPU = torch.device("meta"), torch.device("cpu")
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "repeat_interleave", "bincount"}
WITH_PASS = [name for name, one in IMPORTANCES.items() if one.backwards or one.reads]


class There(torch.Tensor):
    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, device=DEVICE, **layout)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with Pretended():
            return function(*args, **kwargs or {})


class Pretended(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), function.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if not isinstance(x, There) and x.dim() and x.numel()]  # numbers may be on the CPU
        there = {id(x.held): x for x in tensors if isinstance(x, There)}
        target = torch.device(kwargs["device"]) if kwargs.get("device") else DEVICE if there else CPU
        if name in ("_to_copy", "copy_"):
            target = target if kwargs.get("device") else args[0].device
            source = args[-1] if name == "copy_" and isinstance(args[-1], torch.Tensor) else args[name == "copy_"]
            if source.device != target and source.numel():
                self.events.append(
                    "to cpu" if target == CPU else "copy" if kwargs.get("non_blocking") else "waiting copy"
                )
        elif there:
            if here:
                raise RuntimeError(f"{function}: tensors on two devices, {[tuple(x.shape) for x in here]} on the CPU")
            by_mask = "index" in name and any(
                x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, There)
            )
            self.events.append(name if name in WAITS or by_mask else "kernel")
        swap = {torch.device: lambda x: CPU, There: lambda x: x.held}
        args, kwargs = tree_map(lambda x: swap.get(type(x), lambda x: x)(x), (args, kwargs))
        result = function(*args, **kwargs)
        wrapped = target != CPU and name != "_local_scalar_dense"
        return tree_map(
            lambda x: (there[id(x)] if id(x) in there else There(x)) if wrapped and isinstance(x, torch.Tensor) else x,
            result,
        )


@pytest.fixture(autouse=True)
def pretending(monkeypatch):
    """Several chunks of logits; functions that do not know `meta`; transformers itself asks a GPU whether rows are packed."""
    autocast, enabled, tensor = torch.autocast, torch.is_autocast_enabled, torch.tensor
    functions = {
        "autocast": lambda kind, **how: nullcontext() if kind == "meta" else autocast(kind, **how),
        "is_autocast_enabled": lambda kind="cpu": kind != "meta" and enabled(kind),
        "tensor": lambda x, device=None, **how: (
            There(tensor(x, **how)) if device == DEVICE else tensor(x, device=device, **how)
        ),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch, name, function)
    monkeypatch.setattr(rows_module, "CHUNK", 5)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


@pytest.fixture(scope="module")
def models():
    model = random_model(vocab_size=300)
    moved = copy.deepcopy(model)
    for part in moved.modules():
        part._parameters |= {
            n: torch.nn.Parameter(There(p.detach())) for n, p in part._parameters.items() if p is not None
        }
        part._buffers |= {n: There(one) for n, one in part._buffers.items() if one is not None}
    return model, moved


def request_of(name, probe="answer_mean"):
    return asked(name, probe, sigma=0.05, temperature=0.7, num_draws=2, replacement_token=world.PAD)


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


def assert_no_wait(events):
    first, last = events.index("kernel"), len(events) - events[::-1].index("kernel")
    assert {*events[first:last]} <= {"kernel", "copy"}
    assert events[last:] == ["to cpu"]


@pytest.mark.parametrize(
    ("name", "probe"),
    [*((name, "answer_mean") for name in WITH_PASS), *(("fisher", p) for p in PROBES if p != "answer_mean")],
)
def test_a_gradient_pass_does_not_wait(models, name, probe):
    arguments = request_of(name, probe), *padded(rows_of(), left=True)
    with Pretended() as device:
        got = gradient_pass(models[1], *arguments)
    assert_close(got, gradient_pass(models[0], *arguments))
    assert device.events.count("copy") == 2  # the model's inputs, and all indices
    assert_no_wait(device.events)


@pytest.mark.parametrize(("name", "probe"), [("fisher", "last"), *(("oar_p", probe) for probe in PROBES)])
def test_a_batch_on_the_device_mixes_with_nothing_on_the_cpu(models, name, probe):
    """As TRL has it; with masked copies and the trial of a model."""
    batch = padded(rows_of())
    with Pretended():
        got = batch_importance(models[1], request_of(name, probe), *(one.to(DEVICE) for one in batch), 80).cpu()
    assert_close(got, batch_importance(models[0], request_of(name, probe), *batch, 80))


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_runs_where_the_hosts_advantages_are(gate):
    _, segments, mask = padded(rows_of())
    torch.manual_seed(0)
    status_B, score_BL = torch.full((len(mask),), int(Status.SCORED)), torch.rand(mask.shape)
    credit = TokenCredit({"gate": gate}, None, padding=mock.Mock(pad_token_id=0))
    inputs = mask.float(), score_BL, segments, status_B
    with Pretended():
        got = credit.reshape(1, *(one.to(DEVICE) for one in inputs)).advantage_BL.cpu()
    assert_close(got, credit.reshape(1, *inputs).advantage_BL)


@pytest.mark.parametrize("ulysses", [False, True])
@pytest.mark.parametrize("name", ["fisher", "oar_g"])
def test_verls_fsdp_engine_does_not_wait_around_a_forward_step(monkeypatch, models, name, ulysses):
    """Around a stand-in for verl's own `forward_step`, which waits by itself (`loss.item()`). Under Ulysses a pack, on the one
    rank of a group: sums over ranks are asked for, and verl's attention is not here."""
    pytest.importorskip("verl")
    from tensordict import TensorDict

    from oar_plugin.hosts.verl import fsdp
    from oar_plugin.hosts.verl.fsdp import OarFSDPMixin
    from oar_plugin.hosts.verl.importance_pass import ROW, packed_of
    from oar_plugin.passes.request import nested

    class Host:
        use_ulysses_sp = use_remove_padding = ulysses
        ulysses_parallel_group = None

        def get_data_parallel_group(self):
            return None

        def prepare_model_inputs(self, micro_batch):
            ids = micro_batch["input_ids"]
            ids = ids.values()[None] if ulysses else ids.to_padded_tensor(0)
            return {"input_ids": to_device(next(self.module.parameters()).device, ids)[0]}, None

    group = mock.Mock(get_rank=lambda group: 0)
    monkeypatch.setattr(fsdp, "distributed", group)
    monkeypatch.setattr(fsdp, "prepare_micro_batches", lambda data, **_: ([data], None))
    monkeypatch.setattr(fsdp.tu, "assign_non_tensor", lambda data, **_: None)

    def scored(model):
        engine = type("Engine", (OarFSDPMixin, Host), {"module": model})()
        engine.model_config = mock.Mock(enable_gradient_checkpointing=False, use_fused_kernels=False)
        engine.model_config.enable_activation_offload, engine.ulysses_sequence_parallel_size = False, 1
        engine._autocast_dtype, tokens, segments = torch.float32, *map(list, zip(*rows_of(), strict=True))
        data = TensorDict({"input_ids": nested(tokens), ROW: torch.arange(len(tokens))}, [len(tokens)])
        packed, request, found = packed_of(data, segments), request_of(name), []

        def begin(rows, layout):
            found.append(MicroBatchPass(request, packed, layout))
            return MicroBatch(found[0].tap)

        engine._run(data, Work(request.forwards(), begin))
        found[0].total(engine._sum_over_sharing_ranks)
        return importance_of_scores(request, packed, found[0].scores)

    with Pretended() as device:
        got = scored(models[1])
    assert_close(got, scored(models[0]))
    assert_no_wait(device.events)
    assert bool(group.all_reduce.mock_calls) == ulysses


def test_waits_and_mixes_are_noticed():
    there = There(torch.arange(3.0))
    with Pretended() as device:
        there.nonzero()
        there[there > 1]
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.arange(3.0)
    assert [event for event in device.events if event != "kernel"] == ["nonzero", "index"]
