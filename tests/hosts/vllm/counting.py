"""The extension under test, with what the tests need to know and do inside of the worker."""

import math
from typing import Any

from oar_plugin.hosts.vllm.extension import OutcomeExtension
from oar_plugin.hosts.vllm.outcomes import OutcomeSpec


class CountingExtension(OutcomeExtension):
    def oar_install(self) -> None:
        first_time = not hasattr(self.model_runner, "oar_recorder")
        super().oar_install()
        if not first_time:
            return
        runner, recorder = self.model_runner, self.model_runner.oar_recorder
        runner.restarts_within_answers = 0
        stock = recorder.step
        reached: dict[str, int] = {}

        def step(hidden_TD: Any, items: Any) -> Any:
            for item in items:
                before = reached.get(item.request, 0)
                answer = item.spec.start if isinstance(item.spec, OutcomeSpec) else math.inf
                runner.restarts_within_answers += item.first < before >= answer
                reached[item.request] = item.first + item.count
            return stock(hidden_TD, items)

        recorder.step = step

    def oar_runner(self) -> str:
        """The module of the model runner."""
        return type(self.model_runner).__module__

    def oar_restarts_within_answers(self) -> int:
        """How often a request went back that had reached its answer by then."""
        return self.model_runner.restarts_within_answers

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
