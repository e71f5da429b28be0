"""Writes the new keys and values of a decode step to their pages, ahead of the attention.

The attention kernel writes a row's own new key itself, which is enough where every row belongs to another sequence.
Where several new tokens of one sequence take a row each, a token attends to keys that other programs of the same
launch would be writing; this kernel, one launch before, writes them all, and the attention then only reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode.lines import head_constants, head_lines, store_new
from decode.overlap import begin


@triton.jit
def write_keys_kernel(
    qkv_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, kv_ptr, positions_ptr,
    slots_ptr, table_ptr, eps, stride_split, stride_table, stride_page, stride_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The new key and value of each row and head.  grid (rows * HEADS,)

    Arguments: see `decode.attention.decode_attention_kernel`.
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    position, slot = tl.load(positions_ptr + row), tl.load(slots_ptr + row)
    page = tl.load(table_ptr + slot.to(tl.int64) * stride_table + position // P).to(tl.int64)
    near_bias, far_bias, near_norm, far_norm, cos, sin = head_constants(
        q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, head, position,
        GROUP, BH, D, BIAS, NORM, 0,
    )  # fmt: skip
    begin(PDL)
    lines = head_lines(qkv_ptr, row, 1, head, near_bias, far_bias, near_norm, far_norm, cos, sin, eps, stride_split,
                       HEADS, GROUP, BH, D, SPLITS, NORM, 0, kv_ptr.dtype.element_ty)  # fmt: skip
    store_new(lines, True, kv_ptr, page, position, head * (P * D), stride_page, stride_v, GROUP, BH, P, D)
