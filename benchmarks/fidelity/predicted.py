"""Scores that are predicted from hidden states, against exact OAR-P: how many responses must be scored?

The package's regression is fitted on the scores of one part of the responses, and judged on another part, so that each
response is judged once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.estimators import REFERENCE
from benchmarks.fidelity.responses import Response
from benchmarks.fidelity.scores import judged, top_overlap
from benchmarks.fidelity.tables import BASELINE, MAIN, Rows
from oar_plugin.credit.regression import FEATURES, Regression, projected, token_features
from oar_plugin.passes.prediction import LEAST, RIDGE

PREDICTED = {
    **{f"oar_p, 1 in {parts} scored": (REFERENCE, parts, slice(None)) for parts in (4, 8, 16)},
    f"{BASELINE.split()[0]}, 1 in 8 scored": (BASELINE, 8, slice(None)),
    # Without hidden states.
    "control: place and doubt": (REFERENCE, 8, slice(FEATURES - 4, None)),
}
"""By name: what is predicted, one in how many responses it is fitted on, and the columns that it sees."""
PLAIN = {"forward": 1.0, "backward": 0.0, "time": 1.0}
"""Costs of a response that is not scored."""


@torch.no_grad()
def features(model: Any, response: Response, layers: Sequence[int] = (-1,)) -> list[Tensor]:
    """The features of each reasoning token, float32 `[R, F]`, as the passes make them (of the last layer)."""
    device, at_R = next(model.parameters()).device, response.reasoning_R
    token_1T = response.token_T[None].to(device)
    out = model(token_1T, output_hidden_states=True)
    log_prob_R = out.logits[0, at_R - 1].float().log_softmax(-1).gather(-1, token_1T[0, at_R, None])[:, 0].cpu()
    rest = -torch.expm1(log_prob_R), torch.linspace(-1, 1, len(at_R))
    projections = (projected(out.hidden_states[layer][0]).cpu() for layer in layers)
    return [token_features(hidden_TP[at_R], hidden_TP[at_R - 1], *rest) for hidden_TP in projections]


def predicted(feature: Sequence[Tensor], score: Sequence[Tensor], parts: int) -> list[Tensor]:
    """Logarithms `[R]` of each response's scores, less a constant, from the part of the responses before its own."""
    fits = list[Regression]()
    for part in range(parts):
        fits.append(Regression(feature[0].shape[-1], RIDGE))
        mine = [index for index in range(part, len(feature), parts) if score[index].any()]
        logs = [score[index].clamp_min(LEAST * score[index].mean()).log() for index in mine]
        target_U = torch.cat([score[0][:0], *(log_R - log_R.mean() for log_R in logs)])
        feature_UF = torch.cat([feature[0][:0], *(feature[index] - feature[index].mean(0) for index in mine)])
        fits[-1].end_step(fits[-1].sums(feature_UF, target_U), len(target_U), len(mine))
    return [fits[(index - 1) % parts].predict(feature_RF)[:, 0] for index, feature_RF in enumerate(feature)]


def predicted_rows(model: nn.Module, found: Sequence[Rows]) -> Rows:
    """Rows of these estimators for `Findings`. `found`: of the sources of this model, with exact scores."""
    scored = [row for rows in found for row in rows["scored"]]
    # A source's responses are beside each other.
    order = torch.randperm(len(scored), generator=torch.Generator().manual_seed(0)).tolist()
    mine = [scored[index] for index in order]
    feature, more = [features(model, row["response"])[0] for row in mine], Rows(judged=[], costs=[])
    for name, (of, parts, columns) in PREDICTED.items():
        score = [row["scores"][of] for row in mine]
        for row, log_R in zip(mine, predicted([one[:, columns] for one in feature], score, parts), strict=True):
            response, reference_R = row["response"], row["scores"][REFERENCE]
            way = {"way": MAIN, "estimator": name, "answer": "right" if response.right else "wrong"}
            of_R = judged(log_R.double(), reference_R, response.causal_T[response.reasoning_R])
            gain = of_R["overlap"] - top_overlap(row["scores"][BASELINE], reference_R)
            key = {part: row[part] for part in ("task", "length", "model")}
            more["judged"].append({**key, **way, **of_R, "own": float("nan"), "gain": gain})
    for rows in found:
        spent = {row["estimator"]: row for row in rows["costs"]}
        for name, (of, parts, _) in PREDICTED.items():
            share = {part: spent[of][part] / parts + plain * (1 - 1 / parts) for part, plain in PLAIN.items()}
            more["costs"].append({**spent[of], "estimator": name, **share})
    return more
