"""RMSNorm of the training forward and its gradient, each one pass, with the residual sum that stands before it.

`norm` and `add_norm` return the residual stream beside the normed rows, so that both gradients of a residual meet in
one kernel instead of in an addition of their own. Rounding points of the forward are those of Hugging Face's modules
and of `decode.products`: the sum, the scaled row, and its product with the weight, each in the model dtype.
The backward is fp32 inside; the weight's gradient is summed in fp32 over rows, program by program.

Formulas, with r = rsqrt(mean(x^2) + eps), n = x r and g = dy w: dx = r (g - n mean(g n)), dw = sum over rows of dy n.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of a backward pass, each over many rows: eight for each of an H200's 132 multiprocessors


@triton.jit
def norm_forward_kernel(
    x_ptr, add_ptr, weight_ptr, sum_ptr, normed_ptr, rstd_ptr, N, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    at = row.to(tl.int64) * N + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    dtype = x.dtype
    if ADD:
        x = (x.to(tl.float32) + tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + at, x, mask=mask)
    x32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x32 * x32, axis=0) / N + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, ((x32 * rstd).to(dtype).to(tl.float32) * weight).to(dtype), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def norm_backward_kernel(
    x_ptr, rstd_ptr, weight_ptr, by_normed_ptr, by_sum_ptr, by_x_ptr, by_weight_ptr, rows, N,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + programs, ...; by_weight [programs, N] fp32 takes each program's sum."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    by_weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * N + columns
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        by_normed = tl.load(by_normed_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        scaled = x.to(tl.float32) * rstd
        by_weight += by_normed * scaled.to(x.dtype).to(tl.float32)
        by_scaled = by_normed * weight
        by_x = rstd * (by_scaled - scaled * (tl.sum(by_scaled * scaled, axis=0) / N))
        if RESIDUAL:
            by_x += tl.load(by_sum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(by_x_ptr + at, by_x.to(x.dtype), mask=mask)
    tl.store(by_weight_ptr + program * N + columns, by_weight, mask=mask)


def _warps(block: int) -> int:
    return min(8, max(1, block // 256))


class _AddNorm(torch.autograd.Function):
    """(x [..., N], add [..., N] or None, weight [N], eps) -> (x + add, or x itself, and its norm)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, size = x.contiguous(), x.shape[-1]
        rows = x.numel() // size
        total = x if add is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(size)
        norm_forward_kernel[(rows,)](
            x, x if add is None else add.contiguous(), weight, total, normed, rstd, size, eps, ADD=add is not None,
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        ctx.save_for_backward(total, rstd, weight)
        ctx.adds = add is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_total, by_normed = gradients
        if by_normed is None:
            return by_total, by_total if ctx.adds else None, None, None
        total, rstd, weight = ctx.saved_tensors
        size, rows = total.shape[-1], rstd.numel()
        by_x = torch.empty_like(total)
        programs = min(rows, PROGRAMS)
        by_weight = torch.empty(programs, size, dtype=torch.float32, device=total.device)
        block = triton.next_power_of_2(size)
        norm_backward_kernel[(programs,)](
            total, rstd, weight, by_normed.contiguous(), by_normed if by_total is None else by_total.contiguous(),
            by_x, by_weight, rows, size, RESIDUAL=by_total is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        return by_x, by_x if ctx.adds else None, by_weight.sum(0).to(weight.dtype), None


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and its RMSNorm, each [..., N]; use the returned x for what else reads it, so that gradients meet here."""
    return _AddNorm.apply(x, None, weight, eps)


def add_norm(x: Tensor, add: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + add and its RMSNorm, each [..., N]."""
    return _AddNorm.apply(x, add, weight, eps)
