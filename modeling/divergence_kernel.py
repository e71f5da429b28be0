"""Fused divergences for CUDA: whole-vocabulary logits of both sides in, the gradient by the policy's logits out.

The same function as `modeling.divergence.chunk_gradient` without top_k. A chunk of logits of either side exists in the
model dtype alone (311 MB for 1,024 rows of 151,936 in bf16); the policy's is turned into its own gradient in place.
One program does one row in three passes: normalisers, value, gradient.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from modeling.divergence import LOG_FLOOR, Measure

CHUNK_ROWS = 1024
BLOCK = 4096
KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}


@triton.jit
def _log_total(row_ptr, V, scale, BLOCK: tl.constexpr):
    """Log-sum-exp of a row of logits times `scale`."""
    best, total = -1e30, 0.0  # finite, so that a block of -inf does not give inf - inf
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32) * scale
        larger = tl.maximum(best, tl.max(z))
        total = total * tl.exp(best - larger) + tl.sum(tl.exp(z - larger))
        best = larger
    return best + tl.log(total)


@triton.jit
def _logprobs(row_ptr, column, V, scale, log_total, FLOOR: tl.constexpr):
    """Floored log-probabilities of a block, and the probabilities, 0 outside the row."""
    z = tl.load(row_ptr + column, mask=column < V, other=0.0).to(tl.float32) * scale
    log_p = tl.maximum(z - log_total, FLOOR)
    return log_p, tl.where(column < V, tl.exp(log_p), 0.0)


@triton.jit
def _log_mixture(log_p, log_q, log_own, log_other):
    a, b = log_p + log_own, log_q + log_other
    larger = tl.maximum(a, b)
    return larger + tl.log(tl.exp(a - larger) + tl.exp(b - larger))


@triton.jit
def divergence_gradient_kernel(
    z_ptr, y_ptr, target_ptr, weight_ptr, value_ptr, gap_ptr, entropy_ptr, V, z_stride, y_stride, scale, beta,
    log_own, log_other, KIND: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z: the policy's logits, y: the teacher's; log_own, log_other: log (1 - beta), log beta."""
    row = tl.program_id(0)
    z_row, y_row = z_ptr + row.to(tl.int64) * z_stride, y_ptr + row.to(tl.int64) * y_stride
    z_total, y_total = _log_total(z_row, V, scale, BLOCK), _log_total(y_row, V, scale, BLOCK)
    target = tl.load(target_ptr + row)
    of_policy, _ = _logprobs(z_row, target, V, scale, z_total, FLOOR)
    of_teacher, _ = _logprobs(y_row, target, V, scale, y_total, FLOOR)
    tl.store(gap_ptr + row, of_policy - of_teacher)
    own, other, entropy = 0.0, 0.0, 0.0  # KL from the policy and from the teacher, to each other or to the mixture
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        log_p, p = _logprobs(z_row, column, V, scale, z_total, FLOOR)
        log_q, q = _logprobs(y_row, column, V, scale, y_total, FLOOR)
        entropy -= tl.sum(q * log_q)
        if KIND == 2:
            log_m = _log_mixture(log_p, log_q, log_own, log_other)
            own += tl.sum(p * (log_p - log_m))
            other += tl.sum(q * (log_q - log_m))
        else:
            own += tl.sum(p * (log_p - log_q))
            other += tl.sum(q * (log_q - log_p))
    value = other if KIND == 0 else (own if KIND == 1 else beta * other + (1 - beta) * own)
    tl.store(value_ptr + row, value)
    tl.store(entropy_ptr + row, entropy)
    weight = tl.load(weight_ptr + row)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        log_p, p = _logprobs(z_row, column, V, scale, z_total, FLOOR)
        log_q, q = _logprobs(y_row, column, V, scale, y_total, FLOOR)
        if KIND == 0:
            gradient = p - q
        elif KIND == 1:
            gradient = p * (log_p - log_q - own)
        else:
            gradient = (1 - beta) * p * (log_p - _log_mixture(log_p, log_q, log_own, log_other) - own)
        tl.store(z_row + column, (weight * gradient).to(z_ptr.dtype.element_ty), mask=column < V)


def fused_gradient(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, targets: Tensor, scales: Tensor,
    measure: Measure, figures: Tensor,
) -> Tensor:  # fmt: skip
    """See `modeling.divergence.chunk_gradient`."""
    z, y = torch.mm(hidden, head.T), torch.mm(teacher_hidden, teacher_head.T)  # [C, V]
    values, gap, entropy = figures
    divergence_gradient_kernel[(len(targets),)](
        z, y, targets, scales, values, gap, entropy, z.shape[1], z.stride(0), y.stride(0), 1.0 / measure.temperature,
        measure.beta, math.log1p(-measure.beta), math.log(measure.beta), KIND=KINDS[measure.kind], FLOOR=LOG_FLOOR,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return z
