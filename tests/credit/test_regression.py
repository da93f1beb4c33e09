"""The regression, against a plain solution; its sums over ranks; features."""

import numpy as np
import pytest
import torch

from oar_plugin.credit.regression import COLUMNS, DECAY, Regression, projected, token_features


def tokens(seed, count=40, size=5):
    generator = torch.Generator().manual_seed(seed)
    feature_NF = torch.cat([torch.randn(count, size - 1, generator=generator), torch.ones(count, 1)], 1)
    return feature_NF, torch.randn(count, generator=generator)


def step(regression, *batches):
    for batch in batches:
        regression.add(*batch)
    regression.end_step(regression.step_sums(torch.device("cpu")))


def test_it_is_the_ridge_regression_of_all_steps_where_earlier_ones_count_less():
    regression = Regression(5, 3.0)
    batches = [tokens(seed) for seed in range(3)]
    for batch in batches:
        step(regression, batch)
    weight = np.sqrt([DECAY ** (2 - place) for place in range(3)])
    rows = [np.concatenate([w * x.numpy() for w, (x, _) in zip(weight, batches, strict=True)])]
    rows.append(np.sqrt(3.0) * np.eye(5))  # a ridge is a row more per feature
    target = np.concatenate([w * y.numpy() for w, (_, y) in zip(weight, batches, strict=True)] + [np.zeros(5)])
    want = np.linalg.lstsq(np.concatenate(rows), target)[0]
    np.testing.assert_allclose(regression.predict(torch.eye(5)).numpy(), want, rtol=1e-4)
    assert regression.tokens == pytest.approx(40 * (1 + DECAY + DECAY**2))


def test_sums_over_ranks_are_those_of_one_process():
    one, *ranks = (Regression(5, 1.0) for _ in range(3))
    batches = [tokens(seed) for seed in range(2)]
    step(one, *batches)
    for rank, batch in zip(ranks, batches, strict=True):
        rank.add(*batch)
    summed = sum(rank.step_sums(torch.device("cpu")) for rank in ranks)
    for rank in ranks:
        rank.end_step(summed.clone())
        torch.testing.assert_close(rank.predict(torch.eye(5)), one.predict(torch.eye(5)))


def test_without_tokens_nothing_changes_and_bad_ones_are_left_out():
    regression = Regression(5, 1.0)
    assert not regression.predict(torch.eye(5)).any()
    step(regression)
    assert regression.tokens == 0
    good, (bad_NF, bad_N) = tokens(0), tokens(1)
    bad_NF[:20, 0], bad_N[20:] = torch.inf, torch.nan
    step(regression, good, (bad_NF, bad_N))
    other = Regression(5, 1.0)
    step(other, good)
    assert torch.equal(regression.predict(torch.eye(5)), other.predict(torch.eye(5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projected_states_do_not_depend_on_scale_or_autocast(dtype):
    hidden_NH = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = projected(hidden_NH)
    assert once.shape == (64, COLUMNS)
    assert once.dtype == torch.float32
    assert once.std().item() == pytest.approx(1, abs=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(projected(4 * hidden_NH), once)


def test_features_end_with_one_which_counts_tokens():
    own, before, doubt = torch.zeros(3, COLUMNS), torch.ones(3, COLUMNS), torch.tensor([0.0, 0.5, 1.0])
    feature_NF = token_features(own, before, doubt, torch.tensor([-1.0, 0.0, 1.0]))
    assert feature_NF[:, -4:].tolist() == [[0, -1, 1, 1], [0.5, 0, 0, 1], [1, 1, 1, 1]]
