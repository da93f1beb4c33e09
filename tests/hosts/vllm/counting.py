"""The extension under test, with what the tests need to know and do inside of the worker."""

from __future__ import annotations

from typing import Any

from oar_plugin.hosts.vllm.extension import OutcomeExtension


class CountingExtension(OutcomeExtension):
    def oar_install(self) -> None:
        first_time = not hasattr(self.model_runner, "oar_recorder")
        super().oar_install()
        if not first_time:
            return
        self.model_runner.restarts = {"restarts": 0, "within_answer": 0}
        recorder, counts = self.model_runner.oar_recorder, self.model_runner.restarts
        stock = recorder.step
        reached: dict[str, int] = {}

        def step(hidden_TD: Any, items: Any) -> Any:
            for item in items:
                before = reached.get(item.request, 0)
                if item.first < before:
                    counts["restarts"] += 1
                    counts["within_answer"] += before >= item.spec.start
                reached[item.request] = item.first + item.count
            return stock(hidden_TD, items)

        recorder.step = step

    def oar_restarts(self) -> dict[str, int]:
        """How often a request went back, and how often it had reached its answer by then."""
        counts: dict[str, int] = self.model_runner.restarts
        return counts

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
