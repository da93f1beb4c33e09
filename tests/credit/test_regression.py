"""The regression, against a plain solution; features."""

from math import exp

import numpy as np
import pytest
import torch

from oar_plugin.credit.regression import COLUMNS, REMEMBERED, SURFACE, Regression, projected, token_features


def labels(seed, count=40, size=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator), torch.randn(count, generator=generator)


@pytest.mark.parametrize("responses", [1, 80])  # a quarter of the labels that are remembered, and more of the responses
def test_it_is_the_ridge_regression_of_all_labels_where_earlier_ones_count_less(responses):
    """And one of the last columns alone."""
    regression, count = Regression(7, 3.0), REMEMBERED[0] // 4
    assert not regression.predict(torch.eye(7)).any()
    batches, kept = [labels(seed) for seed in range(3)], exp(-min(0.25, responses / REMEMBERED[1]))
    for batch in batches:
        assert regression.end_step(regression.sums(*batch), count, responses) == pytest.approx(kept)
    for column, (used, ridge) in enumerate(((slice(None), 3.0), (slice(-SURFACE, None), 1.0))):
        weight = np.sqrt([kept ** (2 - place) for place in range(3)])
        rows = [w * x.numpy()[:, used] for w, (x, _) in zip(weight, batches, strict=True)]
        size = rows[0].shape[1]
        target = [w * y.numpy() for w, (_, y) in zip(weight, batches, strict=True)]
        # A ridge is a row more per feature.
        design, wanted = (
            np.concatenate([*rows, np.sqrt(ridge) * np.eye(size)]),
            np.concatenate([*target, np.zeros(size)]),
        )
        want = np.zeros(7)
        want[used] = np.linalg.lstsq(design, wanted)[0]
        np.testing.assert_allclose(regression.predict(torch.eye(7))[:, column].numpy(), want, rtol=1e-3, atol=1e-6)
    assert regression.labels == pytest.approx(count * (1 + kept + kept**2))
    assert regression.responses == pytest.approx(responses * (1 + kept + kept**2))
    before = regression.predict(torch.eye(7))
    assert regression.end_step(torch.zeros(7, 8), 0, 0) == 1
    assert torch.equal(regression.predict(torch.eye(7)), before), "a step without labels"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projected_states_do_not_depend_on_scale_or_autocast(dtype):
    hidden_NH = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = projected(hidden_NH)
    assert once.shape == (64, COLUMNS)
    assert once.dtype == torch.float32
    assert once.std().item() == pytest.approx(1, abs=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(projected(4 * hidden_NH), once)


def test_features_end_with_what_hidden_states_do_not_say():
    own, before, doubt = torch.zeros(3, COLUMNS), torch.ones(3, COLUMNS), torch.tensor([0.0, 0.5, 1.0])
    feature_NF = token_features(own, before, doubt, torch.tensor([-1.0, 0.0, 1.0]))
    assert feature_NF[:, -SURFACE:].tolist() == [[0, -1, 1, 1], [0.5, 0, 0, 1], [1, 1, 1, 1]]
