"""Counter-based Gumbel noise: a pure function of (run seed, step, prompt, sample, position, token).

A draw therefore does not depend on neighbours, batch size, lane, rank or device. `row_key` folds the first four
into 64 bits on the host; position and token enter on the device. 32-bit integers give a uniform v in (0, 1), and
-log(-log1p(-v)) is finite for each of them: 24-bit uniforms would reach 0 or 1 and bias the upper tail.
The Triton sampler computes the same integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B9
ODD = 0x7FEB352D


def row_key(seed: int, step: int, prompt: int, sample: int) -> tuple[int, int]:
    """Two unsigned 32-bit words that name one trajectory (splitmix64, Steele et al. 2014, folded over the four)."""
    state = 0
    for word in (seed, step, prompt, sample):
        state = _splitmix64((state ^ (word & _MASK64)) & _MASK64)
    return state & 0xFFFFFFFF, state >> 32


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, fp32.

    keys: the words of `row_key` as int32 bit patterns  # [B, 2]
    positions: index in the sequence of the token to draw  # [B]
    returns noise  # [B, V]
    """
    position = positions.to(torch.int32)
    first = _mix(keys[:, 0] ^ position * _i32(GOLDEN))  # [B]
    second = _mix(keys[:, 1] + position * _i32(ODD))  # [B]
    token = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * _i32(GOLDEN)  # [V]
    bits = _mix(_mix(token[None] + first[:, None]) ^ second[:, None])  # [B, V]
    unsigned = bits.to(torch.int64).bitwise_and_(0xFFFFFFFF).to(torch.float32)
    uniform = unsigned.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """murmur3's 32-bit finalizer on int32, whose products wrap as unsigned ones do."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _i32(0x85EBCA6B)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _i32(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def _i32(word: int) -> int:
    """The signed value with the same 32 bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
