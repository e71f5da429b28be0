"""Tile shapes of the decode products: chosen by rule from the shapes alone, so that nothing is tuned at start-up.

The rule was read off timings on an H200 (`benchmarks/RESULTS_decode.md`); other shapes follow by analogy, never fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SLOTS = 264  # programs that run at once: two on each of an H200's 132 multiprocessors


@dataclass(frozen=True, slots=True)
class Tiles:
    bn: int  # weight rows of a program
    bm: int  # activation rows
    bk: int
    splits: int  # parts of the k range
    stages: int
    warps: int
    ahead: int  # columns read ahead of the wait for the activations

    def ahead_of(self, k: int) -> int:
        """The columns read ahead: a power of two, at most `ahead` and the shortest split."""
        each = math.ceil(math.ceil(k / self.bk) / self.splits) * self.bk
        shortest = k - (self.splits - 1) * each
        return min(self.ahead, 1 << (shortest.bit_length() - 1))

    def even(self, k: int) -> bool:
        """Whether every tile of the loop over the rest is whole."""
        return k % self.bk == 0 and self.ahead_of(k) % self.bk == 0


def rows_tile(rows: int) -> int:
    """BM: the least of 16, 32, 64, 128 that holds all rows; more rows take several tiles of 128."""
    return next(bm for bm in (16, 32, 64, 128) if rows <= bm or bm == 128)


def product_tiles(kind: str, rows: int, n: int, k: int, itemsize: int, divisor: int = 0) -> Tiles:
    """Tiles of one product [rows, k] x [n, k]ᵀ; kind: qkv, o, gate_up (n counts both), down or head.

    divisor: what bn must divide, 0 if nothing.
    """
    bm = rows_tile(rows)
    bn = 128 if kind == "head" else 64
    if divisor:
        bn = min(bn, math.gcd(divisor, bn))
    bk = 128 // (itemsize // 2)
    stages = {16: 4, 32: 4, 64: 4, 128: 3}[bm]
    if kind == "head" and bm >= 64:
        bk //= 2
    tiles = math.ceil(n / bn) * math.ceil(rows / bm)
    splits = 1
    if kind in ("qkv", "o", "down"):
        most = max(1, math.ceil(k / bk) // 2)
        splits = max(1, min(8, most, round(SLOTS / tiles / 1.5)))
    splits = math.ceil(math.ceil(k / bk) / math.ceil(math.ceil(k / bk) / splits))  # no empty last split
    return Tiles(bn, bm, bk, splits, stages, 8 if bm == 128 else 4, 2 * bk)
