"""The mixture of experts of a decode step as Triton kernels: routing, then only the experts that some lane chose.

Four kernels a layer: the router's choice for each lane; the lanes of each expert, listed; gate and up products with
GPT-OSS's own gate; down product, bias and share. Each expert's weights are read once for all of its lanes (in tiles of
BM), and the parts are left in fp32, one for each of a lane's experts, for `decode.products.join_kernel` to sum in the
router's order. Rounding points are those of Hugging Face's grouped product in the model dtype.

Invariants: every kernel follows the rule of `decode.overlap`; nothing depends on a value read on the host. A choice
that two experts tie for goes to the lower. Left out: weights laid out [out, in], experts without biases.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode.overlap import begin
from decode.tiles import ExpertTiles, expert_tiles
from decode.weights import ExpertWeights


@triton.jit
def route_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, shares_ptr, routes_ptr, positions_ptr, slots_ptr, table_ptr, stride_table, E, K,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, RECORD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The experts of each lane and their shares.  grid (rows,); x [rows, K], w [E, K]; ids, shares [rows, TOP_K]

    A padding lane (slot 0) has none, id -1: its experts would be read for nobody.

    RECORD: also write the experts to the new token's place in routes [pages, P, TOP_K] uint8
    """
    row = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((EXPERTS,), tl.float32)
    begin(PDL)
    for k in range(0, K, BK):
        column = k + tl.arange(0, BK)
        x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
        at = w_ptr + expert[:, None] * K + column[None, :]
        w = tl.load(at, mask=(expert < E)[:, None] & (column < K)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(w * x[None, :], axis=1)
    bias = tl.load(bias_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
    score = tl.where(expert < E, (total + bias).to(dtype).to(tl.float32), float("-inf"))
    top = tl.max(score, axis=0)
    chosen = tl.zeros((EXPERTS,), tl.int32) - 1  # a chosen expert's rank
    for rank in tl.static_range(TOP_K):
        best = tl.max(tl.where(chosen < 0, score, float("-inf")), axis=0)
        choice = tl.min(tl.where((score == best) & (chosen < 0), expert, EXPERTS), axis=0)
        chosen = tl.where(expert == choice, rank, chosen)
    weight = tl.where(chosen >= 0, tl.exp(score - top), 0.0)
    share = (weight / tl.sum(weight, axis=0)).to(dtype)
    slot = tl.load(slots_ptr + row)
    tl.store(ids_ptr + row * TOP_K + chosen, tl.where(slot > 0, expert, -1), mask=chosen >= 0)
    tl.store(shares_ptr + row * TOP_K + chosen, share, mask=chosen >= 0)
    if RECORD:
        position = tl.load(positions_ptr + row)
        page = tl.load(table_ptr + slot.to(tl.int64) * stride_table + position // P).to(tl.int64)
        at = routes_ptr + (page * P + position % P) * TOP_K + chosen
        tl.store(at, expert.to(tl.uint8), mask=chosen >= 0)


@triton.jit
def list_kernel(ids_ptr, pairs_ptr, counts_ptr, count, stride_pairs, PAIRS: tl.constexpr, PDL: tl.constexpr):
    """The pairs (row * TOP_K + rank) of each expert, in order.  grid (E,); pairs [E, stride_pairs], counts [E]"""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    begin(PDL)
    mine = (tl.load(ids_ptr + pair, mask=pair < count, other=-1) == expert).to(tl.int32)
    place = tl.cumsum(mine) - mine
    tl.store(pairs_ptr + expert * stride_pairs + place, pair, mask=mine > 0)
    tl.store(counts_ptr + expert, tl.sum(mine))


@triton.jit
def _expert_product(
    x_ptr, w_ptr, lines, live, columns, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x[lines] W, fp32  # [BM, BN]; x [., K], w [K, N] of one expert, lines [BM] (where live), columns [BN]"""
    inner = tl.arange(0, BK)
    x_at = x_ptr + lines[:, None] * K
    w_at = w_ptr + columns[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        rows = k + inner
        if EVEN:
            x = tl.load(x_at + rows[None, :], mask=live[:, None], other=0.0)
            w = tl.load(w_at + rows[:, None] * N)
        else:
            x = tl.load(x_at + rows[None, :], mask=live[:, None] & (rows < K)[None, :], other=0.0)
            w = tl.load(w_at + rows[:, None] * N, mask=(rows < K)[:, None] & (columns < N)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def experts_gate_kernel(
    x_ptr, w_ptr, bias_ptr, pairs_ptr, counts_ptr, out_ptr, N, K, stride_pairs, alpha, limit,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """(up + 1) * gate * sigmoid(alpha * gate) of every pair, both clamped.  grid (ceil(N / BN), E)

    x [rows, K]; w [E, K, N], bias [E, N], gate in the even columns and up in the odd; out [pairs, N / 2] model dtype
    """
    expert = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    halves = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    bias = tl.load(bias_ptr + expert * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    begin(PDL)
    count = tl.load(counts_ptr + expert)
    for first in range(0, count, BM):
        lane = first + tl.arange(0, BM)
        live = lane < count
        pair = tl.load(pairs_ptr + expert * stride_pairs + lane, mask=live, other=0)
        acc = _expert_product(
            x_ptr, w_ptr + expert * N * K, pair // TOP_K, live, columns, N, K, BM, BN, BK, EVEN, STAGES
        )
        both = (acc.to(dtype).to(tl.float32) + bias[None, :]).to(dtype).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BM, BN // 2, 2)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        gain = tl.sigmoid((gate * alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        glu = (gate * gain).to(dtype).to(tl.float32)
        value = ((up + 1.0).to(dtype).to(tl.float32) * glu).to(dtype)
        at = out_ptr + pair[:, None] * (N // 2) + halves[None, :]
        tl.store(at, value, mask=live[:, None] & (halves < N // 2)[None, :])


@triton.jit
def experts_down_kernel(
    x_ptr, w_ptr, bias_ptr, pairs_ptr, counts_ptr, shares_ptr, out_ptr, N, K, stride_pairs, stride_split,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each pair's product, bias and share.  grid (ceil(N / BN), E)

    x [pairs, K]; w [E, K, N]; bias [E, N]; out [TOP_K, rows, N] fp32, values rounded to the model dtype
    """
    expert = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    bias = tl.load(bias_ptr + expert * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    begin(PDL)
    count = tl.load(counts_ptr + expert)
    for first in range(0, count, BM):
        lane = first + tl.arange(0, BM)
        live = lane < count
        pair = tl.load(pairs_ptr + expert * stride_pairs + lane, mask=live, other=0)
        acc = _expert_product(x_ptr, w_ptr + expert * N * K, pair, live, columns, N, K, BM, BN, BK, EVEN, STAGES)
        share = tl.load(shares_ptr + pair, mask=live, other=0.0).to(tl.float32)
        value = (acc.to(dtype).to(tl.float32) + bias[None, :]).to(dtype).to(tl.float32)
        value = (value * share[:, None]).to(dtype).to(tl.float32)
        at = out_ptr + (pair % TOP_K)[:, None] * stride_split + (pair // TOP_K)[:, None] * N + columns[None, :]
        tl.store(at, value, mask=live[:, None] & (columns < N)[None, :])


class ExpertStage:
    """Buffers for up to `max_rows` lanes, and the launches of one layer's mixture."""

    def __init__(
        self, weights: ExpertWeights, max_rows: int, overlap: bool, positions: Tensor, slots: Tensor, table: Tensor,
        page_size: int,
    ):  # fmt: skip
        """weights: any layer's; all have one shape. positions, slots [max_rows], table: see `DecodeStack`."""
        self._positions, self._slots, self._table, self._page_size = positions, slots, table, page_size
        experts, inner, hidden = weights.down.shape
        like = weights.down
        self._experts, self._inner, self._hidden, self._overlap = experts, inner, hidden, overlap
        self.override: ExpertTiles | None = None  # benchmarks try others than the rule's
        self._stride = max_rows * weights.top_k
        self.ids = torch.zeros(max_rows, weights.top_k, dtype=torch.int32, device=like.device)
        self._shares = torch.zeros(max_rows, weights.top_k, dtype=like.dtype, device=like.device)
        self._pairs = torch.zeros(experts, self._stride, dtype=torch.int32, device=like.device)
        self._counts = torch.zeros(experts, dtype=torch.int32, device=like.device)
        self._gated = torch.zeros(self._stride, inner, dtype=like.dtype, device=like.device)

    def launch(self, rows: int, w: ExpertWeights, x: Tensor, parts: Tensor, routes: Tensor | None) -> int:
        """x [rows, hidden] -> parts [top_k, rows, hidden] fp32; returns top_k.

        routes: where the layer's choices are written, beside its keys  # [pages, page_size, top_k] uint8
        """
        t = self.override or expert_tiles(rows * w.top_k / self._experts, x.element_size())
        self._choose(rows, w, x, routes)
        common = {
            "TOP_K": w.top_k, "BM": t.bm, "BN": t.bn, "BK": t.bk, "STAGES": t.stages, "PDL": self._overlap,
            "num_warps": t.warps, "launch_pdl": self._overlap,
        }  # fmt: skip
        wide = 2 * self._inner
        experts_gate_kernel[(math.ceil(wide / t.bn), self._experts)](
            x, w.gate_up, w.gate_up_bias, self._pairs, self._counts, self._gated, wide, self._hidden, self._stride,
            w.alpha, w.limit, EVEN=wide % t.bn == 0 and self._hidden % t.bk == 0, **common,
        )  # fmt: skip
        experts_down_kernel[(math.ceil(self._hidden / t.bn), self._experts)](
            self._gated, w.down, w.down_bias, self._pairs, self._counts, self._shares, parts, self._hidden,
            self._inner, self._stride, parts.stride(0),
            EVEN=self._hidden % t.bn == 0 and self._inner % t.bk == 0, **common,
        )  # fmt: skip
        return w.top_k

    def _choose(self, rows: int, w: ExpertWeights, x: Tensor, routes: Tensor | None) -> None:
        """The experts of each lane, and the lanes of each expert."""
        route_kernel[(rows,)](
            x, w.router, w.router_bias, self.ids, self._shares, self.ids if routes is None else routes,
            self._positions, self._slots, self._table, self._table.stride(0), self._experts, self._hidden,
            EXPERTS=triton.next_power_of_2(self._experts), TOP_K=w.top_k,
            BK=min(512, triton.next_power_of_2(self._hidden)), P=self._page_size, RECORD=routes is not None,
            PDL=self._overlap, num_warps=8, launch_pdl=self._overlap,
        )  # fmt: skip
        list_kernel[(self._experts,)](
            self.ids, self._pairs, self._counts, rows * w.top_k, self._stride,
            PAIRS=triton.next_power_of_2(rows * w.top_k), PDL=self._overlap, num_warps=4, launch_pdl=self._overlap,
        )  # fmt: skip
