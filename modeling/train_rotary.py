"""Per-head RMSNorm and rotation of queries and keys in the training forward, and the gradient, each one pass.

A token's query and key heads [H + G, D] are one program's work. Rounding points of the forward are those of Hugging
Face's modules and of `decode.attention`: the scaled head, its product with the weight, both products of the
rotation and their sum, each in the model dtype. The halves of a rotation table are taken to be equal, as in every
family that `modeling.train_layers` accepts.

Formulas: y = (n1 c - n2 s, n2 c + n1 s) of the halves of a normed head n, so dn = (dy1 c + dy2 s, dy2 c - dy1 s); the
norm's gradient is that of `modeling.train_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of a backward pass, each over many tokens


@triton.jit
def _heads_forward(
    x_ptr, weight_ptr, out_ptr, token, c, s, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """All heads of one token; c, s: the first half of the rotation, fp32  # [1, D / 2]"""
    half: tl.constexpr = D // 2
    head, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, half)[None, :]
    mask = (head < HEADS) & (column < half)
    at = token.to(tl.int64) * (HEADS * D) + head * D + column
    first = tl.load(x_ptr + at, mask=mask, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), tl.load(x_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D + eps)[:, None]
        w1, w2 = tl.load(weight_ptr + column).to(tl.float32), tl.load(weight_ptr + half + column).to(tl.float32)
        first = ((first * rstd).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        second = ((second * rstd).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    out1 = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    out2 = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, out1.to(dtype), mask=mask)
    tl.store(out_ptr + at + half, out2.to(dtype), mask=mask)


@triton.jit
def rotate_forward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HB: tl.constexpr, GB: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    token = tl.program_id(0)
    table = token.to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
    c, s = tl.load(cos_ptr + table).to(tl.float32), tl.load(sin_ptr + table).to(tl.float32)
    _heads_forward(q_ptr, q_weight_ptr, q_out_ptr, token, c, s, eps, HEADS, HB, D, NORM)
    _heads_forward(k_ptr, k_weight_ptr, k_out_ptr, token, c, s, eps, GROUPS, GB, D, NORM)


@triton.jit
def _heads_backward(
    x_ptr, weight_ptr, by_out_ptr, by_x_ptr, token, c, s, eps, sum1, sum2,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The gradient of all heads of one token; adds the weight's to sum1 and sum2, head by head  # [BLOCK, D / 2]"""
    half: tl.constexpr = D // 2
    head, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, half)[None, :]
    mask = (head < HEADS) & (column < half)
    at = tl.cast(token, tl.int64) * (HEADS * D) + head * D + column
    by1 = tl.load(by_out_ptr + at, mask=mask, other=0.0)
    dtype = by1.dtype
    by1, by2 = by1.to(tl.float32), tl.load(by_out_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
    by_n1, by_n2 = by1 * c + by2 * s, by2 * c - by1 * s
    if NORM:
        first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D + eps)[:, None]
        n1, n2 = first * rstd, second * rstd
        sum1 += by_n1 * n1.to(dtype).to(tl.float32)
        sum2 += by_n2 * n2.to(dtype).to(tl.float32)
        by_n1 *= tl.load(weight_ptr + column).to(tl.float32)
        by_n2 *= tl.load(weight_ptr + half + column).to(tl.float32)
        mean = ((tl.sum(by_n1 * n1, axis=1) + tl.sum(by_n2 * n2, axis=1)) / D)[:, None]
        by_n1, by_n2 = rstd * (by_n1 - n1 * mean), rstd * (by_n2 - n2 * mean)
    tl.store(by_x_ptr + at, by_n1.to(dtype), mask=mask)
    tl.store(by_x_ptr + at + half, by_n2.to(dtype), mask=mask)
    return sum1, sum2


@triton.jit
def rotate_backward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, by_q_out_ptr, by_k_out_ptr, by_q_ptr, by_k_ptr,
    by_weights_ptr, tokens, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HB: tl.constexpr, GB: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Tokens program_id, program_id + programs, ...; by_weights [programs, 2, D] fp32 takes each program's sums."""
    half: tl.constexpr = D // 2
    program = tl.program_id(0)
    column = tl.arange(0, half)
    q1, q2 = tl.zeros((HB, half), tl.float32), tl.zeros((HB, half), tl.float32)
    k1, k2 = tl.zeros((GB, half), tl.float32), tl.zeros((GB, half), tl.float32)
    for token in range(program, tokens, tl.num_programs(0)):
        table = tl.cast(token, tl.int64) * D + column[None, :]
        c, s = tl.load(cos_ptr + table).to(tl.float32), tl.load(sin_ptr + table).to(tl.float32)
        q1, q2 = _heads_backward(
            q_ptr, q_weight_ptr, by_q_out_ptr, by_q_ptr, token, c, s, eps, q1, q2, HEADS, HB, D, NORM
        )
        k1, k2 = _heads_backward(
            k_ptr, k_weight_ptr, by_k_out_ptr, by_k_ptr, token, c, s, eps, k1, k2, GROUPS, GB, D, NORM
        )
    if NORM:
        out = by_weights_ptr + program * (2 * D) + column
        tl.store(out, tl.sum(q1, axis=0))
        tl.store(out + half, tl.sum(q2, axis=0))
        tl.store(out + D, tl.sum(k1, axis=0))
        tl.store(out + D + half, tl.sum(k2, axis=0))


def _shape(q: Tensor, k: Tensor, normed: bool) -> dict[str, Any]:
    heads, groups, size = q.shape[1], k.shape[1], q.shape[2]
    blocks = {"HB": triton.next_power_of_2(heads), "GB": triton.next_power_of_2(groups)}
    return {"HEADS": heads, "GROUPS": groups, "D": size, "NORM": normed, "num_warps": 4, **blocks}


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, cos, sin = (x.contiguous() for x in (q, k, cos, sin))
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        normed = q_weight is not None
        rotate_forward_kernel[(q.shape[0],)](
            q, k, q_weight if normed else q, k_weight if normed else k, cos, sin, q_out, k_out, eps,
            # Else product and sum of the rotation become one bf16 instruction, which rounds once.
            **_shape(q, k, normed), enable_fp_fusion=False,
        )  # fmt: skip
        ctx.save_for_backward(*((q, k, q_weight, k_weight, cos, sin) if normed else (cos, sin)))
        ctx.normed, ctx.eps = normed, eps
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_q_out, by_k_out = (x.contiguous() for x in gradients)
        *saved, cos, sin = ctx.saved_tensors
        q, k, q_weight, k_weight = saved or (by_q_out, by_k_out, None, None)
        by_q, by_k = torch.empty_like(by_q_out), torch.empty_like(by_k_out)
        programs = min(by_q.shape[0], PROGRAMS)
        sums = torch.empty(programs, 2, by_q.shape[2], dtype=torch.float32, device=by_q.device)
        rotate_backward_kernel[(programs,)](
            q, k, q_weight if ctx.normed else q, k_weight if ctx.normed else k, cos, sin, by_q_out, by_k_out, by_q,
            by_k, sums, by_q.shape[0], ctx.eps, **_shape(by_q, by_k, ctx.normed),
        )  # fmt: skip
        by_weights = sums.sum(0).to(by_q.dtype) if ctx.normed else (None, None)
        return by_q, by_k, by_weights[0], by_weights[1], None, None, None


def norm_rotate(
    q: Tensor, k: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Queries [N, H, D] and keys [N, G, D] after their per-head norms, where the family has any, and the rotation.

    norms: weights [D] of queries' and keys' norm; cos, sin: [N, D], the second half of a row equal to the first
    """
    q_weight, k_weight = norms or (None, None)
    return _NormRotate.apply(q, k, q_weight, k_weight, cos, sin, eps)
