"""Importance that is predicted from hidden states: `algorithm.oar.amortize`.

A `Predictor` belongs to a run. In each step it says which units of which responses are scored, its labels (`choose`,
`labelled`). It learns them (`learn`, then `end_step`), and predicts all tokens from the labels of earlier steps (`predict`).
It holds no token, and every rank has the same one. A resumed run begins with a new one: its first steps are plain GRPO.

Shape suffix U: labels, of one unit each. A *unit* is the tokens that one masked copy replaces.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oar_plugin.config import PREFIX, OarConfig
from oar_plugin.credit.noise import response_seeds, uniform
from oar_plugin.credit.regression import FEATURES, REMEMBERED, Regression, sum_dtype, token_features
from oar_plugin.output import logger
from oar_plugin.passes.gradient import Packed, Scores
from oar_plugin.passes.taps import to_device

ENOUGH = 480, 16  # scores are predicted from this many labels and responses on
MARGIN = 2.0  # until then, a step has about this many times the labels that are missing
FEWEST = 64  # labels of every step, if the batch has so many
BINS = 4096  # of the hashes that choose responses
STEPS = 20  # in a row without predictions, after which the log says so
LEAST = 1e-6  # scores below this share of the mean label count as this one, or their logarithms would decide
RIDGE = 100.0  # added to the sums, which have about 1 per label and feature on their diagonal
LARGEST = 60.0  # predicted logarithms are cut to this size: the exponential is finite in float32
CHUNK = 2**15  # tokens whose features are held at once: those of all would take twice the memory of the hidden states


class Units:
    """Units of a micro-batch, in order, of at most `span` tokens (`oar_plugin.credit.perturbation.units`).

    `labelled_T`: bool, tokens of the units that are held. None: of all. `count_B`: units held of each response. `at_Us`: packed
    positions of each one's tokens, then -1. `number_N` and `response_N`: of each reasoning token, its unit among all, and row.
    """

    def __init__(self, packed: Packed, span: int, labelled_T: Tensor | None = None) -> None:
        reasoning_T, response_T = packed.reasoning_T, packed.response_T
        at_N, index_N = reasoning_T.nonzero()[:, 0], torch.arange(int(reasoning_T.sum()))
        self.response_N = response_T[at_N]
        begins_N = at_N.diff(prepend=at_N[:1] - 2) > 1  # between two responses is a prompt
        place_N = (index_N - index_N.where(begins_N, 0).cummax(0)[0]) % span
        kept_N = torch.ones_like(begins_N) if labelled_T is None else labelled_T[at_N]
        self.number_N = (place_N == 0).cumsum(0) - 1
        self.count_B = self.response_N[kept_N & (place_N == 0)].bincount(minlength=len(packed.offsets) - 1)
        unit_n = (kept_N & (place_N == 0))[kept_N].cumsum(0) - 1
        self.at_Us = torch.full((int(self.count_B.sum()), span), -1)
        self.at_Us[unit_n, place_N[kept_N]] = at_N[kept_N]

    def mean(self, value: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
        """The mean over each unit's tokens, `[U, ...]`, of what `value` returns for packed positions on a device."""
        means = []
        for at_us in to_device(device, self.at_Us)[0].split(max(1, CHUNK // self.at_Us.shape[1])):
            value_us = value(at_us.flatten()).unflatten(0, at_us.shape)
            there_us = (at_us >= 0).view(*at_us.shape, *[1] * (value_us.ndim - 2))
            means.append(value_us.where(there_us, 0.0).sum(1) / there_us.sum(1))
        return torch.cat(means)


class Features:
    """What is known of the N reasoning tokens of a micro-batch, in its order: hidden states, doubts, positions.

    `packed` is on the CPU, `scores` on the device. float32 `log_prob_T`, on any device, has the log-prob of each packed token.
    """

    def __init__(self, packed: Packed, scores: Scores, log_prob_T: Tensor) -> None:
        self.packed, self._hidden_TP, device = packed, scores.hidden_TP, scores.hidden_TP.device
        reasoning_T, response_T = packed.reasoning_T, packed.response_T
        self.size_B = response_T[reasoning_T].bincount(minlength=len(packed.offsets) - 1)
        # Position of each reasoning token among those of its response, from -1 to 1; 0 for a single one.
        index_T = reasoning_T.cumsum(0) - 1 - (self.size_B.cumsum(0) - self.size_B)[response_T]
        last_T = self.size_B[response_T] - 1
        position_T = torch.where(last_T > 0, 2 * index_T / last_T.clamp_min(1) - 1, 0.0).float()
        (self.at_N,) = to_device(device, reasoning_T.nonzero()[:, 0])
        self._position_T, self._log_prob_T = position_T.to(device), log_prob_T.to(device, torch.float32)

    def of(self, at_n: Tensor) -> Tensor:
        """`token_features` of the reasoning tokens at some packed positions, float32 `[n, F]`."""
        doubt_n = -torch.expm1(self._log_prob_T[at_n])
        return token_features(self._hidden_TP[at_n], self._hidden_TP[at_n - 1], doubt_n, self._position_T[at_n])


class Predictor:
    """Predicts the scores of all responses from those of some units. See `AmortizeConfig` for `share` and `units`.

    `learning` counts steps in a row without predictions. `explained`: the shares of the variance of labels that predictions
    made before explain, and that position and probability alone explain; NaN until there are any.
    """

    def __init__(self, share: float, units: int | None, span: int) -> None:
        self.regression = Regression(FEATURES, RIDGE)
        self.learning, self.explained = 0, (math.nan, math.nan)
        self._share, self._units, self.span, self.fewest = share, units, span, FEWEST
        self._labels = list[tuple[Tensor, Tensor]]()  # of each response of rank and step: centred features, scores
        # Sums, where earlier ones count less: mean logarithm of each response's scores; number of the labels that were
        # predicted, their squares, and those of the errors of both kinds of predictions.
        self._log_sum, self._judged_4 = 0.0, torch.zeros(4, dtype=torch.float64)
        self._warned = False

    @property
    def ready(self) -> bool:
        """The gate would amplify what few labels say as much as what many do."""
        return ready(self.regression)

    def choose(self, units: Units, seed_B: Tensor, usable_B: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        """The responses that are labelled, bool `[B]`, for a host whose ranks choose by themselves.

        `total` sums a tensor over the ranks that hold different rows. `seed_B`: `response_seeds`, of this step. All ranks have
        the same threshold of hashes, whatever their number.
        """
        labels_B = units.count_B.clamp_max(self._units or len(units.number_N))
        bin_B = (hashed(seed_B) * BINS).long().clamp_max(BINS - 1)
        # `learn` leaves single labels out.
        found_2B = torch.stack([labels_B * (labels_B > 1), torch.ones_like(labels_B)])[:, usable_B]
        sum_2K = total(torch.zeros(2, BINS).index_add_(1, bin_B[usable_B], found_2B.float())).cpu().cumsum(-1)
        labels, responses = needed_labels(self._share * sum_2K[1, -1].item(), self.regression, self.fewest)
        few_K = (sum_2K[0] < labels) | (sum_2K[1] < responses)
        return usable_B & (bin_B <= int(few_K.sum()))  # to the end of the first bin with enough

    def labelled(self, units: Units, seed_B: Tensor, chosen_B: Tensor) -> Tensor:
        """Which of the N reasoning tokens belong to units that are scored, bool `[N]`."""
        if self._units is None:
            return chosen_B[units.response_N]
        picked_BK = (units.count_B.cumsum(0) - units.count_B)[:, None] + drawn_units(units.count_B, seed_B, self._units)
        there_BK = torch.arange(self._units) < units.count_B.clamp_max(self._units)[:, None]
        return torch.isin(units.number_N, picked_BK[chosen_B[:, None] & there_BK])

    def predict(self, features: Features) -> Tensor:
        """Importance per packed token, float32 `[T]`, on the CPU; 0 outside the reasoning, and until `ready`."""
        importance_T = torch.zeros(len(features.packed.token_T))
        if not self.ready:
            return importance_T
        chunks = [self.regression.predict(features.of(at_n))[:, 0].cpu() for at_n in features.at_N.split(CHUNK)]
        # No label says how large the scores of this response are: their logarithms get the mean of all responses.
        rows, level = torch.cat(chunks).split(features.size_B.tolist()), self._log_sum / self.regression.responses
        log_N = torch.cat([log_R - log_R.mean() + level for log_R in rows]).clamp(-LARGEST, LARGEST)
        return importance_T.masked_scatter_(features.packed.reasoning_T, log_N.exp())

    def learn(self, feature_UF: Tensor, score_U: Tensor, sizes: list[int]) -> None:
        """Keeps labels, of responses with `sizes` labels each, until `end_step`, and overwrites `feature_UF`. Those with one
        label, with zeros only, or with a number that is not finite are left out. `score_U` is on the CPU.
        """
        finite_U = score_U.isfinite() & feature_UF.isfinite().all(-1).cpu()
        scores = score_U.double().clamp_min(0.0).split(sizes)  # an importance of the user's own may be negative
        for x_uF, y_u, finite_u in zip(feature_UF.split(sizes), scores, finite_U.split(sizes), strict=True):
            if len(y_u) > 1 and y_u.any() and finite_u.all():
                self._labels.append((x_uF.sub_(x_uF.mean(0)), y_u))

    def end_step(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Ends a step. `total` returns the sum of a tensor on `device` over the ranks that hold different rows."""
        labels, self._labels, dtype = self._labels, [], sum_dtype(device)
        size_2 = torch.tensor([sum(y_u.sum() for _, y_u in labels), sum(len(y_u) for _, y_u in labels)], dtype=dtype)
        scores, count = total(size_2).tolist()
        sums, of_step_6 = torch.zeros(FEATURES, FEATURES + 1, device=device, dtype=dtype), torch.zeros(6).double()
        for x_uF, y_u in labels:
            # One least score for all: that of a response would depend on which of its units were drawn.
            log_u = y_u.clamp_min(LEAST * scores / count).log()
            target_u = log_u - log_u.mean()
            error_u2 = target_u[:, None] - self.regression.predict(x_uF).cpu()
            squares_3 = torch.cat([target_u[:, None], error_u2], -1).square().sum(0)
            sums += self.regression.sums(x_uF, target_u)
            of_step_6 += torch.tensor([len(y_u), 1, log_u.mean(), *squares_3], dtype=torch.float64)
        summed = total(torch.cat([sums.flatten(), of_step_6.to(sums)])).cpu().double()
        count, responses, log_sum, *squares = summed[sums.numel() :].tolist()
        ready, kept = self.ready, self.regression.end_step(summed[: sums.numel()].view_as(sums), count, responses)
        self._log_sum = kept * self._log_sum + log_sum
        self._judged_4 = kept * self._judged_4 + ready * torch.tensor([count, *squares])
        self._watch(ready)

    def _watch(self, ready: bool) -> None:
        """Says that nothing is predicted, or nothing that position and probability would not tell."""
        self.learning = 0 if ready else self.learning + 1
        if self.learning == STEPS:
            text = "OAR: %d steps without predictions, which were plain GRPO: %.0f labels of %.0f responses so far, needed "
            text += "%d of %d. Are there scores (oar/fallback)? If so use larger batches, or %s.amortize.share=null"
            logger.warning(text, STEPS, self.regression.labels, self.regression.responses, *ENOUGH, PREFIX)
        judged, variance, error, surface = self._judged_4.tolist()
        if variance:
            self.explained = 1 - error / variance, 1 - surface / variance
        if judged > REMEMBERED[0] / 2 and error >= surface and variance and not self._warned:
            text = "OAR: predictions explain %.0f %% of the variance of scores, position and probability alone %.0f %%: hidden "
            text += "states add nothing; see the metrics oar/amortize/explained and oar/amortize/explained_by_position"
            logger.warning(text, *(100 * share for share in self.explained))
            self._warned = True


def ready(counted: "Regression | Choice") -> bool:
    return counted.labels >= ENOUGH[0] and counted.responses >= ENOUGH[1]


def needed_labels(responses: float, counted: "Regression | Choice", fewest: int) -> tuple[float, float]:
    """How many labels a step needs, and how many responses: at least these, and more until predictions are ready."""
    if ready(counted):
        return fewest, responses
    labels = MARGIN * (ENOUGH[0] - counted.labels)
    return max(fewest, labels), max(responses, ENOUGH[1] - counted.responses)


class Choice:
    """The choice for the whole batch, by a driver. Scores then do not depend on the number of ranks, which can share evenly.

    Made of the settings. `labels` and `responses` count what was learned; a response of n tokens has n / span units.
    """

    def __init__(self, config: OarConfig) -> None:
        self._share, self._units, self._span = config.amortize.share, config.amortize.units, config.perturbation.span
        self.labels = self.responses = 0.0

    def choose(self, packed: Packed, own_B: Tensor, needed_B: Tensor, seed: int) -> Tensor:
        """Chosen responses, bool `[B]`: of those that need credit (`needed_B`) as many of the smallest hashes as are needed.

        `own_B`: how many of its own tokens each one has. `seed`: of the step.
        """
        if self._share is None:
            return torch.zeros_like(needed_B)
        hash_B = hashed(response_seeds(packed.token_T, packed.response_T, len(needed_B), seed))
        order = needed_B.nonzero()[:, 0]
        order = order[hash_B[order].argsort(stable=True)]
        labels, responses = needed_labels(math.ceil(self._share * len(order)), self, FEWEST)
        few_B = (self.each(own_B)[order].cumsum(0) < labels) | (torch.arange(len(order)) + 1 < responses)
        return torch.zeros_like(needed_B).index_fill(0, order[: int(few_B.sum()) + 1], True)

    def share_of(self, own_B: Tensor) -> float:
        """The share of such responses that rollout engines are to score in the next step; they choose before all are there."""
        labels, responses = needed_labels((self._share or 1.0) * len(own_B), self, FEWEST)
        return min(1.0, max(responses / len(own_B), labels / self.each(own_B).sum().item()))

    def each(self, own_B: Tensor) -> Tensor:
        """Labels of each response."""
        return (own_B / self._span).ceil().clamp_max(self._units or math.inf)

    def learned(self, labelled_B: Tensor, own_B: Tensor) -> None:
        """Counts responses that gave labels."""
        self.labels += self.each(own_B)[labelled_B].sum().item()
        self.responses += labelled_B.sum().item()


def drawn_units(count_B: Tensor, seed_B: Tensor, number: int) -> Tensor:
    """Numbers of the units that are scored of responses with `count_B` units, int64 `[B, number]`.

    One of each of as many parts of a response, which are about equally long. Fewer units are all in the first columns.
    """
    part_K, count_B1 = torch.arange(number), count_B[:, None]
    parts_B1 = count_B1.clamp(1, number)
    low_BK, high_BK = (edge_K * count_B1 // parts_B1 for edge_K in (part_K, part_K + 1))
    drawn_BK = (uniform(~seed_B, 1 + number)[:, 1:] * (high_BK - low_BK)).long()
    return torch.minimum(low_BK + drawn_BK, high_BK - 1)


def hashed(seed_B: Tensor) -> Tensor:
    """Uniform numbers that choose responses, `[B]`: not those that signs and noise are made of."""
    return uniform(~seed_B, 1)[:, 0]


def predictor_of(config: OarConfig) -> Predictor | None:
    """A new predictor, or None if all scores are computed."""
    amortize = config.amortize
    return None if amortize.share is None else Predictor(amortize.share, amortize.units, config.perturbation.span)
