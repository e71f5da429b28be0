"""Decode attention over paged keys and values: one new token per lane, split over the lane's past, in Triton.

`plan_items` cuts the lanes' pasts into items of work, on the device and from the positions alone, so that long and
short lanes fill the GPU evenly and one captured graph serves every mix of lengths. Lanes of very different lengths are
common, and a wave of programs with a few more than fit at once takes far longer than a full one. Layers with a sliding
window have a plan of their own, over the tiles that hold a lane's last tokens.

A program takes one item and one KV head with all query heads of its group. Inside, every warp walks its own tokens
with its own online softmax (a batched product, one batch entry per warp), so that nothing is exchanged between warps
until the end. The item that ends at the new token writes its key and value to their page first. A lane cut in several
items is merged by whichever ends last, in the order of the items. The kernel starts from the unsummed parts of the
q/k/v product (`decode.heads`). A sliding window bounds the walk; a sink joins a lane's sum where its output is made.

Where tokens of one sequence have adjoining lanes (TOKENS), an item serves several of them, which then read their past
once; each sees it up to itself. All new keys are in their pages before (`decode.heads.write_keys_kernel`).

Invariants: pages listed in a lane's table up to its position exist; page 0 is nobody's (padding lanes write there).
Left out: soft caps, head sizes that are not powers of two, balancing to the last tile: where one wave cannot hold all,
the hardware hands out programs as others end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode.heads import group_heads, head_constants, store_new
from decode.overlap import begin, prefetch

LOG2_E = tl.constexpr(1.4426950408889634)
MERGED = tl.constexpr(8)  # parts of a lane that are read at once
NONE = tl.constexpr(-1.0e30)  # a score below all others; minus infinity would give NaN for a warp without tokens
MOST_PIECES = tl.constexpr(32)  # of one lane; merging more would take longer than reading them


@triton.jit
def plan_items(
    positions_ptr, spans_ptr, items_ptr, first_ptr, count_ptr, lanes, kv_heads, target, window,
    LANES: tl.constexpr, ITEMS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Cut all lanes into items of about equal length, at most `target` programs if possible; called by one program.

    positions: of the new tokens; spans: how many tokens in adjoining lanes each lane's items take; 0 where another's
    items take it, or it is idle  # [lanes] int32; items: (lane, start, stop) of each, lane -1 if unused
    # [3, ITEMS] int32; first, count: the items of each lane  # [lanes] int32. ITEMS >= lanes + target / kv_heads.
    A stretch is the shortest with which all items run at once, but at most twice an even share.
    window: tokens that a lane sees, its new one included; the first item starts at most BN - 1 tokens before them
    """
    lane = tl.arange(0, LANES)
    span = tl.load(spans_ptr + lane, mask=lane < lanes, other=0)
    position = tl.load(positions_ptr + lane, mask=span > 0, other=0)
    start = tl.maximum(position + 1 - window, 0) // BN * BN
    past = tl.where(span > 0, position + span - start, 0)
    share = tl.cdiv(tl.sum(past) * kv_heads, target)
    low = tl.maximum(tl.maximum(tl.cdiv(share, BN), tl.cdiv(tl.max(past), BN * MOST_PIECES)), 2)
    high = 2 * low
    while low < high:  # the stretch, in tiles
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(past, middle * BN)) * kv_heads <= target
        low, high = tl.where(fits, low, middle + 1), tl.where(fits, middle, high)
    pieces = tl.maximum(tl.cdiv(past, low * BN), 1)
    stretches = tl.maximum(tl.cdiv(tl.cdiv(past, pieces), BN) * BN, BN)  # the lane's pieces, evened out
    count = tl.cdiv(past, stretches)
    first = tl.cumsum(count) - count
    tl.store(first_ptr + lane, first, mask=lane < lanes)
    tl.store(count_ptr + lane, count, mask=lane < lanes)
    index = tl.arange(0, ITEMS)
    tl.store(items_ptr + index, tl.full((ITEMS,), -1, tl.int32), mask=index >= tl.sum(count))
    for piece in range(tl.max(count)):
        has = piece < count
        at = items_ptr + first + piece
        tl.store(at, lane, mask=has)
        tl.store(at + ITEMS, start + piece * stretches, mask=has)
        tl.store(at + 2 * ITEMS, start + tl.minimum((piece + 1) * stretches, past), mask=has)


@triton.jit
def _prefetch_pages(kv_ptr, table_ptr, start, stop, head_offset, stride_page, stride_v,
                    P: tl.constexpr, D: tl.constexpr, PREFETCH: tl.constexpr):  # fmt: skip
    """Ask for the item's first PREFETCH tokens in L2 (16-bit elements): one request a page for keys and values."""
    if PREFETCH > 0:
        pages: tl.constexpr = PREFETCH // P
        index = start // P + tl.arange(0, pages)
        last = (stop - 1) // P
        page = tl.load(table_ptr + tl.minimum(index, last)).to(tl.int64)
        address = kv_ptr + page * stride_page + head_offset
        size = tl.where(index <= last, P * D * 2, 0)
        prefetch(address.to(tl.int64), size, pages)
        prefetch((address + stride_v).to(tl.int64), size, pages)


@triton.jit
def _walk(
    q, start, stop, low, own, kv_ptr, table_ptr, head_offset, stride_page, stride_v, scale,
    P: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Softmax of q [BH, D] over tokens [start, stop) from low on: maximum [BH], sum [BH], unscaled output [BH, D].

    Scores are in powers of two (scale includes log2 e). With TOKENS each query ends at a token of its own, own [BH].
    """
    each: tl.constexpr = BN // W
    top = tl.full((W, BH), NONE, tl.float32)
    total = tl.zeros((W, BH), tl.float32)
    acc = tl.zeros((W, BH, D), tl.float32)
    q_all = tl.broadcast_to(q[None, :, :], (W, BH, D))
    place, dim = tl.arange(0, each), tl.arange(0, D)
    inside = head_offset + place[:, None] * D + dim[None, :]  # [each, D]
    for base in tl.range(start, stop, BN, num_stages=STAGES):
        token = base + tl.arange(0, W) * each  # each warp's tokens lie in one page
        page = tl.load(table_ptr + token // P, mask=token < stop, other=0).to(tl.int64)
        at = kv_ptr + (page * stride_page + (token % P) * D)[:, None, None] + inside[None, :, :]
        each_token = token[:, None] + place[None, :]  # [W, each]
        live = (each_token < stop) & (each_token >= low)
        k = tl.load(at, mask=live[:, :, None], other=0.0)  # [W, each, D]
        scores = tl.dot(q_all, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale  # [W, BH, each]
        seen = live[:, None, :]
        if TOKENS > 0:
            seen = seen & (each_token[:, None, :] <= own[None, :, None])
            if WINDOW > 0:
                seen = seen & (each_token[:, None, :] > own[None, :, None] - WINDOW)
        scores = tl.where(seen, scores, NONE)
        peak = tl.maximum(top, tl.max(scores, axis=2))
        weight = tl.where(seen, tl.exp2(scores - peak[:, :, None]), 0.0)
        fade = tl.exp2(top - peak)
        total = total * fade + tl.sum(weight, axis=2)
        v = tl.load(at + stride_v, mask=live[:, :, None], other=0.0)
        acc = tl.dot(weight.to(q.dtype), v, acc * fade[:, :, None], input_precision="ieee")
        top = peak
    peak = tl.max(top, axis=0)
    fade = tl.exp2(top - peak[None, :])
    return peak, tl.sum(total * fade, axis=0), tl.sum(acc * fade[:, :, None], axis=0)


@triton.jit
def _sinks(sinks_ptr, head, GROUP: tl.constexpr, BH: tl.constexpr, SINKS: tl.constexpr):
    """The sink scores of the query heads, in powers of two  # [BH], or a scalar below all others"""
    sink = NONE
    if SINKS:
        sink = tl.load(sinks_ptr + head * GROUP + tl.arange(0, BH) % GROUP).to(tl.float32) * LOG2_E
    return sink


@triton.jit
def _scaled(peak, total, acc, sink):
    """The output [BH, D] of a lane's whole past, whose softmax the sink takes part in."""
    top = tl.maximum(peak, sink)
    fade = tl.exp2(peak - top)
    return acc * fade[:, None] / (total * fade + tl.exp2(sink - top))[:, None]


@triton.jit
def _finish(
    peak, total, acc, sink, out_ptr, parts_ptr, sums_ptr, arrivals_ptr, item, lane, span, head, count, first,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, BH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the output of an item's queries, or leave a part of it; the last part to arrive merges them all."""
    index = tl.arange(0, BH)
    dim = tl.arange(0, D)
    real = index < span * GROUP
    head_of = head * GROUP + index % GROUP
    out = out_ptr + ((lane + index // GROUP) * (HEADS * GROUP) + head_of)[:, None] * D + dim[None, :]
    if count == 1:
        tl.store(out, _scaled(peak, total, acc, sink), mask=real[:, None])
    else:
        inside = index[:, None] * D + dim[None, :]
        cell = item * HEADS + head
        tl.store(parts_ptr + cell * (QUERIES * D) + inside, acc, mask=real[:, None])
        tl.store(sums_ptr + cell * (2 * QUERIES) + index, peak, mask=real)
        tl.store(sums_ptr + cell * (2 * QUERIES) + QUERIES + index, total, mask=real)
        tl.debug_barrier()  # all threads' parts are written before the arrival is announced
        arrival = arrivals_ptr + lane * HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1:
            tl.store(arrival, 0)
            _merge(out, real, sink, parts_ptr, sums_ptr, head, count, first, HEADS, QUERIES, BH, D)


@triton.jit
def _merge(
    out, mine, sink, parts_ptr, sums_ptr, head, count, first,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, BH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Join the parts of an item's queries in the order of the items; the reads of MERGED go out together."""
    index = tl.arange(0, BH)
    inside = index[:, None] * D + tl.arange(0, D)[None, :]
    top = tl.full((BH,), NONE, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, D), tl.float32)
    for base in range(0, count, MERGED):
        for ahead in tl.static_range(MERGED):
            piece = base + ahead
            real = mine & (piece < count)
            cell = (first + piece) * HEADS + head
            sums = sums_ptr + cell * (2 * QUERIES) + index
            part = tl.load(
                parts_ptr + cell * (QUERIES * D) + inside, mask=real[:, None], other=0.0, cache_modifier=".cg"
            )
            its_top = tl.load(sums, mask=real, other=NONE, cache_modifier=".cg")
            its_total = tl.load(sums + QUERIES, mask=real, other=0.0, cache_modifier=".cg")
            peak = tl.maximum(top, its_top)
            fade, its_fade = tl.exp2(top - peak), tl.exp2(its_top - peak)
            acc = acc * fade[:, None] + part * its_fade[:, None]
            total = total * fade + its_total * its_fade
            top = peak
    tl.store(out, _scaled(top, tl.where(mine, total, 1.0), acc, sink), mask=mine[:, None])


@triton.jit
def _own_positions(spans_ptr, lane, position, GROUP: tl.constexpr, BH: tl.constexpr, TOKENS: tl.constexpr):
    """The tokens of an item, and each query's position  # [BH] and [BH, 1]; without TOKENS 1 and the position."""
    if TOKENS > 0:
        span = tl.load(spans_ptr + lane)
        own = position + tl.minimum(tl.arange(0, BH) // GROUP, span - 1)
        places = own[:, None]
    else:
        span, own, places = 1, position, position
    return span, own, places


@triton.jit
def decode_attention_kernel(
    qkv_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, sinks_ptr, cos_ptr, sin_ptr, kv_ptr, out_ptr,
    positions_ptr, slots_ptr, spans_ptr, table_ptr, items_ptr, first_ptr, count_ptr, parts_ptr, sums_ptr, arrivals_ptr,
    scale, eps, stride_split, stride_table, stride_page, stride_v,
    ITEMS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    BN: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, PREFETCH: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attention of every lane's new token; without TOKENS its key and value are written, too.

    grid (ITEMS * HEADS,), or as many as are in use
    qkv: parts of the q/k/v product  # [SPLITS, lanes, HEADS * (GROUP + 2) * D] fp32
    cos, sin: the model's rotary table in its dtype  # [context, D]; out [lanes, HEADS * GROUP * D]
    kv: one layer of the cache  # [2, pages, HEADS, P, D]
    positions, slots: of each lane's new token and its page table  # [lanes] int32; table [slots, stride_table] int32
    spans: with TOKENS, how many tokens in adjoining lanes the items of a lane take, at most TOKENS  # [lanes] int32
    WINDOW: tokens that a lane sees, its new one included, or 0 for all; the items must begin accordingly

    The heads (`group_heads`) serve as the queries. What no kernel before has written is read at once.
    """
    item, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    lane = tl.load(items_ptr + item)
    if lane < 0:
        begin(PDL)
    else:
        start, stop = tl.load(items_ptr + ITEMS + item), tl.load(items_ptr + 2 * ITEMS + item)
        position, slot = tl.load(positions_ptr + lane), tl.load(slots_ptr + lane)
        count, first = tl.load(count_ptr + lane), tl.load(first_ptr + lane)
        table = table_ptr + slot.to(tl.int64) * stride_table
        page = tl.load(table + position // P).to(tl.int64)  # of the new token
        span, own, places = _own_positions(spans_ptr, lane, position, GROUP, BH, TOKENS)
        offset = head * (P * D)
        _prefetch_pages(kv_ptr, table, start, stop, offset, stride_page, stride_v, P, D, PREFETCH)
        near_bias, far_bias, near_norm, far_norm, cos, sin = head_constants(
            q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, head, places,
            GROUP, BH, D, BIAS, NORM, TOKENS,
        )  # fmt: skip
        sink = _sinks(sinks_ptr, head, GROUP, BH, SINKS)
        begin(PDL)
        heads = group_heads(qkv_ptr, lane, span, head, near_bias, far_bias, near_norm, far_norm, cos, sin, eps,
                           stride_split, HEADS, GROUP, BH, D, SPLITS, NORM, TOKENS,
                           out_ptr.dtype.element_ty)  # fmt: skip
        if TOKENS == 0:
            store_new(heads, stop > position, kv_ptr, page, position, offset, stride_page, stride_v, GROUP, BH, P, D)
        peak, total, acc = _walk(heads, start, stop, position - WINDOW + 1 if WINDOW else 0, own, kv_ptr, table,
                                 offset, stride_page, stride_v, scale, P, BN, BH, D, W, STAGES, TOKENS,
                                 WINDOW)  # fmt: skip
        _finish(peak, total, acc, sink, out_ptr, parts_ptr, sums_ptr, arrivals_ptr, item, lane, span, head, count,
                first, HEADS, GROUP, max(TOKENS, 1) * GROUP, BH, D)  # fmt: skip
