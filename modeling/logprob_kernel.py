"""Fused log-probabilities for CUDA: one pass over a chunk of logits forward, one in place backward.

The same function as `modeling.logprob`'s plain walk. A chunk of logits exists in the model dtype alone (311 MB for
1,024 rows of 151,936 in bf16); the forward keeps hidden states, targets and one normaliser a row, and the backward
computes the chunk's product again and turns it into its own gradient; where memory allows, all logits are kept
instead. Formulas: with p = softmax(z / T),
d log p_t / d z = (1[t] - p) / T; entropy and top-1 are reported and not differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_ROWS = 1024


@triton.jit
def logprob_forward_kernel(
    z_ptr, target_ptr, logprob_ptr, entropy_ptr, top1_ptr, log_total_ptr, V, stride, scale, BLOCK: tl.constexpr
):
    """One row a program: log-sum-exp, mean logit and largest logit in one pass."""
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * stride
    best = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_row + column, mask=column < V, other=float("-inf")).to(tl.float32) * scale
        new_best = tl.maximum(best, tl.max(z))
        weight = tl.exp(z - new_best)
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight)
        weighted = weighted * shrink + tl.sum(weight * tl.where(column < V, z, 0.0))
        best = new_best
    log_total = best + tl.log(total)
    target = tl.load(z_row + tl.load(target_ptr + row)).to(tl.float32) * scale
    tl.store(logprob_ptr + row, target - log_total)
    tl.store(entropy_ptr + row, log_total - weighted / total)
    tl.store(top1_ptr + row, tl.where(target >= best, 1.0, 0.0))
    tl.store(log_total_ptr + row, log_total)


@triton.jit
def logprob_backward_kernel(z_ptr, target_ptr, log_total_ptr, grad_ptr, V, stride, scale, BLOCK: tl.constexpr):
    """Turns logits into their gradient, in place."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = z_ptr + row.to(tl.int64) * stride + column
    z = tl.load(place, mask=column < V, other=0.0).to(tl.float32) * scale
    p = tl.exp(z - tl.load(log_total_ptr + row))
    hit = tl.where(column == tl.load(target_ptr + row), 1.0, 0.0)
    gradient = tl.load(grad_ptr + row) * scale * (hit - p)
    tl.store(place, gradient.to(z_ptr.dtype.element_ty), mask=column < V)


class FusedLogprobs(torch.autograd.Function):
    """(hidden [M, H], weight [V, H], targets [M], temperature, keep) -> (log-probs, entropy, top-1), each [M] fp32.

    keep: all rows are one chunk, whose logits wait for the backward pass and become their own gradient there
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, keep: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, top1, log_totals = torch.empty(4, len(targets), device=hidden.device, dtype=torch.float32)
        rows = len(targets) if keep else min(len(targets), CHUNK_ROWS)
        buffer = hidden.new_empty(rows, weight.shape[0])
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            z = torch.mm(hidden[part], weight.T, out=buffer[: len(targets[part])])
            logprob_forward_kernel[(z.shape[0],)](
                z, targets[part], logprobs[part], entropy[part], top1[part], log_totals[part], z.shape[1],
                z.stride(0), 1.0 / temperature, BLOCK=4096,
            )  # fmt: skip
        ctx.save_for_backward(hidden, weight, targets, log_totals)
        ctx.temperature, ctx.logits = temperature, buffer if keep else None
        ctx.mark_non_differentiable(entropy, top1)
        return logprobs, entropy, top1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_totals = ctx.saved_tensors
        by_logprob = gradients[0].contiguous()
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        kept, ctx.logits = ctx.logits, None
        buffer = hidden.new_empty(min(len(targets), CHUNK_ROWS), weight.shape[0]) if kept is None else kept
        for start in range(0, len(targets), len(buffer)):
            part = slice(start, start + len(buffer))
            z = buffer[: len(targets[part])]
            if kept is None:
                torch.mm(hidden[part], weight.T, out=z)
            grid = (z.shape[0], triton.cdiv(z.shape[1], 4096))
            logprob_backward_kernel[grid](
                z, targets[part], log_totals[part], by_logprob[part], z.shape[1], z.stride(0), 1.0 / ctx.temperature,
                BLOCK=4096,
            )  # fmt: skip
            torch.mm(z, weight, out=grad_hidden[part])
            grad_weight.addmm_(z.T, hidden[part])
        return grad_hidden, grad_weight, None, None, None
