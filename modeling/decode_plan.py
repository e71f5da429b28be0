"""Cuts the rows' pasts into items of work for the decode attention, on the device.

From the positions alone, so that long and short rows fill the GPU evenly and one captured graph serves every mix of
lengths. Layers with a sliding window have a plan of their own, over the tiles that hold a row's last tokens.
Left out: balancing to the last tile; the hardware hands out programs as others end.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_PIECES = tl.constexpr(32)  # of one row; merging more would take longer than reading them


@triton.jit
def plan_items(
    positions_ptr, items_ptr, first_ptr, count_ptr, rows, kv_heads, target, window,
    ROWS: tl.constexpr, ITEMS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Cut all rows into items of about equal length, about `target` programs in all; called by one program.

    positions: of the new tokens  # [rows] int32; items: (row, start, stop) of each, row -1 if unused
    # [3, ITEMS] int32; first, count: the items of each row  # [rows] int32. ITEMS >= rows + target / kv_heads.
    window: tokens that a row sees, its new one included; the first item starts at most BN - 1 tokens before them
    """
    row = tl.arange(0, ROWS)
    live = row < rows
    stop = tl.load(positions_ptr + row, mask=live, other=-1) + 1
    start = tl.maximum(stop - window, 0) // BN * BN
    past = stop - start
    share = tl.cdiv(tl.sum(past) * kv_heads, target)
    # A program may take an eighth more than its share: rows of about a share each would otherwise be cut in two.
    least = tl.maximum(share + share // 8, tl.cdiv(tl.max(past), MOST_PIECES))
    stretch = tl.maximum(tl.cdiv(least, BN) * BN, 2 * BN)
    pieces = tl.maximum(tl.cdiv(past, stretch), 1)  # a row beyond the last has none
    stretches = tl.maximum(tl.cdiv(tl.cdiv(past, pieces), BN) * BN, BN)  # the row's pieces, evened out
    count = tl.where(live, tl.maximum(tl.cdiv(past, stretches), 1), 0)
    first = tl.cumsum(count) - count
    tl.store(first_ptr + row, first, mask=live)
    tl.store(count_ptr + row, count, mask=live)
    slot = tl.arange(0, ITEMS)
    tl.store(items_ptr + slot, tl.full((ITEMS,), -1, tl.int32), mask=slot >= tl.sum(count))
    for piece in range(tl.max(count)):
        has = piece < count
        at = items_ptr + first + piece
        tl.store(at, row, mask=has)
        tl.store(at + ITEMS, start + piece * stretches, mask=has)
        tl.store(at + 2 * ITEMS, tl.minimum(start + (piece + 1) * stretches, stop), mask=has)
