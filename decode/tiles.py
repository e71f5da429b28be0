"""Tile shapes of the decode kernels: chosen by rule from the shapes alone, so that nothing is tuned at start-up.

The rules were read off whole-step timings on an H200 (`benchmarks/RESULTS.md`); other shapes follow by analogy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

PROCESSORS = 132  # multiprocessors of an H100 or H200
LEAST_DOT = 16  # columns that a product on the tensor cores takes at least
SMALL = 8 << 20  # weights of a product up to this many elements are bound by latency, not by bytes


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one product."""

    bn: int  # weight rows of a program
    bm: int  # activation rows
    bk: int
    splits: int  # parts of the k range
    stages: int
    warps: int
    ahead: int  # columns read ahead of the wait for the activations

    def ahead_of(self, k: int) -> int:
        """The columns read ahead: a power of two, at most `ahead` and the shortest split."""
        return min(self.ahead, 1 << (_shortest(k, self.bk, self.splits).bit_length() - 1))

    def even(self, k: int) -> bool:
        """Whether every tile of the loop over the rest is whole."""
        return k % self.bk == 0 and self.ahead_of(k) % self.bk == 0


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    bn: int  # tokens of a tile
    warps: int
    stages: int  # the page numbers take half of them
    target: int  # programs to cut the work into
    prefetch: int  # tokens of an item asked for ahead of the wait


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of one expert's products."""

    bm: int  # rows that chose it
    bn: int  # its output columns
    bk: int
    stages: int
    warps: int


# kind -> (bn, bk, splits, stages, warps, ahead), for few and for many weights.
UP_TO_16 = {
    "qkv": ((64, 64, 4, 2, 4, 256), (64, 64, 3, 4, 4, 256)),
    "o": ((64, 64, 4, 2, 4, 512), (64, 64, 3, 5, 4, 512)),
    "gate_up": ((64, 64, 1, 8, 4, 128), (64, 64, 1, 4, 4, 256)),
    "down": ((64, 64, 6, 2, 4, 512), (64, 64, 5, 5, 4, 256)),
    "head": ((64, 64, 1, 4, 4, 128), (64, 64, 1, 4, 4, 128)),
}
UP_TO_64 = {
    "qkv": ((64, 64, 2, 2, 4, 512), (64, 128, 1, 4, 4, 128)),
    "o": ((64, 64, 4, 2, 4, 512), (64, 128, 3, 3, 4, 256)),
    "gate_up": ((64, 64, 1, 4, 4, 256), (128, 64, 1, 4, 4, 64)),
    "down": ((64, 64, 6, 2, 4, 512), (64, 128, 3, 4, 4, 128)),
    "head": ((64, 64, 1, 3, 4, 128), (64, 64, 1, 3, 4, 64)),
}
UP_TO_32 = {
    **UP_TO_16,
    "qkv": ((64, 64, 4, 2, 4, 256), (64, 64, 1, 8, 4, 128)),
    "o": ((64, 64, 4, 2, 4, 512), (64, 64, 3, 6, 4, 256)),
    "gate_up": (UP_TO_16["gate_up"][0], UP_TO_64["gate_up"][1]),
}
UP_TO_128 = {
    "qkv": ((64, 64, 2, 5, 4, 64), (128, 64, 2, 4, 8, 64)),
    "o": ((64, 64, 3, 5, 4, 64), (64, 64, 3, 5, 4, 64)),
    "gate_up": ((64, 64, 1, 4, 4, 64), (128, 64, 1, 3, 8, 64)),
    "down": ((64, 64, 5, 4, 4, 64), (64, 64, 3, 5, 4, 64)),
}
MORE_ROWS = {  # in tiles of 64
    "qkv": ((64, 64, 1, 4, 4, 128), (64, 64, 1, 4, 4, 128)),
    "o": ((64, 64, 2, 3, 4, 64), (64, 64, 2, 3, 4, 64)),
    "gate_up": ((128, 64, 1, 3, 4, 64), (128, 64, 1, 3, 4, 64)),
    "down": ((64, 64, 2, 4, 4, 128), (64, 64, 2, 4, 4, 128)),
    "head": ((64, 64, 1, 3, 4, 64), (64, 64, 1, 3, 4, 64)),
}


def rows_tile(rows: int) -> int:
    """BM: the least of 16, 32, 64, 128 that holds all rows; more rows take several tiles of 64."""
    return next((bm for bm in (16, 32, 64, 128) if rows <= bm), 64)


def product_tiles(kind: str, rows: int, n: int, k: int, itemsize: int, divisor: int = 0, adapter: int = 0) -> Tiles:
    """Tiles of one product [rows, k] x [n, k]ᵀ; kind: qkv, o, gate_up (n counts both), down or head.

    divisor: what bn must divide, 0 if nothing. adapter: padded rank of its adapters, if it has any; at 256 those of
    gate and up would not fit the shared memory beside 128 rows. fp32 takes half the columns, for the same bytes.
    """
    bm = rows_tile(rows)
    if kind == "head" or adapter > 64:  # sampling takes registers, too
        bm = min(bm, 64)
    table = {16: UP_TO_16, 32: UP_TO_32, 64: UP_TO_64, 128: UP_TO_128}[bm] if rows <= bm else MORE_ROWS
    bn, bk, splits, stages, warps, ahead = table[kind][n * k > SMALL]
    if divisor:
        bn = math.gcd(divisor, bn)
    if math.ceil(n / bn) * splits > PROCESSORS:
        ahead = min(ahead, 256)  # what is read ahead stays in registers, which two programs of one processor share
    tiles = Tiles(bn, bm, bk, 1, stages, warps, ahead)
    if itemsize == 4:
        tiles = replace(tiles, bk=bk // 2, ahead=ahead // 4, stages=min(stages, 3))
    return replace(tiles, splits=_splits(k, tiles.bk, splits))


def attention_tiles(
    rows: int, kv_heads: int, qkv_weights: int, itemsize: int, together: bool = False
) -> AttentionTiles:
    """One wave of programs where rows times heads about fill one: one program a multiprocessor, two, or four small.

    together: rows of one sequence share items, so that there are fewer. Keys are asked for ahead where the q/k/v
    product before is long enough (its weights: qkv_weights) to hide that.
    """
    pairs = rows * kv_heads
    if itemsize == 4:
        return AttentionTiles(bn=32, warps=2, stages=3, target=4 * PROCESSORS, prefetch=0)
    if pairs <= PROCESSORS:
        ahead = 0 if qkv_weights <= SMALL else 64 if pairs <= PROCESSORS // 2 else 128
        return AttentionTiles(bn=64, warps=4, stages=9, target=PROCESSORS, prefetch=ahead)
    if pairs > 2 * PROCESSORS and (pairs <= 4 * PROCESSORS or together):
        return AttentionTiles(bn=32, warps=2, stages=7, target=4 * PROCESSORS, prefetch=0)
    return AttentionTiles(bn=64, warps=4, stages=7, target=2 * PROCESSORS, prefetch=0)


def tokens_together(group: int) -> int:
    """Tokens of one sequence whose queries, `group` for each token and KV head, fill a tile of the tensor cores."""
    return max(1, 16 // group)


def expert_tiles(mean: float, itemsize: int) -> ExpertTiles:
    """For `mean` rows an expert: bm holds the rows of all but the busiest ones, whose weights are read again."""
    bm = next(bm for bm in (16, 32, 64) if 2.5 * mean <= bm or bm == 64)
    if itemsize == 4:
        return ExpertTiles(bm, bn=64, bk=32, stages=3, warps=4)
    return ExpertTiles(bm, bn=128, bk=64, stages=4, warps=4)


def padded_rank(rank: int) -> int:
    """The rows of an adapter's tile: a power of two that the tensor cores take."""
    return max(16, 1 << (rank - 1).bit_length())


def low_tiles(rows: int, k: int, rank: int, itemsize: int) -> Tiles:
    """Tiles of an adapter's first product [rows, k] x [rank, k]ᵀ: many short splits, since it is all latency."""
    bk = 64 if itemsize == 2 else 32
    return Tiles(padded_rank(rank), rows_tile(rows), bk, _splits(k, bk, 8), stages=3, warps=4, ahead=bk)


def _splits(k: int, bk: int, most: int) -> int:
    """The most parts of k, up to `most`, in whole tiles but the last, which is no shorter than a product may be."""
    return next((n for n in range(most, 1, -1) if _shortest(k, bk, n) >= LEAST_DOT), 1)


def _shortest(k: int, bk: int, splits: int) -> int:
    """Columns of the last split; less than 1 where there are too many."""
    return k - (splits - 1) * math.ceil(math.ceil(k / bk) / splits) * bk
