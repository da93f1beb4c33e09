"""The extension under test, with what the tests need to know and do inside of the worker."""

from typing import Any

from oar_plugin.hosts.vllm.extension import OutcomeExtension


class CountingExtension(OutcomeExtension):
    def oar_counts(self) -> dict[str, int]:
        """What the recorder keeps: references, and requests whose prompt has not ended."""
        recorder = self.model_runner.oar_recorder
        return {"references": len(recorder._references), "requests": len(recorder._tallies)}

    def oar_runner(self) -> str:
        """The module of the model runner."""
        return type(self.model_runner).__module__

    def oar_mask_tail(self, vocabulary: int | None) -> None:
        """Keep tokens from `vocabulary` on from being sampled, as verl does; None undoes it."""
        model = self.model_runner.get_model()
        if vocabulary is None:
            del model.compute_logits
            return
        stock = model.compute_logits

        def compute_logits(hidden_RD: Any) -> Any:
            logits_RV = stock(hidden_RD)
            logits_RV[..., vocabulary:] = float("-inf")
            return logits_RV

        model.compute_logits = compute_logits
