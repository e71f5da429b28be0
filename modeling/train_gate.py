"""The gated activation of the training forward, silu(gate) * up, alone and with the down product after it.

`gated_down` keeps gate and up for its backward pass and computes the activation again beside their gradients, in the
same kernel, where autograd's own product would keep it: about a sixth of a layer's activations.

Rounding points of the forward are those of Hugging Face's modules and of `decode.products`: silu in fp32,
rounded to the model dtype, times up. Formulas, with s = sigmoid(g): d silu / dg = s (1 + g (1 - s)).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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
def gate_backward_kernel(
    gate_ptr, up_ptr, by_out_ptr, by_gate_ptr, by_up_ptr, out_ptr, count, AGAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """AGAIN: leaves the forward's value in out as well."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    by_out = tl.load(by_out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    s = tl.sigmoid(g)
    silu = (g * s).to(gate.dtype).to(tl.float32)
    tl.store(by_up_ptr + at, (by_out * silu).to(gate.dtype), mask=mask)
    tl.store(by_gate_ptr + at, (by_out * up * s * (1 + g * (1 - s))).to(gate.dtype), mask=mask)
    if AGAIN:
        tl.store(out_ptr + at, (silu * up).to(gate.dtype), mask=mask)


def _activation(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    gate_forward_kernel[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK=BLOCK)
    return out


def _gradients(gate: Tensor, up: Tensor, by_out: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of gate and of up; and the activation, where it is asked for again."""
    by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
    out = torch.empty_like(gate) if again else by_out
    gate_backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
        gate, up, by_out.contiguous(), by_gate, by_up, out, gate.numel(), AGAIN=again, BLOCK=BLOCK
    )
    return by_gate, by_up, out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _activation(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _gradients(gate, up, gradients[0], again=False)[:2]


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_activation(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        by_out = gradients[0]
        by_gate, by_up, activation = _gradients(gate, up, by_out @ weight, again=True)
        return by_gate, by_up, by_out.flatten(0, -2).T @ activation.flatten(0, -2)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; the shapes are equal."""
    return _Gate.apply(gate, up)


def gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) times weight [hidden, inner]; gate and up [..., inner]."""
    return _GatedDown.apply(gate, up, weight)
