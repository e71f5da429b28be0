"""Noise: a pure function of its counters, standard Gumbel, never infinite."""

from __future__ import annotations

import numpy as np
import torch

from decode.noise import gumbel, row_key


def keys(*rows: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def test_a_row_has_the_same_noise_alone_and_among_others():
    many = keys(*[row_key(1, 2, 3, s) for s in range(5)])
    positions = torch.tensor([4, 900, 7, 7, 0])
    together = gumbel(many, positions, 1000)
    for row in range(5):
        assert torch.equal(together[row], gumbel(many[row : row + 1], positions[row : row + 1], 1000)[0])


def test_each_counter_changes_the_noise():
    base = (0, 0, 0, 0)
    reference = gumbel(keys(row_key(*base)), torch.tensor([0]), 64)
    for place in range(4):
        other = [*base]
        other[place] = 1
        assert not torch.equal(gumbel(keys(row_key(*other)), torch.tensor([0]), 64), reference)
    assert not torch.equal(gumbel(keys(row_key(*base)), torch.tensor([1]), 64), reference)


def test_row_keys_of_a_run_are_distinct():
    seen = {row_key(seed, step, p, s) for seed in (0, 1) for step in range(50) for p in range(16) for s in range(8)}
    assert len(seen) == 2 * 50 * 16 * 8


def test_the_integers_are_those_of_an_unsigned_restatement():
    """The Triton sampler uses uint32; here Python integers stand for it."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & 0xFFFFFFFF
        x ^= x >> 13
        x = x * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    first_key, second_key = row_key(9, 8, 7, 6)
    position, width = 70_000, 17
    first = mix(first_key ^ position * 0x9E3779B9 & 0xFFFFFFFF)
    second = mix(second_key + position * 0x7FEB352D & 0xFFFFFFFF)
    bits = [mix(mix(token * 0x9E3779B9 + first & 0xFFFFFFFF) ^ second) for token in range(width)]
    uniform = np.minimum((np.float32(bits) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    expected = -np.log(-np.log1p(-uniform))
    got = gumbel(keys((first_key, second_key)), torch.tensor([position]), width)[0]
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_the_noise_is_standard_gumbel_and_finite():
    noise = gumbel(keys(*[row_key(0, 0, 0, s) for s in range(64)]), torch.arange(64), 32_768)
    assert torch.isfinite(noise).all()
    ordered = noise.flatten().sort().values.double()
    quantiles = torch.exp(-torch.exp(-ordered))
    distance = (quantiles - torch.linspace(0, 1, len(quantiles), dtype=torch.float64)).abs().max()
    assert distance < 1.6 / len(quantiles) ** 0.5  # Kolmogorov-Smirnov, well under one false alarm in a hundred
    assert noise.max() > 12  # the upper tail is there: the expected maximum of 2 million is 14.6


def test_the_extreme_integers_give_finite_noise():
    uniform = torch.tensor([0.0, 2.0**32 - 1]).add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.isfinite(-torch.log(-torch.log1p(-uniform))).all()
