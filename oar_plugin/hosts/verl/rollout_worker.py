"""The worker extension of vLLM for the offload: verl's and ours in one class."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from oar_plugin.hosts.vllm.extension import OutcomeExtension


class OarColocateWorkerExtension(OutcomeExtension, vLLMColocateWorkerExtension):
    """Both extensions: vLLM takes only one, and verl calls `monkey_patch_model` once on every worker."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        super().monkey_patch_model(vocab_size=vocab_size, banned_token_ids=banned_token_ids)
        self.oar_install()
