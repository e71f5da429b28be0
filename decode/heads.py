"""The heads of a decode step: for each KV head the queries of its group, the new key and the new value.

They come as the unsummed parts of the q/k/v product. Sum, bias, per-head norm and rotation happen here, with the
rounding points of Hugging Face's modules. With TOKENS above 0 they are the query heads alone, of up to TOKENS tokens
in adjoining lanes: index i is head i % GROUP of the group, of token i // GROUP.

The attention kernel writes a lane's own new key itself, which is enough where every lane belongs to another sequence.
Where several new tokens of one sequence take a lane each, a token attends to keys that other programs of the same
launch would be writing; `write_keys_kernel`, one launch before, writes them all, and the attention then only reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode.overlap import begin


@triton.jit
def _head_biases(q_ptr, k_ptr, v_ptr, head, column, GROUP: tl.constexpr, BH: tl.constexpr, D: tl.constexpr,
                 BIAS: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """The biases of the heads (queries of the group, k, v), fp32  # [BH, D], or a scalar 0"""
    index = tl.arange(0, BH)[:, None]
    if BIAS and TOKENS > 0:
        bias = tl.load(q_ptr + (head * GROUP + index % GROUP) * D + column).to(tl.float32)
    elif BIAS:
        q = tl.load(q_ptr + (head * GROUP + index) * D + column, mask=index < GROUP, other=0.0)
        k = tl.load(k_ptr + head * D + column, mask=index == GROUP, other=0.0)
        v = tl.load(v_ptr + head * D + column, mask=index == GROUP + 1, other=0.0)
        bias = (q + k + v).to(tl.float32)
    else:
        bias = 0.0
    return bias


@triton.jit
def _head_norms(q_ptr, k_ptr, column, GROUP: tl.constexpr, BH: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr):
    """The per-head norm weights of the heads, fp32  # [BH, D] or [1, D], or a scalar 1"""
    if NORM and TOKENS > 0:
        norm = tl.load(q_ptr + column).to(tl.float32)
    elif NORM:
        index = tl.arange(0, BH)[:, None]
        norm = tl.where(index < GROUP, tl.load(q_ptr + column), tl.load(k_ptr + column)).to(tl.float32)
    else:
        norm = 1.0
    return norm


@triton.jit
def head_constants(
    q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, head, position,
    GROUP: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """What `group_heads` takes beside the product: biases, norms, cosines, sines. No kernel of the step writes them.

    position: the token's, or with TOKENS that of each query  # [BH, 1]; near is column d, far the column that
    rotate_half pairs with it, d + D/2 mod D.
    """
    near = tl.arange(0, D)[None, :]
    far = (near + D // 2) % D
    near_bias = _head_biases(q_bias_ptr, k_bias_ptr, v_bias_ptr, head, near, GROUP, BH, D, BIAS, TOKENS)
    far_bias = _head_biases(q_bias_ptr, k_bias_ptr, v_bias_ptr, head, far, GROUP, BH, D, BIAS, TOKENS)
    near_norm = _head_norms(q_norm_ptr, k_norm_ptr, near, GROUP, BH, NORM, TOKENS)
    far_norm = _head_norms(q_norm_ptr, k_norm_ptr, far, GROUP, BH, NORM, TOKENS)
    cos = tl.load(cos_ptr + position * D + near).to(tl.float32)
    sin = tl.load(sin_ptr + position * D + near).to(tl.float32)
    return near_bias, far_bias, near_norm, far_norm, cos, sin


@triton.jit
def _sum_parts(at, mask, stride_split, SPLITS: tl.constexpr):
    x = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(at + split * stride_split, mask=mask, other=0.0)
    return x


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Finite fp32 x rounded to dtype, in fp32.

    In integers for bf16: of `to` and a sum the compiler makes one instruction that rounds once.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def group_heads(
    qkv_ptr, lane, span, head, near_bias, far_bias, near_norm, far_norm, cos, sin, eps, stride_split,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, TOKENS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sums the parts of the heads, adds biases, norms and rotates queries and key.  # [BH, D], model dtype

    After the group's queries, index GROUP is the key and GROUP + 1 the value; with TOKENS there are the queries of
    `span` tokens from `lane` on instead. Those beyond are idle.
    """
    index, near = tl.arange(0, BH)[:, None], tl.arange(0, D)[None, :]
    far = (near + D // 2) % D
    if TOKENS > 0:
        at = qkv_ptr + ((lane + index // GROUP) * (HEADS * (GROUP + 2)) + head * GROUP + index % GROUP) * D
        real = index < span * GROUP
    else:
        of_kv = HEADS * GROUP + tl.where(index == GROUP, 0, HEADS) + head
        at = qkv_ptr + (lane * (HEADS * (GROUP + 2)) + tl.where(index < GROUP, head * GROUP + index, of_kv)) * D
        real = index < GROUP + 2
    value = (_sum_parts(at + near, real, stride_split, SPLITS) + near_bias).to(dtype)
    x_far = (_sum_parts(at + far, real, stride_split, SPLITS) + far_bias).to(dtype).to(tl.float32)
    x = value.to(tl.float32)
    if NORM:
        rms = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = ((x * rms).to(dtype).to(tl.float32) * near_norm).to(dtype).to(tl.float32)
        x_far = ((x_far * rms).to(dtype).to(tl.float32) * far_norm).to(dtype).to(tl.float32)
    turned = tl.where(near < D // 2, -x_far, x_far)  # rotate_half
    turned = (_rounded(x * cos, dtype) + _rounded(turned * sin, dtype)).to(dtype)
    if TOKENS == 0:
        turned = tl.where(index > GROUP, value, turned)
    return turned


@triton.jit
def store_new(heads, holds_new, kv_ptr, page, position, head_offset, stride_page, stride_v,
               GROUP: tl.constexpr, BH: tl.constexpr, P: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Write the new key and value to their page, then let the whole program see them."""
    index = tl.arange(0, BH)[:, None]
    at = kv_ptr + page * stride_page + head_offset + (position % P) * D + tl.arange(0, D)[None, :]
    at += tl.where(index > GROUP, stride_v, 0)
    tl.store(at, heads, mask=(index >= GROUP) & (index < GROUP + 2) & holds_new)
    tl.debug_barrier()


@triton.jit
def write_keys_kernel(
    qkv_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, kv_ptr, positions_ptr,
    slots_ptr, table_ptr, eps, stride_split, stride_table, stride_page, stride_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The new key and value of each lane and head.  grid (lanes * HEADS,)

    Arguments: see `decode.attention.decode_attention_kernel`.
    """
    lane, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    position, slot = tl.load(positions_ptr + lane), tl.load(slots_ptr + lane)
    page = tl.load(table_ptr + slot.to(tl.int64) * stride_table + position // P).to(tl.int64)
    near_bias, far_bias, near_norm, far_norm, cos, sin = head_constants(
        q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, head, position,
        GROUP, BH, D, BIAS, NORM, 0,
    )  # fmt: skip
    begin(PDL)
    heads = group_heads(qkv_ptr, lane, 1, head, near_bias, far_bias, near_norm, far_norm, cos, sin, eps, stride_split,
                       HEADS, GROUP, BH, D, SPLITS, NORM, 0, kv_ptr.dtype.element_ty)  # fmt: skip
    store_new(heads, True, kv_ptr, page, position, head * (P * D), stride_page, stride_v, GROUP, BH, P, D)
