"""LoRA in the decode products: x Wᵀ + scale * (x Aᵀ) Bᵀ, with the adapters as they are, never merged.

One more small kernel before a product leaves x Aᵀ in parts; the product's own kernel sums them, multiplies by Bᵀ and
adds to what it has accumulated (`adapter_sum`). The sum is rounded once, where peft's modules round the base product,
the adapter's and their sum; x Aᵀ is rounded as theirs is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode.overlap import begin
from decode.products import accumulate, early_weights, split_range
from decode.tiles import low_tiles, padded_rank
from decode.weights import Adapter, DecodeWeights, distance

MOST_SPLITS = 8  # of the k range of x Aᵀ


@triton.jit(do_not_specialize=["rows_live"])
def adapter_low_kernel(
    x_ptr, a_ptr, rows_live, second_from_first, third_from_first, low_ptr, R, K, stride_split,
    RP: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Parts of x Aᵀ for up to three adapters of rank R.  grid (rows / BM, adapters, SPLITS)

    x [rows, K]; the second and third A [R, K] start at the given distances from the first
    low [SPLITS, rows, WIDTH] fp32, RP columns an adapter, those from R on 0
    """
    which, m0, split = tl.program_id(1), tl.program_id(0) * BM, tl.program_id(2)
    first, stop = split_range(split, K, BK, SPLITS)
    start = tl.where(which == 2, third_from_first, tl.where(which == 1, second_from_first, 0))
    lane = tl.arange(0, RP)
    offsets = start + lane.to(tl.int64) * K
    early = early_weights(a_ptr, offsets, lane < R, first, AHEAD)
    begin(PDL)
    acc = accumulate(early, x_ptr, a_ptr, offsets, lane < R, m0, rows_live, first, stop, K, RP, BM, BK, AHEAD,
                     EVEN_K, STAGES)  # fmt: skip
    at = low_ptr + split * stride_split + (m0 + tl.arange(0, BM))[None, :] * WIDTH + (which * RP + lane)[:, None]
    tl.store(at, acc)


class Low(NamedTuple):
    """What a product's kernel needs of its adapters, in the order of its arguments."""

    tensors: tuple[Tensor, Tensor, int, int]  # parts of x Aᵀ; the first B, and where the others start from it
    numbers: tuple[int, int, float, int]  # stride of the parts, columns of one, scale, rank
    padded: int
    splits: int  # 0: there are none


class AdapterStage:
    """The buffer for up to `rows` rows, and the launch for one product."""

    def __init__(self, weights: DecodeWeights, rows: int, overlap: bool):
        ranks = [one.a.shape[0] for layer in weights.layers for group in layer.adapters.values() for one in group]
        width = 3 * padded_rank(max(ranks)) if ranks else 1
        self._parts = torch.zeros(MOST_SPLITS, rows, width, dtype=torch.float32, device=weights.norm.device)
        self._overlap = overlap

    def launch(self, rows: int, x: Tensor, adapters: tuple[Adapter, ...]) -> Low:
        """x [rows, k] and one adapter for each matrix of the product, or none."""
        parts = self._parts
        stride, width = parts.stride(0), parts.shape[2]
        if not adapters:
            return Low((parts, x, 0, 0), (stride, width, 0.0, 1), 16, 0)
        rank, k = adapters[0].a.shape
        first, second, third = ([*adapters, adapters[0], adapters[0]])[:3]
        t = low_tiles(rows, k, rank, x.element_size())
        adapter_low_kernel[(math.ceil(rows / t.bm), len(adapters), t.splits)](
            x, first.a, rows, distance(first.a, second.a), distance(first.a, third.a), parts, rank, k, stride, RP=t.bn,
            WIDTH=width, BM=t.bm, BK=t.bk, SPLITS=t.splits, EVEN_K=t.even(k), STAGES=t.stages, AHEAD=t.ahead_of(k),
            PDL=self._overlap, num_warps=t.warps, launch_pdl=self._overlap,
        )  # fmt: skip
        seconds = distance(first.b, second.b), distance(first.b, third.b)
        return Low((parts, first.b, *seconds), (stride, width, first.scale, rank), t.bn, t.splits)
