"""Attention sinks: a learned score per head that takes part in the softmax and brings no value.

A sink s turns a softmax with log-sum-exp L into one with L' = log(e^L + e^s), and its output O into O' = O e^(L-L').
So any attention kernel that gives L serves, forward and backward: the stock backward, fed O' and L' instead of its
own, computes the gradients of q, k and v, and d loss / d s = -sum e^(s-L') (dO . O') over all queries of the head.
Nothing of O(T^2) is kept. Dropping sinks in training alone makes gradients explode: `modeling.probe` refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Vectorised loops on CPU round what is left over at a tensor's end otherwise; padded to this nothing is left over, and
# a query's result in fp32 is the same bits in both phases (see `modeling.attention`).
LOOP = 64


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [..., D] and its log-sum-exp lse [...] without sinks -> both with; sinks fp32, broadcast to lse."""
    count = lse.numel()
    rest = -count % LOOP if lse.device.type == "cpu" else 0
    flat, against = (F.pad(x.flatten(), (0, rest)) for x in (lse, sinks.expand_as(lse)))
    total = torch.logaddexp(flat, against)
    share = (flat - total).exp()[:count].view_as(lse)
    return (out * share[..., None]).to(out.dtype), total[:count].view_as(lse)


def by_sinks(grad_out: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """d loss / d sink of every query  # [...] fp32; out and total are those with sinks."""
    return -(sinks - total).exp() * (grad_out.float() * out.float()).sum(-1)


class PaddedSinkAttention(torch.autograd.Function):
    """torch's CPU flash attention with sinks: (q, k, v [B, H, T, D], mask, scaling, sinks) -> [B, H, T, D].

    mask: additive, in the dtype of q, or None for causal; sinks: fp32, one a query  # [H, T] or [H, 1]
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor
    ) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scaling
        )
        out, total = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, mask, sinks, out, total)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, sinks, out, total = ctx.saved_tensors
        grad_out = gradients[0]
        by_q, by_k, by_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, total, 0.0, mask is None, attn_mask=mask, scale=ctx.scaling
        )
        return by_q, by_k, by_v, None, None, by_sinks(grad_out, out, total, sinks).sum(0).sum_to_size(sinks.shape)


class PackedSinkAttention(torch.autograd.Function):
    """torch's variable-length flash attention with sinks, causal, for rows that lie end to end on CUDA.

    (q [N, H, D], k and v [M, G, D], ends of the rows among queries and keys [rows + 1] int32 each, the longest row of
    each, scaling, window or None, sinks [H] fp32) -> [N, H, D]
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, longest: tuple[int, int],
        scaling: float, window: int | None, sinks: Tensor,
    ) -> Tensor:  # fmt: skip
        # A longest query row of 1 would make the kernel fold heads into rows, and the log-sum-exps with them.
        longest = (max(longest[0], 2), longest[1])
        options = {"scale": scaling, **window_sizes(window)}
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, q_ends, k_ends, *longest, 0.0, True, False, **options
        )
        out, total = with_sinks(out, lse.T, sinks)
        total = total.T.contiguous()  # [H, N], as the backward kernel wants it
        ctx.save_for_backward(q, k, v, q_ends, k_ends, sinks, out, total, state, unused)
        ctx.longest, ctx.options = longest, options
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_ends, k_ends, sinks, out, total, state, unused = ctx.saved_tensors
        grad_out = gradients[0].contiguous()
        by_q, by_k, by_v = torch.ops.aten._flash_attention_backward(
            grad_out, q, k, v, out, total, q_ends, k_ends, *ctx.longest, 0.0, True, state, unused, **ctx.options
        )
        return by_q, by_k, by_v, None, None, None, None, None, by_sinks(grad_out, out, total.T, sinks).sum(0)


def window_sizes(window: int | None) -> dict[str, int]:
    """The flash operator's words for: a token sees itself and window - 1 before it; nothing where all are seen."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
