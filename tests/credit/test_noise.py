"""Signs and noise: random enough, and the same however the work is cut."""

import torch

from oar_plugin.credit.noise import gaussian, gumbel, position_seeds, response_seeds, signs, step_seed, uniform


def test_signs_are_balanced_and_independent():
    sign = signs(torch.arange(64) * 7919, 0, 4096)
    assert set(sign.unique().tolist()) == {-1.0, 1.0}
    assert sign.mean().abs() < 5 / (64 * 4096) ** 0.5
    correlation = (sign @ sign.T / 4096).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / 4096**0.5


def test_a_slice_of_the_vocabulary_equals_the_whole_vocabulary_there():
    seed = torch.tensor([1, -5, 1 << 60])
    assert torch.equal(signs(seed, 100, 50), signs(seed, 0, 1000)[:, 100:150])


def test_gaussian_has_unit_variance_and_no_outliers_beyond_chance():
    values = gaussian(torch.arange(200), 500)
    assert abs(values.mean().item()) < 0.02
    assert abs(values.var().item() - 1) < 0.02
    assert abs((values**4).mean().item() - 3) < 0.15
    assert torch.isfinite(values).all()
    assert values.abs().max() < 6.5


def test_a_response_has_the_same_seed_alone_and_in_a_batch():
    first, second = torch.tensor([5, 6, 7]), torch.tensor([7, 6, 5, 5])
    together = response_seeds(torch.cat([first, second]), torch.tensor([0, 0, 0, 1, 1, 1, 1]), 2, seed=3)
    alone = [response_seeds(ids, torch.zeros_like(ids), 1, seed=3)[0] for ids in (first, second)]
    assert together.tolist() == [int(a) for a in alone]
    assert len(set(together.tolist())) == 2


def test_order_of_tokens_and_seed_matter():
    ids = torch.tensor([5, 6, 7])
    zero = torch.zeros_like(ids)
    seeds = {int(response_seeds(x, zero, 1, s)[0]) for x in (ids, ids.flip(0)) for s in (0, 1)}
    assert len(seeds) == 4


def test_draws_and_places_differ():
    seed = torch.tensor([11, 11])
    place = torch.tensor([0, 1])
    values = torch.cat([position_seeds(seed, place, draw) for draw in range(3)])
    assert len(values.unique()) == 6


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    signs(torch.tensor([1]), 0, 10)
    gaussian(torch.tensor([1]), 10)
    uniform(torch.tensor([1]), 10)
    step_seed(1, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_uniform_is_flat_and_open_at_both_ends_and_gumbel_is_finite():
    values = uniform(torch.arange(200), 500).flatten()
    assert 0 < values.min() < values.max() < 1
    assert abs(values.mean().item() - 0.5) < 0.005
    assert torch.histc(values, 10, 0, 1).sub(10_000).abs().max() < 500
    assert torch.isfinite(gumbel(torch.arange(200), 500)).all()
    assert abs(gumbel(torch.arange(200), 500).mean().item() - 0.5772) < 0.02


def test_a_response_that_is_seen_again_in_another_step_gets_other_signs():
    ids = torch.tensor([5, 6, 7])

    def of(seed, step):
        return signs(response_seeds(ids, torch.zeros_like(ids), 1, step_seed(seed, step)), 0, 640)

    first = of(0, 1)
    assert torch.equal(first, of(0, 1))
    others = torch.cat([of(0, 2), of(0, 3), of(1, 1)])
    correlation = (torch.cat([first, others]) @ torch.cat([first, others]).T / 640).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / 640**0.5


def test_the_seeds_of_steps_are_in_range_and_apart():
    found = {step_seed(seed, step) for seed in (0, 1, 2**31 - 1) for step in range(1, 2001)}
    assert len(found) == 6000
    assert all(0 <= seed < 2**31 for seed in found)
