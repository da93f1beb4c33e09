"""Random numbers that depend on the response and not on the layout.

A sign or a noise value is a hash of (seed, response, coordinate). A response gets the same values alone or in a batch, on one
process or on eight, on a CPU or a GPU. Each rank computes only its slice, and the host's random state does not change.
"""

import math

import torch
from torch import Tensor

# splitmix64 (Steele, Lea and Flood 2014): its finaliser passes the usual statistical tests.
_GOLDEN = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's `>>` keeps the sign of an int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def response_seeds(token_T: Tensor, response_T: Tensor, num_responses: int, seed: int) -> Tensor:
    """One 64-bit seed per response, int64 `[B]`: a hash of its tokens and `seed`, that of the run or of the step (`step_seed`).

    `token_T` has the concatenated responses, `response_T` the response of each position, int64.
    """
    index_T = torch.arange(token_T.shape[0], device=token_T.device)
    last_B = torch.full((num_responses,), token_T.shape[0], device=token_T.device)
    place_T = index_T - last_B.scatter_reduce(0, response_T, index_T, "amin")[response_T]
    hashed_T = _mix(token_T.long() * _GOLDEN + _mix(place_T + 1))
    total_B = torch.zeros(num_responses, dtype=torch.int64, device=token_T.device).index_add_(0, response_T, hashed_T)
    return _mix(total_B + _mix(torch.full_like(total_B, seed + 1) * _GOLDEN))


def signs(seed_N: Tensor, start: int, size: int) -> Tensor:
    """Random signs (+1 or -1) for coordinates `start .. start + size - 1`, float32 `[N, size]`; 64 from one hash."""
    first, last = start // 64, (start + size + 63) // 64
    word = torch.arange(first + 1, last + 1, dtype=torch.int64, device=seed_N.device)
    hashed = _mix(seed_N[:, None] + word * _GOLDEN)
    # As bytes: the bits of a vocabulary of 152,000 in int64 would take eight times the memory of the signs. Every machine
    # that torch runs on is little-endian.
    bits = hashed.view(torch.uint8)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=seed_N.device)
    skip = start - 64 * first
    return bits.bitwise_and_(1).flatten(1)[:, skip : skip + size].float().mul_(-2).add_(1)


def gaussian(seed_N: Tensor, size: int) -> Tensor:
    """Standard normal values, float32 `[N, size]` (Box-Muller: two values from two hashed 24-bit uniforms)."""
    pairs = (size + 1) // 2
    coordinate = torch.arange(1, pairs + 1, dtype=torch.int64, device=seed_N.device) * _GOLDEN
    hashed = _mix(seed_N[:, None] + coordinate)
    radius = (-2.0 * ((_shift(hashed, 40) + 1).float() * 2.0**-24).log()).sqrt()
    angle = (hashed & 0xFFFFFF).float() * (2.0 * math.pi * 2.0**-24)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :size]


def uniform(seed_N: Tensor, size: int, start: int = 0) -> Tensor:
    """Uniform values in (0, 1) for coordinates `start .. start + size - 1`, float32 `[N, size]`, of 24 bits."""
    coordinate = torch.arange(start + 1, start + size + 1, dtype=torch.int64, device=seed_N.device) * _GOLDEN
    # The largest of 2^24 values would round to 1, whose Gumbel value is infinite.
    return ((_shift(_mix(seed_N[:, None] + coordinate), 40).float() + 0.5) * 2.0**-24).clamp_max(1 - 2.0**-24)


def gumbel(seed_N: Tensor, size: int, start: int = 0) -> Tensor:
    """Standard Gumbel values for coordinates `start .. start + size - 1`, float32 `[N, size]`."""
    return -(-uniform(seed_N, size, start).log()).log()


def step_seed(seed: int, step: int) -> int:
    """The seed of training step `step` (from 1), so that a response gets other signs when it returns in a later step."""
    return int(_shift(_mix(torch.tensor(seed * 2**20 + step)), 33))


def position_seeds(seed_N: Tensor, place_N: Tensor, draw: int = 0) -> Tensor:
    """One seed per (response, place in the response, draw), int64 `[N]`."""
    return _mix(_mix(seed_N + (place_N.long() + 1) * _GOLDEN) + torch.full_like(seed_N, draw + 1) * _MIX_2)
