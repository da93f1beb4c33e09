"""Importance that is predicted from hidden states: `algorithm.oar.amortize`.

A `Predictor` belongs to a run. In each step it says which responses are scored (`chosen`). It learns their scores (`learn`,
then `end_step`), and predicts those of the others (`predict`), which run through the model without a graph. It holds no token,
and every rank has the same one. A resumed run begins with a new one: its first step scores more responses, as that of a run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from oar_plugin.config import PREFIX, OarConfig
from oar_plugin.credit.noise import uniform
from oar_plugin.credit.regression import DECAY, FEATURES, Regression, token_features
from oar_plugin.output import logger
from oar_plugin.passes.gradient import Packed, Scores
from oar_plugin.passes.taps import to_device

ENOUGH = 4 * FEATURES  # scores are predicted from this many tokens on; until then, more responses are scored
MARGIN = 2.0  # a first step chooses responses with about this many times `ENOUGH` tokens
FEWEST = 16  # and about this many responses at least. As many are measured before the share is doubled
TOP = 0.2  # overlap is watched for this share of a response's tokens
LEAST = 1e-6  # scores below this share of a response's mean count as this one, or their logarithms would decide
RIDGE = 100.0  # added to the sums, which have about 1 per token and feature on their diagonal
LARGEST = 60.0  # predicted logarithms are cut to this size: the exponential is finite in float32
CHUNK = 2**15  # tokens whose features are held at once: those of all would take twice the memory of the hidden states


class Features:
    """What is known of the N reasoning tokens of a micro-batch, in its order: hidden states, doubts, positions.

    `packed` is on the CPU, `scores` on the device. float32 `log_prob_T`, on any device, has the log-prob of each packed token.
    """

    def __init__(self, packed: Packed, scores: Scores, log_prob_T: Tensor) -> None:
        self.packed, self._hidden_TP = packed, scores.hidden_TP
        reasoning_T, device = packed.reasoning_T, scores.hidden_TP.device
        at_N = reasoning_T.nonzero()[:, 0]
        self.response_N = packed.response_T[at_N]
        self._own_N, self._before_N = to_device(device, at_N, at_N - 1)
        self._doubt_T, log_prob_T = self._hidden_TP.new_zeros(len(reasoning_T)), log_prob_T.to(device, torch.float32)
        self._doubt_T[self._own_N] = -torch.expm1(log_prob_T[self._own_N])
        # Position of each reasoning token among those of its response, from -1 to 1; 0 for a single one.
        size_B = self.response_N.bincount(minlength=len(packed.offsets) - 1)
        index_N = torch.arange(len(at_N)) - (size_B.cumsum(0) - size_B)[self.response_N]
        last_N = size_B[self.response_N] - 1
        self._position_N = torch.where(last_N > 0, 2 * index_N / last_N.clamp_min(1) - 1, 0.0).float().to(device)

    def chunks(self) -> list[slice]:
        """Parts of the N tokens, whose features are made one after the other."""
        return [slice(start, start + CHUNK) for start in range(0, len(self.response_N), CHUNK)]

    def of(self, chosen: slice) -> Tensor:
        """`token_features` of some tokens, float32 `[n, F]`."""
        own_N, before_N = self._own_N[chosen], self._before_N[chosen]
        hidden = self._hidden_TP[own_N], self._hidden_TP[before_N]
        return token_features(*hidden, self._doubt_T[own_N], self._position_N[chosen])


class Predictor:
    """Scores of a share of the responses, predicted for the others.

    `share` is doubled if predictions agree with scores too little. `mean_log`: mean logarithm of a response's scores.
    """

    def __init__(self, share: float, least_overlap: float) -> None:
        self.regression = Regression(FEATURES, RIDGE)
        self.share, self._least, self.mean_log = share, least_overlap, 0.0
        self._measured = torch.zeros(4, dtype=torch.float64)  # sums over responses, of this rank and step
        self._agreed = 0.0, 0.0  # sums of overlaps and of responses, where earlier ones count less
        self._warned = False

    @property
    def ready(self) -> bool:
        """The gate would amplify what few tokens say as much as what many do."""
        return self.regression.tokens >= ENOUGH

    def predict(self, features: Features) -> Tensor:
        """Importance per packed token, float32 `[T]`, on the CPU; 0 outside the reasoning, and until `ENOUGH` were seen."""
        importance_T, parts = torch.zeros(len(features.packed.token_T)), [torch.zeros(0)]
        if not self.ready:
            return importance_T
        for chosen in features.chunks():
            log_n = self.regression.predict(features.of(chosen)) + self.mean_log
            parts.append(log_n.clamp(-LARGEST, LARGEST).exp().cpu())
        return importance_T.masked_scatter_(features.packed.reasoning_T, torch.cat(parts))

    def end_step(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Ends a step. `total` returns the sum of a tensor on `device` over the ranks that hold different rows."""
        sums = self.regression.step_sums(device)
        summed = total(torch.cat([sums.flatten(), self._measured.to(sums)])).cpu().double()
        self.regression.end_step(summed[: sums.numel()].view_as(sums))
        self._measured.zero_()
        mean_log, rows, overlap, measured = summed[sums.numel() :].tolist()
        self.mean_log = mean_log / rows if rows else self.mean_log
        self._agreed = DECAY * self._agreed[0] + overlap, DECAY * self._agreed[1] + measured
        too_little = self._agreed[0] < self._least * self._agreed[1]
        if too_little and self._agreed[1] >= FEWEST and self.share < 1:
            if not self._warned:
                mean = self._agreed[0] / self._agreed[1]
                logger.warning(
                    "OAR: predictions share %.0f %% of the top tokens of computed scores, less than %s=%g: the share of scored "
                    "responses is doubled until they agree more; see the metrics oar/amortize/overlap and oar/amortize/share",
                    100 * mean, f"{PREFIX}.amortize.least_overlap", self._least,
                )  # fmt: skip
            self.share, self._agreed, self._warned = min(1.0, 2 * self.share), (0.0, 0.0), True

    def wanted(self, size: Callable[[], Tensor]) -> float:
        """The share of the responses to score in a step. Until `ENOUGH` tokens were seen, `size` is asked for the numbers of
        tokens and of responses, int64 `[2]`, that all ranks together have to score or to predict.
        """
        if self.ready:
            return self.share
        tokens, responses = size().clamp_min(1).tolist()
        return min(1.0, max(self.share, MARGIN * ENOUGH / tokens, FEWEST / responses))

    def chosen(self, seed_B: Tensor, size: Callable[[], Tensor]) -> Tensor:
        """Whether to score each response, bool `[B]`, by a hash of its tokens and the step (`response_seeds`)."""
        return hashed(seed_B) < self.wanted(size)

    def learn(self, features: Features, importance_T: Tensor) -> Tensor:
        """Adds scored responses, and first predicts them. Returns overlap and rank correlation, float32 `[B, 2]`, or NaN.

        `importance_T` is per packed token, on the CPU. Responses with a NaN, or with zeros only, are left out.
        """
        count = len(features.packed.offsets) - 1
        score_N, agreement_B2 = importance_T[features.packed.reasoning_T].double(), torch.full((count, 2), torch.nan)
        predicted_N = self.predict(features)[features.packed.reasoning_T].double()
        target_N, end = torch.full_like(score_N, torch.nan), 0
        for row, size in enumerate(features.response_N.bincount(minlength=count).tolist()):
            mine = slice(end, end := end + size)
            score_R = score_N[mine]
            if not score_R.any() or not score_R.isfinite().all():
                continue
            log_R = score_R.clamp_min(LEAST * score_R.mean()).log()
            target_N[mine] = log_R - log_R.mean()
            self._measured[:2] += torch.stack([log_R.mean(), torch.ones_like(log_R[0])])
            if self.ready and size > 1:
                overlap, correlation = agreement(predicted_N[mine], score_R)
                agreement_B2[row] = torch.tensor([overlap, correlation])
                self._measured[2:] += torch.tensor([overlap, 1.0], dtype=torch.float64)
        for chosen in features.chunks():
            self.regression.add(features.of(chosen), target_N[chosen])
        return agreement_B2


def hashed(seed_B: Tensor) -> Tensor:
    """Uniform numbers that choose responses, `[B]`: not those that signs and noise are made of."""
    return uniform(~seed_B, 1)[:, 0]


def agreement(predicted_R: Tensor, score_R: Tensor) -> tuple[float, float]:
    """Overlap of the `TOP` largest (at least one), and rank correlation. Of equal scores the first is the larger one."""
    count, size = max(1, round(TOP * len(score_R))), len(score_R)
    ranks = [x_R.argsort(descending=True, stable=True) for x_R in (predicted_R, score_R)]
    top = [set(order_R[:count].tolist()) for order_R in ranks]
    place_2R = torch.stack([order_R.argsort() for order_R in ranks]).double()
    place_2R -= (size - 1) / 2
    correlation = (place_2R[0] * place_2R[1]).sum() / place_2R[0].square().sum()
    return len(top[0] & top[1]) / count, correlation.item()


def predictor_of(config: OarConfig) -> Predictor | None:
    """A new predictor, or None if all scores are computed."""
    share = config.amortize.share
    return None if share is None else Predictor(share, config.amortize.least_overlap)
