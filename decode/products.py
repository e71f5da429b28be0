"""The matrix products of a decode step as Triton kernels, and the residual sum and norm between them.

For few rows a product is the reading of its weight W [N, K] once, so a program takes BN weight rows (the tile's M
side, which the tensor cores want large) against BM activation rows. `split_product_kernel` divides the k range among
programs and leaves the parts, in fp32, for the next kernel to sum: the attention for q, k, v; `join_kernel` for the
other two, which also adds the residual and norms the row for the next product. That small kernel costs little: the
product after it reads its first weights meanwhile (`decode.overlap`). `gated_product_kernel` ends in silu(g) * u.

Rounding points are those of Hugging Face's modules in the model dtype. Tiles of rows come first in the grid, so that
those that share weights run together. Of a tile's rows those beyond the live ones are neither read nor written. Biases
of q, k, v are the attention kernel's to add, that of the output product `join_kernel`'s. Left out: biases of the MLP,
other activations than silu.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode.overlap import ask_next, begin


@triton.jit
def early_weights(w_ptr, offsets, mask, first, AHEAD: tl.constexpr):
    """Elements [first, first + AHEAD) of each weight row, read ahead of the wait for the activations.  # [BN, AHEAD]

    offsets: where each weight row starts, in elements from w_ptr  # [BN] int64; mask: which of them exist  # [BN]
    """
    return tl.load(w_ptr + offsets[:, None] + (first + tl.arange(0, AHEAD))[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def accumulate(
    early, x_ptr, w_ptr, offsets, mask, m0, live, first, stop, K, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over k in [first, stop) of W[n, k] x[m, k], fp32  # [BN, BM]; early, offsets, mask: see `early_weights`.

    Rows from `live` on are not read: of 16 rows x would be a quarter of the bytes that come from L2.
    """
    rows = m0 + tl.arange(0, BM)
    real = (rows < live)[:, None]
    columns = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(first + AHEAD, stop, BK, num_stages=STAGES):
        w_at = w_ptr + offsets[:, None] + (k + columns)[None, :]
        x_at = x_ptr + rows[:, None] * K + (k + columns)[None, :]
        if EVEN_K:
            w = tl.load(w_at, mask=mask[:, None], other=0.0)
            x = tl.load(x_at, mask=real, other=0.0)
        else:
            inside = (k + columns) < stop
            w = tl.load(w_at, mask=mask[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_at, mask=real & inside[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    # Last, so that the loop's own reads are under way before anything waits for x.
    x = tl.load(x_ptr + rows[:, None] * K + (first + tl.arange(0, AHEAD))[None, :], mask=real, other=0.0)
    return tl.dot(early, tl.trans(x), acc, input_precision="ieee")


@triton.jit
def split_range(split, K, BK: tl.constexpr, SPLITS: tl.constexpr):
    """The k range [first, stop) of one split, in whole tiles of BK."""
    each = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    return split * each, tl.minimum((split + 1) * each, K)


@triton.jit
def adapter_sum(
    low_ptr, b_ptr, offsets, live, m0, first, stride_low, width, scale, BM: tl.constexpr, COLUMNS: tl.constexpr,
    RP: tl.constexpr, LOW_SPLITS: tl.constexpr,
):  # fmt: skip
    """LoRA's scale * B (A x), fp32  # [BN, BM]; `decode.adapters` leaves A x in low

    offsets: of B's row for each output  # [BN] int64; live: which of COLUMNS of low, from `first`, belong to it and
    exist  # [BN, COLUMNS]; low [LOW_SPLITS, rows, width] fp32
    """
    column = tl.arange(0, COLUMNS)
    at = low_ptr + (m0 + tl.arange(0, BM))[:, None] * width + first + column[None, :]
    low = tl.load(at)
    for split in tl.static_range(1, LOW_SPLITS):
        low += tl.load(at + split * stride_low)
    b = tl.load(b_ptr + offsets[:, None] + (column % RP)[None, :], mask=live, other=0.0)
    return tl.dot(b, tl.trans(low.to(b.dtype)), input_precision="ieee") * scale


@triton.jit(do_not_specialize=["rows_live"])
def split_product_kernel(
    x_ptr, w_ptr, rows_live, second_from_first, third_from_first, out_ptr, next_ptr, piece, low_ptr, b_ptr, b_second,
    b_third, N, N_FIRST, N_SECOND, K, stride_split, stride_low, width, scale, R, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr, RP: tl.constexpr, LOW_SPLITS: tl.constexpr,
):  # fmt: skip
    """Parts of x Wᵀ, W up to three matrices one on top of the other.  grid (rows / BM, ceil(N / BN), SPLITS)

    x [rows_live, K]; out [SPLITS, rows, N] fp32. The matrices have N_FIRST, N_SECOND and the rest of the N rows; the
    second and third start at the given distances from the first. Where there are several, BN divides each one's rows.
    next_ptr, piece: see `decode.overlap.ask_next`.
    LOW_SPLITS above 0: each matrix has an adapter (`adapter_sum`) of rank R <= RP; their B start likewise.
    """
    n0, m0, split = tl.program_id(1) * BN, tl.program_id(0) * BM, tl.program_id(2)
    first, stop = split_range(split, K, BK, SPLITS)
    in_second, in_third = n0 >= N_FIRST, n0 >= N_FIRST + N_SECOND
    start = tl.where(in_third, third_from_first, tl.where(in_second, second_from_first, 0))
    local = n0 - tl.where(in_third, N_FIRST + N_SECOND, tl.where(in_second, N_FIRST, 0))
    columns = n0 + tl.arange(0, BN)
    mask = columns < N
    offsets = start + (local + tl.arange(0, BN)).to(tl.int64) * K
    early = early_weights(w_ptr, offsets, mask, first, AHEAD)
    begin(PDL)
    acc = accumulate(early, x_ptr, w_ptr, offsets, mask, m0, rows_live, first, stop, K, BN, BM, BK, AHEAD, EVEN_K,
                     STAGES)  # fmt: skip
    ask_next(next_ptr, piece, PDL)
    if LOW_SPLITS > 0:  # noqa: SIM102  # decided when compiling; the second where it runs
        if split == 0:
            which = tl.where(in_third, 2, tl.where(in_second, 1, 0))
            b_start = tl.where(in_third, b_third, tl.where(in_second, b_second, 0))
            of_b = b_start + (local + tl.arange(0, BN)).to(tl.int64) * R
            live = mask[:, None] & (tl.arange(0, RP) < R)[None, :]
            acc += adapter_sum(low_ptr, b_ptr, of_b, live, m0, which * RP, stride_low, width, scale, BM, RP, RP,
                               LOW_SPLITS)  # fmt: skip
    rows = m0 + tl.arange(0, BM)
    real = mask[:, None] & (rows < rows_live)[None, :]
    tl.store(out_ptr + split * stride_split + rows[None, :] * N + columns[:, None], acc, mask=real)


@triton.jit(do_not_specialize=["rows_live"])
def gated_product_kernel(
    x_ptr, gate_ptr, rows_live, up_from_gate, out_ptr, low_ptr, b_ptr, b_up_from_gate, N, K, stride_low, width, scale,
    R, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr, RP: tl.constexpr, LOW_SPLITS: tl.constexpr,
):  # fmt: skip
    """silu(x Gᵀ) * (x Uᵀ).  grid (rows / BM, ceil(N / (BN / 2))); out [rows, N] model dtype

    Weight rows alternate in a tile, gate and up of one output column, so that both end in one program.
    Adapters: see `split_product_kernel`.
    """
    half: tl.constexpr = BN // 2
    n0, m0 = tl.program_id(1) * half, tl.program_id(0) * BM
    lane = tl.arange(0, BN)
    pair = n0 + lane // 2
    mask = pair < N
    offsets = pair.to(tl.int64) * K + (lane % 2).to(tl.int64) * up_from_gate
    early = early_weights(gate_ptr, offsets, mask, 0, AHEAD)
    begin(PDL)
    acc = accumulate(early, x_ptr, gate_ptr, offsets, mask, m0, rows_live, 0, K, K, BN, BM, BK, AHEAD, EVEN_K, STAGES)
    if LOW_SPLITS > 0:
        of_b = pair.to(tl.int64) * R + (lane % 2).to(tl.int64) * b_up_from_gate
        column = tl.arange(0, 2 * RP)
        live = mask[:, None] & (column // RP == (lane % 2)[:, None]) & (column % RP < R)[None, :]
        acc += adapter_sum(low_ptr, b_ptr, of_b, live, m0, 0, stride_low, width, scale, BM, 2 * RP, RP, LOW_SPLITS)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (half, 2, BM)), (0, 2, 1)))  # each [half, BM]
    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    rows, columns = m0 + tl.arange(0, BM), n0 + tl.arange(0, half)
    product = (silu * up.to(dtype).to(tl.float32)).to(dtype)
    real = (columns < N)[:, None] & (rows < rows_live)[None, :]
    tl.store(out_ptr + rows[None, :] * N + columns[:, None], product, mask=real)


@triton.jit
def rms_norm(h, norm, N, eps, LATE: tl.constexpr = False):
    """RMSNorm of one row in the model dtype, rounded where Hugging Face's modules round.  # h, norm [BLOCK]

    LATE: once, after the weight (GPT-OSS); else before it as well.
    """
    h32 = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h32 * h32, axis=0) / N + eps)
    normed = h32 * scale
    if not LATE:
        normed = normed.to(h.dtype).to(tl.float32)
    return (normed * norm.to(tl.float32)).to(h.dtype)


@triton.jit
def join_kernel(
    parts_ptr, h_ptr, norm_ptr, x_ptr, bias_ptr, N, stride_split, eps,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h += the sum of a product's parts, in order, and its bias; x = rmsnorm(h).  grid (rows,)

    parts [SPLITS, rows, N] fp32; bias [N] where BIAS; LATE: see `rms_norm`
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    at = row * N + columns
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    before = tl.load(h_ptr + at, mask=mask, other=0.0)  # by the join before, three launches back
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=mask, other=0.0)
    begin(PDL)
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + split * stride_split + at, mask=mask, other=0.0)
    if BIAS:
        total += bias.to(tl.float32)
    h = (before.to(tl.float32) + total.to(before.dtype).to(tl.float32)).to(before.dtype)
    tl.store(h_ptr + at, h, mask=mask)
    tl.store(x_ptr + at, rms_norm(h, norm, N, eps, LATE), mask=mask)
