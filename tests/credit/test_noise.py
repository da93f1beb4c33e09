"""Signs and noise are random enough, and the same on every layout."""

import math

import pytest
import torch

from oar_plugin.credit.noise import gaussian, gumbel, position_seeds, response_seeds, signs, step_seed, uniform

IDS = torch.tensor([5, 6, 7])
GOLDEN, LAST = 0x9E3779B97F4A7C15, 0x94D049BB133111EB


def mixed(number):
    """The finaliser of splitmix64, on unsigned integers."""
    number %= 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * LAST % 2**64
    return number ^ (number >> 31)


def without_sign(seeds):
    return [int(seed) % 2**64 for seed in seeds]


@pytest.mark.parametrize("size", [1, 2, 5, 200])
def test_draws_are_hashes_of_seed_and_coordinate(size):
    seed_N = torch.tensor([0, 7919, -3])
    hashed = [[mixed(seed + GOLDEN * place) for place in range(1, size + 1)] for seed in without_sign(seed_N)]
    want = torch.tensor([[((one >> 40) + 0.5) * 2**-24 for one in row] for row in hashed])
    assert torch.equal(uniform(seed_N, size), want)
    torch.testing.assert_close(gumbel(seed_N, size), -(-want.log()).log())
    bits = [[1 - 2 * (row[place // 64] >> place % 64 & 1) for place in range(5, 5 + size)] for row in hashed]
    assert signs(seed_N, 5, size).tolist() == bits
    pairs = (size + 1) // 2
    radius = torch.tensor([[-2 * math.log(((one >> 40) + 1) / 2**24) for one in row[:pairs]] for row in hashed]).sqrt()
    angle = torch.tensor([[(one % 2**24) * 2 * math.pi / 2**24 for one in row[:pairs]] for row in hashed])
    normal = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
    torch.testing.assert_close(gaussian(seed_N, size), normal[:, :size], atol=1e-5, rtol=1e-5)


def test_seeds_are_hashes_of_tokens_places_steps_and_draws():
    total = sum(mixed(token * GOLDEN + mixed(place + 1)) for place, token in enumerate(IDS.tolist()))
    (seed,) = without_sign(seed_of(IDS, 3))
    assert seed == mixed(total + mixed(4 * GOLDEN))
    assert step_seed(3, 5) == mixed(3 * 2**20 + 5) >> 33
    of_draws = [without_sign(position_seeds(torch.tensor([11]), torch.tensor([2]), draw)) for draw in (0, 1)]
    assert of_draws == [[mixed(mixed(11 + 3 * GOLDEN) + (draw + 1) * LAST)] for draw in (0, 1)]
    assert without_sign(position_seeds(torch.tensor([11]), torch.tensor([2]))) == of_draws[0]


def seed_of(ids, seed):
    return response_seeds(ids, torch.zeros_like(ids), 1, seed)


def test_a_response_has_the_same_seed_alone_and_in_a_batch():
    second = torch.tensor([7, 6, 5, 5])
    together = response_seeds(torch.cat([IDS, second]), torch.tensor([0, 0, 0, 1, 1, 1, 1]), 2, seed=3)
    assert torch.equal(together, torch.cat([seed_of(IDS, 3), seed_of(second, 3)]))
    assert len(together.unique()) == 2
