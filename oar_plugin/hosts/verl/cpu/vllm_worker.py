"""vLLM's CPU workers under verl: weights that can be reloaded, through a socket that no other run uses.

No worker extension has to be named in the configuration: verl's own extension makes the worker process import verl,
and with it this plugin, before the model is built.
"""

import os
from functools import wraps
from typing import Any

import torch

SESSION_VARIABLE = "OAR_SESSION"
"""Names the run to which a process belongs; see ``session.py``."""


def keep_weights_unpacked(layer_utils: Any) -> None:
    """Multiply with the plain weight instead of a packed copy (``vllm.model_executor.layers.utils``).

    vLLM hands the weight to oneDNN, which keeps it in a layout of its own, and drops the parameter: a later
    ``load_weights`` finds no ``weight_loader`` and the run hangs. Where the parameter stays (embedding, head) it is
    worse: loading succeeds and the packed copy goes on answering with the old weights.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def private_socket(handle: str) -> str:
    """The address of a weight socket with the name of the session in it; unchanged outside a session."""
    session = os.environ.get(SESSION_VARIABLE)
    return handle.replace(".sock", f"-{session}.sock") if session else handle


def send_through_private_socket(rollout: Any) -> None:
    """The trainer's end of the socket (``verl.workers.rollout.vllm_rollout.vllm_rollout``)."""
    original = rollout.ServerAdapter.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.zmq_handle = private_socket(self.zmq_handle)

    rollout.ServerAdapter.__init__ = init


def receive_through_private_socket(utils: Any) -> None:
    """The vLLM worker's end of the socket (``verl.workers.rollout.vllm_rollout.utils``)."""
    original = utils.vLLMColocateWorkerExtension._get_zmq_handle

    @wraps(original)
    def get_zmq_handle(self: Any) -> str:
        return private_socket(original(self))

    utils.vLLMColocateWorkerExtension._get_zmq_handle = get_zmq_handle
