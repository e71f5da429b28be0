"""Cuts the rows' pasts into items of work for the decode attention, on the device.

From the positions alone, so that long and short rows fill the GPU evenly and one captured graph serves every mix of
lengths. Rows of very different lengths are common, and a wave of programs with a few more than fit at once takes far
longer than a full one. Layers with a sliding window have a plan of their own, over the tiles that hold a row's last
tokens.
Left out: balancing to the last tile; where one wave cannot hold all, the hardware hands out programs as others end.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_PIECES = tl.constexpr(32)  # of one row; merging more would take longer than reading them


@triton.jit
def plan_items(
    positions_ptr, spans_ptr, items_ptr, first_ptr, count_ptr, rows, kv_heads, target, window,
    ROWS: tl.constexpr, ITEMS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Cut all rows into items of about equal length, at most `target` programs if possible; called by one program.

    positions: of the new tokens; spans: how many tokens in adjoining rows each row's items take, 0: it has none, being
    another's or idle  # [rows] int32; items: (row, start, stop) of each, row -1 if unused
    # [3, ITEMS] int32; first, count: the items of each row  # [rows] int32. ITEMS >= rows + target / kv_heads.
    A stretch is the shortest with which all items run at once, but at most twice an even share.
    window: tokens that a row sees, its new one included; the first item starts at most BN - 1 tokens before them
    """
    row = tl.arange(0, ROWS)
    span = tl.load(spans_ptr + row, mask=row < rows, other=0)
    position = tl.load(positions_ptr + row, mask=span > 0, other=0)
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
    stretches = tl.maximum(tl.cdiv(tl.cdiv(past, pieces), BN) * BN, BN)  # the row's pieces, evened out
    count = tl.cdiv(past, stretches)
    first = tl.cumsum(count) - count
    tl.store(first_ptr + row, first, mask=row < rows)
    tl.store(count_ptr + row, count, mask=row < rows)
    slot = tl.arange(0, ITEMS)
    tl.store(items_ptr + slot, tl.full((ITEMS,), -1, tl.int32), mask=slot >= tl.sum(count))
    for piece in range(tl.max(count)):
        has = piece < count
        at = items_ptr + first + piece
        tl.store(at, row, mask=has)
        tl.store(at + ITEMS, start + piece * stretches, mask=has)
        tl.store(at + 2 * ITEMS, start + tl.minimum((piece + 1) * stretches, past), mask=has)
