"""The extension of vLLM's workers: tagged requests return outcomes in place of prompt log-probabilities.

A request is tagged by `SamplingParams.extra_args["oar"]` (a spec of `outcomes`) and asks for `prompt_logprobs=0`, which is what
makes vLLM hand rows back with it. Row `i` of what it gets is number `i` of `OutcomeRecorder.step` as the log-probability of
token 0. Untagged requests are left to vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from oar_plugin.hosts.vllm import runner_v1, runner_v2
from oar_plugin.hosts.vllm.outcomes import OutcomeRecorder

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner


class OutcomeExtension:
    """For `worker_extension_cls`; its methods are reached by `collective_rpc`."""

    model_runner: Any

    def oar_install(self) -> None:
        """Answer tagged requests from now on. A second call changes nothing.

        Raises:
            RuntimeError: the worker has a model runner whose prompt rows cannot be reached.
        """
        runner = self.model_runner
        if hasattr(runner, "oar_recorder"):
            return
        hook = next((hook for hook in (runner_v1, runner_v2) if getattr(runner, hook.HOOKED, None) is not None), None)
        if hook is None:
            raise RuntimeError(
                f"OAR-P cannot be computed in vLLM's model runner {type(runner).__module__}.{type(runner).__name__}, which has "
                f"neither {runner_v1.HOOKED} nor {runner_v2.HOOKED}: set algorithm.oar.perturbation.backend=actor"
            )
        stock: FirstRunner | SecondRunner = runner
        model = stock.get_model()

        def project(hidden_RD: Tensor) -> Tensor | None:
            # The class's function: verl replaces the instance's by one that masks tokens that must not be sampled, and
            # the actor's distribution has these tokens.
            return type(model).compute_logits(model, hidden_RD)

        recorder = OutcomeRecorder(project)
        hook.install(runner, recorder)
        runner.oar_recorder = recorder

    def oar_counts(self) -> dict[str, int]:
        return self.model_runner.oar_recorder.counts()
