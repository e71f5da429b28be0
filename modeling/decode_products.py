"""The four matrix products of a decode step as Triton kernels, each with the pointwise work around it.

For few rows a product is the reading of its weight W [N, K] once, so a program takes BN weight rows (the tile's M
side, which the tensor cores want large) against BM activation rows, and the work between two products rides along:
- `normed_product_kernel`: y = rmsnorm(h) Wᵀ, as unsummed split-K parts in fp32 (the attention kernel sums them);
- `gated_product_kernel`: silu(rmsnorm(h) Gᵀ) * (rmsnorm(h) Uᵀ);
- `residual_product_kernel`: h += x Wᵀ; the last split of a tile to arrive sums all, in fixed order.

RMSNorm without a pass of its own: rmsnorm(h) Wᵀ = ((h * norm) Wᵀ) / rms(h). Whoever writes h also writes h * norm and
the sums of squares of its tile's columns, so the next product only scales its result. Rounding points are those of
Hugging Face's modules in the model dtype, except that h * norm is rounded once where the module rounds twice.

Tiles of rows come first in the grid, so that those that share weights run together. Rows are not masked:
activation buffers hold a multiple of BM rows. Left out: biases (q/k/v biases are added by the
attention kernel), other activations than silu.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modeling.overlap import begin


@triton.jit
def early_weights(w_ptr, offsets, mask, first, AHEAD: tl.constexpr):
    """Elements [first, first + AHEAD) of each weight row, read ahead of the wait for the activations.  # [BN, AHEAD]

    offsets: where each weight row starts, in elements from w_ptr  # [BN] int64; mask: which of them exist  # [BN]
    """
    return tl.load(w_ptr + offsets[:, None] + (first + tl.arange(0, AHEAD))[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def accumulate(
    early, x_ptr, w_ptr, offsets, mask, m0, first, stop, K, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over k in [first, stop) of W[n, k] x[m, k], fp32  # [BN, BM]; early, offsets, mask: see `early_weights`."""
    rows = m0 + tl.arange(0, BM)
    columns = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(first + AHEAD, stop, BK, num_stages=STAGES):
        w_at = w_ptr + offsets[:, None] + (k + columns)[None, :]
        x_at = x_ptr + rows[:, None] * K + (k + columns)[None, :]
        if EVEN_K:
            w = tl.load(w_at, mask=mask[:, None], other=0.0)
            x = tl.load(x_at)
        else:
            live = (k + columns) < stop
            w = tl.load(w_at, mask=mask[:, None] & live[None, :], other=0.0)
            x = tl.load(x_at, mask=live[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    # Last, so that the loop's own reads are under way before anything waits for x.
    x = tl.load(x_ptr + rows[:, None] * K + (first + tl.arange(0, AHEAD))[None, :])
    return tl.dot(early, tl.trans(x), acc, input_precision="ieee")


@triton.jit
def inverse_rms(squares_ptr, rows, stride, width, eps, TILES: tl.constexpr, TILES_POW2: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each row, from the sums its writer left per tile of columns.  # [BM]"""
    tiles = tl.arange(0, TILES_POW2)
    parts = tl.load(
        squares_ptr + tiles[:, None] * stride + rows[None, :], mask=(tiles < TILES)[:, None], other=0.0
    )  # [TILES_POW2, BM]
    return tl.rsqrt(tl.sum(parts, axis=0) / width + eps)


@triton.jit
def split_range(split, K, BK: tl.constexpr, SPLITS: tl.constexpr):
    """The k range [first, stop) of one split, in whole tiles of BK."""
    each = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    return split * each, tl.minimum((split + 1) * each, K)


@triton.jit
def normed_product_kernel(
    x_ptr, squares_ptr, q_ptr, k_from_q, v_from_q, out_ptr, N_Q, N_KV, K, stride_squares, stride_split, eps,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    TILES: tl.constexpr, TILES_POW2: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Parts of rmsnorm(h) [Wq; Wk; Wv]ᵀ.  grid (rows / BM, N / BN, SPLITS); out [SPLITS, rows, N_Q + 2 N_KV] fp32

    x: h * norm [rows, K]; squares [TILES, stride_squares]; k_from_q, v_from_q: element distance of the weights of k
    and v from that of q, so that no adjacency is needed. BN divides N_Q and N_KV.
    """
    n0, m0, split = tl.program_id(1) * BN, tl.program_id(0) * BM, tl.program_id(2)
    first, stop = split_range(split, K, BK, SPLITS)
    width = N_Q + 2 * N_KV
    in_k = n0 >= N_Q
    in_v = n0 >= N_Q + N_KV
    start = tl.where(in_v, v_from_q, tl.where(in_k, k_from_q, 0))
    local = n0 - tl.where(in_v, N_Q + N_KV, tl.where(in_k, N_Q, 0))
    offsets = start + (local + tl.arange(0, BN)).to(tl.int64) * K
    mask = tl.full((BN,), 1, tl.int1)
    early = early_weights(q_ptr, offsets, mask, first, AHEAD)
    begin(PDL)
    acc = accumulate(early, x_ptr, q_ptr, offsets, mask, m0, first, stop, K, BN, BM, BK, AHEAD, EVEN_K, STAGES)
    rows = m0 + tl.arange(0, BM)
    acc *= inverse_rms(squares_ptr, rows, stride_squares, K, eps, TILES, TILES_POW2)[None, :]
    columns = n0 + tl.arange(0, BN)
    tl.store(out_ptr + split * stride_split + rows[None, :] * width + columns[:, None], acc)


@triton.jit
def gated_product_kernel(
    x_ptr, squares_ptr, gate_ptr, up_from_gate, out_ptr, N, K, stride_squares, eps,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    TILES: tl.constexpr, TILES_POW2: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(rmsnorm(h) Gᵀ) * (rmsnorm(h) Uᵀ).  grid (rows / BM, ceil(N / (BN / 2))); out [rows, N] model dtype

    Weight rows alternate in a tile, gate and up of one output column, so that both end in one program.
    """
    half: tl.constexpr = BN // 2
    n0, m0 = tl.program_id(1) * half, tl.program_id(0) * BM
    lane = tl.arange(0, BN)
    pair = n0 + lane // 2
    mask = pair < N
    offsets = tl.minimum(pair, N - 1).to(tl.int64) * K + (lane % 2).to(tl.int64) * up_from_gate
    early = early_weights(gate_ptr, offsets, mask, 0, AHEAD)
    begin(PDL)
    acc = accumulate(early, x_ptr, gate_ptr, offsets, mask, m0, 0, K, K, BN, BM, BK, AHEAD, EVEN_K, STAGES)
    rows = m0 + tl.arange(0, BM)
    acc *= inverse_rms(squares_ptr, rows, stride_squares, K, eps, TILES, TILES_POW2)[None, :]
    gate, up = tl.split(tl.permute(tl.reshape(acc, (half, 2, BM)), (0, 2, 1)))  # each [half, BM]
    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    columns = n0 + tl.arange(0, half)
    product = (silu * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + rows[None, :] * N + columns[:, None], product, mask=(columns < N)[:, None])


@triton.jit
def _add_to_residual(total, h_ptr, norm_ptr, normed_ptr, squares_ptr, tile, columns, rows, mask, N, stride_squares):
    """h += total; also h * norm for the next product, and this tile's sums of squares."""
    dtype = h_ptr.dtype.element_ty
    where = rows[None, :] * N + columns[:, None]
    before = tl.load(h_ptr + where, mask=mask[:, None], other=0.0).to(tl.float32)
    h = (before + total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(h_ptr + where, h, mask=mask[:, None])
    h32 = h.to(tl.float32)
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + where, (h32 * norm[:, None]).to(dtype), mask=mask[:, None])
    tl.store(squares_ptr + tile * stride_squares + rows, tl.sum(h32 * h32, axis=0))


@triton.jit
def residual_product_kernel(
    x_ptr, w_ptr, h_ptr, norm_ptr, normed_ptr, squares_ptr, parts_ptr, arrivals_ptr, N, K, stride_squares,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h += x Wᵀ in place, and h * norm and the sums of squares.  grid (rows / BM, ceil(N / BN), SPLITS)

    x [rows, K]; h, normed [rows, N]; squares [tiles, stride_squares] fp32; parts: scratch, BN * BM fp32 a program;
    arrivals: one int32 per tile, 0 before and after.
    """
    m_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop = split_range(split, K, BK, SPLITS)
    columns = tile * BN + tl.arange(0, BN)
    mask = columns < N
    offsets = tl.minimum(columns, N - 1).to(tl.int64) * K
    early = early_weights(w_ptr, offsets, mask, first, AHEAD)
    begin(PDL)
    acc = accumulate(early, x_ptr, w_ptr, offsets, mask, m_tile * BM, first, stop, K, BN, BM, BK, AHEAD, EVEN_K, STAGES)
    rows = m_tile * BM + tl.arange(0, BM)
    if SPLITS == 1:
        _add_to_residual(acc, h_ptr, norm_ptr, normed_ptr, squares_ptr, tile, columns, rows, mask, N, stride_squares)
    else:
        cell = m_tile * tl.num_programs(1) + tile
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        block = parts_ptr + cell * (SPLITS * BN * BM) + inside
        tl.store(block + split * (BN * BM), acc)
        tl.debug_barrier()  # all threads' parts are written before the arrival is announced
        if tl.atomic_add(arrivals_ptr + cell, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals_ptr + cell, 0)
            total = tl.zeros((BN, BM), tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(block + other * (BN * BM), cache_modifier=".cg")
            _add_to_residual(
                total, h_ptr, norm_ptr, normed_ptr, squares_ptr, tile, columns, rows, mask, N, stride_squares
            )
