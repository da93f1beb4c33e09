"""Scores that are predicted from hidden states, against exact OAR-P: how many responses must be scored?

A ridge regression of the package is fitted on the scores of some responses, and judged on all others. Parts of the responses
take turns to be the ones that it is fitted on.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.estimators import REFERENCE
from benchmarks.fidelity.responses import Response
from benchmarks.fidelity.scores import judged
from oar_plugin.credit.regression import SCORE_FEATURES, Regression, of_score, projected
from oar_plugin.passes.prediction import LEAST, RIDGE

PREDICTED = (REFERENCE, "fisher 1")
"""What is predicted."""
SHARES = {"1 in 4": 4, "1 in 8": 8, "1 in 16": 16, "1 in 32": 32}
"""Responses that are scored."""


@torch.no_grad()
def features(model: Any, response: Response) -> Tensor:
    """Of each reasoning token, float32 `[R, F]`, as the passes make them."""
    token_1T = response.token_T[None].to(model.device)
    out = model(token_1T, output_hidden_states=True)
    hidden_TP = projected(out.hidden_states[-1][0])
    log_prob_T = out.logits[0, :-1].log_softmax(-1).gather(-1, token_1T[0, 1:, None])[:, 0]
    at_R = response.reasoning_R
    place_R = torch.linspace(-1, 1, len(at_R), device=hidden_TP.device)
    return of_score(hidden_TP[at_R], hidden_TP[at_R - 1], -torch.expm1(log_prob_T[at_R - 1]), place_R).cpu()


def target(score_R: Tensor) -> Tensor:
    """Log scores less their mean, float64 `[R]`, as `Amortized` learns them."""
    log_R = score_R.double().clamp_min(LEAST * score_R.double().mean()).log()
    return log_R - log_R.mean()


def predictions(
    feature: Sequence[Tensor], score: Sequence[Tensor], parts: int, columns: slice
) -> Iterator[tuple[int, Tensor]]:
    """Index and predicted logarithms of every response that is not in the part that the regression was fitted on."""
    for part in range(parts):
        regression = Regression(feature[0][:, columns].shape[-1], RIDGE)
        for index in range(part, len(feature), parts):
            if score[index].any():
                regression.add(feature[index][:, columns], target(score[index]))
        regression.close(regression.step_sums(torch.device("cpu")))
        for index in range(len(feature)):
            if index % parts != part:
                yield index, regression.predict(feature[index][:, columns])


def rows(model: nn.Module, scored: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """`judged`, of each predicted score, share and response; `scored`: those of `Findings`, in an order that is shuffled."""
    order = torch.randperm(len(scored), generator=torch.Generator().manual_seed(0)).tolist()
    mine = [scored[index] for index in order]
    feature = [features(model, one["response"]) for one in mine]
    ways = {"": slice(None), ", place and doubt alone": slice(SCORE_FEATURES - 4, None)}
    for name in PREDICTED:
        score = [one["scores"][name] for one in mine]
        for share, parts in SHARES.items():
            for way, columns in ways.items():
                for index, predicted_R in predictions(feature, score, parts, columns):
                    one, causal_R = mine[index], torch.zeros(len(predicted_R), dtype=torch.bool)
                    found = judged(predicted_R.double(), one["scores"][REFERENCE], causal_R)
                    yield {"estimator": f"{name} predicted{way}", "scored": share, "index": order[index], **found}
