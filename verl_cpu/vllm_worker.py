"""vLLM's CPU workers under verl: their weights can be reloaded, through a socket that no other run uses.

The configuration names no worker extension: verl's own makes the worker process import verl, and with it this plugin, before
the model is built.
"""

import inspect
import os
from functools import wraps
from typing import Any

import torch

SESSION_VARIABLE = "OAR_SESSION"
"""Names the run to which a process belongs; see ``session.py``."""


def keep_weights_unpacked(layer_utils: Any) -> None:
    """Multiply with the plain weight instead of a packed copy (``vllm.model_executor.layers.utils``).

    vLLM gives the weight to oneDNN, which keeps it in a layout of its own, and drops the parameter: a later
    ``load_weights`` finds no ``weight_loader``, and the run hangs. Where the parameter stays (embedding, head), loading
    succeeds, but the layer keeps computing with the old weights.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def keep_experts_unpacked(experts: Any) -> None:
    """Do the same for mixtures of experts (``vllm.model_executor.layers.fused_moe``, ``experts.cpu_moe`` or ``cpu_fused_moe``).

    Packed weights have the shape of plain ones: loading new weights into them succeeds, and the experts compute nonsense.
    """
    if not hasattr(experts, "cpu_fused_moe"):  # the one of the two modules that does not run experts
        return
    into = "out" in inspect.signature(experts.cpu_fused_moe).parameters
    experts.cpu_prepack_moe_weight = lambda weight, isa: weight
    experts.cpu_fused_moe = (lambda out, *arguments: out.copy_(plain_experts(*arguments))) if into else plain_experts


def name_experts(layer: Any) -> None:
    """Give ``vllm.model_executor.layers.fused_moe.layer`` a class by the name that it had before vLLM 0.24.

    verl 0.8 looks there for experts to quantise when it loads weights. A CPU run quantises none.
    """
    if not hasattr(layer, "FusedMoE"):
        layer.FusedMoE = type("FusedMoE", (), {})


def plain_experts(
    input: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    act: str,
    isa: str,
    skip_weighted: bool = False,
) -> torch.Tensor:
    """Return what vLLM's ``cpu_fused_moe`` computes for SwiGLU without biases, one expert after the other.

    Raises:
        NotImplementedError: another activation, or biases.
    """
    if act != "silu" or w13_bias is not None or w2_bias is not None:
        raise NotImplementedError(f"experts with activation {act} or biases, on a CPU under verl")
    output = torch.zeros_like(input)
    for expert in topk_ids.unique().tolist():
        row, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(input[row], w13[expert]).chunk(2, -1)
        hidden = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
        output.index_add_(0, row, hidden if skip_weighted else hidden * topk_weights[row, place, None].to(hidden.dtype))
    return output


def private_socket(handle: str) -> str:
    """Return the address of a weight socket with the name of the session in it; unchanged outside a session."""
    session = os.environ.get(SESSION_VARIABLE)
    return handle.replace(".sock", f"-{session}.sock") if session else handle


def send_through_private_socket(rollout: Any) -> None:
    """Change the trainer's end of the socket (``verl.workers.rollout.vllm_rollout.vllm_rollout``)."""
    original = rollout.ServerAdapter.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.zmq_handle = private_socket(self.zmq_handle)

    rollout.ServerAdapter.__init__ = init


def receive_through_private_socket(utils: Any) -> None:
    """Change the vLLM worker's end of the socket (``verl.workers.rollout.vllm_rollout.utils``)."""
    original = utils.vLLMColocateWorkerExtension._get_zmq_handle

    @wraps(original)
    def get_zmq_handle(self: Any) -> str:
        return private_socket(original(self))

    utils.vLLMColocateWorkerExtension._get_zmq_handle = get_zmq_handle
