"""The vLLM worker's side of the offload: verl's worker extension, and ours beside it."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from oar_plugin.hosts.vllm.extension import OutcomeExtension


class OarColocateWorkerExtension(OutcomeExtension, vLLMColocateWorkerExtension):
    """verl's own extension; vLLM takes only one, and verl calls `monkey_patch_model` once on every worker."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl's, and the hook that reads outcomes."""
        super().monkey_patch_model(vocab_size=vocab_size, banned_token_ids=banned_token_ids)
        self.oar_install()
