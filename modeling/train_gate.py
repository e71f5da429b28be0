"""The gated activation of the training forward, silu(gate) * up, and its gradient, each one pass.

Rounding points of the forward are those of Hugging Face's modules and of `modeling.decode_products`: silu in fp32,
rounded to the model dtype, times up. Formulas, with s = sigmoid(g): d silu / dg = s (1 + g (1 - s)).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def gate_forward_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + at, (silu * up).to(gate.dtype), mask=mask)


@triton.jit
def gate_backward_kernel(gate_ptr, up_ptr, by_out_ptr, by_gate_ptr, by_up_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    by_out = tl.load(by_out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(by_up_ptr + at, (by_out * (g * s).to(gate.dtype).to(tl.float32)).to(gate.dtype), mask=mask)
    tl.store(by_gate_ptr + at, (by_out * up * s * (1 + g * (1 - s))).to(gate.dtype), mask=mask)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        gate_forward_kernel[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK=BLOCK)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
        gate_backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, gradients[0].contiguous(), by_gate, by_up, gate.numel(), BLOCK=BLOCK
        )
        return by_gate, by_up


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; the shapes are equal."""
    return _Gate.apply(gate, up)
